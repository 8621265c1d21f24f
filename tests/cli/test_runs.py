"""The verbs that read run directories: doctor, advise, eval, bisect, plot, runs, show, watch, checkpoints."""

import json
import os

import pytest

from mint.cli.failures import Code
from mint.rl.recheck import CheckpointEvaluator
from mint.rl.rundir import CheckpointRecord, RunDir
from mint.rl.summary import summarise
from tests.cli.conftest import invoke

REWARD = "test/env/all/reward/total"


def test_doctor_tells_alarms_and_exits_with_1(run):
    code, text = invoke("doctor", run.path)
    assert code == 1 and "ALARM truncated, steps 0 to 5" in text and "remedy: Raise max_tokens" in text
    code, text = invoke("doctor", run.path, "--json")
    assert code == 1 and json.loads(text)[0]["kind"] == "truncated"


def test_doctor_has_nothing_to_say_of_a_run_that_has_not_begun(tmp_path):
    RunDir(tmp_path).write_config({})
    assert invoke("doctor", tmp_path) == (0, f"{tmp_path}: nothing to report.\n")


@pytest.mark.parametrize("verb", ["doctor", "advise", "eval", "bisect", "plot", "show", "watch", "report"])
def test_a_folder_that_holds_no_run_is_told_with_what_to_do(tmp_path, verb):
    code, text = invoke(verb, tmp_path)
    assert code == Code.NOT_FOUND and text.startswith(f"mint {verb}: ") and text.count("\n") == 2
    assert "has no config.json" in text and "mint quickstart" in text


@pytest.mark.parametrize("verb", ["show", "watch", "doctor", "report", "plot"])
def test_a_corrupt_line_is_told_by_its_number(run, verb):
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    run.metrics_file.write_text("".join([lines[0], "{broken\n", *lines[1:]]))
    code, text = invoke(verb, run.path)
    assert code == Code.USAGE and "metrics.jsonl, line 2, is not JSON" in text and text.count("\n") == 2
    code, text = invoke("runs", run.path.parent, "--json")
    assert code == 0 and json.loads(text)[0]["state"] == "broken" and "line 2" in json.loads(text)[0]["note"]


def test_runs_are_listed_latest_first_with_where_they_stand(run, tmp_path):
    started = RunDir(tmp_path / "started")
    started.write_config({"model_name": "m"})
    os.utime(started.config_file, (1, 1))
    code, text = invoke("runs", tmp_path, "--json")
    first, second = json.loads(text)
    assert code == 0 and (first["state"], first["steps"], first["total_steps"]) == ("finished", 6, 6)
    assert first["reward"] == run.metrics()[5]["env/all/reward/total"]
    assert (first["first_holdout"], first["holdout"]) == (run.metrics()[0][REWARD], run.metrics()[6][REWARD])
    assert first["alarms"] >= 1 and (second["state"], second["steps"]) == ("stopped", 0)
    code, text = invoke("runs", tmp_path)
    assert code == 0 and "finished" in text and "6/6" in text


def test_a_run_is_running_while_it_writes_and_starting_before_its_first_step(run):
    written = run.metrics_file.stat().st_mtime
    run.checkpoints_file.unlink()
    assert summarise(run, written + 5).state == "running" and summarise(run, written + 500).state == "stopped"
    assert summarise(run, written + 5).seconds_left == pytest.approx(0)
    run.metrics_file.unlink()
    assert summarise(run, written + 5).state == "starting"


def test_a_loop_written_by_hand_is_summarised_by_its_own_names(tmp_path):
    by_hand = RunDir(tmp_path)
    by_hand.write_config({"steps": 2, "base_model": "m"})
    for step, line in enumerate([{"reward": 0.25, "test/reward": 0.2}, {"reward": 0.5}, {"test/reward": 0.6}]):
        by_hand.append_metrics(step, line | {"time/total": 1.0})
    found = summarise(by_hand)
    assert (found.state, found.steps, found.total_steps) == ("finished", 2, 2)
    assert (found.reward, found.first_holdout, found.holdout, found.model) == (0.5, 0.2, 0.6, "m")
    by_hand.write_config({"steps": 3})
    assert summarise(by_hand).state == "running"


def test_no_runs_yet_is_no_error_and_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("runs", "--json") == (0, "[]\n")
    code, text = invoke("runs")
    assert code == 0 and "mint quickstart" in text


def test_show_goes_from_the_run_to_the_token(run):
    code, text = invoke("show", run.path)
    assert code == 0 and "finished, 6 of 6 steps" in text and "Best and worst of step 5" in text
    code, text = invoke("show", run.path, "--step", 1)
    assert code == 0 and len([line for line in text.splitlines() if line.strip()[:1].isdigit()]) == 6
    record = next(r for r in run.rollouts(1) if (r.group, r.member) == (2, 1))
    code, text = invoke("show", run.path, "--step", 1, "--group", 2, "--member", 1, "--json")
    assert code == 0 and [r["completion_tokens"] for r in json.loads(text)] == [record.completion_tokens]
    code, text = invoke("show", run.path, "--step", 1, "--group", 2, "--member", 1)
    row = next(line.split() for line in text.splitlines() if line.startswith("0 "))
    assert code == 0 and "policy" in row and f"{record.logprobs[0]:.4f}" in row
    code, text = invoke("show", run.path, "--step", 77)
    assert code == Code.NOT_FOUND and "there are 0 to 5" in text
    code, text = invoke("show", run.path, "--step", 1, "--group", 77)
    assert code == Code.NOT_FOUND and "no group 77" in text


def test_watch_shows_every_step_and_ends_with_the_run(run):
    code, text = invoke("watch", run.path)
    assert code == 0 and all(f"Step {step}:" in text for step in range(7)) and "ALARM truncated" in text


def test_a_run_may_be_named_by_its_name_or_left_out(run, monkeypatch):
    (run.path.parent / "runs").mkdir()
    moved = run.path.rename(run.path.parent / "runs" / "mine")
    monkeypatch.chdir(moved.parents[1])
    assert invoke("doctor") == invoke("doctor", "mine") == invoke("doctor", "runs/mine")
    code, text = invoke("doctor", "min")
    assert code == Code.NOT_FOUND and "did you mean runs/mine?" in text
    code, text = invoke("doctor", "runs")
    assert code == Code.NOT_FOUND and "runs holds 1 runs; name one of them" in text


def test_checkpoints_of_a_run_are_listed(run):
    code, text = invoke("checkpoints", "list", run.path, "--json")
    assert code == 0 and [one["batch"] for one in json.loads(text)] == [2, 4, 6]
    assert run.checkpoints()[-1].state_path in invoke("checkpoints", "list", run.path)[1]


def test_advise_counts_problems_and_names_a_size(run):
    code, text = invoke("advise", run.path)
    assert code == 0 and text.startswith("36 problems: ") and "Advised: groups of" in text


def test_eval_measures_the_last_checkpoint_or_all(run):
    logged = {line["step"]: line[REWARD] for line in run.metrics() if REWARD in line}
    assert invoke("eval", run.path) == (0, f"000006  {REWARD} = {logged[6]:.4f}\n")
    code, text = invoke("eval", run.path, "--metric", "no/such")
    assert code == Code.USAGE and "no metric 'no/such'" in text and REWARD in text
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
