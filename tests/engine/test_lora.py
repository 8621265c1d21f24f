from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import logits, peft_model, random_adapter, random_tokens
from torch import Tensor

from mint.engine.attention import PackedAttention
from mint.engine.lora import ALPHA, Adapter, Rows
from mint.engine.model import BaseModel
from mint.types import LoraConfig


def forward(model: BaseModel, sequences: list[list[int]], adapters: list[Adapter | None]) -> list[Tensor]:
    lengths = [len(tokens) for tokens in sequences]
    rows: Rows = list(zip(adapters, lengths, strict=True))
    tokens_T = torch.tensor([token for tokens in sequences for token in tokens])
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        hidden = model.hidden(tokens_T, positions_T, PackedAttention(lengths), rows)
        return list(model.logits(hidden, rows).split(lengths))


def test_an_adapter_gives_the_logits_of_peft(model: BaseModel, tiny_folder: Callable[[str], Path], family: str) -> None:
    adapter = random_adapter(model, LoraConfig(rank=4, seed=1))
    tokens = random_tokens(np.random.default_rng(0), 13)
    with torch.no_grad():
        theirs = logits(peft_model(tiny_folder(family), adapter), tokens)
    ours, base = forward(model, [tokens, tokens], [adapter, None])
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    assert (ours - base).abs().max() > 0.1


def test_adapters_of_mixed_rank_and_targets_share_a_pass_with_the_base_model(model: BaseModel) -> None:
    rng = np.random.default_rng(1)
    adapters = [
        random_adapter(model, LoraConfig(rank=2, seed=1), seed=1),
        None,
        random_adapter(model, LoraConfig(rank=5, seed=2, train_unembed=False), seed=2),
        random_adapter(model, LoraConfig(rank=3, seed=3, train_attn=False, train_mlp=False), seed=3),
    ]
    sequences = [random_tokens(rng, length) for length in (5, 9, 9, 3)]
    together = forward(model, sequences, adapters)
    for tokens, adapter, shared in zip(sequences, adapters, together, strict=True):
        (alone,) = forward(model, [tokens], [adapter])
        torch.testing.assert_close(shared, alone, atol=1e-5, rtol=1e-5)


def test_a_fresh_adapter_changes_nothing(model: BaseModel) -> None:
    tokens = random_tokens(np.random.default_rng(2), 8)
    fresh, base = forward(model, [tokens, tokens], [model.new_adapter(LoraConfig(rank=4)), None])
    torch.testing.assert_close(fresh, base, atol=1e-5, rtol=0)


FLAGS = [
    dict(train_attn=attn, train_mlp=mlp, train_unembed=unembed)
    for attn in (True, False)
    for mlp in (True, False)
    for unembed in (True, False)
    if attn or mlp or unembed
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(k[6:] for k, on in flags.items() if on))
def test_trainable_parameters_equal_the_closed_form(model: BaseModel, flags: dict[str, bool]) -> None:
    hidden, mlp, vocab, heads, kv, head, layers, rank = 32, 48, 97, 4, 2, model.head_dim, 3, 5
    sizes = {
        "train_attn": layers * (2 * (hidden + heads * head) + 2 * (hidden + kv * head)),
        "train_mlp": layers * 3 * (hidden + mlp),
        "train_unembed": hidden + vocab,
    }
    adapter = model.new_adapter(LoraConfig(rank=rank, **flags))
    assert adapter.facts().trainable_parameters == rank * sum(sizes[flag] for flag, on in flags.items() if on)


def test_turning_a_group_off_leaves_the_others_as_they_were(model: BaseModel) -> None:
    whole = model.new_adapter(LoraConfig(rank=3, seed=7))
    part = model.new_adapter(LoraConfig(rank=3, seed=7, train_attn=False))
    assert set(whole.weights) - set(part.weights) == {p for p, m in model.linears.items() if m.group == "attn"}
    assert all(torch.equal(part.weights[path][0], whole.weights[path][0]) for path in part.weights)


def test_a_seed_gives_the_same_adapter_and_none_a_fresh_one(model: BaseModel) -> None:
    first, second = (model.new_adapter(LoraConfig(rank=3, seed=5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    fresh, other = (model.new_adapter(LoraConfig(rank=3)) for _ in range(2))
    assert not torch.equal(fresh.parameters()[0], other.parameters()[0])
    again = model.new_adapter(fresh.config)
    assert torch.equal(fresh.parameters()[0], again.parameters()[0]), "the drawn seed is recorded in the config"


def test_initial_weights_are_uniform_within_one_over_the_root_of_the_width(model: BaseModel) -> None:
    adapter = model.new_adapter(LoraConfig(rank=64, seed=0))
    for path, (down, up) in adapter.weights.items():
        bound = 1 / math.sqrt(model.linears[path].in_features)
        assert 0.95 * bound < down.abs().max() <= bound
        assert abs(down.std().item() - bound / math.sqrt(3)) < 0.05 * bound
        assert not up.any()
    assert adapter.scale == ALPHA / 64
    assert all(p.dtype == torch.float32 and p.requires_grad for p in adapter.parameters())


def test_a_snapshot_does_not_follow_later_training(model: BaseModel) -> None:
    adapter = random_adapter(model, LoraConfig(rank=2, seed=0))
    tokens = random_tokens(np.random.default_rng(3), 6)
    (before,) = forward(model, [tokens], [adapter])
    frozen = adapter.snapshot()
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(1.0)
    after, kept = forward(model, [tokens, tokens], [adapter, frozen])
    torch.testing.assert_close(kept, before, atol=1e-5, rtol=1e-5)
    assert (after - before).abs().max() > 0.1
    assert not any(p.requires_grad for p in frozen.parameters())
    assert adapter.snapshot(torch.bfloat16).parameters()[0].dtype == torch.bfloat16
