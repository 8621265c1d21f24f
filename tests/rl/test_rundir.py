"""The run directory as an API: what is written comes back, whatever a dying process left behind."""

import json
import math

import pytest

from mint.errors import BadRequest
from mint.rl.rundir import (
    CheckpointRecord,
    RolloutRecord,
    RunDir,
    TurnRecord,
    append_jsonl,
    file_name,
    read_jsonl,
    write_jsonl,
)


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path / "run")


def record(step: int, **fields) -> RolloutRecord:
    return RolloutRecord(step=step, group=1, member=2, policy_version=step, temperature=0.8, reward=1.5, **fields)


def test_a_torn_last_line_is_ignored_and_cut_off_by_the_next_one(tmp_path):
    file = tmp_path / "lines.jsonl"
    append_jsonl(file, {"n": 1})
    with open(file, "a") as torn:
        torn.write('{"n": 2, "text": "not fin')
    assert read_jsonl(file) == [{"n": 1}]
    append_jsonl(file, {"n": 3})
    assert read_jsonl(file) == [{"n": 1}, {"n": 3}]


def test_a_file_that_is_one_torn_line_reads_as_empty_and_can_be_appended_to(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"n"')
    assert read_jsonl(file) == []
    append_jsonl(file, {"n": 1})
    assert file.read_text() == '{"n": 1}\n'


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"n": 1}\n{"n":\n{"n": 3}\n')
    with pytest.raises(BadRequest, match=r"lines.jsonl, line 2"):
        read_jsonl(file)


def test_a_missing_file_reads_as_empty(run):
    assert run.metrics() == [] and run.checkpoints() == [] and run.rollouts(0) == [] and run.config() is None
    assert run.last_checkpoint() is None and run.rollout_steps() == []


def test_a_whole_file_is_replaced_at_once(tmp_path, monkeypatch):
    file = tmp_path / "lines.jsonl"
    write_jsonl(file, [{"n": 1}])

    def lines():
        yield {"n": 2}
        raise RuntimeError("died while writing")

    with pytest.raises(RuntimeError):
        write_jsonl(file, lines())
    assert read_jsonl(file) == [{"n": 1}]


def test_metrics_come_back_with_their_step_and_numbers_that_are_not_finite(run):
    run.append_metrics(3, {"a": 0.1, "b": math.nan, "c": math.inf})
    (line,) = run.metrics()
    assert line["step"] == 3 and line["a"] == 0.1 and math.isnan(line["b"]) and line["c"] == math.inf


def test_rollouts_come_back_as_they_were(run):
    turns = [TurnRecord(0, 2, 0.5, metrics={"ok": 1.0}, logs={"said": "hi"}), TurnRecord(4, 5, restarts=True)]
    one = record(
        7,
        reward_terms={"format": 1.0},
        advantage=-0.5,
        trained=True,
        prompt_tokens=[1, 2],
        completion_tokens=[3, 4, 5, 6, 7],
        mask=[1, 1, 0, 0, 1],
        logprobs=[-0.1, -0.2, 0.0, 0.0, -0.3],
        turns=turns,
    )
    run.write_rollouts(7, [one])
    run.write_rollouts(7, [record(7)], evaluator="test")
    assert run.rollouts(7) == [one]
    assert run.rollouts(7, "test") == [record(7)]
    assert run.rollout_steps() == [7] and run.rollout_steps("test") == [7]


def test_checkpoint_lines_of_a_newer_version_can_be_read(run):
    append_jsonl(run.checkpoints_file, {"name": "000004", "batch": 4, "state_path": "s", "position": [4, 1], "mood": 3})
    assert run.last_checkpoint() == CheckpointRecord("000004", 4, "s", position=(4, 1))


def test_rewinding_forgets_the_step_and_all_after_it_and_nothing_else(run):
    for step in range(4):
        run.append_metrics(step, {"a": step})
        append_jsonl(run.ledger_file, {"step": step})
        append_jsonl(run.health_file, {"step": step})
        run.write_rollouts(step, [record(step)])
        run.write_rollouts(step, [record(step)], evaluator="test")
        write_jsonl(run.pending_file(step), [{}])
    run.rewind(2)
    assert [line["step"] for line in run.metrics()] == [0, 1]
    assert [line["step"] for line in read_jsonl(run.ledger_file)] == [0, 1]
    assert [line["step"] for line in read_jsonl(run.health_file)] == [0, 1]
    assert run.rollout_steps() == [0, 1] and run.rollout_steps("test") == [0, 1]
    assert sorted(file.name for file in run.pending_folder.iterdir()) == [
        "000000.jsonl",
        "000001.jsonl",
        "000002.jsonl",
    ]


def test_config_is_plain_json(run):
    run.write_config({"model_name": "mint/tiny", "max_tokens": 8})
    assert json.loads(run.config_file.read_text()) == run.config() == {"model_name": "mint/tiny", "max_tokens": 8}


@pytest.mark.parametrize(("text", "name"), [("test", "test"), ("a/b c", "a-b-c"), ("../..", "unnamed")])
def test_names_of_evaluators_become_file_names(text, name):
    assert file_name(text) == name
