"""Data that can be computed but is almost certainly not what was meant: targets that are not shifted, prompts in the
loss, log-probs that are none. Asked by client and server alike; `loss_fn_config={"unchecked": 1}` is for those who mean
it. What cannot be computed at all is refused by `mint.checks`.

A position counts if its weight and its advantage are not 0 (each where the datum has one). Only patterns that correct
data does not show are refused; docs/data_checks.md has them all, and what is let through with a warning and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mint.checks import LOSS_FNS, UNCHECKED, WEIGHTS
from mint.columns import Columns
from mint.errors import BadRequest
from mint.types import Datum

# Fewer positions than this may match any shift by chance.
LEAST_POSITIONS = 4
# A log-prob above this is not rounding.
ROUNDING = 1e-3

_SWITCH = f'If it is meant so, pass loss_fn_config={{"{UNCHECKED}": 1}}.'


@dataclass(frozen=True)
class _Read:
    """One datum as the checks want it, every array of length N."""

    index: int
    tokens: np.ndarray
    targets: np.ndarray
    counts: np.ndarray
    """Where the loss counts."""
    weights: np.ndarray | None
    logprobs: np.ndarray | None
    advantages: np.ndarray | None


def check_plausible(data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str] | None = None) -> None:
    """Raises `BadRequest` for the first mistake, by datum and position. The data have passed `check_data`."""
    if (config or {}).get(UNCHECKED) or loss_fn not in LOSS_FNS:
        return
    _check_clips(config or {})
    columns = Columns.of(data)
    if columns is not None and _are_plausible(columns):
        return
    data_read = [_read(index, datum) for index, datum in enumerate(data)]
    for read in data_read:
        if read is not None:
            _check_shift(read)
            _check_logprobs(read)
            _check_mask(read)
    _check_offset([read for read in data_read if read is not None and read.advantages is not None])


def _check_clips(config: Mapping[str, float | str]) -> None:
    """A range that leaves out 1 clips the policy that sampled: the bounds were meant as distances from 1."""
    for name, beside in (("clip_low_threshold", -1), ("clip_high_threshold", 1)):
        given = config.get(name)
        if isinstance(given, (int, float)) and (given - 1) * beside < 0:
            example = f" For a distance of {given:g} give {1 + beside * given:g}." if 0 < given < 1 else ""
            raise BadRequest(
                f"loss_fn_config[{name!r}] is {given:g}; it bounds the ratio itself, which is 1 where nothing has "
                f"changed, so it must be {'at least' if beside > 0 else 'at most'} 1.{example} {_SWITCH}"
            )


def _are_plausible(data: Columns) -> bool:
    """Whether no mistake would be found in any datum; which it is, the checks of each say themselves."""
    read = _read_columns(data)
    if read is None:
        return False
    starts, ends = data.starts, data.starts + data.lengths - 1
    inside = np.ones(len(read.tokens) - 1, dtype=bool)  # positions that have a neighbour of the same datum behind them
    inside[ends[:-1]] = False
    if not ((read.targets[:-1] == read.tokens[1:]) | ~inside).all():
        return False
    if read.logprobs is not None:
        long = starts[data.lengths > 1]
        silent = read.counts & (read.logprobs == 0)
        if (read.counts & (read.logprobs > ROUNDING)).any() or (silent[long] & silent[long + 1]).any():
            return False
    if read.advantages is None:
        return True

    def any_of(where: np.ndarray) -> np.ndarray:
        return np.logical_or.reduceat(where, starts)

    if read.weights is not None:
        weighted, signal = read.weights != 0, read.advantages != 0
        apart = ~any_of(weighted & signal) & ~any_of(~(weighted | signal))
        if (apart & any_of(weighted) & any_of(signal)).any():
            return False
    if read.logprobs is None:
        return False
    here, there = read.counts, read.logprobs != 0
    told = any_of(here) & any_of(there)
    for left, right in ((here, there), (there, here)):  # one beside the other, as in `_one_beside`
        beside = np.append((left[:-1] == right[1:]) | ~inside, True)
        if told.sum() >= 2 and (~any_of(~beside) & ~right[starts] & ~left[ends])[told].all():
            return False
    return True


def warnings_about(data: Sequence[Datum], loss_fn: str) -> Iterator[str]:
    """What is let through, because documented code or correct data can look so, but deserves a word."""
    policy = "advantages" in LOSS_FNS[loss_fn].required if loss_fn in LOSS_FNS else False
    columns = Columns.of(data)
    together = None if columns is None else _read_columns(columns)
    each = (_read(index, datum) for index, datum in enumerate(data))
    data_read = [read for read in each if read is not None] if together is None else [together]
    all_read = together is not None or len(data_read) == len(data)
    counted = [read for read in data_read if read.counts.any()]
    if policy and counted and not any(r.logprobs[r.counts].any() for r in counted if r.logprobs is not None):
        yield (
            "every sampling log-prob with a non-zero advantage is exactly 0.0, as if the sampler had not returned any. "
            "The importance ratio is then the model's probability itself, which is wrong: pass on sequence.logprobs of "
            "the samples."
        )
    if not policy and all_read and not counted and any(r.weights is not None for r in data_read):
        yield "every weight of these data is 0, so there is nothing to learn from: is the mask the wrong way round?"


def _read(index: int, datum: Datum) -> _Read | None:
    """None for soft targets, which are nobody's next token."""
    inputs = {key: tensor.to_numpy() for key, tensor in datum.loss_fn_inputs.items()}
    return _read_inputs(index, np.asarray(datum.model_input.to_ints(), dtype=np.int64), inputs)


def _read_columns(data: Columns) -> _Read | None:
    """All datums as if they were one; None where that will not do."""
    return _read_inputs(0, data.tokens, data.inputs) if data.lengths.min() > 0 else None


def _read_inputs(index: int, tokens: np.ndarray, inputs: Mapping[str, np.ndarray]) -> _Read | None:
    targets = inputs.get("target_tokens")
    if targets is None or targets.ndim != 1:
        return None
    weights = next((inputs[key] for key in WEIGHTS if key in inputs), None)
    counts = np.ones(len(targets), dtype=bool)
    for factor in (weights, inputs.get("advantages")):
        if factor is not None:
            counts &= factor != 0
    return _Read(index, tokens, targets, counts, weights, inputs.get("logprobs"), inputs.get("advantages"))


def _check_shift(read: _Read) -> None:
    """Where the loss counts, the target is the next input token; one that is another neighbour throughout was shifted
    by the wrong amount. Targets of another kind altogether are the sender's business."""
    tokens, targets, counts = read.tokens, read.targets, read.counts
    if len(tokens) > 1 and (targets[:-1] == tokens[1:]).all():  # as it should be: nearly always, so first
        return
    faults = {
        0: "the input tokens themselves, so nothing is predicted: the shift was forgotten",
        2: "the tokens after next: they were shifted twice",
        -1: "the tokens before: they were shifted the wrong way",
    }
    if not counts.any() or _matches(tokens, targets, counts, 1, least=1) > 0.5:
        return
    everywhere = np.ones_like(counts)
    for shift, fault in faults.items():
        if _matches(tokens, targets, everywhere, shift, LEAST_POSITIONS) >= 0.9:
            position = int(np.flatnonzero(counts)[0])
            raise BadRequest(
                f"datum {read.index}: target_tokens are {fault}. At position {position} the target is "
                f"{targets[position]}, the input goes on with {tokens[position + 1 : position + 2].tolist()}. Give "
                f"input tokens[:-1] and target tokens[1:]. {_SWITCH}"
            )


def _matches(tokens: np.ndarray, targets: np.ndarray, where: np.ndarray, shift: int, least: int) -> float:
    """The share of positions i whose target is token i + shift; 0 if there are fewer than `least` to tell by."""
    position = np.flatnonzero(where)
    position = position[(position + shift >= 0) & (position + shift < len(tokens))]
    if len(position) < least:
        return 0.0
    return float((targets[position] == tokens[position + shift]).mean())


def _check_logprobs(read: _Read) -> None:
    logprobs, counts = read.logprobs, read.counts
    if logprobs is None or not counts.any():
        return
    positive = np.flatnonzero(counts & (logprobs > ROUNDING))
    if len(positive):
        given = logprobs[counts]
        likely = "the log-probs of the samples"
        if (given >= 0).all():
            likely = "the log of these probabilities" if given.max() <= 1 else "their negative: these look like losses"
        raise BadRequest(
            f"datum {read.index}: logprobs holds {logprobs[positive[0]]:.4g} at position {positive[0]}, where the "
            f"advantage is not 0; the log of a probability is never above 0. Send {likely}. {_SWITCH}"
        )
    silent = counts & (logprobs == 0)
    prompt = int(np.argmin(silent)) if not silent.all() else 0  # length of the run at the start
    if prompt >= 2 and logprobs[counts].any():
        raise BadRequest(
            f"datum {read.index}: positions 0 to {prompt - 1} have log-prob 0.0 and an advantage, while later ones "
            "have real log-probs: these look like prompt tokens, which were not sampled and must not be in the loss. "
            f"Set their advantages (or weights) to 0. {_SWITCH}"
        )


def _check_mask(read: _Read) -> None:
    if read.weights is None or read.advantages is None:
        return
    weighted, signal = read.weights != 0, read.advantages != 0
    if weighted.any() and signal.any() and not (weighted & signal).any() and (weighted | signal).all():
        position = int(np.flatnonzero(weighted)[0])
        raise BadRequest(
            f"datum {read.index}: the weights are 0 exactly where the advantages are not (at position {position} the "
            f"weight is {read.weights[position]:g} and the advantage 0), so nothing is learned: the mask is the wrong "
            f"way round. {_SWITCH}"
        )


def _check_offset(data: Sequence[_Read]) -> None:
    """Advantages that stand one beside the log-probs, in every datum; in a single one it could be a token of
    probability 1."""
    signs = []
    for read in data:
        assert read.logprobs is not None
        has_advantage, has_logprob = read.counts, read.logprobs != 0
        if has_advantage.any() and has_logprob.any():
            signs.append((read, _one_beside(has_advantage, has_logprob)))
    for side, word in ((1, "before"), (-1, "after")):
        if len(signs) >= 2 and all(sign == side for _, sign in signs):
            read = signs[0][0]
            position = int(np.flatnonzero(read.counts)[0])
            raise BadRequest(
                f"datum {read.index}, and every other: the advantages stand one position {word} the log-probs (the "
                f"first advantage is at position {position}, the first log-prob at {position + side}). Both belong at "
                f"the position whose target is the sampled token, the first at len(prompt) - 1. {_SWITCH}"
            )


def _one_beside(here: np.ndarray, there: np.ndarray) -> int:
    """1 if `here` is `there` moved one to the left, -1 if one to the right, else 0."""
    if np.array_equal(here[:-1], there[1:]) and not there[0] and not here[-1]:
        return 1
    if np.array_equal(here[1:], there[:-1]) and not here[0] and not there[-1]:
        return -1
    return 0
