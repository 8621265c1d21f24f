"""Where the KL term enters a training step: the table of modes. The formulas are in `mint.rl.kl`.

A term has two chances: to change advantages before they are sent, and to add datums for `cross_entropy` once the
trainer's own log-probs are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mint.errors import BadRequest
from mint.rl.kl import (
    ScoringClient,
    differences,
    kl_loss_datums,
    mean_kl,
    note_reference,
    penalise,
    score_datums,
)
from mint.types import Datum


class KLTerm:
    """No KL at all: the term of a run without a reference."""

    in_loss = False
    """Whether `loss_datums` has something to say, for which the trainer's log-probs must be waited for."""

    async def adjust(self, data_D: Sequence[Datum]) -> dict[str, float]:
        """Changes advantages in place; returns metrics."""
        return {}

    async def loss_datums(
        self, data_D: Sequence[Datum], training_logprobs_D: Sequence[np.ndarray], scales_D: np.ndarray
    ) -> tuple[list[Datum], dict[str, float]]:
        """Datums to add to the same optimizer step; metrics."""
        return [], {}


@dataclass(frozen=True)
class AdvantageKL(KLTerm):
    reference: ScoringClient
    coef: float
    discount: float
    estimator: str

    async def adjust(self, data_D: Sequence[Datum]) -> dict[str, float]:
        if not data_D:
            return {}
        reference_D = await score_datums(self.reference, data_D)
        note_reference(data_D, reference_D)
        return penalise(data_D, reference_D, self.coef, self.discount)


@dataclass(frozen=True)
class LossKL(KLTerm):
    reference: ScoringClient
    coef: float
    discount: float
    estimator: str
    in_loss = True

    async def loss_datums(
        self, data_D: Sequence[Datum], training_logprobs_D: Sequence[np.ndarray], scales_D: np.ndarray
    ) -> tuple[list[Datum], dict[str, float]]:
        reference_D = await score_datums(self.reference, data_D)
        note_reference(data_D, reference_D)
        datums = kl_loss_datums(data_D, training_logprobs_D, reference_D, self.coef, self.estimator, scales_D)
        return datums, {"kl_policy_base": mean_kl(data_D, differences(data_D, training_logprobs_D, reference_D))}


@dataclass(frozen=True)
class KLMode:
    term: Callable[[ScoringClient, float, float, str], KLTerm]
    estimators: tuple[str, ...]
    """The first is the default."""
    discounts: bool
    """Whether the mode has a use for a discount factor."""


KL_MODES: dict[str, KLMode] = {
    "advantage": KLMode(AdvantageKL, ("k1",), discounts=True),
    "loss": KLMode(LossKL, ("k2", "k3"), discounts=False),
}


def choose_kl(mode: str, estimator: str | None, discount: float) -> tuple[KLMode, str]:
    """The mode of that name and its estimator, if the two go together."""
    if mode not in KL_MODES:
        raise BadRequest(f"no KL mode is called {mode!r}; there are {', '.join(KL_MODES)}.")
    chosen = KL_MODES[mode]
    if estimator is not None and estimator not in chosen.estimators:
        raise BadRequest(f"kl_estimator is {estimator!r}; kl_mode {mode!r} takes {' or '.join(chosen.estimators)}.")
    if discount and not chosen.discounts:
        raise BadRequest(f"kl_discount_factor is {discount}; kl_mode {mode!r} has no discount, leave it at 0.")
    return chosen, estimator or chosen.estimators[0]
