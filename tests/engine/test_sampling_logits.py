"""Drawing tokens, against plain Python and against the distribution itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mint.engine.sampler.logits import DrawParams, draw, invert, logprobs_of, topk_rows
from mint.engine.sampler.streams import stream_of, uniforms


def params(rows: int = 1, **changes: object) -> DrawParams:
    fields = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5, **changes}
    return DrawParams(**{f"{name}_N": np.broadcast_to(np.asarray(value), rows) for name, value in fields.items()})  # type: ignore[arg-type]


def plain_distribution(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Temperature, then top-k, top-p, min-p, one token at a time."""
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    kept = order if top_k == -1 else order[:top_k]
    total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if nucleus and mass >= top_p:
            break
        nucleus.append(i)
        mass += weights[i] / total
    kept = [i for i in nucleus if weights[i] >= min_p * weights[nucleus[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@settings(max_examples=200)
@given(
    logits=st.lists(st.integers(-24, 24).map(lambda x: x / 4), min_size=1, max_size=12),  # ties exact, others clear
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 1, 3, 50]),
    top_p=st.sampled_from([0.1137, 0.5713, 0.9313, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.51]),
)
def test_every_draw_is_the_inverse_of_the_plain_distribution(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    expected = np.cumsum(plain_distribution(logits, temperature, top_k, top_p, min_p))
    grid = (np.arange(64) + 0.37) / 64
    drawn = draw(
        torch.tensor([logits]).expand(64, -1),
        params(64, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=grid),
    )
    for u, token in zip(grid, drawn.tolist(), strict=True):
        edges = np.abs(expected - u).min()
        if edges > 1e-4:  # float32 may differ from Python's doubles right at an edge
            assert token == np.searchsorted(expected, u, side="right")


def test_each_row_follows_its_own_parameters() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0]).expand(5, -1)
    drawn = draw(
        logits,
        params(
            5, temperature=np.array([0.0, 1.0, 1.0, 1.0, 1e-30]), top_k=np.array([-1, 1, -1, -1, -1]),
            top_p=np.array([1, 1, 0.2, 1, 1]), min_p=np.array([0, 0, 0, 0.9, 0]), uniform=0.999,
        ),
    )  # fmt: skip
    assert drawn.tolist() == [1, 1, 1, 1, 1]
    assert draw(logits[:1], params(uniform=0.999)).tolist() == [3]


def test_the_draw_follows_the_distribution() -> None:
    """Chi-square of 20,000 draws by counter on a fixed row; 5 degrees of freedom, 0.1 % level."""
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -2.0])
    n = 20_000
    u = uniforms(np.full(n, stream_of(11, 0), dtype=np.uint64), np.arange(n))
    drawn = draw(logits.expand(n, -1), params(n, uniform=u)).numpy()
    expected = n * torch.softmax(logits, -1).numpy()
    observed = np.bincount(drawn, minlength=6)
    assert ((observed - expected) ** 2 / expected).sum() < 20.5


def test_uniforms_are_uniform_along_positions_and_across_samples() -> None:
    """Kolmogorov-Smirnov at the 0.1 % level, and no correlation between neighbours."""
    n = 20_000
    along = uniforms(np.full(n, stream_of(3, 1), dtype=np.uint64), np.arange(n))
    across = uniforms(np.array([stream_of(3, i) for i in range(n)], dtype=np.uint64), np.zeros(n, dtype=np.int64))
    for numbers in (along, across):
        assert numbers.min() >= 0 and numbers.max() < 1
        gap = np.abs(np.sort(numbers) - (np.arange(n) + 0.5) / n).max()
        assert gap < 1.95 / math.sqrt(n)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 3.3 / math.sqrt(n)


def test_streams_of_seeds_and_samples_are_all_different() -> None:
    assert len({stream_of(seed, index) for seed in (-1, 0, 1, 2, 2**63, 2**64 - 2) for index in range(1000)}) == 6000


def test_a_uniform_next_to_one_never_draws_a_token_of_probability_zero() -> None:
    probs = torch.tensor([[0.3, 0.7, 0.0, 0.0]])
    assert invert(probs, np.array([[1 - 2**-53, 0.0, 0.3]])).tolist() == [[1, 0, 1]]
    assert invert(torch.tensor([[0.0, 1.0]]), np.array([[0.0]])).tolist() == [[1]]


def test_log_probs_are_those_of_log_softmax_whatever_the_shift() -> None:
    logits = torch.randn(3, 50) * 5 + torch.tensor([[0.0], [30.0], [-30.0]])
    ids = torch.tensor([[0, 7], [3, 3], [49, 1]])
    expected = torch.log_softmax(logits.double(), -1).gather(-1, ids).float()
    torch.testing.assert_close(logprobs_of(logits, ids), expected, atol=1e-5, rtol=0)


def test_topk_rows_come_best_first() -> None:
    (row,) = topk_rows(torch.tensor([[0.0, 3.0, 1.0]]), 2)
    expected = torch.log_softmax(torch.tensor([0.0, 3.0, 1.0]), -1)
    assert [token for token, _ in row] == [1, 2]
    assert [logprob for _, logprob in row] == pytest.approx([expected[1].item(), expected[2].item()])
    assert len(topk_rows(torch.zeros(1, 3), 10)[0]) == 3


def test_of_equally_likely_tokens_the_lower_ids_are_kept() -> None:
    drawn = draw(torch.zeros(8, 6), params(8, top_k=2, uniform=(np.arange(8) + 0.5) / 8))
    assert drawn.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
