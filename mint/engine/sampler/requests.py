"""Checks a sample request against the model's facts, once, before it takes a place in the queue."""

from __future__ import annotations

import numpy as np

from mint.backend import ModelFacts
from mint.errors import BadRequest
from mint.types import SampleRequest


def check_request(request: SampleRequest, facts: ModelFacts, room: int) -> int:
    """The number of tokens each sample may have; `room` is what the key/value cache can hold of one sequence."""
    if request.num_samples < 1:
        raise BadRequest(f"num_samples is {request.num_samples}; it must be at least 1.")
    prompt = request.prompt.to_ints()
    if not prompt:
        raise BadRequest("the prompt is empty; it must hold at least one token.")
    _check_ids(np.asarray(prompt), facts.vocab_size, "the prompt")
    _check_ids(np.asarray(request.sampling_params.stop_ids, dtype=np.int64), facts.vocab_size, "stop")
    _check_scoring(request, len(prompt), facts.vocab_size)
    return _tokens_to_draw(request.sampling_params.max_tokens, len(prompt), facts.max_context, room)


def _tokens_to_draw(max_tokens: int | None, prompt: int, context: int, room: int) -> int:
    if prompt >= context:
        raise BadRequest(
            f"the prompt has {prompt} tokens and the model's context is {context}, which leaves no room for an answer; "
            "shorten the prompt."
        )
    if max_tokens is not None and prompt + max_tokens > context:
        raise BadRequest(
            f"the prompt has {prompt} tokens and max_tokens is {max_tokens}, together {prompt + max_tokens}; the "
            f"model's context is {context}. Ask for at most {context - prompt} tokens, or leave max_tokens out."
        )
    fits = room - prompt + 1  # the last token drawn is never read, so it takes no room
    if fits < (max_tokens or 1):
        raise BadRequest(
            f"the prompt has {prompt} tokens and max_tokens is {max_tokens}; the memory set aside for keys and values "
            f"holds {room} tokens of one sequence. Ask for less, or give the engine more memory."
        )
    return max_tokens if max_tokens is not None else min(context - prompt, fits)


def _check_scoring(request: SampleRequest, prompt: int, vocab_size: int) -> None:
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if (value := getattr(request, name)) < 0:
            raise BadRequest(f"{name} is {value}; it must be 0 or more.")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None:
        if not (request.prompt_logprobs or request.topk_prompt_logprobs):
            raise BadRequest("prompt_logprobs_last_n was given without prompt_logprobs; turn prompt_logprobs on.")
        if not 1 <= last_n < prompt:
            raise BadRequest(
                f"prompt_logprobs_last_n is {last_n}; it must be between 1 and {prompt - 1}, one less than the "
                "prompt's length."
            )
    if request.target_prompt_logprobs is not None:
        targets = request.target_prompt_logprobs
        if targets.dtype != "int64" or len(targets.shape) != 2 or targets.shape[0] != prompt - 1:
            raise BadRequest(
                f"target_prompt_logprobs has shape {targets.shape} and dtype {targets.dtype}; it must be int64 of "
                f"shape [{prompt - 1}, K]: one row for each of the prompt's {prompt} tokens after the first."
            )
        _check_ids(targets.to_numpy(), vocab_size, "target_prompt_logprobs", lowest=-1)


def _check_ids(ids: np.ndarray, vocab_size: int, where: str, lowest: int = 0) -> None:
    wrong = np.argwhere((ids < lowest) | (ids >= vocab_size))
    if len(wrong):
        position = tuple(int(i) for i in wrong[0])
        at = position[0] if len(position) == 1 else list(position)
        raise BadRequest(
            f"{where} holds token {int(ids[position])} at position {at}; the model's token ids run from 0 to "
            f"{vocab_size - 1}."
        )
