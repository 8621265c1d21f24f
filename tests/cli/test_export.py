"""`mint export` as a person calls it: from a server, a run directory or a folder, proved in a process of its own."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mint
from mint.cli.__main__ import app
from mint.rl.rundir import CheckpointRecord, RunDir
from mint.types import AdamParams, Datum, ModelInput


@pytest.fixture(scope="module")
def checkpoint(service: mint.ServiceClient) -> str:
    """The path of a trained checkpoint on the local server."""
    trainer = service.create_lora_training_client("mint/tiny", rank=4)
    datum = Datum(ModelInput.from_ints([1, 2, 3, 4]), {"target_tokens": [2, 3, 4, 5]})
    for _ in range(3):
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(AdamParams(learning_rate=1e-2)).result()
    return trainer.save_weights_for_sampler("final").result().path


def run(*words: str) -> str:
    told = CliRunner().invoke(app, ["export", *words])
    assert told.exit_code == 0, told.output
    return told.output


def test_a_runs_latest_checkpoint_comes_from_its_server_and_is_proved(checkpoint: str, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.write_config({"base_url": None})
    for n, name in enumerate(("000001", "final")):
        rundir.append_checkpoint(
            CheckpointRecord(name, n, state_path="tinker://gone/weights/x", sampler_path=checkpoint)
        )
    told = run(f"{tmp_path / 'run'}/latest", "--to", "peft", "--out", str(tmp_path / "out"))
    assert "differ from the trainer's by" in told and "(limit 0.001)" in told
    record = json.loads((tmp_path / "out" / "mint_export.json").read_text())
    assert record["difference"]["largest"] < 1e-4
    assert record["checkpoint"]["base_model"] == "mint/tiny"
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_a_difference_above_the_limit_is_an_exit_code_and_no_folder(checkpoint: str, tmp_path: Path) -> None:
    words = [checkpoint, "--to", "merged", "--out", str(tmp_path / "out"), "--limit", "0"]
    told = CliRunner().invoke(app, ["export", *words])
    assert told.exit_code == 1
    assert "largest difference is" in told.output
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint_is_told_in_a_sentence(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["export", f"{tmp_path}/latest", "--to", "peft", "--out", str(tmp_path / "out")])
    assert told.exit_code == 3
    assert "is not a run directory" in told.output
