"""Shared beginnings: the tree itself, and training over it against each sequence computed alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import SHARED, group_data, random_adapter
from test_trainer import assert_gradients, train

from mint.engine import tree
from mint.engine.model import BaseModel
from mint.engine.planning import plan
from mint.engine.trainer import Trainer
from mint.types import LoraConfig


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(0, 30)), min_size=1, max_size=9))
def test_a_tree_holds_every_token_at_its_position_and_looks_at_what_stands_before_it(
    made: list[tuple[int, int, int]],
) -> None:
    rng = np.random.default_rng(0)
    stems = rng.integers(0, 3, (3, 60))
    sequences = [np.concatenate([stems[n][:kept], rng.integers(0, 3, added)]) for n, kept, added in made]
    grown = tree.grow(sequences)
    tokens, positions, keys = np.full(grown.size, -1), grown.positions(), grown.keys()
    for sequence, rows in zip(sequences, grown.rows, strict=True):
        assert positions[rows].tolist() == list(range(len(sequence)))
        assert ((tokens[rows] == -1) | (tokens[rows] == sequence)).all()
        tokens[rows] = sequence
        ends = [node for node in keys if node[-1] in rows]
        assert all((node == rows[: len(node)]).all() for node in ends)
    assert (tokens >= 0).all()


def test_a_group_has_its_prompt_once_and_nested_prompts_nest() -> None:
    rng = np.random.default_rng(0)
    system, question = rng.integers(0, 97, 20), rng.integers(0, 97, 30)
    turns = np.concatenate([system, question])
    answers = [np.concatenate([turns, rng.integers(0, 97, 5)]) for _ in range(4)]
    other = np.concatenate([system, rng.integers(0, 97, 9)])
    grown = tree.grow([*answers, other, turns])
    assert sorted(grown.lengths) == [5, 5, 5, 5, 9, 20, 30]
    assert grown.lengths[: grown.roots] == [20]


def test_short_common_beginnings_are_left_alone() -> None:
    stem = np.arange(tree.SHORTEST_SHARED - 1)
    assert tree.grow([np.append(stem, 90), np.append(stem, 91)]).roots == 2


def test_micro_batches_keep_groups_together_and_count_their_prompt_once() -> None:
    rng = np.random.default_rng(0)
    groups = [rng.integers(0, 97, 100) for _ in range(3)]
    sequences = [np.concatenate([groups[n % 3], rng.integers(0, 97, 10)]) for n in range(12)]
    batches = plan(sequences, 150)
    assert sorted(map(sorted, batches)) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert all(tree.grow([sequences[i] for i in batch]).size <= 120 for batch in plan(sequences, 120))


@pytest.mark.parametrize("shape", SHARED)
def test_shared_beginnings_give_the_log_probs_and_gradients_of_sequences_computed_alone(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    data = group_data(1, *SHARED[shape])
    shared, plain = (random_adapter(model, LoraConfig(rank=3, seed=0)) for _ in range(2))
    ours = train(Trainer(model), shared, data)
    monkeypatch.setattr(tree, "SHORTEST_SHARED", 10**6)
    theirs = train(Trainer(model, token_budget=1), plain, data)
    for mine, reference in zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(mine["logprobs"].to_numpy(), reference["logprobs"].to_numpy(), atol=3e-5)
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4, abs=1e-5)
    assert plain.gradients is not None
    assert_gradients(shared.gradients, plain.gradients)


def test_a_family_of_unknown_layers_trains_through_its_own_modules_to_the_same_numbers(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = tiny_model("gemma3"), group_data(2, *SHARED["groups, singles and a short prompt"])
    ours, theirs = (random_adapter(model, LoraConfig(rank=3, seed=0)) for _ in range(2))
    train(Trainer(model), ours, data)
    monkeypatch.setattr(model, "_fused", None)
    train(Trainer(model), theirs, data)
    assert theirs.gradients is not None
    assert_gradients(ours.gradients, theirs.gradients)


def test_every_family_has_layers_of_ours(model: BaseModel) -> None:
    assert model._fused is not None


def test_lean_training_gives_the_same_bits(model: BaseModel) -> None:
    data = group_data(3, *SHARED["a group"])
    lean, plain = (random_adapter(model, LoraConfig(rank=3, seed=0)) for _ in range(2))
    assert train(Trainer(model, lean=True), lean, data) == train(Trainer(model), plain, data)
    assert lean.gradients is not None and plain.gradients is not None
    assert all(torch.equal(a, b) for a, b in zip(lean.gradients, plain.gradients, strict=True))
