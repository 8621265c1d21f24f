"""The documentation builds without a warning and without the network, and its lists are complete."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import performance_page
from benchmarks.recipes import RESULTS, table
from docs.generate_metrics import page
from mint.recipes import RECIPES
from mint.recipes.presets import PRESETS
from mint.rl.advantages import ESTIMATORS
from mint.rl.aggregation import AGGREGATIONS
from mint.rl.metric_names import explain
from mint.rl.rundir import RunDir
from tests.rl.conftest import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    # As `make docs` has it: made quiet, mkdocs does not count its warnings, and strict has nothing to stop at.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_the_site_asks_for_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    outside = re.compile(r'<(?:script|img|iframe|source)[^>]*\ssrc="(?:https?:)?//|<link[^>]*\shref="(?:https?:)?//')
    for file in pages:
        found = [match for match in outside.findall(file.read_text()) if "canonical" not in match]
        assert not found, f"{file}: {found}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_the_reference_is_made_from_the_docstrings(site: Path) -> None:
    text = (site / "reference" / "train.html").read_text()
    assert "Steps between evaluations, which also happen before the first step" in text
    assert 'id="mint.rl.config.Config.kl_penalty_coef"' in text
    assert "create_lora_training_client" in (site / "reference" / "client.html").read_text()


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    there = {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")}
    assert listed <= there, f"in mkdocs.yml and not there: {listed - there}"
    assert there <= listed, f"not in the nav of mkdocs.yml: {there - listed}"


def finding_kinds() -> set[str]:
    """Every kind a check can report, read off the calls of `Finding(kind, ...)`."""
    kinds = set()
    for file in (ROOT / "mint" / "rl" / "doctor").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                named = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
                assert named, f"{file.name}:{node.lineno}: the kind is not written out here"
                kinds.update(named)
    return kinds


def test_every_kind_of_finding_has_its_entry() -> None:
    entries = set(re.findall(r"^### (\w+)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE))
    assert len(finding_kinds()) > 30
    assert entries == finding_kinds()


def test_the_page_of_metrics_is_the_table() -> None:
    assert (DOCS / "metrics.md").read_text() == page(), "run: python -m docs.generate_metrics"


def test_every_metric_a_run_writes_is_explained(run: RunDir) -> None:
    for line in run.metrics():
        assert [name for name in line if explain(name) is None] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("env/all/reward/total", "Mean reward of all rollouts"),
        ("env/addition/reward/total", "Mean reward of all rollouts"),
        ("test/env/all/truncated", "cut off by a token limit"),
        ("test/gap", "Training reward less holdout"),
        ("time/sample:total", "Seconds of one part"),
        ("train/ratio:max", "Importance ratios"),
        ("rollout_errors/ValueError", "by kind of exception"),
        ("rollout_errors/total", "Rollouts that failed"),
        ("env/all/episode/turns", "for names with a slash"),
    ],
)
def test_a_metric_is_explained_by_its_closest_entry(name: str, words: str) -> None:
    assert words in (explain(name) or "")


def test_an_unknown_metric_is_not_explained() -> None:
    assert explain("no/such") is None


def test_the_recipes_page_lists_all_and_shows_what_was_measured() -> None:
    text = (DOCS / "recipes.md").read_text()
    assert all(f"| `{name}` |" in text for name in RECIPES)
    result = json.loads(RESULTS.read_text())
    assert {run["recipe"] for run in result["runs"]} == set(RECIPES)
    assert table(result) in text, "run: python benchmarks/recipes.py"


def test_the_page_of_algorithms_lists_every_choice() -> None:
    text = (DOCS / "algorithms.md").read_text()
    for name in (*ESTIMATORS, *AGGREGATIONS, *PRESETS):
        assert f"| `{name}` " in text, name


def test_the_performance_page_shows_the_committed_figures() -> None:
    text = performance_page.PAGE.read_text()
    assert performance_page.MARKED.search(text)
    assert performance_page.filled(text) == text, "run: python benchmarks/performance_page.py"
