"""How an adapter is made, how it is trained and how it is sampled from; each refuses what cannot be meant."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from mint.errors import BadRequest


def _real(value: object) -> float:
    """The number that was given, NaN for what is none: text, True, or more than a float holds."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _make_plain(params: object, kind: Callable[[Any], int | float], names: Sequence[str]) -> None:
    """numpy's numbers are welcome, but do not become JSON."""
    for name in names:
        if (value := getattr(params, name)) is not None:
            object.__setattr__(params, name, kind(value))


MAX_RANK = 1024
"""Far above what is of use; without a bound one request could ask for more memory than there is."""


@dataclass(frozen=True)
class LoraConfig:
    """Which linears get an adapter, and how wide it is."""

    rank: int = 16
    """Width of the low-rank matrices, from 1 to `MAX_RANK`."""
    seed: int | None = None
    """Seed of the initial weights; None draws a fresh one."""
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def __post_init__(self) -> None:
        if not _is_whole(self.rank) or not 1 <= self.rank <= MAX_RANK:
            raise BadRequest(f"LoRA rank is {self.rank!r:.40}; it must be a whole number from 1 to {MAX_RANK}.")
        if self.seed is not None and not (_is_whole(self.seed) and -(2**63) <= self.seed < 2**64):
            raise BadRequest(f"LoRA seed is {self.seed!r:.40}; it must fit into 64 bits, or be None for a fresh one.")
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise BadRequest("train_mlp, train_attn and train_unembed are all False: nothing to train. Turn one on.")
        _make_plain(self, int, ("rank", "seed"))


LARGE_RATE = 0.1
"""Learning rates above this are let through with a warning."""


@dataclass(frozen=True)
class AdamParams:
    """One AdamW step. The defaults are those of the MinT documents; `mint.tinker.AdamParams` has the Tinker SDK's."""

    learning_rate: float = 2e-5
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled: weights shrink by learning_rate * weight_decay."""
    grad_clip_norm: float = 0.0
    """Largest global norm of the adapter's gradient; 0 leaves it alone."""
    betas: InitVar[tuple[float, float] | None] = None
    """Another spelling of (beta1, beta2)."""

    def __post_init__(self, betas: tuple[float, float] | None) -> None:
        if isinstance(betas, (tuple, list)):  # left out, the class attribute default stands here
            object.__setattr__(self, "beta1", float(betas[0]))
            object.__setattr__(self, "beta2", float(betas[1]))
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm", "beta1", "beta2"):
            value, below = getattr(self, name), 1 if name.startswith("beta") else math.inf
            if not 0 <= _real(value) < below:
                limit = " and below 1" if below == 1 else ""
                raise BadRequest(f"AdamParams.{name} is {value!r:.40}; it must be a finite number, at least 0{limit}.")
            _make_plain(self, float, (name,))
        if self.learning_rate > LARGE_RATE:
            warnings.warn(
                f"AdamParams.learning_rate is {self.learning_rate:g}: Adam moves every weight by up to that much a "
                "step, and those of an adapter are mostly below 0.1: one step undoes the model. Usual: 1e-5 to 1e-3.",
                stacklevel=3,
            )


@dataclass(frozen=True)
class SamplingParams:
    """How to draw a completion. `stop` mixes strings and token ids freely; the end-of-sequence token always stops too,
    unless `stop=[]`, which turns every stop off."""

    max_tokens: int | None = None
    """None: as many as the context holds."""
    seed: int | None = None
    """Same seed, same prompt, same weights: same samples; the samples of one request differ from each other."""
    stop: str | Sequence[str | int] | None = None
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or drawn so far are divided by this where positive, multiplied where negative."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens drawn so far, from -2 to 2..."""
    frequency_penalty: float = 0.0
    """...and this as many times as each was drawn."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids, from -100, in effect a ban, to 100."""
    regex: str | None = None
    """The answer matches this from its beginning to its end."""
    json_schema: Mapping[str, Any] | None = None
    """The answer is JSON that this schema allows."""
    stop_token_ids: InitVar[Sequence[int] | None] = None
    """Another spelling of token ids in `stop`; both may be given."""

    def __post_init__(self, stop_token_ids: Sequence[int] | None) -> None:
        stop: list[str | int] | None
        if self.stop is None:
            stop = None
        elif isinstance(self.stop, (str, int)):
            stop = [self.stop]
        else:
            stop = list(self.stop)
        if isinstance(stop_token_ids, Sequence):
            stop = [*(stop or []), *stop_token_ids]
        for item in stop or []:
            if isinstance(item, bool) or not isinstance(item, (str, int, np.integer)) or item == "":
                raise BadRequest(f"stop holds {item!r}; each stop must be a non-empty string or a token id.")
        object.__setattr__(self, "stop", stop if stop is None else [s if isinstance(s, str) else int(s) for s in stop])
        if self.max_tokens is not None and not (_is_whole(self.max_tokens) and self.max_tokens >= 1):
            raise BadRequest(f"max_tokens is {self.max_tokens!r:.40}; it must be a whole number, at least 1.")
        if not 0 <= _real(self.temperature) < math.inf:
            raise BadRequest(f"temperature is {self.temperature!r:.40}; it must be a number, 0 (greedy) or more.")
        if not 0 < _real(self.top_p) <= 1:
            raise BadRequest(f"top_p is {self.top_p!r:.40}; it must be a number in (0, 1].")
        if not _is_whole(self.top_k) or self.top_k == 0 or not -1 <= self.top_k < 2**31:
            raise BadRequest(f"top_k is {self.top_k!r:.40}; it must be -1 (no limit) or from 1 to {2**31 - 1}.")
        if not 0 <= _real(self.min_p) < 1:
            raise BadRequest(f"min_p is {self.min_p!r:.40}; it must be a number in [0, 1).")
        if self.seed is not None and not _is_whole(self.seed):
            raise BadRequest(f"seed is {self.seed!r:.40}; it must be an integer.")
        self._check_steering()
        _make_plain(self, int, ("max_tokens", "top_k", "seed"))
        _make_plain(self, float, ("temperature", "top_p", "min_p", *_PENALTIES))

    def _check_steering(self) -> None:
        if not 0 < _real(self.repetition_penalty) < math.inf:
            raise BadRequest(
                f"repetition_penalty is {self.repetition_penalty!r:.40}; it must be a number above 0 (1: no penalty)."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= _real(value := getattr(self, name)) <= 2:
                raise BadRequest(f"{name} is {value!r:.40}; it must be a number from -2 to 2.")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.regex is not None and not isinstance(self.regex, str):
            raise BadRequest(f"regex is {self.regex!r:.40}; it must be text.")
        if self.json_schema is not None and not isinstance(self.json_schema, Mapping):
            raise BadRequest(f"json_schema is {self.json_schema!r:.40}; it must be a JSON object: {{'type': ...}}.")
        if self.regex is not None and self.json_schema is not None:
            raise BadRequest("both regex and json_schema were given; an answer follows one of them.")
        if self.constrained and not self.stops_at_eos:
            raise BadRequest(
                "stop=[] turns the end-of-sequence token off, which ends an answer that follows a regex or a "
                "json_schema; leave stop out."
            )

    @property
    def stop_strings(self) -> list[str]:
        return [s for s in self.stop or [] if isinstance(s, str)]

    @property
    def stop_ids(self) -> list[int]:
        return [s for s in self.stop or [] if isinstance(s, int)]

    @property
    def stops_at_eos(self) -> bool:
        return self.stop is None or len(self.stop) > 0

    @property
    def constrained(self) -> bool:
        """Answers follow a grammar."""
        return self.regex is not None or self.json_schema is not None

    @property
    def steers(self) -> bool:
        """Logits are moved before a draw, each sequence's by what it has drawn."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0) or bool(self.logit_bias) or self.constrained


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _biases(given: Any) -> dict[int, float]:
    """JSON's keys are text: "5" is token 5."""
    biases: dict[int, float] = {}
    for key, value in given.items() if isinstance(given, Mapping) else [(given, math.nan)]:
        token = int(key) if _is_whole(key) or (isinstance(key, str) and key.isdecimal()) else -1
        if token < 0 or not -100 <= _real(value) <= 100:
            raise BadRequest(
                f"logit_bias holds {key!r:.40}: {value!r:.40}; it must map token ids to numbers from -100 to 100."
            )
        biases[token] = float(value)
    return biases
