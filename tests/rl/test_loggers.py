"""Loggers: metrics.jsonl always, the console readable, trackers imported only when asked for."""

import io
import sys
import types

import pytest
from rich.console import Console

from mint.errors import BadRequest
from mint.rl.loggers import ConsoleLogger, NullLogger, RunInfo, make_logger
from mint.rl.rundir import RunDir

METRICS = {"env/all/reward/total": 0.25, "optim/lr": 1e-5, "env/all/by_group/frac_mixed": 0.5, "time/total": 1.25}


@pytest.fixture
def info(tmp_path):
    return RunInfo(RunDir(tmp_path / "run"), 10, {"max_tokens": 3}, project="p", name="n")


def test_metrics_are_always_written_as_lines(info):
    logger = make_logger((), info)
    logger.log(0, METRICS)
    logger.log(1, METRICS)
    logger.close()
    assert info.run_dir.metrics() == [{"step": 0, **METRICS}, {"step": 1, **METRICS}]


def test_without_a_terminal_the_console_gets_one_line_a_step(info):
    out = io.StringIO()
    logger = ConsoleLogger(info, Console(file=out, width=80))
    logger.log(3, METRICS)
    logger.close()
    assert out.getvalue() == "Step 3: reward=0.250, mixed=50%, lr=1.0e-05, seconds=1.2\n"


def test_a_terminal_gets_a_table_a_bar_and_the_time_left(info):
    out = io.StringIO()
    logger = ConsoleLogger(info, Console(file=out, width=140, force_terminal=True))
    for step in range(20):
        logger.log(step, METRICS)
    logger.close()
    last = out.getvalue()[-4000:]
    assert "reward" in last and "0.250" in last and "10/10" in last and "0:00:00" in last


def test_an_unknown_logger_is_refused_with_those_there_are(info):
    with pytest.raises(BadRequest, match="'paper'; there are console, tensorboard, wandb, trackio"):
        make_logger(("paper",), info)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_get_project_config_and_metrics_under_their_own_names(info, monkeypatch, name):
    calls = []
    fake = types.ModuleType(name)
    fake.init = lambda **options: calls.append(("init", options["project"], options["name"], options["config"]))
    fake.log = lambda metrics, step: calls.append(("log", step, metrics))
    fake.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, name, fake)
    logger = make_logger((name,), info)
    logger.log(4, METRICS)
    logger.close()
    assert calls == [("init", "p", "n", {"max_tokens": 3}), ("log", 4, METRICS), ("finish",)]


def test_a_missing_tracker_says_what_to_install(info, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(BadRequest, match="pip install trackio"):
        make_logger(("trackio",), info)


def test_tensorboard_files_hold_every_metric(info):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = make_logger(("tensorboard",), info)
    logger.log(5, METRICS)
    logger.close()
    events = EventAccumulator(str(info.run_dir.path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == set(METRICS)
    assert [(e.step, e.value) for e in events.Scalars("env/all/reward/total")] == [(5, 0.25)]


def test_the_null_logger_says_nothing(capsys):
    NullLogger().log(0, METRICS)
    NullLogger().close()
    assert capsys.readouterr() == ("", "")
