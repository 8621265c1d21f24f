"""The static report: whole, by itself, and safe whatever a run wrote."""

import re
import tarfile
from dataclasses import replace

import pytest

from mint.cli.failures import Code
from mint.rl.report import report_page
from mint.rl.report.charts import MOST_POINTS, Mark, _axis, charts
from mint.rl.rundir import RunDir
from tests.cli.conftest import invoke
from tests.rl.conftest import ROOT


@pytest.fixture(scope="session")
def sick_run(tmp_path_factory) -> RunDir:
    """A run with length hacking, as kept for the doctor's tests."""
    folder = tmp_path_factory.mktemp("runs")
    with tarfile.open(ROOT / "tests" / "data" / "doctor_runs.tar.xz") as archive:
        members = [m for m in archive.getmembers() if m.name.startswith("reward_for_length")]
        archive.extractall(folder, members, filter="data")
    return RunDir(folder / "reward_for_length")


def test_the_report_has_curves_findings_samples_and_settings_and_asks_for_nothing_else(sick_run, tmp_path):
    target = tmp_path / "page.html"
    code, text = invoke("report", sick_run.path, "--out", target)
    assert code == 0 and text.strip() == str(target)
    page = target.read_text()
    for part in ("curves", "doctor", "samples", "settings"):
        assert f'<section id="{part}">' in page
    assert "length drift" in page and "overlong_buffer" in page
    assert not re.search(r'(src|href)="(?!#)', page) and "http" not in page and "@import" not in page
    assert "prefers-color-scheme: dark" in page and len(page) < 1_000_000
    first, middle, last = 0, 5, 9
    assert re.findall(r"<h3>Step (\d+)", page) == [str(first), str(middle), str(last)]
    best = max(sick_run.rollouts(0), key=lambda record: record.reward)
    assert f"reward {best.reward:.3g}" in page


def test_every_token_carries_its_figures(sick_run):
    page = report_page(sick_run, [0])
    figures = {f"advantage {r.advantages[0]:+.4f}, log-prob {r.logprobs[0]:.4f}" for r in sick_run.rollouts(0)}
    assert sum(told in page for told in figures) == 3
    assert re.findall(r"<h3>Step (\d+)", page) == ["0"]


def test_what_a_model_writes_cannot_become_markup(sick_run, tmp_path):
    bad = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    run = RunDir(tmp_path / bad.replace("/", "-"))
    run.path.mkdir()
    run.write_config((sick_run.config() or {}) | {"recipe_name": bad, "model_name": bad})
    for line in sick_run.metrics():
        run.append_metrics(line.pop("step"), line)
    for step in sick_run.rollout_steps():
        records = [
            replace(
                record,
                prompt_text=bad,
                completion_text=bad,
                completion_pieces=[bad] * len(record.completion_pieces),
                stop_reason=bad,
                reward_terms={bad: 1.0},
                problem=bad,
            )
            for record in sick_run.rollouts(step)
        ]
        run.write_rollouts(step, records)
    page = report_page(run)
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;" in page


def test_a_run_that_has_not_begun_has_a_page_too(tmp_path):
    run = RunDir(tmp_path / "new")
    run.write_config({"model_name": "m"})
    page = report_page(run)
    assert "No step has been written yet" in page and "nothing to report" in page


def test_steps_without_samples_are_refused(sick_run):
    code, text = invoke("report", sick_run.path, "--step", 99)
    assert code == Code.USAGE and "there are 0 to 9" in text


def test_long_runs_are_thinned_and_marks_are_drawn():
    lines = [{"step": n, "env/all/reward/total": n / 2000} for n in range(2000)]
    page = charts(lines, [Mark(1000, "alarm", "collapse: it fell")])
    points = re.search(r'points="([^"]*)"', page).group(1).split()
    assert len(points) == MOST_POINTS and len(page) < 100_000
    assert 'class="mark alarm"' in page and "collapse: it fell" in page


def test_values_that_are_not_finite_leave_a_gap_not_an_error():
    lines = [
        {"step": n, "env/all/reward/total": value} for n, value in enumerate([0.0, float("nan"), float("inf"), 1.0])
    ]
    assert len(re.search(r'points="([^"]*)"', charts(lines, [])).group(1).split()) == 2


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.33, 0.81), (-3e-8, 5e-8), (5, 5), (0, 0), (-2, 900)])
def test_the_axis_holds_the_values_between_round_numbers(low, high):
    bottom, top, ticks = _axis(low, high)
    assert bottom <= low and high <= top and bottom < top and 2 <= len(ticks) <= 7
    assert ticks[0] == pytest.approx(bottom) and ticks[-1] == pytest.approx(top)
