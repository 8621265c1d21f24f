"""The tutorials run as scripts, offline, and print what they promise."""

import os
import re
import subprocess
import sys

import pytest

from tests.rl.conftest import ROOT
from tests.rl.test_tutorial import PRINTED

pytest.importorskip("marimo")


def printed_by(name: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tutorials" / f"{name}.py")], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tutorial_on_hyperparameters_prints_the_published_numbers(served) -> None:
    printed = printed_by("01_rl_hyperparameters")
    published = [line for line in PRINTED.splitlines() if line]
    assert [line for line in printed.splitlines() if line in published] == published


def test_the_tutorial_on_rewards_ends_with_a_better_model(served) -> None:
    printed = printed_by("02_your_first_reward")
    shares = [tuple(map(int, pair)) for pair in re.findall(r"(\d+)% exact, (\d+)% partial", printed)]
    assert len(shares) == 3 and all(partial >= exact for exact, partial in shares) and shares[0][1] > shares[0][0]
    accuracy = [float(value) for value in re.findall(r"accuracy=([\d.]+)%", printed)]
    assert len(accuracy) == 12 and sum(accuracy[-3:]) > sum(accuracy[:3])


def test_the_tutorial_on_agents_teaches_asking_the_tool(served) -> None:
    printed = printed_by("03_agentic_rl")
    rewards, calls, held_out = (
        [float(value) for value in re.findall(rf"{name} ([\d.]+)", printed)]
        for name in ("reward", "tool calls", "held out")
    )
    assert len(rewards) == 8 and sum(rewards[-3:]) > sum(rewards[:3])
    assert calls[-1] > calls[0] and len(held_out) == 2 and held_out[1] > held_out[0]
    assert re.search(
        r"Reward 1\.0, for what the model wrote: '<tool_call>[^<]*</tool_call><\|im_end\|>The answer", printed
    )
