"""Samples that a connection waits for: all choices of one completion request, whole or token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from mint.errors import Unauthorized
from mint.server.policies import Policy
from mint.server.samplers import Samplers
from mint.types import SampledSequence, SampleRequest, SampleResponse


@dataclass(frozen=True)
class Piece:
    """New tokens of one choice."""

    choice: int
    tokens: Sequence[int]
    logprobs: Sequence[float]


class Run:
    """The samples of several prompts under one policy; choices are numbered through, prompt by prompt."""

    def __init__(self, samplers: Samplers, policy: Policy, requests: Sequence[SampleRequest], owner: str) -> None:
        self._samplers = samplers
        self._owner = owner
        self._policy = policy
        self._requests = requests
        self._work: list[asyncio.Future[SampleResponse]] = []
        self._news: asyncio.Queue[Piece | None] = asyncio.Queue()

    async def start(self) -> None:
        """Raises what can be said about the requests before the first token."""
        await self._samplers.admit(self._policy, self._owner)
        try:
            await self._begin()
        except BaseException:
            self.cancel()
            raise
        everything = asyncio.gather(*self._work, return_exceptions=True)
        everything.add_done_callback(lambda _: self._news.put_nowait(None))
        self._samplers.hold(self._owner, everything)

    async def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        first = 0
        for request in self._requests:

            def on_tokens(n: int, tokens: Sequence[int], logprobs: Sequence[float], first: int = first) -> None:
                loop.call_soon_threadsafe(self._news.put_nowait, Piece(first + n, tokens, logprobs))

            self._work.append(await self._samplers.begin(self._policy, request, self._owner, on_tokens))
            first += request.num_samples

    async def results(self) -> list[SampleResponse]:
        try:
            return list(await asyncio.gather(*self._work))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unauthorized("the key was revoked or has expired while this was sampled; it was stopped.") from None

    async def pieces(self) -> AsyncIterator[Piece]:
        """Tokens as they are drawn; every token of every choice comes once."""
        seen: dict[int, int] = {}
        while (piece := await self._news.get()) is not None:
            seen[piece.choice] = seen.get(piece.choice, 0) + len(piece.tokens)
            yield piece
        for choice, sequence in enumerate(choices_of(await self.results())):
            start = seen.get(choice, 0)
            if rest := sequence.tokens[start:]:
                yield Piece(choice, rest, (sequence.logprobs or [])[start:])

    def cancel(self) -> None:
        for work in self._work:
            work.cancel()


def choices_of(responses: Sequence[SampleResponse]) -> list[SampledSequence]:
    return [sequence for response in responses for sequence in response.sequences]
