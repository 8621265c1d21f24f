"""Requests checked before anything is computed: what client and server can say without a tensor.

A fault is named by datum, key and position, so that it can be found in a batch of thousands. What the losses are and
how they are computed is the engine's; `LOSS_FNS` is their menu: what each reads from a datum, and its options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mint.columns import Columns
from mint.errors import BadRequest
from mint.types import Datum, ModelInput, SampleRequest, TensorData

WEIGHTS = ("weights", "loss_weights", "mask")
"""One input under three names: a factor on each token's loss, 1 where not given."""

UNCHECKED = "unchecked"
"""The option of every loss that turns the checks of `mint.mistakes` off: 1 for data that look wrong and are not."""

MAX_SAMPLES = 4096
MAX_TOPK = 1024


@dataclass(frozen=True)
class LossMenu:
    """What a loss reads from each datum, and its options with their defaults."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    options: Mapping[str, float] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.required, *self.optional, *WEIGHTS)


_POLICY = ("target_tokens", "logprobs", "advantages")
_CLIPS = ("clip_low_threshold", "clip_high_threshold")
# Divides the trainer's logits before the log-softmax, for log-probs that were recorded after tempering.
_TEMPERATURE = {"temperature": 1.0}


def _clip_options(low: float, high: float) -> dict[str, float]:
    """Bounds on the ratio itself, not distances from 1; inputs of the same names override them token by token."""
    return {"clip_low_threshold": low, "clip_high_threshold": high, **_TEMPERATURE}


LOSS_FNS: dict[str, LossMenu] = {
    "cross_entropy": LossMenu(("target_tokens",)),
    "importance_sampling": LossMenu(_POLICY, options=_TEMPERATURE),
    "ppo": LossMenu(_POLICY, _CLIPS, _clip_options(0.8, 1.2)),
    "cispo": LossMenu(_POLICY, _CLIPS, _clip_options(0.0, 4.0)),
    # Vendors differ on beta (0.01 to 0.05); 0.05 is the value of the only public example of the upstream API.
    "dro": LossMenu(_POLICY, options={"beta": 0.05, **_TEMPERATURE}),
    # The range of the GSPO paper, 3e-4 below and 4e-4 above 1; far narrower than ppo's because the ratio is a mean.
    "gspo": LossMenu(_POLICY, (*_CLIPS, "sequence_ratio_mask"), _clip_options(0.9997, 1.0004)),
}


# Names of algorithms that are asked for as if they were losses.
_MEANT = {
    "grpo": " GRPO is importance_sampling or ppo with advantages centred within a group.",
    "reinforce": " REINFORCE is importance_sampling.",
    "sft": " Supervised training is cross_entropy.",
}


def check_loss(loss_fn: str, config: Mapping[str, float | str] | None = None) -> dict[str, float]:
    """The options of that loss: those given, checked, over the defaults."""
    if loss_fn not in LOSS_FNS:
        raise BadRequest(f"unknown loss_fn {loss_fn!r}; known: {', '.join(LOSS_FNS)}.{_MEANT.get(loss_fn, '')}")
    menu = LOSS_FNS[loss_fn]
    options = dict(menu.options)
    for key, value in (config or {}).items():
        if key == UNCHECKED:
            if value not in (0, 1) or isinstance(value, (bool, str)):
                raise BadRequest(f"loss_fn_config[{UNCHECKED!r}] is {value!r}; it must be 0 or 1.")
            continue
        if key not in menu.options:
            known = ", ".join(f"{k}={v}" for k, v in (dict(menu.options) | {UNCHECKED: 0}).items())
            raise BadRequest(f"loss_fn_config of {loss_fn} has unknown key {key!r}; its options and defaults: {known}.")
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (key == "temperature" and value == 0):  # type: ignore[operator]
            least = "> 0" if key == "temperature" else ">= 0"
            raise BadRequest(f"loss_fn_config[{key!r}] is {value!r}; it must be a number {least}.")
        options[key] = float(value)
    low, high = options.get("clip_low_threshold", 0.0), options.get("clip_high_threshold", math.inf)
    if low > high:
        raise BadRequest(
            f"clip_low_threshold {low} is above clip_high_threshold {high}; both bound the ratio itself: 0.2 to either "
            "side of 1 is 0.8 and 1.2."
        )
    return options


def check_data(
    data: Sequence[Datum], loss_fn: str, vocab_size: int | None = None, max_context: int | None = None
) -> None:
    """Raises `BadRequest` for the first fault; the model's facts are checked where they are known."""
    check_loss(loss_fn)
    if not len(data):
        raise BadRequest("the list of data is empty; give at least one datum.")
    columns = Columns.of(data)
    if columns is not None and _are_right(columns, loss_fn, vocab_size, max_context):
        return
    for index, datum in enumerate(data):
        where = f"datum {index}"
        length = _check_tokens(f"{where}: model_input", datum.model_input, vocab_size, max_context)
        _check_inputs(where, datum.loss_fn_inputs, loss_fn, length, vocab_size)


def _are_right(data: Columns, loss_fn: str, vocab_size: int | None, max_context: int | None) -> bool:
    """Whether the checks of every datum would pass; which does not, and why, they say themselves."""
    menu, lengths, inputs = LOSS_FNS[loss_fn], data.lengths, data.inputs
    if not (set(menu.required) <= inputs.keys() <= set(menu.inputs)):
        return False
    if lengths.min() < 1 or (max_context is not None and lengths.max() > max_context):
        return False
    targets = inputs["target_tokens"]
    if targets.dtype.kind != "i" or not all(_are_ids(ids, vocab_size) for ids in (data.tokens, targets)):
        return False
    factors = [inputs[key] for key in WEIGHTS if key in inputs]
    if not all(f.dtype == factors[0].dtype and np.array_equal(f, factors[0]) for f in factors[1:]):
        return False
    return all(column.dtype.kind == "i" or np.isfinite(column).all() for column in inputs.values())


def _are_ids(ids: np.ndarray, vocab_size: int | None) -> bool:
    return bool(ids.min() >= 0) and (vocab_size is None or bool(ids.max() < vocab_size))


def check_sample(request: SampleRequest, vocab_size: int | None = None, max_context: int | None = None) -> None:
    length = _check_tokens("the prompt", request.prompt, vocab_size, max_context)
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise BadRequest(f"num_samples is {request.num_samples}; it must be between 1 and {MAX_SAMPLES}.")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if not 0 <= getattr(request, name) <= MAX_TOPK:
            raise BadRequest(f"{name} is {getattr(request, name)}; it must be between 0 and {MAX_TOPK}.")
    if request.prompt_logprobs_last_n is not None and request.prompt_logprobs_last_n < 0:
        raise BadRequest(f"prompt_logprobs_last_n is {request.prompt_logprobs_last_n}; it must be 0 or more.")
    if request.target_prompt_logprobs is not None:
        _check_targets(request.target_prompt_logprobs, length, vocab_size)
    wanted = request.sampling_params.max_tokens
    # The last token drawn is never read again, so it needs no place in the context.
    if max_context is not None and wanted is not None and length + wanted - 1 > max_context:
        raise BadRequest(
            f"a prompt of {length} tokens and max_tokens={wanted} exceed the context of {max_context} tokens; ask for "
            f"at most {max_context - length + 1}, or leave max_tokens out to fill the context."
        )


def _check_tokens(what: str, given: ModelInput, vocab_size: int | None, max_context: int | None) -> int:
    try:
        runs = [np.asarray(chunk.tokens, dtype=np.int64) for chunk in given.chunks]
        tokens = np.concatenate(runs) if runs else np.zeros(0, np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise BadRequest(f"{what} holds something that is no token id: {error}.") from error
    if not len(tokens):
        raise BadRequest(f"{what} is empty; it needs at least one token.")
    if max_context is not None and len(tokens) > max_context:
        raise BadRequest(f"{what} has {len(tokens)} tokens, more than the context of {max_context}.")
    _check_ids(what, tokens, 0, vocab_size)
    return len(tokens)


def _check_ids(what: str, ids: np.ndarray, least: int, vocab_size: int | None) -> None:
    bad = ids < least
    if vocab_size is not None:
        bad |= ids >= vocab_size
    if bad.any():
        position = np.argwhere(bad)[0]
        upper = "" if vocab_size is None else f" to {vocab_size - 1}"
        raise BadRequest(
            f"{what} holds token id {int(ids[tuple(position)])} at position {int(position[0])}; ids run from "
            f"{least}{upper}."
        )


def _check_targets(targets: TensorData, length: int, vocab_size: int | None) -> None:
    shape = targets.shape
    if targets.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1:
        raise BadRequest(
            f"target_prompt_logprobs is {targets.dtype} of shape {shape}; it must be int64 of shape [{length - 1}, K], "
            "one row for each prompt token after the first."
        )
    _check_ids("target_prompt_logprobs", targets.to_numpy(), -1, vocab_size)


def _check_inputs(
    where: str, inputs: Mapping[str, TensorData], loss_fn: str, length: int, vocab_size: int | None
) -> None:
    menu = LOSS_FNS[loss_fn]
    for key in inputs:
        if key not in menu.inputs:
            raise BadRequest(
                f"{where}: {loss_fn} does not read loss_fn_inputs[{key!r}]; it reads {', '.join(menu.inputs)}."
            )
    for key in menu.required:
        if key not in inputs:
            hint = " Pass on sequence.logprobs of the samples." if key == "logprobs" else ""
            raise BadRequest(
                f"{where}: loss_fn_inputs lacks {key!r}; {loss_fn} needs {', '.join(menu.required)}.{hint}"
            )
    targets = inputs["target_tokens"]
    if len(targets.shape) > (1 if "advantages" in menu.required else 2):
        raise BadRequest(
            f"{where}: target_tokens has shape {targets.shape}; {loss_fn} reads one target a token, and two dimensions "
            "are for cross_entropy alone."
        )
    for key, tensor in inputs.items():
        _check_input(f"{where}: {key}", key, tensor, length)
        if tensor.shape != targets.shape:
            raise BadRequest(
                f"{where}: {key} has shape {tensor.shape}, target_tokens has {targets.shape}; they must be equal."
            )
    _check_ids(f"{where}: target_tokens", targets.to_numpy(), 0, vocab_size)
    factors = [key for key in WEIGHTS if key in inputs]
    if any(inputs[key] != inputs[factors[0]] for key in factors):
        raise BadRequest(
            f"{where}: {' and '.join(factors)} are the same input under different names, and differ; give one."
        )


def _check_input(what: str, key: str, tensor: TensorData, length: int) -> None:
    array = tensor.to_numpy()
    if array.ndim == 0 or len(array) != length:
        given = len(array) if array.ndim else "a single number"
        cause = ", as if it were not shifted" if given == length + 1 else ""
        raise BadRequest(
            f"{what} has length {given}, model_input has {length}{cause}; give one value for each input token, already "
            "shifted (input tokens[:-1], target tokens[1:])."
        )
    if key == "target_tokens" and tensor.dtype != "int64":
        raise BadRequest(f"{what} is {tensor.dtype}; token ids must be int64.")
    if not np.isfinite(array).all():
        position = np.argwhere(~np.isfinite(array))[0]
        raise BadRequest(f"{what} holds {array[tuple(position)]} at position {int(position[0])}; it must be finite.")
