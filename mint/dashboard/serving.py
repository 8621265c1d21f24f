"""Questions to a MinT server over HTTP, with the viewer's own key: what it holds, and samples streamed from it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from mint.config import ClientConfig
from mint.errors import Internal
from mint.local import local_server

ASK_SECONDS = 5.0
READ_SECONDS = 300.0
"""A model that is loaded on first use may take minutes before its first token."""


class ServerDown(Internal):
    """Nobody answers at the address."""


class Refused(Internal):
    """The server answered with an error."""

    def __init__(self, answered: int, text: str) -> None:
        super().__init__(f"The server answered {answered}: {text}")
        self.answered = answered


@dataclass(frozen=True)
class Piece:
    """Some streamed text with the log-probs of its tokens."""

    text: str
    tokens: list[tuple[str, float]] = field(default_factory=list)


class Serving:
    """One server. Without an address a local one is started, but only by what needs samples."""

    def __init__(self, config: ClientConfig, itself: bool = False) -> None:
        """`itself`: the server at this address is this very process."""
        self.config = config
        self._itself = itself
        self._started: ClientConfig | None = None

    @property
    def address(self) -> str | None:
        """None: a local server that was not started yet."""
        found = self._started or self.config
        return found.base_url

    async def start(self) -> None:
        """Makes sure that there is a server to ask."""
        if self.config.base_url is None and self._started is None:
            self._started = await asyncio.to_thread(lambda: local_server().wait_until_ready())

    async def get(self, path: str, **params: Any) -> Any:
        """JSON of the Tinker or OpenAI API, such as `api/v1/training_runs`."""
        async with self._client() as client:
            try:
                answer = await client.get(path, params=params, timeout=ASK_SECONDS)
            except httpx.HTTPError as error:
                raise self._down(error) from error
        if answer.is_error:
            raise _error(answer)
        return answer.json()

    async def stream(self, route: str, body: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """Text of `v1/completions` or `v1/chat/completions` as it is sampled."""
        await self.start()
        async with self._client() as client:
            try:
                sending = client.stream("POST", route, json={**body, "stream": True}, timeout=READ_SECONDS)
                async with sending as answer:
                    if answer.is_error:
                        await answer.aread()
                        raise _error(answer)
                    async for line in answer.aiter_lines():
                        if line.startswith("data: ") and line != "data: [DONE]":
                            yield _piece(json.loads(line.removeprefix("data: ")))
            except httpx.HTTPError as error:
                raise self._down(error) from error

    def _client(self) -> httpx.AsyncClient:
        found = self._started or self.config
        if found.base_url is None:
            raise ServerDown("No server is running yet. The playground starts one on this machine when it needs it.")
        headers = {"X-API-Key": found.api_key, "Authorization": f"Bearer {found.api_key}"} if found.api_key else {}
        # Its own certificate is made out to the name others know it by.
        return httpx.AsyncClient(base_url=found.base_url, headers=headers, trust_env=False, verify=not self._itself)

    def _down(self, error: httpx.HTTPError) -> ServerDown:
        return ServerDown(
            f"No server answers at {self.address} ({type(error).__name__}). Start one with `mint serve`, or start the "
            "dashboard with --server ADDRESS where it runs."
        )


def _error(answer: httpx.Response) -> Refused:
    try:
        told = answer.json()
        text = told.get("detail") or told["error"]["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        text = answer.text[:300]
    return Refused(answer.status_code, text)


def _piece(event: dict[str, Any]) -> Piece:
    if "error" in event:
        raise Internal(f"The server answered: {event['error'].get('message', event['error'])}")
    choices = event.get("choices") or [{}]
    choice = choices[0]
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    told = choice.get("logprobs") or {}
    if "content" in told:
        tokens = [(token["token"], float(token["logprob"])) for token in told["content"] or []]
    else:
        pairs = zip(told.get("tokens") or [], told.get("token_logprobs") or [], strict=True)
        tokens = [(token, float(logprob)) for token, logprob in pairs if logprob is not None]
    return Piece(text, tokens)
