from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from mint.backend import ModelFacts
from mint.checks import LOSS_FNS, check_loss
from mint.engine.batch import Example, Part, pack, read_data
from mint.engine.planning import plan
from mint.errors import BadRequest
from mint.types import Datum, ModelInput, TensorData

FACTS = ModelFacts("a/model", "", "", vocab_size=50, max_context=16, parameters=0, dtype="float32", device="cpu")
GOOD: dict[str, Any] = {"target_tokens": [2, 3, 4], "logprobs": [-1, -2, -3], "advantages": [0, 1, 1]}


def check(
    inputs: Mapping[str, Any],
    tokens: list[int] | None = None,
    loss_fn: str = "ppo",
    config: Mapping[str, float] | None = None,
) -> Example:
    options = check_loss(loss_fn, config)
    good = Datum(ModelInput.from_ints([7]), {key: [0] for key in LOSS_FNS[loss_fn].required})
    datum = Datum(ModelInput.from_ints([1, 2, 3] if tokens is None else tokens), dict(inputs))
    return read_data([good, datum], loss_fn, options, FACTS)[1]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (GOOD | {"advantages": [1, 2]}, "datum 1: advantages has length 2, model_input has 3"),
        (GOOD | {"weights": [1, 1, 1, 1]}, "datum 1: weights has length 4, model_input has 3"),
        (GOOD | {"logprobs": -1.0}, "datum 1: logprobs has length a single number"),
        (GOOD | {"target_tokens": [2, 50, 4]}, "target_tokens holds token id 50 at position 1; ids run from 0 to 49"),
        (GOOD | {"target_tokens": [2, 3, -100]}, "token id -100 at position 2"),
        (GOOD | {"advantages": [0, 1, math.nan]}, "datum 1: advantages holds nan at position 2"),
        (GOOD | {"weights": [math.inf, 1, 1]}, "datum 1: weights holds inf at position 0"),
        (GOOD | {"logprobs": [-1, -math.inf, -1]}, "datum 1: logprobs holds -inf at position 1"),
        (GOOD | {"target_tokens": TensorData([2.0, 3, 4], "float32")}, "datum 1: target_tokens is float32"),
        (GOOD | {"target_tokens": [[2], [3], [4]]}, "two dimensions are for cross_entropy"),
        (GOOD | {"advantages": [[0, 1], [1, 1], [1, 1]]}, r"advantages has shape \[3, 2\], target_tokens has \[3\]"),
        (GOOD | {"reward": [1, 1, 1]}, r"datum 1: ppo does not read loss_fn_inputs\['reward'\]; it reads"),
        ({"target_tokens": [2, 3, 4], "logprobs": [0, 0, 0]}, "datum 1: loss_fn_inputs lacks 'advantages'"),
        (GOOD | {"weights": [1, 1, 1], "mask": [0, 1, 1]}, "datum 1: weights and mask are the same input"),
        (GOOD | {"clip_low_threshold": [0.8, 1.3, 0.8]}, "above clip_high_threshold at position 1"),
    ],
)
def test_a_faulty_input_is_named_by_datum_key_and_position(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        check(inputs)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "datum 1: model_input is empty"),
        ([1, 50, 3], "datum 1: model_input holds token id 50 at position 1"),
        ([1, -1, 3], "datum 1: model_input holds token id -1 at position 1"),
        ([1] * 17, "datum 1: model_input has 17 tokens, more than the context of 16"),
    ],
)
def test_a_faulty_model_input_is_named_by_datum_and_position(tokens: list[int], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        check(GOOD, tokens)


def test_an_empty_list_of_data_is_refused() -> None:
    with pytest.raises(BadRequest, match="list of data is empty"):
        read_data([], "cross_entropy", {}, FACTS)


@pytest.mark.parametrize("alias", ["weights", "loss_weights", "mask"])
def test_weights_go_by_three_names(alias: str) -> None:
    example = check(GOOD | {alias: [0.0, 0.5, -2.0]})
    assert example.weights_NK.ravel().tolist() == [0.0, 0.5, -2.0]
    assert example.counted_NK.ravel().tolist() == [False, True, True]


def test_equal_weights_under_two_names_are_accepted() -> None:
    assert check(GOOD | {"weights": [0, 1, 1], "mask": [0, 1, 1]}).weights_NK.ravel().tolist() == [0, 1, 1]


def test_without_weights_every_token_weighs_one_and_those_without_advantage_do_not_count() -> None:
    example = check(GOOD)
    assert example.weights_NK.ravel().tolist() == [1, 1, 1]
    assert example.counted_NK.ravel().tolist() == [False, True, True]


def test_thresholds_come_from_the_options_where_the_datum_has_none() -> None:
    example = check(GOOD | {"clip_high_threshold": [2, 3, 4]}, config={"clip_low_threshold": 0.5})
    assert example.inputs_NK["clip_low_threshold"].ravel().tolist() == [0.5, 0.5, 0.5]
    assert example.inputs_NK["clip_high_threshold"].ravel().tolist() == [2, 3, 4]


def test_micro_batches_keep_to_the_budget_and_hold_every_datum_once() -> None:
    lengths = [5, 30, 1, 7, 12, 3, 3, 9]
    rng = np.random.default_rng(0)
    batches = plan([rng.integers(0, 97, length) for length in lengths], 12)
    assert sorted(i for batch in batches for i in batch) == list(range(8))
    assert all(sum(lengths[i] for i in batch) <= 12 or len(batch) == 1 for batch in batches)
    assert batches[0] == [1]


def test_packing_lays_examples_end_to_end_and_leaves_out_tokens_of_weight_zero() -> None:
    data = [check(GOOD | {"weights": [0, 1, 2]}), check(GOOD | {"weights": [3, 0, 0]}, tokens=[4, 5, 6])]
    batch = pack([Part([1, 0], data)])
    rows = [batch.tree.rows[n].tolist() for n in range(2)]
    assert sorted(rows) == [[0, 1, 2], [3, 4, 5]]
    assert [batch.tokens_T[r].tolist() for r in rows] == [[4, 5, 6], [1, 2, 3]]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.cells_C.tolist() == [0, 4, 5]
    assert batch.weights_C.tolist() == [3, 1, 2]
    assert batch.sequence_C.tolist() == [0, 1, 1]
    assert [batch.locate(cell) for cell in range(3)] == [(1, 0), (0, 1), (0, 2)]


def test_tokens_of_weight_zero_may_still_enter_the_sequence_ratio() -> None:
    example = check(GOOD | {"weights": [0, 0, 1], "sequence_ratio_mask": [0, 1, 1]}, loss_fn="gspo")
    batch = pack([Part([0], [example])])
    assert batch.cells_C.tolist() == [1, 2]
    assert batch.weights_C.tolist() == [0, 1]
    assert batch.inputs_C["sequence_ratio_mask"].tolist() == [1, 1]
    assert batch.counted_C.tolist() == [False, True]


def test_soft_and_hard_targets_pack_together_and_come_apart_in_their_shapes() -> None:
    two = {"target_tokens": [[1, 2], [3, 4], [5, 6]], "weights": [[1, 0], [0.5, 0.5], [0, 0]]}
    soft = check(two, loss_fn="cross_entropy")
    hard = check({"target_tokens": [7, 8, 9]}, loss_fn="cross_entropy")
    batch = pack([Part([0, 1], [soft, hard])])
    assert batch.targets.targets_C[batch.targets.back_C].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert batch.cells_C.tolist() == [0, 2, 3, 6, 7, 8]
    assert [batch.locate(cell) for cell in (2, 3, 5)] == [(0, 1), (1, 0), (1, 2)]
    parts = dict(batch.of_call(0, torch.arange(9.0)))
    np.testing.assert_array_equal(parts[0], [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(parts[1], [6, 7, 8])


@pytest.mark.parametrize("given", [(), ("weights",), ("mask",)], ids=str)
def test_data_read_at_once_is_what_each_datum_alone_gives(given: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    options = check_loss("ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4})
    data = []
    for length in (3, 1, 7):
        inputs = {key: rng.normal(size=length).astype(np.float32) for key in ("logprobs", "advantages", *given)}
        inputs["target_tokens"] = rng.integers(0, 50, length)
        data.append(Datum(ModelInput.from_ints(rng.integers(0, 50, length).tolist()), inputs))
    for together, datum in zip(read_data(data, "ppo", options, FACTS), data, strict=True):
        odd = Datum(ModelInput.from_ints([7]), {key: [0] for key in LOSS_FNS["ppo"].inputs})  # so not in columns
        alone = read_data([odd, datum], "ppo", options, FACTS)[1]
        assert together.target_shape == alone.target_shape
        for name in ("tokens_N", "targets_NK", "weights_NK", "counted_NK"):
            np.testing.assert_array_equal(getattr(together, name), getattr(alone, name))
        assert list(together.inputs_NK) == list(alone.inputs_NK)
        for key, values in alone.inputs_NK.items():
            np.testing.assert_array_equal(together.inputs_NK[key], values)
