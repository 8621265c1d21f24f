"""Each loss against its formula written out token by token in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from mint.checks import LOSS_FNS, check_loss
from mint.engine.losses import LOSSES, LossTokens, Terms
from mint.errors import BadRequest

RNG = np.random.default_rng(0)
COUNT = 40
P = -3 + RNG.normal(size=COUNT)
Q = P + 0.5 * RNG.normal(size=COUNT)
A = RNG.normal(size=COUNT)
SEQUENCE = np.repeat([0, 1, 2, 3], 10)
IN_RATIO = np.ones(COUNT)


def run(name: str, in_ratio: Sequence[float] = IN_RATIO, **config: float) -> tuple[Terms, np.ndarray]:
    """The terms of a loss, and the gradient of their sum."""
    options = check_loss(name, config)
    p = torch.tensor(P, requires_grad=True)
    tokens = LossTokens(
        p=p,
        q=torch.tensor(Q),
        advantages=torch.tensor(A),
        clip_low=torch.full((COUNT,), options.get("clip_low_threshold", 0.0), dtype=torch.float64),
        clip_high=torch.full((COUNT,), options.get("clip_high_threshold", 0.0), dtype=torch.float64),
        in_ratio=torch.tensor(in_ratio),
        sequence=torch.tensor(SEQUENCE),
        sequences=4,
    )
    terms = LOSSES[name](tokens, options)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), p)
    return terms, gradient.numpy()


def clip(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, low), high)


def test_cross_entropy_is_minus_the_log_prob() -> None:
    terms, gradient = run("cross_entropy")
    np.testing.assert_allclose(terms.loss.detach(), [-p for p in P])
    np.testing.assert_allclose(gradient, -np.ones(COUNT))
    assert terms.ratio is None


def test_importance_sampling_is_minus_ratio_times_advantage() -> None:
    terms, gradient = run("importance_sampling")
    expected = [-math.exp(p - q) * a for p, q, a in zip(P, Q, A, strict=True)]
    np.testing.assert_allclose(terms.loss.detach(), expected)
    np.testing.assert_allclose(gradient, expected)  # d exp(p - q) / dp = exp(p - q)


def test_importance_sampling_at_ratio_one_is_reinforce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_losses.Q", P)
    _, gradient = run("importance_sampling")
    np.testing.assert_allclose(gradient, -A)


@pytest.mark.parametrize("bounds", [(0.8, 1.2), (0.95, 1.5)])
def test_ppo_is_clipped_and_has_no_gradient_exactly_where_the_clip_binds(bounds: tuple[float, float]) -> None:
    low, high = bounds
    terms, gradient = run("ppo", clip_low_threshold=low, clip_high_threshold=high)
    expected, slopes, bound = [], [], []
    for p, q, a in zip(P, Q, A, strict=True):
        ratio = math.exp(p - q)
        expected.append(-min(ratio * a, clip(ratio, low, high) * a))
        bound.append((a > 0 and ratio > high) or (a < 0 and ratio < low))
        slopes.append(0.0 if bound[-1] else -ratio * a)
    np.testing.assert_allclose(terms.loss.detach(), expected)
    np.testing.assert_allclose(gradient, slopes)
    assert 3 < sum(bound) < COUNT - 3
    assert terms.clipped is not None and terms.clipped.tolist() == bound


def test_ppo_clips_at_0_8_and_1_2_unless_told_otherwise() -> None:
    torch.testing.assert_close(run("ppo")[0].loss, run("ppo", clip_low_threshold=0.8, clip_high_threshold=1.2)[0].loss)


@pytest.mark.parametrize("bounds", [(0.0, 4.0), (0.8, 1.2)])
def test_cispo_weighs_the_log_prob_by_a_clipped_constant_and_keeps_every_gradient(bounds: tuple[float, float]) -> None:
    low, high = bounds
    terms, gradient = run("cispo", clip_low_threshold=low, clip_high_threshold=high)
    factors = [-clip(math.exp(p - q), low, high) * a for p, q, a in zip(P, Q, A, strict=True)]
    np.testing.assert_allclose(terms.loss.detach(), factors * P)
    np.testing.assert_allclose(gradient, factors)
    assert np.all(gradient != 0)


@pytest.mark.parametrize("beta", [0.05, 0.3])
def test_dro_penalises_the_square_of_the_drift(beta: float) -> None:
    terms, gradient = run("dro", beta=beta)
    expected = [-(p * a - 0.5 * beta * (p - q) ** 2) for p, q, a in zip(P, Q, A, strict=True)]
    np.testing.assert_allclose(terms.loss.detach(), expected)
    np.testing.assert_allclose(gradient, [-a + beta * (p - q) for p, q, a in zip(P, Q, A, strict=True)])
    assert LOSS_FNS["dro"].options["beta"] == 0.05


@pytest.mark.parametrize("masked", [False, True])
def test_gspo_clips_the_length_normalised_ratio_of_the_sequence(masked: bool) -> None:
    low, high = 0.9, 1.1
    in_ratio = RNG.integers(0, 2, COUNT).astype(float) if masked else IN_RATIO
    terms, gradient = run("gspo", in_ratio, clip_low_threshold=low, clip_high_threshold=high)
    for sequence in range(4):
        members = [i for i in range(COUNT) if SEQUENCE[i] == sequence]
        entering = [i for i in members if in_ratio[i]]
        ratio = math.exp(sum(P[i] - Q[i] for i in entering) / len(entering))
        for i in members:
            assert terms.loss[i].item() == pytest.approx(-min(ratio * A[i], clip(ratio, low, high) * A[i]))
            bound = (A[i] > 0 and ratio > high) or (A[i] < 0 and ratio < low)
            assert gradient[i] == pytest.approx(0.0 if bound else -ratio * A[i])


def test_gspo_with_equal_advantages_has_the_gradient_of_the_sequence_objective() -> None:
    """Length times min(s A, clip(s) A), differentiated through s itself."""
    drift = torch.tensor(P[:10] - Q[:10], requires_grad=True)
    (10 * torch.exp(drift.mean()) * -1.7).backward()
    p = torch.tensor(P[:10], requires_grad=True)
    ones = torch.ones(10, dtype=torch.float64)
    first = torch.zeros(10, dtype=torch.long)
    tokens = LossTokens(p, torch.tensor(Q[:10]), 1.7 * ones, 0 * ones, 9 * ones, ones, first, 1)
    LOSSES["gspo"](tokens, {}).loss.sum().backward()
    torch.testing.assert_close(p.grad, drift.grad)


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadRequest, match="'reinforce'; known: cross_entropy, importance_sampling, ppo, cispo"):
        check_loss("reinforce", {})


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("ppo", {"epsilon": 0.2}, r"unknown key 'epsilon'.*clip_low_threshold=0\.8, clip_high_threshold=1\.2"),
        ("cross_entropy", {"temperature": 1.0}, "its options and defaults: unchecked=0"),
        ("ppo", {"clip_low_threshold": 1.3}, r"clip_low_threshold 1\.3 is above clip_high_threshold 1\.2"),
        ("ppo", {"clip_low_threshold": math.nan}, "must be a number >= 0"),
        ("dro", {"beta": "large"}, "'large'; it must be a number"),
        ("ppo", {"temperature": 0}, "must be a number > 0"),
    ],
)
def test_a_wrong_option_is_refused_by_name(name: str, config: dict[str, float | str], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        check_loss(name, config)


def test_every_advertised_loss_is_there() -> None:
    assert set(LOSSES) == set(LOSS_FNS)
