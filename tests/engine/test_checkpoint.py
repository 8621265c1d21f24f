from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from reference import logits, peft_model, plain_model, policy_datum, random_adapter, random_tokens
from test_lora import forward
from test_trainer import train

from mint.engine import folders
from mint.engine.checkpoint import load_state, read, save, state_of
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.optimizer import AdamW
from mint.engine.trainer import Trainer
from mint.errors import BadRequest, NotFound
from mint.types import AdamParams, LoraConfig

TOKENS = random_tokens(np.random.default_rng(0), 11)


@pytest.fixture
def llama(tiny_model: Callable[[str], BaseModel]) -> BaseModel:
    return tiny_model("llama")


def step(model: BaseModel, adapter: Adapter, optimizer: AdamW, seed: int) -> float:
    data = [policy_datum(np.random.default_rng(seed), 9, 3)]
    loss = train(Trainer(model), adapter, data).metrics["loss:sum"]
    optimizer.step(AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
    return loss


def test_peft_reads_a_saved_folder_and_gives_our_logits(
    model: BaseModel, family: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0))
    save(tmp_path / "saved", adapter, AdamW(adapter))
    with torch.no_grad():
        theirs = logits(PeftModel.from_pretrained(plain_model(tiny_folder(family)), tmp_path / "saved"), TOKENS)
    (ours,) = forward(model, [TOKENS], [adapter])
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("pending", [True, False])
def test_a_state_brings_back_weights_optimizer_and_gradients_to_the_last_bit(
    llama: BaseModel, tmp_path: Path, pending: bool
) -> None:
    def more(adapter: Adapter, optimizer: AdamW) -> list[torch.Tensor]:
        step(llama, adapter, optimizer, 7)
        return adapter.parameters()

    adapter = llama.new_adapter(LoraConfig(rank=3, seed=0))  # 32 / 3 is no binary fraction
    optimizer = AdamW(adapter)
    step(llama, adapter, optimizer, 1)
    if pending:
        train(Trainer(llama), adapter, [policy_datum(np.random.default_rng(2), 9, 3)])
    state = state_of(adapter, optimizer)
    quiet = more(adapter, optimizer)  # while the state is being written
    state.write(tmp_path / "state")
    other = llama.new_adapter(LoraConfig(rank=3, seed=5))
    fresh = AdamW(other)
    train(Trainer(llama), other, [policy_datum(np.random.default_rng(3), 9, 3)])
    load_state(tmp_path / "state", other, fresh)
    assert (other.gradients is not None) == pending
    assert all(torch.equal(a, b) for a, b in zip(quiet, more(other, fresh), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(optimizer.state().values(), fresh.state().values(), strict=True))


def test_a_plain_peft_folder_is_read_and_gives_the_logits_of_peft(
    model: BaseModel, family: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    flags = dict(train_unembed=False)  # PEFT would save a tied embedding along with an adapted lm_head
    source = random_adapter(model, LoraConfig(rank=3, seed=0, **flags))
    source.scale = 0.5  # PEFT's users choose their own alpha
    peft = peft_model(tiny_folder(family), source)
    peft.save_pretrained(tmp_path)
    checkpoint = read(tmp_path)
    assert (checkpoint.config.rank, checkpoint.config.train_unembed, checkpoint.optimizer) == (3, False, None)
    target = model.new_adapter(LoraConfig(rank=3, **flags))
    checkpoint.load_into(target, AdamW(target), with_optimizer=False)
    with torch.no_grad():
        theirs = logits(peft, TOKENS)
    for ours in forward(model, [TOKENS, TOKENS], [checkpoint.policy(model.linears), target]):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_a_run_goes_on_from_a_checkpoint_as_if_never_interrupted(llama: BaseModel, tmp_path: Path) -> None:
    adapter = llama.new_adapter(LoraConfig(rank=3, seed=0))
    optimizer = AdamW(adapter)
    for seed in range(3):
        step(llama, adapter, optimizer, seed)
    size = save(tmp_path / "run", adapter, optimizer)
    assert size == sum(path.stat().st_size for path in (tmp_path / "run").iterdir())

    resumed = llama.new_adapter(LoraConfig(rank=3, seed=99))
    fresh = AdamW(resumed)
    step(llama, resumed, fresh, 7)
    train(Trainer(llama), resumed, [policy_datum(np.random.default_rng(8), 5, 0)])
    checkpoint = read(tmp_path / "run")
    checkpoint.load_into(resumed, fresh, with_optimizer=True)
    assert (checkpoint.step, fresh.steps, resumed.gradients) == (3, 3, None)
    for seed in (10, 11):
        assert step(llama, resumed, fresh, seed) == step(llama, adapter, optimizer, seed)
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), adapter.parameters(), strict=True))


def test_loading_the_weights_alone_starts_a_fresh_optimizer(llama: BaseModel, tmp_path: Path) -> None:
    adapter = llama.new_adapter(LoraConfig(rank=2, seed=0))
    optimizer = AdamW(adapter)
    step(llama, adapter, optimizer, 0)
    save(tmp_path / "run", adapter, optimizer)
    read(tmp_path / "run").load_into(adapter, optimizer, with_optimizer=False)
    assert optimizer.steps == 0 and not any(t.any() for t in optimizer.state().values())


def test_a_folder_holds_what_other_tools_look_for(llama: BaseModel, tmp_path: Path) -> None:
    adapter = llama.new_adapter(LoraConfig(rank=4, seed=0, train_mlp=False))
    save(tmp_path / "sampler", adapter)
    save(tmp_path / "training", adapter, AdamW(adapter))
    common = {"adapter_model.safetensors", "adapter_config.json", "mint.json", "checkpoint_complete"}
    assert {path.name for path in (tmp_path / "sampler").iterdir()} == common
    assert {path.name for path in (tmp_path / "training").iterdir()} == common | {"optimizer.safetensors"}
    assert (tmp_path / "sampler" / "checkpoint_complete").stat().st_size == 0
    settings = json.loads((tmp_path / "sampler" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["k_proj", "lm_head", "o_proj", "q_proj", "v_proj"]
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 32, "LORA")
    manifest = json.loads((tmp_path / "sampler" / "mint.json").read_text())
    assert (manifest["format"], manifest["base_model"], manifest["lora"]["seed"]) == (1, llama.facts.name, 0)
    assert read(tmp_path / "sampler").config == adapter.config


def test_another_rank_or_other_targets_are_refused_saying_both(llama: BaseModel, tmp_path: Path) -> None:
    save(tmp_path / "run", llama.new_adapter(LoraConfig(rank=4)))
    checkpoint = read(tmp_path / "run")
    for other, message in (
        (LoraConfig(rank=8), r"rank 4 on 22 linears \(attn, mlp, unembed\).*rank 8 on 22 linears"),
        (LoraConfig(rank=4, train_mlp=False), r"rank 4 on 22 linears.*rank 4 on 13 linears \(attn, unembed\)"),
    ):
        target = llama.new_adapter(other)
        with pytest.raises(BadRequest, match=message):
            checkpoint.load_into(target, AdamW(target), with_optimizer=False)


def test_an_adapter_of_another_base_model_is_refused(
    llama: BaseModel, tiny_model: Callable[[str], BaseModel], tmp_path: Path
) -> None:
    save(tmp_path / "run", llama.new_adapter(LoraConfig(rank=4)))
    other = tiny_model("qwen3")
    target = other.new_adapter(LoraConfig(rank=4))
    with pytest.raises(BadRequest, match="made for another base model"):
        read(tmp_path / "run").load_into(target, AdamW(target), with_optimizer=False)
    with pytest.raises(BadRequest, match="made for another base model"):
        read(tmp_path / "run").policy(other.linears)


def test_a_sampler_checkpoint_has_no_optimizer_to_load(llama: BaseModel, tmp_path: Path) -> None:
    adapter = llama.new_adapter(LoraConfig(rank=2))
    save(tmp_path / "run", adapter)
    with pytest.raises(BadRequest, match="holds no optimizer state"):
        read(tmp_path / "run").load_into(adapter, AdamW(adapter), with_optimizer=True)


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no checkpoint folder"):
        read(tmp_path / "nothing")


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json", "mint.json"]
)
@pytest.mark.parametrize("damage", ["torn", "flipped", "gone"])
def test_a_damaged_file_is_named(llama: BaseModel, tmp_path: Path, name: str, damage: str) -> None:
    adapter = llama.new_adapter(LoraConfig(rank=2))
    save(tmp_path / "run", adapter, AdamW(adapter))
    path = tmp_path / "run" / name
    content = bytearray(path.read_bytes())
    if damage == "torn":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[0] ^= 0xFF
        path.write_bytes(content)
    elif name == "mint.json":
        return  # without it the folder is a plain PEFT one
    else:
        path.unlink()
    with pytest.raises(BadRequest, match=f"is damaged: {name}"):
        read(tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "sets use_dora"),
        ({"bias": "all"}, "sets bias"),
        ({"peft_type": "IA3"}, "does not describe a LoRA"),
    ],
)
def test_what_is_not_plain_lora_is_refused(
    llama: BaseModel, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    save(tmp_path / "run", llama.new_adapter(LoraConfig(rank=2)))
    (tmp_path / "run" / "mint.json").unlink()
    config = tmp_path / "run" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(BadRequest, match=message):
        read(tmp_path / "run")


class PowerCut(BaseException):
    """Not an Exception: nothing may catch it and tidy up as a living process would."""


@contextmanager
def cut_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> Iterator[None]:
    """Lets the n-th system call that changes the disk, and all after it, fail."""
    left = [calls]

    def failing(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise PowerCut
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing(os.rename))
        patch.setattr(os, "fsync", failing(os.fsync))
        patch.setattr(folders.shutil, "rmtree", failing(folders.shutil.rmtree))
        patch.setattr(folders, "_exchange", failing(folders._exchange))
        yield


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("calls", range(16))
def test_an_overwrite_cut_short_leaves_the_old_or_the_new_one_whole(
    llama: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    old, new = (random_adapter(llama, LoraConfig(rank=2, seed=seed), seed) for seed in (1, 2))
    save(tmp_path / "run", old, AdamW(old))
    with cut_after(monkeypatch, calls), suppress(PowerCut):
        save(tmp_path / "run", new, AdamW(new))
    found = read(tmp_path / "run")
    assert found.optimizer is not None
    assert found.config.seed in (1, 2)
    source = {1: old, 2: new}[found.config.seed]
    assert all(torch.equal(found.weights[path][1], pair[1]) for path, pair in source.weights.items())
    assert save(tmp_path / "run", new) and read(tmp_path / "run").config.seed == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing is left lying about"


def test_every_file_is_on_disk_before_the_folder_takes_its_place(
    llama: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    flush, rename = folders._flush, os.rename
    monkeypatch.setattr(folders, "_flush", lambda path: (events.append(path.name), flush(path)))
    monkeypatch.setattr(os, "rename", lambda *paths: (events.append("rename"), rename(*paths)))
    adapter = llama.new_adapter(LoraConfig(rank=2))
    save(tmp_path / "run", adapter, AdamW(adapter))
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert set(events[:-3]) == files and len(files) == 5
    assert events[-3:] == [".run.new", "rename", tmp_path.name]


def test_a_killed_writer_never_leaves_a_folder_that_does_not_read(llama: BaseModel, tmp_path: Path) -> None:
    """A child overwrites one checkpoint over and over until it is killed; whatever stands there must be whole."""
    script = f"""
import itertools, sys, torch
from mint.engine.checkpoint import save
from mint.engine.lora import Adapter
from mint.types import LoraConfig
for seed in itertools.count():
    weights = {{"lm_head": (torch.full((2, 4000), float(seed)), torch.full((4000, 2), float(seed)))}}
    save({str(tmp_path / "run")!r}, Adapter("base", LoraConfig(rank=2, seed=seed), weights))
    print(seed, flush=True)
"""
    for wait in range(3):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(1 + wait):
            acknowledged = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        child.wait()
        found = read(tmp_path / "run")
        assert found.config.seed is not None and found.config.seed >= acknowledged
        assert float(found.weights["lm_head"][0][0, 0]) == found.config.seed
