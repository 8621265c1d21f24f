"""A policy as a function: from tokens to tokens (what rollouts use) or from messages to a message (what judges use).

Over a SamplingClient, or for messages over any OpenAI-compatible endpoint.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mint.errors import BadRequest, RequestFailed
from mint.rl.hashing import stable_hash
from mint.rl.renderers import Renderer
from mint.rl.types import Message, Observation, StopCondition, TokensWithLogprobs
from mint.types import ModelInput, SampledSequence, SampleResponse, SamplingParams

ENDPOINT_PATIENCE = 120.0
"""Seconds a judge's endpoint may take to answer."""


class TokenSampler(Protocol):
    """What is asked of a sampling client; every Tinker-compatible one has it."""

    async def sample_async(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse: ...


class TokenCompleter(ABC):
    @abstractmethod
    async def __call__(
        self, model_input: Observation, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """One completion; `max_tokens` lowers the completer's own limit for this call."""

    async def complete_many(
        self, model_input: Observation, stop: StopCondition, count: int, *, max_tokens: int | None = None
    ) -> list[TokensWithLogprobs]:
        """Independent completions of one prompt; a completer that can ask for all in one request does."""
        return list(await asyncio.gather(*(self(model_input, stop, max_tokens=max_tokens) for _ in range(count))))

    def for_member(self, *index: int) -> TokenCompleter:
        """The same policy with a random stream of its own, if it has seeds: one per member and attempt."""
        return self


class MessageCompleter(ABC):
    @abstractmethod
    async def __call__(self, messages: Sequence[Message]) -> Message: ...


@dataclass
class SamplingTokenCompleter(TokenCompleter):
    """Over a SamplingClient. With a seed, call n of member i always draws from the same stream, whatever else runs."""

    sampling_client: TokenSampler
    max_tokens: int
    temperature: float = 1.0
    context_window: int | None = None
    """If given, no request asks for more tokens than fit after its prompt."""
    seed: int | None = None
    member: tuple[int, ...] = ()
    calls: int = field(default=0, init=False)

    async def __call__(
        self, model_input: Observation, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        return (await self.complete_many(model_input, stop, 1, max_tokens=max_tokens))[0]

    async def complete_many(
        self, model_input: Observation, stop: StopCondition, count: int, *, max_tokens: int | None = None
    ) -> list[TokensWithLogprobs]:
        params = SamplingParams(
            max_tokens=self._room(model_input, max_tokens),
            temperature=self.temperature,
            stop=stop,
            seed=self._next_seed(),
        )
        response = await self.sampling_client.sample_async(
            prompt=model_input, num_samples=count, sampling_params=params
        )
        return [_action(sequence) for sequence in response.sequences]

    def for_member(self, *index: int) -> SamplingTokenCompleter:
        return self if self.seed is None else replace(self, member=(*self.member, *index))

    def _next_seed(self) -> int | None:
        if self.seed is None:
            return None
        self.calls += 1
        return stable_hash(self.seed, self.calls, *self.member) >> 1  # 31 bits: any service takes them

    def _room(self, model_input: Observation, max_tokens: int | None) -> int:
        limits = [self.max_tokens]
        if max_tokens is not None:
            limits.append(max_tokens)
        if self.context_window is not None:
            limits.append(self.context_window - model_input.length)
        if min(limits) < 1:
            raise BadRequest(
                f"the prompt has {model_input.length} tokens and the context window {self.context_window}: "
                "no room to generate. Shorten the prompt or set a max_trajectory_tokens limit."
            )
        return min(limits)


def _action(sequence: SampledSequence) -> TokensWithLogprobs:
    if sequence.logprobs is None and sequence.tokens:
        raise RequestFailed("the sampling service returned no log-probs; without them there is no ratio to train on.")
    return TokensWithLogprobs(list(sequence.tokens), list(sequence.logprobs or []), sequence.stop_reason)


@dataclass
class SamplingMessageCompleter(MessageCompleter):
    """Over a SamplingClient and a renderer."""

    sampling_client: TokenSampler
    renderer: Renderer
    max_tokens: int
    temperature: float = 1.0

    async def __call__(self, messages: Sequence[Message]) -> Message:
        response = await self.sampling_client.sample_async(
            prompt=self.renderer.build_generation_prompt(messages),
            num_samples=1,
            sampling_params=SamplingParams(
                max_tokens=self.max_tokens, temperature=self.temperature, stop=self.renderer.get_stop_sequences()
            ),
        )
        return self.renderer.parse_response(response.sequences[0].tokens)[0]


@dataclass
class EndpointMessageCompleter(MessageCompleter):
    """Over any OpenAI-compatible server: POST <base_url>/chat/completions."""

    base_url: str
    """Up to and with the version, as in `http://localhost:8000/v1`."""
    model: str
    api_key: str | None = None
    max_tokens: int = 512
    temperature: float = 0.0
    transport: Any = None
    """An httpx transport, for tests and proxies."""

    async def __call__(self, messages: Sequence[Message]) -> Message:
        import httpx

        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        async with httpx.AsyncClient(transport=self.transport, timeout=ENDPOINT_PATIENCE) as client:
            reply = await client.post(f"{self.base_url.rstrip('/')}/chat/completions", json=body, headers=headers)
        if reply.status_code != 200:
            raise RequestFailed(f"{self.base_url} answered {reply.status_code} for {self.model!r}: {reply.text[:500]}")
        message: Message = reply.json()["choices"][0]["message"]
        return message
