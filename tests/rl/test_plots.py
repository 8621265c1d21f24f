"""Curves from run directories."""

import sys

import pytest

from mint.errors import BadRequest
from mint.rl.plots import curve, plot_runs
from mint.rl.rundir import RunDir


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "one")
    for step in range(5):
        run.append_metrics(step, {"env/all/reward/total": step / 5, "optim/lr": 1e-3})
    run.append_metrics(5, {"test/env/all/reward/total": 1.0})
    return run


def test_a_curve_has_the_steps_that_logged_its_metric(run):
    assert curve(run.metrics(), "env/all/reward/total") == ([0, 1, 2, 3, 4], [0.0, 0.2, 0.4, 0.6, 0.8])
    assert curve(run.metrics(), "test/env/all/reward/total") == ([5], [1.0])


def test_a_run_or_several_become_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    other = RunDir(tmp_path / "two")
    other.append_metrics(0, {"optim/entropy": 0.5})
    assert plot_runs(run.path) == run.path / "plot.png"
    assert plot_runs([run.path, other.path], tmp_path / "both.png") == tmp_path / "both.png"
    for file in (run.path / "plot.png", tmp_path / "both.png"):
        assert file.read_bytes().startswith(b"\x89PNG")


def test_metrics_nobody_logged_are_refused_with_those_there_are(run):
    with pytest.raises(BadRequest, match=r"none of loss was logged; there are .*optim/lr"):
        plot_runs(run.path, metrics=["loss"])


def test_a_run_without_metrics_is_refused(tmp_path):
    with pytest.raises(BadRequest, match="has no metrics yet"):
        plot_runs(tmp_path)


def test_without_matplotlib_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BadRequest, match="pip install matplotlib"):
        plot_runs(run.path)
