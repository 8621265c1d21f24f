"""The committed figures: the page is what the script makes of them, and they bear out what is claimed of them."""

import json
import sys
from itertools import pairwise
from statistics import mean

import pytest

from tests.rl.conftest import ROOT

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def demos(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "demos", raising=False)
    import demos

    yield demos
    monkeypatch.delitem(sys.modules, "demos", raising=False)


def test_the_results_page_is_made_from_the_stored_runs(demos) -> None:
    stored = json.loads((RESULTS / "demos.json").read_text())
    assert (ROOT / "docs" / "results.md").read_text() == demos.page(stored)
    runs = [demos.Result(**entry) for entry in stored["results"]]
    assert {name: sum(r.script == name for r in runs) for name in demos.SEEDS} == demos.SEEDS
    assert sum(demos.points(r) >= 40 for r in runs if r.script == "quickstart") >= 4
    assert all(demos.points(r) > 0 for r in runs)


def test_the_measured_kl_falls_as_the_coefficient_rises() -> None:
    stored = json.loads((RESULTS / "kl_order.json").read_text())
    kl: dict[float, list[float]] = {}
    for run in stored["results"]:
        kl.setdefault(run["kl_penalty_coef"], []).append(mean(run["kl"][-5:]))
    assert list(kl) == [0.0, 0.01, 0.05, 0.1]
    assert all(mean(larger) > mean(smaller) for larger, smaller in pairwise(kl.values()))
    recipe = stored["starting_recipe"]
    assert (recipe["learning_rate"], recipe["group_size"], recipe["kl_penalty_coef"]) == (1e-5, 4, 0.05)
    assert abs(recipe["kl"][0]) < 1e-5 < abs(recipe["kl"][-1])
