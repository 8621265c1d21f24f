"""Splitting a batch and putting its results together."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mint import types
from mint.client.chunks import combine, estimated_bytes, split


def _datum(length: int) -> types.Datum:
    return types.Datum(
        types.ModelInput.from_ints([1] * length), {"target_tokens": [1] * length, "weights": [1.0] * length}
    )


def test_a_datum_is_four_bytes_a_token_and_its_tensors() -> None:
    assert estimated_bytes(_datum(10)) == 10 * (4 + 8 + 4)


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 5), st.integers(1, 400))
def test_pieces_keep_the_order_and_both_limits(lengths: list[int], max_datums: int, max_bytes: int) -> None:
    data = [_datum(length) for length in lengths]
    pieces = split(data, max_datums, max_bytes)
    assert [datum for piece in pieces for datum in piece] == data
    for piece in pieces:
        assert 1 <= len(piece) <= max_datums
        assert len(piece) == 1 or sum(map(estimated_bytes, piece)) <= max_bytes
    for left, right in itertools.pairwise(pieces):  # no piece could have taken one more
        assert len(left) == max_datums or sum(map(estimated_bytes, [*left, right[0]])) > max_bytes


def _output(datums: int, **metrics: float) -> types.ForwardBackwardOutput:
    rows = [{"logprobs": types.TensorData([float(n)], "float32")} for n in range(datums)]
    return types.ForwardBackwardOutput(rows, {key.replace("__", ":"): value for key, value in metrics.items()})


def test_metrics_are_reduced_as_their_names_end() -> None:
    combined = combine(
        [
            _output(
                3,
                a__sum=1,
                b__mean=1,
                c__max=1,
                d__min=1,
                e__slack=2,
                f__unique=5,
                g__hash2=2.0**63,
                h__odd=1,
                i__sum=1,
            ),
            _output(1, a__sum=2, b__mean=5, c__max=4, d__min=-1, e__slack=6, f__unique=6, g__hash2=2.0**63, h__odd=1),
        ]
    )
    assert len(combined.loss_fn_outputs) == 4
    assert combined.metrics == {
        "a:sum": 3,
        "b:mean": (3 * 1 + 1 * 5) / 4,
        "c:max": 4,
        "d:min": -1,
        "e:slack": 6 - (3 * 2 + 1 * 6) / 4,
        "f:unique": 5,
        "f:unique_1": 6,
        "g:hash2": 0.0,
    }


def test_a_single_piece_is_left_as_it_came() -> None:
    output = _output(2, odd=1.0)
    assert combine([output]) is output


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_the_mean_over_pieces_is_the_mean_over_data(cut: int) -> None:
    values = np.array([1.0, 5.0, 2.0, 8.0, 9.0])
    pieces = [values[:cut], values[cut:]]
    combined = combine([_output(len(piece), x__mean=float(piece.mean())) for piece in pieces])
    assert combined.metrics["x:mean"] == pytest.approx(values.mean())
