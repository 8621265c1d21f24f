"""Proof that a policy that is served is the one that was trained.

When a snapshot is taken, the copy is compared with the weights in training. When it is first sampled, a few fixed
tokens are scored twice: by the sampler, through its queue, its cache and its draw, beside the samples that were asked
for; and by the trainer, with the copy. No sample is handed out before the two agree. A policy is refused, with the
figures, if

    the two differ by more than the rounding of the number format explains;
    the trainer's log-probs have left the base model's and the sampler's have not: rollouts would be the base model's;
    the trainer's have moved since the last snapshot and the sampler's have not: rollouts would be stale;
    neither differs from the base model although the adapter is not empty: it is not applied at all.

The last three compare bit for bit, so they need no tolerance: an update that moves nearly all of the trainer's
log-probs by a bit or more moves some of the sampler's as well, unless it never got there.

What it costs is in docs/verification.md: one pass of the trainer over 21 tokens, and 21 tokens more in two steps that
the sampler does anyway.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from mint.engine.faults import as_mint_error
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.sampler.sampler import Sampler
from mint.engine.sampler.sequence import OnDone
from mint.engine.trainer import Trainer
from mint.errors import Internal, MintError
from mint.types import Datum, ModelInput, SampleRequest, SampleResponse, SamplingParams, TensorData

FIXED_TOKENS = 20
"""More than one block of the cache."""
# Drawn from the policy itself: the second is the first thing that is computed from the cache.
DRAWN_TOKENS = 2

# What counts as rounding: SLACK times the difference the base model itself showed when it was loaded, between sampler
# and trainer and between batches of different sizes, and never less than this (nats, on average and at most). How much
# a model's depth and weights amplify rounding differs a hundredfold between models; docs/verification.md has figures.
SLACK = 4.0
LEAST_LIMITS = {torch.float32: (5e-5, 5e-4), torch.bfloat16: (0.03, 0.25)}
COMPANY = 24
# A base model that differs by more than this on average is not computed rightly.
BASE_LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.5}
# Of the trainer's log-probs so many must have changed before the sampler's not changing at all means something: each
# of the sampler's had the same chance.
MOVED = 0.9
# What an adapter adds to an activation of size 1, at least, before its having no effect at all means something.
LEAST_EFFECT = 1e-6
# Times the sampler is asked, should its step fail for somebody else's reason.
TRIES = 3

T = TypeVar("T")

log = logging.getLogger(__name__)

# What an adapter adds to an activation of size 1, from which on rounding is no longer small beside what it computes.
DIVERGED = 10.0

REPORT = "This is a fault of the engine, not of your code: please report it. Training can go on from a checkpoint."


@dataclass(frozen=True)
class Readings:
    """Log-probs of the same tokens by the two paths: the fixed ones after the first, then those drawn."""

    tokens: list[int]
    trainer: np.ndarray
    sampler: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        return np.abs(self.trainer - self.sampler)


@dataclass
class History:
    """What an adapter's snapshots have shown so far."""

    version: int = -1
    """Optimizer steps before the newest snapshot that was proved."""
    readings: Readings | None = None
    figures: dict[str, float] = field(default_factory=dict)
    """For people: told with every later optimizer step."""

    def forget(self) -> None:
        """Other weights were loaded: nothing has to follow from what was."""
        self.version, self.readings = -1, None


@dataclass(eq=False)
class Proof:
    """The verdict on one policy. Begins when the policy is first asked for something."""

    weights: Adapter | None
    """What ought to be served; None is the base model."""
    version: int = 0
    history: History = field(default_factory=History)
    verdict: Future[None] = field(default_factory=Future)
    tries: int = 0


class Verifier:
    """Proves the policies of one base model; the base model itself when it is made, before anything else runs."""

    def __init__(self, model: BaseModel, trainer: Trainer, sampler: Sampler) -> None:
        self.proved = self.refused = 0
        self.largest_gap = 0.0
        """Of any policy that was proved: nats between sampler and trainer."""
        self._model = model
        self._trainer = trainer
        self._sampler = sampler
        vocabulary, room = model.facts.vocab_size, model.facts.max_context - DRAWN_TOKENS + 1
        self._tokens = [(7919 * n + 17) % vocabulary for n in range(min(FIXED_TOKENS, room))]
        answers: list[SampleResponse | MintError] = []
        self._ask(None, answers.append)
        while not answers:
            sampler.step()
        self._base = self._read(None, answers[0])
        gap = np.maximum(self._base.gap, np.abs(self._score(None, self._base.tokens, COMPANY) - self._base.trainer))
        least = _of_dtype(LEAST_LIMITS, model)
        self._limits = max(least[0], SLACK * float(gap.mean())), max(least[1], SLACK * float(gap.max()))
        if not gap.mean() <= _of_dtype(BASE_LIMIT, model):
            raise Internal(
                f"{model.facts.name} is refused: on its own tokens the trainer's and the sampler's log-probs differ by "
                f"{gap.mean():.3g} on average. {REPORT}"
            )

    def begin(self, proof: Proof, served: Adapter | None) -> None:
        """Once, on the worker, with the weights the sampler is about to use; settles the verdict in a later step."""
        if proof.tries == 0:
            self._try(proof, served)

    def _try(self, proof: Proof, served: Adapter | None) -> None:
        proof.tries += 1
        self._ask(served, partial(self._conclude, proof, served))

    def _ask(self, adapter: Adapter | None, on_done: OnDone) -> None:
        greedy = SamplingParams(max_tokens=DRAWN_TOKENS, temperature=0.0, seed=0, stop=[])
        request = SampleRequest(ModelInput.from_ints(self._tokens), greedy, prompt_logprobs=True)
        self._sampler.add(request, adapter, on_done, urgent=True)

    def _conclude(self, proof: Proof, served: Adapter | None, answer: SampleResponse | MintError) -> None:
        if isinstance(answer, MintError) and proof.tries < TRIES:
            self._try(proof, served)
            return
        try:
            found = self._read(proof.weights, answer)
        except Exception as error:  # no verdict: whoever waits hears why, and the next to ask has it tried again
            waiting, proof.verdict, proof.tries = proof.verdict, Future(), 0
            waiting.set_exception(as_mint_error(error))
            return
        try:
            last = proof.history.readings if proof.version >= proof.history.version else None
            self._judge(proof.weights, found, last)
            self._record(proof, found)
        except Exception as error:  # whoever waits for the verdict must hear of it, whatever it is
            self.refused += 1
            log.error("version %d of a policy: %s", proof.version, error)
            proof.verdict.set_exception(as_mint_error(error))
        else:
            self.proved += 1
            self.largest_gap = max(self.largest_gap, float(found.gap.max()))
            proof.verdict.set_result(None)

    def _read(self, weights: Adapter | None, answer: SampleResponse | MintError) -> Readings:
        if isinstance(answer, MintError):
            raise answer
        drawn, prompt = answer.sequences[0], answer.prompt_logprobs
        assert drawn.logprobs is not None and prompt is not None
        tokens = self._tokens + drawn.tokens
        sampled = np.array([*prompt[1:], *drawn.logprobs], dtype=np.float32)
        return Readings(tokens, self._score(weights, tokens), sampled)

    def _score(self, weights: Adapter | None, tokens: list[int], copies: int = 1) -> np.ndarray:
        """The trainer's log-probs, of the first of so many copies in one batch."""
        datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": TensorData(tokens[1:], "int64")})
        steps = self._trainer.forward_backward(weights, [datum] * copies, "cross_entropy", {}, backward=False)
        try:
            while True:
                next(steps)
        except StopIteration as stop:
            return stop.value.loss_fn_outputs[0]["logprobs"].to_numpy()

    def _judge(self, weights: Adapter | None, found: Readings, last: Readings | None) -> None:
        base = self._base
        mean, most = float(found.gap.mean()), float(found.gap.max())
        figures = (
            f"Over {len(found.gap)} tokens the trainer's and the sampler's log-probs differ by {mean:.3g} on average "
            f"and {most:.3g} at most; rounding in {self._model.facts.dtype} explains {self._limits[0]:.3g} and "
            f"{self._limits[1]:.3g}."
        )
        if self._moved(found.trainer, base.trainer) and self._equal(found.sampler, base.sampler):
            raise Internal(f"policy refused: the sampler has the base model's weights. {figures} {REPORT}")
        if last and self._moved(found.trainer, last.trainer) and self._equal(found.sampler, last.sampler):
            raise Internal(f"policy refused: the sampler has the weights of an earlier snapshot. {figures} {REPORT}")
        if not (mean <= self._limits[0] and most <= self._limits[1]):
            if weights is not None and effect(weights) > DIVERGED:
                raise Internal(
                    f"policy refused: its training has diverged. The adapter adds up to {effect(weights):.3g} to an "
                    f"activation of 1, so that rounding shows. {figures} Lower the learning rate and go on from an "
                    "earlier checkpoint."
                )
            raise Internal(f"policy refused: sampler and trainer disagree. {figures} {REPORT}")
        if weights is not None and self._equal(found.trainer, base.trainer) and effect(weights) > LEAST_EFFECT:
            raise Internal(
                "policy refused: its log-probs are the base model's to the last bit although its adapter is not empty "
                f"(it should add up to {effect(weights):.3g} to an activation of 1). {REPORT}"
            )

    def _record(self, proof: Proof, found: Readings) -> None:
        if proof.version < proof.history.version:
            return
        fixed = len(self._tokens) - 1
        proof.history.version, proof.history.readings = proof.version, found
        proof.history.figures = {
            "policy/version": float(proof.version),
            "policy/logprob_gap_max": float(found.gap.max()),
            "policy/logprob_gap_mean": float(found.gap.mean()),
            "policy/distance_from_base": float(np.abs(found.sampler - self._base.sampler)[:fixed].mean()),
        }

    def _equal(self, one: np.ndarray, other: np.ndarray) -> bool:
        fixed = len(self._tokens) - 1
        return bool((one[:fixed] == other[:fixed]).all())

    def _moved(self, one: np.ndarray, other: np.ndarray) -> bool:
        fixed = len(self._tokens) - 1
        return float((one[:fixed] != other[:fixed]).mean()) >= MOVED


def _of_dtype(table: dict[torch.dtype, T], model: BaseModel) -> T:
    return table.get(model.dtype, table[torch.bfloat16])


@torch.no_grad()
def check_copy(trained: Adapter, copy: Adapter) -> None:
    """The copy holds the weights in training, rounded to its dtype, and nothing else."""
    if copy.scale != trained.scale or list(copy.weights) != list(trained.weights):
        raise Internal(
            f"snapshot refused: its scale is {copy.scale:g} on {len(copy.weights)} linears, that of the adapter in "
            f"training {trained.scale:g} on {len(trained.weights)}. {REPORT}"
        )
    trained_P, copied_P = trained.values_P, copy.values_P
    if copied_P.device.type == "cpu" and trained_P.dtype == copied_P.dtype and torch.equal(trained_P, copied_P):
        return  # as nearly always, and without a tensor of its own
    difference_P = trained_P.to(copied_P.dtype) - copied_P
    # A NaN, of a training that diverged, is not above 0 either; the sampler says so when it meets one.
    if bool((difference_P.abs() > 0).any()):
        first = next(n for n, part in enumerate(copy.shaped(difference_P)) if bool((part.abs() > 0).any()))
        path = list(trained.weights)[first // 2]
        raise Internal(f"snapshot refused: its weights of {path} are not those of the adapter in training. {REPORT}")


@torch.no_grad()
def effect(adapter: Adapter) -> float:
    """What the adapter adds to an activation, at the size of its largest weight."""
    peaks = torch.stack([up.abs().max() for _, up in adapter.weights.values()])
    return abs(adapter.scale) * float(peaks.max())
