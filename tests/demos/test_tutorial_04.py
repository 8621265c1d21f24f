"""The tutorial on broken runs: five are named, and the mended one learns."""

import re

import pytest

from tests.demos.test_tutorials import printed_by

pytest.importorskip("marimo")


def test_five_broken_runs_are_named_and_the_mended_one_learns(served) -> None:
    printed = printed_by("04_when_it_does_not_learn")
    assert re.findall(r"^(?:ALARM|WARNING) (\w+)", printed, re.MULTILINE) == [
        "stop_token_missing", "rejects_reference", "reward_sign", "learning_rate_small", "reward_hacking",
    ]  # fmt: skip
    curves = {name: [float(x) for x in values.split()] for name, values in CURVE.findall(printed)}
    assert len(curves) == 6
    assert sum(curves["mended"][-4:]) > sum(curves["mended"][:4])
    assert sum(curves["pays-for-even"][-4:]) < sum(curves["pays-for-even"][:4])


CURVE = re.compile(r"^([\w-]+): right answers by step  ([\d. ]+)$", re.MULTILINE)
