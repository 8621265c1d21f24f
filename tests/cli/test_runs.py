"""The verbs that read run directories: doctor, advise, eval, bisect, plot."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mint
from mint.cli.__main__ import app
from mint.rl.recheck import CheckpointEvaluator
from mint.rl.rundir import CheckpointRecord, RunDir
from mint.rl.train import Config, train
from tests.rl.fake_service import FakeService, HalfDataset

REWARD = "test/env/all/reward/total"


class ClosedService(FakeService):
    async def close(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with three checkpoints, on a service that `mint.ServiceClient()` gives too."""
    service = ClosedService(tmp_path / "service")
    monkeypatch.setattr(mint, "ServiceClient", lambda address=None: service)
    config = Config(
        learning_rate=0.05, dataset_builder=HalfDataset(tests=4, groups_per_batch=6, group_size=2), model_name="fake",
        recipe_name="test", max_tokens=4, log_path=str(tmp_path / "run"), loggers=(), eval_every=2, save_every=2,
    )  # fmt: skip
    return train(config, service)


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_doctor_tells_alarms_and_exits_with_1(run):
    code, text = invoke("doctor", run.path)
    assert code == 1 and "ALARM truncated, steps 0 to 5" in text and "remedy: Raise max_tokens" in text
    code, text = invoke("doctor", run.path, "--json")
    assert code == 1 and json.loads(text)[0]["kind"] == "truncated"


def test_doctor_has_nothing_to_say_of_a_run_that_has_not_begun(tmp_path):
    RunDir(tmp_path).write_config({})
    assert invoke("doctor", tmp_path) == (0, f"{tmp_path}: nothing to report.\n")


@pytest.mark.parametrize("verb", ["doctor", "advise", "eval", "bisect", "plot"])
def test_a_folder_that_holds_no_run_is_an_error_in_one_line(tmp_path, verb):
    code, text = invoke(verb, tmp_path)
    assert code == 2 and text.startswith(f"mint {verb}: ") and text.count("\n") == 1


def test_advise_counts_problems_and_names_a_size(run):
    code, text = invoke("advise", run.path)
    assert code == 0 and text.startswith("36 problems: ") and "Advised: groups of" in text


def test_eval_measures_the_last_checkpoint_or_all(run):
    logged = {line["step"]: line[REWARD] for line in run.metrics() if REWARD in line}
    assert invoke("eval", run.path) == (0, f"000006  {REWARD} = {logged[6]:.4f}\n")
    code, text = invoke("eval", run.path, "--all-checkpoints", "--json")
    assert code == 0
    measured = {line["step"]: line[REWARD] for line in map(json.loads, text.splitlines())}
    assert measured == {step: logged[step] for step in (2, 4, 6)}


def test_bisect_finds_the_first_bad_checkpoint(run, monkeypatch):
    async def planted(self: CheckpointEvaluator, record: CheckpointRecord, name: str) -> float:
        return {2: 0.9, 4: 0.3, 6: 0.2}[record.batch]

    monkeypatch.setattr(CheckpointEvaluator, "metric", planted)
    code, text = invoke("bisect", run.path, "--metric", REWARD, "--limit", 0.5, "--json")
    assert code == 0 and json.loads(text) == {
        "first_bad": "000004", "last_good": "000002", "limit": 0.5, "measured": {"000002": 0.9, "000004": 0.3},
    }  # fmt: skip
    code, text = invoke("bisect", run.path)
    assert code == 0 and "First bad checkpoint: 000004 (limit 0.55); 000002 is still good" in text


def test_bisect_names_the_metrics_there_are(run):
    code, text = invoke("bisect", run.path, "--metric", "no/such")
    assert code == 2 and "no metric 'no/such'" in text and REWARD in text


def test_plot_draws_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    code, text = invoke("plot", run.path, "--out", tmp_path / "curves.png", "--metric", "env/all/reward/total")
    assert code == 0 and text.strip() == str(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
