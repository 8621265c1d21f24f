"""The recipes run as written and do what they say, in a few steps each."""

import importlib
import json
from dataclasses import replace

import pytest

from tests.rl.conftest import ROOT


@pytest.fixture
def recipe(tiny_server, tmp_path, monkeypatch):
    """Runs a recipe's main against the server; returns its result and its metrics."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.setenv("MINT_BASE_URL", tiny_server)

    def run(name: str, **fields: object):
        module = importlib.import_module(name)
        config = module.Config(log_path=str(tmp_path / name), **fields)
        result = module.main(config)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return result, lines

    return run


def test_supervised_training_lowers_the_held_out_loss(recipe):
    final, lines = recipe("sl_loop", steps=8, batch_size=16, eval_every=8)
    assert final == lines[-1]["test/nll"] < 0.8 * lines[0]["test/nll"]


def test_supervised_training_takes_a_file(recipe, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "Say:", "completion": " hello"}) + "\n" for _ in range(20)))
    final, lines = recipe("sl_loop", steps=5, batch_size=4, eval_every=5, data=str(data))
    assert final < 0.7 * lines[0]["test/nll"]


def test_the_raw_rl_loop_trains_and_measures(recipe):
    final, lines = recipe("rl_loop", steps=3, groups_per_batch=4, group_size=4, holdout=8, eval_every=3, save_every=2)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert final == lines[-1]["test/reward"] and all("reward" in line and line["datums"] > 0 for line in lines[:3])


def test_dpo_begins_at_log_two_and_learns_the_preference(recipe):
    last, lines = recipe("dpo", steps=6, batch_size=8, eval_every=6)
    assert lines[0]["test/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert lines[0]["test/margin"] == pytest.approx(0, abs=1e-4)
    assert last["test/loss"] < 0.685 and last["test/accuracy"] > 0.7


def test_settings_come_from_the_command_line_and_unknown_ones_are_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    from arguments import configured
    from math_rl import DEFAULT

    changed = configured(
        DEFAULT, ["max_lag=2", "learning_rate=cosine 1e-3 -> 0", "dataset_builder.group_size=16", "log_path=7"]
    )
    assert changed == replace(
        DEFAULT,
        max_lag=2,
        learning_rate="cosine 1e-3 -> 0",
        log_path="7",
        dataset_builder=replace(DEFAULT.dataset_builder, group_size=16),
    )
    with pytest.raises(SystemExit, match="'max_lagg' is not a setting of Config; there are learning_rate"):
        configured(DEFAULT, ["max_lagg=2"])
    with pytest.raises(SystemExit, match="write name=value"):
        configured(DEFAULT, ["max_lag"])
