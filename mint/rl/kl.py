"""KL to a reference policy: its estimators, as a penalty in the advantage, as a term of the loss.

Notation: p = log-prob of a sampled token under the policy, q = under the reference, d = p - q; tokens come from the
policy, so the mean of d is KL(policy || reference). Both forms ask the reference only for log-probs of given tokens.

In the advantage (the default): A_t += coef * (mean(d) - d_t), mean over all unmasked tokens.
In the loss: coef * sum_t k(d_t) is added to the loss. Its gradient is coef * sum_t k'(d_t) * grad p_t, which is that of
a cross-entropy datum (-sum_t w_t * p_t) with w_t = -coef * k'(d_t), at the present p_t. So `kl_loss_datums` are sent
with `cross_entropy` before the same `optim_step`, and no custom loss is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mint.errors import BadRequest
from mint.types import Datum, ModelInput, TensorData

# Estimates of KL(policy || reference) from d = p - q: http://joschu.net/blog/kl-approx.html
KL_ESTIMATORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.expm1(-d) + d,
}

# dk/dp. k1's would be 1 for every token, whose expected gradient is zero whatever the policy, so it has none here:
# k2's, d * grad p, is the unbiased gradient of the KL on fresh samples.
KL_SLOPES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k2": lambda d: d,
    "k3": lambda d: -np.expm1(-d),
}


class ScoringClient(Protocol):
    """The one thing asked of a reference; every `SamplingClient` has it."""

    async def compute_logprobs_async(self, prompt: ModelInput) -> list[float | None]: ...


def full_sequence(datum: Datum) -> ModelInput:
    """The tokens before they were shifted into inputs and targets."""
    return datum.model_input.append_int(int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1]))


async def score_datums(client: ScoringClient, data_D: Sequence[Datum]) -> list[np.ndarray]:
    """The client's log-prob of every target token."""
    logprobs_D = await asyncio.gather(*(client.compute_logprobs_async(full_sequence(datum)) for datum in data_D))
    return [np.array(logprobs[1:], dtype=np.float64) for logprobs in logprobs_D]


def _mask(datum: Datum) -> np.ndarray:
    return datum.loss_fn_inputs["mask"].to_numpy().astype(np.float64)


def differences(
    data_D: Sequence[Datum], policy_logprobs_D: Sequence[np.ndarray], reference_logprobs_D: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """d = p - q, zero where masked."""
    return [
        (policy - reference) * _mask(datum)
        for datum, policy, reference in zip(data_D, policy_logprobs_D, reference_logprobs_D, strict=True)
    ]


def note_reference(data_D: Sequence[Datum], reference_logprobs_D: Sequence[np.ndarray]) -> None:
    """Keeps the reference's log-probs with the datums, for the run directory; `wire_datums` leaves them out."""
    for datum, logprobs in zip(data_D, reference_logprobs_D, strict=True):
        datum.loss_fn_inputs["reference_logprobs"] = TensorData.of(logprobs, "float32")


def sampled_logprobs(data_D: Sequence[Datum]) -> list[np.ndarray]:
    return [datum.loss_fn_inputs["logprobs"].to_numpy().astype(np.float64) for datum in data_D]


def mean_kl(data_D: Sequence[Datum], differences_D: Sequence[np.ndarray], estimator: str = "k1") -> float:
    """The KL estimate averaged over unmasked tokens."""
    if estimator not in KL_ESTIMATORS:
        raise BadRequest(f"no KL estimator is called {estimator!r}; there are {', '.join(KL_ESTIMATORS)}.")
    kl_D = [KL_ESTIMATORS[estimator](d) * _mask(datum) for datum, d in zip(data_D, differences_D, strict=True)]
    tokens = sum(_mask(datum).sum() for datum in data_D)
    return float(sum(kl.sum() for kl in kl_D) / tokens) if tokens else 0.0


# --------------------------------------------------------------------------------------------------------------------
# In the advantage


def discounted_future_sum(x_T: np.ndarray, gamma: float) -> np.ndarray:
    """y_t = x_t + gamma * y_(t+1)."""
    result_T = np.array(x_T, dtype=np.float64)
    for t in range(len(result_T) - 2, -1, -1):
        result_T[t] += gamma * result_T[t + 1]
    return result_T


async def incorporate_kl_penalty(
    data_D: Sequence[Datum],
    reference_client: ScoringClient,
    kl_penalty_coef: float,
    kl_discount_factor: float = 0.0,
) -> dict[str, float]:
    """Adds coef * (mean(d) - d_t) to every unmasked advantage, in place; returns `kl_policy_base` = mean(d).

    With a discount the term of a token is the discounted sum of its own and all later terms of its datum. That sum
    reaches back over observation tokens, so it is masked again: no observation token ever has an advantage.
    """
    reference_D = await score_datums(reference_client, data_D)
    return penalise(data_D, reference_D, kl_penalty_coef, kl_discount_factor)


def penalise(
    data_D: Sequence[Datum],
    reference_logprobs_D: Sequence[np.ndarray],
    kl_penalty_coef: float,
    kl_discount_factor: float = 0.0,
) -> dict[str, float]:
    """`incorporate_kl_penalty` once the reference has spoken."""
    d_D = differences(data_D, sampled_logprobs(data_D), reference_logprobs_D)
    average = mean_kl(data_D, d_D)
    if kl_penalty_coef:
        for datum, d in zip(data_D, d_D, strict=True):
            mask = _mask(datum)
            term = kl_penalty_coef * (average - d) * mask
            if kl_discount_factor > 0:
                term = discounted_future_sum(term, kl_discount_factor) * mask
            advantages = datum.loss_fn_inputs["advantages"].to_numpy() + term
            datum.loss_fn_inputs["advantages"] = TensorData.of(advantages, "float32")
    return {"kl_policy_base": average}


def add_entropy_bonus(data_D: Sequence[Datum], coef: float) -> None:
    """Adds coef * (mean(p) - p_t) to every unmasked advantage, in place: what was unlikely is to become likelier. On
    average that is the gradient of the entropy at the sampled positions, and the penalty for leaving a reference to
    which all tokens are alike."""
    penalise(data_D, [np.zeros(len(logprobs)) for logprobs in sampled_logprobs(data_D)], coef)


# --------------------------------------------------------------------------------------------------------------------
# In the loss


def kl_loss_datums(
    data_D: Sequence[Datum],
    policy_logprobs_D: Sequence[np.ndarray],
    reference_logprobs_D: Sequence[np.ndarray],
    coef: float,
    estimator: str = "k2",
    scales_D: np.ndarray | None = None,
) -> list[Datum]:
    """Datums for `cross_entropy` whose gradient is that of coef * sum_t k(p_t - q_t) over unmasked tokens.

    `policy_logprobs_D` are of the weights about to be stepped: what `forward` returns, or on the first step after a
    refresh the sampled ones. `scales_D` is the aggregation's, so that both parts of the loss are means of one kind.
    """
    if estimator not in KL_SLOPES:
        why = " (the gradient of k1 in the loss is zero on average; take k2)" if estimator == "k1" else ""
        raise BadRequest(f"the KL estimator in the loss is {estimator!r}{why}; it must be {' or '.join(KL_SLOPES)}.")
    scales_D = np.ones(len(data_D)) if scales_D is None else scales_D
    return [
        Datum(
            datum.model_input,
            {
                "target_tokens": datum.loss_fn_inputs["target_tokens"],
                "weights": TensorData.of(-coef * scale * KL_SLOPES[estimator](d) * _mask(datum), "float32"),
            },
        )
        for datum, d, scale in zip(
            data_D, differences(data_D, policy_logprobs_D, reference_logprobs_D), scales_D, strict=True
        )
    ]
