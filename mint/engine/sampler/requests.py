"""Checks a sample request against the model and the room there is, once, before it takes a place in the queue."""

from __future__ import annotations

from mint.backend import ModelFacts
from mint.checks import check_sample
from mint.errors import BadRequest
from mint.types import SampleRequest


def tokens_to_draw(request: SampleRequest, facts: ModelFacts, room: int) -> int:
    """How many tokens each sample may have. `room`: the tokens of one sequence that the key/value cache can hold."""
    check_sample(request, facts.vocab_size, facts.max_context)
    params, prompt = request.sampling_params, request.prompt.length
    for name, ids in (("stop", params.stop_ids), ("logit_bias", params.logit_bias or ())):
        for token in ids:
            if not 0 <= token < facts.vocab_size:
                raise BadRequest(f"{name} holds token id {token}; ids run from 0 to {facts.vocab_size - 1}.")
    if request.prompt_logprobs_last_n is not None and not (request.prompt_logprobs or request.topk_prompt_logprobs):
        raise BadRequest("prompt_logprobs_last_n was given without prompt_logprobs; turn prompt_logprobs on.")
    fits = room - prompt + 1  # the last token drawn is never read, so it takes no room
    if fits < (params.max_tokens or 1):
        raise BadRequest(
            f"the prompt has {prompt} tokens and max_tokens is {params.max_tokens}; the memory set aside for keys and "
            f"values holds {room} tokens of one sequence. Ask for less, or give the engine more memory."
        )
    return params.max_tokens or min(facts.max_context - prompt + 1, fits)
