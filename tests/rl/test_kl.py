"""KL estimators, the penalty in the advantage and the term of the loss, each against loops or finite differences."""

import asyncio

import numpy as np
import pytest

from mint.errors import BadRequest
from mint.rl.data_processing import trajectory_to_data
from mint.rl.kl import (
    KL_ESTIMATORS,
    KL_SLOPES,
    add_entropy_bonus,
    discounted_future_sum,
    incorporate_kl_penalty,
    kl_loss_datums,
    sampled_logprobs,
    score_datums,
)
from mint.types import Datum
from tests.rl.fakes import FakeSamplingClient, FakeTrainingClient, log_softmax
from tests.rl.groups import trajectory, transition

VOCAB = 6


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB))


def datums(policy: np.ndarray, advantage: float = 0.5) -> list[Datum]:
    """Two trajectories, one with an observation between its turns, with the policy's own log-probs."""
    rows = log_softmax(policy)

    def turn(ob: list[int], ac: list[int]) -> object:
        before = [ob[-1], *ac[:-1]]
        return transition(ob, ac, [float(rows[a, b]) for a, b in zip(before, ac, strict=True)])

    two_turns = trajectory(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 0], [5, 1]))  # type: ignore[arg-type]
    return trajectory_to_data(two_turns, advantage) + trajectory_to_data(trajectory(turn([2], [2, 5, 3])), -advantage)  # type: ignore[arg-type]


def array(datum: Datum, key: str) -> np.ndarray:
    return datum.loss_fn_inputs[key].to_numpy().astype(float)


def by_hand(data: list[Datum], reference: np.ndarray) -> tuple[list[list[float]], float]:
    """d for every token (0 where masked), and its mean over unmasked tokens."""
    rows, d_D = log_softmax(reference), []
    for datum in data:
        tokens, targets = datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()
        q = [rows[a, b] for a, b in zip(tokens, targets, strict=True)]
        d_D.append([(p - r) * m for p, r, m in zip(array(datum, "logprobs"), q, array(datum, "mask"), strict=True)])
    return d_D, sum(map(sum, d_D)) / sum(array(datum, "mask").sum() for datum in data)


@pytest.mark.parametrize("coef", [0.05, 1.0])
def test_the_penalty_is_the_formula_of_the_tutorial(coef: float) -> None:
    data, reference = datums(table(0)), table(1)
    d_D, average = by_hand(data, reference)
    before = [array(datum, "advantages") for datum in data]
    metrics = asyncio.run(incorporate_kl_penalty(data, FakeSamplingClient(reference), coef))
    assert metrics == {"kl_policy_base": pytest.approx(average, rel=1e-5)}
    for datum, old, d in zip(data, before, d_D, strict=True):
        for t, trained in enumerate(array(datum, "mask")):
            expected = old[t] + coef * (average - d[t]) if trained else 0.0
            assert array(datum, "advantages")[t] == pytest.approx(expected, abs=1e-6)


def test_the_adjustments_sum_to_zero() -> None:
    data = datums(table(0), advantage=0.0)
    asyncio.run(incorporate_kl_penalty(data, FakeSamplingClient(table(1)), 1.0))
    assert sum(array(datum, "advantages").sum() for datum in data) == pytest.approx(0.0, abs=1e-5)


def test_with_a_discount_no_observation_token_gets_an_advantage() -> None:
    data, reference, gamma = datums(table(0), advantage=0.0), table(1), 0.9
    d_D, average = by_hand(data, reference)
    asyncio.run(incorporate_kl_penalty(data, FakeSamplingClient(reference), 0.1, gamma))
    for datum, d in zip(data, d_D, strict=True):
        mask = array(datum, "mask")
        for t in range(len(mask)):
            future = sum(gamma**k * 0.1 * (average - d[t + k]) * mask[t + k] for k in range(len(mask) - t))
            assert array(datum, "advantages")[t] == pytest.approx(future * mask[t], abs=1e-6)
    assert array(data[0], "mask").tolist() == [0, 1, 1, 0, 1, 1]  # an observation lies between trained tokens


def test_a_coefficient_of_zero_measures_and_changes_nothing() -> None:
    data, untouched = datums(table(0)), datums(table(0))
    metrics = asyncio.run(incorporate_kl_penalty(data, FakeSamplingClient(table(1)), 0.0))
    assert metrics["kl_policy_base"] != 0.0
    assert [d.loss_fn_inputs for d in data] == [d.loss_fn_inputs for d in untouched]


def test_against_itself_the_kl_is_zero() -> None:
    data = datums(table(0))
    metrics = asyncio.run(incorporate_kl_penalty(data, FakeSamplingClient(table(0)), 0.1))
    assert metrics["kl_policy_base"] == pytest.approx(0.0, abs=1e-6)


def test_discounted_future_sum_equals_its_definition() -> None:
    x = np.array([1.0, -2.0, 0.5, 3.0])
    expected = [sum(0.5**k * x[t + k] for k in range(4 - t)) for t in range(4)]
    np.testing.assert_allclose(discounted_future_sum(x, 0.5), expected)
    assert len(discounted_future_sum(np.zeros(0), 0.5)) == 0


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_every_estimator_estimates_the_kl(name: str) -> None:
    p, q = log_softmax(table(2)[0] * 0.2), log_softmax(table(3)[0] * 0.2)
    exact = float((np.exp(p) * (p - q)).sum())
    estimate = float((np.exp(p) * KL_ESTIMATORS[name](p - q)).sum())  # its expectation, exactly
    assert estimate == pytest.approx(exact, rel=0.15 if name == "k2" else 1e-9)  # k2 is biased, by little


@pytest.mark.parametrize("name", KL_SLOPES)
def test_slopes_are_derivatives(name: str) -> None:
    d, h = np.linspace(-2, 2, 9), 1e-6
    numeric = (KL_ESTIMATORS[name](d + h) - KL_ESTIMATORS[name](d - h)) / (2 * h)
    np.testing.assert_allclose(KL_SLOPES[name](d), numeric, atol=1e-6)


@pytest.mark.parametrize("estimator", KL_SLOPES)
def test_the_cross_entropy_datums_have_the_gradient_of_the_kl_loss(estimator: str) -> None:
    """coef * scale * sum k(p - q), differentiated numerically with respect to every logit."""
    coef, scales, current, reference = 0.3, np.array([1.0, 0.25]), table(4), table(1)
    data = datums(table(0))  # sampled by an older policy than the one being stepped

    def loss(logits: np.ndarray) -> float:
        rows, ref, total = log_softmax(logits), log_softmax(reference), 0.0
        for datum, scale in zip(data, scales, strict=True):
            targets = datum.loss_fn_inputs["target_tokens"].tolist()
            for a, b, m in zip(datum.model_input.to_ints(), targets, array(datum, "mask"), strict=True):
                total += coef * scale * m * float(KL_ESTIMATORS[estimator](np.array(rows[a, b] - ref[a, b])))
        return total

    numeric = np.zeros_like(current)
    for i in np.ndindex(*current.shape):
        nudge = np.zeros_like(current)
        nudge[i] = 1e-5
        numeric[i] = (loss(current + nudge) - loss(current - nudge)) / 2e-5

    async def gradient() -> np.ndarray:
        client = FakeTrainingClient(current)
        output = (await client.forward_async(data, "cross_entropy")).result()
        policy = [out["logprobs"].to_numpy() for out in output.loss_fn_outputs]
        reference_D = await score_datums(FakeSamplingClient(reference), data)
        extra = kl_loss_datums(data, policy, reference_D, coef, estimator, scales)
        await client.forward_backward_async(extra, "cross_entropy")
        return client.gradient

    np.testing.assert_allclose(asyncio.run(gradient()), numeric, atol=1e-5)


def test_the_k2_loss_has_the_gradient_of_the_kl_itself_on_average() -> None:
    """Over all tokens with their probabilities, k2's gradient is that of KL(policy || reference); k1's is zero."""
    logits, q = table(5)[0], log_softmax(table(6)[0])

    def exact_kl(x: np.ndarray) -> float:
        p = log_softmax(x)
        return float((np.exp(p) * (p - q)).sum())

    p = log_softmax(logits)
    numeric = np.array([(exact_kl(logits + e) - exact_kl(logits - e)) / 2e-6 for e in np.eye(VOCAB) * 1e-6])
    score = np.eye(VOCAB) - np.exp(p)  # d log p(token) / d logits, a row a token
    np.testing.assert_allclose((np.exp(p) * KL_SLOPES["k2"](p - q)) @ score, numeric, atol=1e-7)
    np.testing.assert_allclose(np.exp(p) @ score, 0.0, atol=1e-12)


def test_k1_in_the_loss_is_refused_with_the_reason() -> None:
    data = datums(table(0))
    with pytest.raises(BadRequest, match="gradient of k1 in the loss is zero on average; take k2"):
        kl_loss_datums(data, sampled_logprobs(data), sampled_logprobs(data), 0.1, "k1")


def test_the_entropy_bonus_is_its_formula_and_leaves_observations_alone() -> None:
    data = datums(table(0))
    before = [array(datum, "advantages") for datum in data]
    masks, p_D = [array(datum, "mask") for datum in data], [array(datum, "logprobs") for datum in data]
    mean = sum((p * m).sum() for p, m in zip(p_D, masks, strict=True)) / sum(m.sum() for m in masks)
    add_entropy_bonus(data, 0.3)
    for datum, old, p, mask in zip(data, before, p_D, masks, strict=True):
        expected = [a + 0.3 * (mean - x) if m else a for a, x, m in zip(old, p, mask, strict=True)]
        np.testing.assert_allclose(array(datum, "advantages"), expected, atol=1e-6)


def test_the_entropy_bonus_has_the_gradient_of_the_entropy_on_average() -> None:
    """Over all tokens with their probabilities: the weights of the log-probs' gradients give that of the entropy."""
    logits = table(5)[0]

    def entropy(x: np.ndarray) -> float:
        p = log_softmax(x)
        return float(-(np.exp(p) * p).sum())

    p = log_softmax(logits)
    numeric = np.array([(entropy(logits + e) - entropy(logits - e)) / 2e-6 for e in np.eye(VOCAB) * 1e-6])
    bonus = (np.exp(p) * p).sum() - p  # mean(p) - p, the mean by probability
    np.testing.assert_allclose((np.exp(p) * bonus) @ (np.eye(VOCAB) - np.exp(p)), numeric, atol=1e-7)
