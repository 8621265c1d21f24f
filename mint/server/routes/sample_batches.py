"""Many samples in one request, and each result in its answer as soon as it is there. For MinT's own clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from mint import wire
from mint.errors import MintError
from mint.server.auth import User
from mint.server.bodies import read_body
from mint.server.futures import Promise
from mint.server.routes import State, Uncounted, form
from mint.server.routes.sampling import begin_sample
from mint.server.state import Server

router = APIRouter()


@router.post("/mint/samples")
async def samples(request: Request, server: State, user: Uncounted) -> Response:
    """The body holds, in frames, what each would send to `asample`."""
    bodies = wire.read_frames(await read_body(request, server.limits), server.limits.batched_samples)
    return Batch([await _begin(server, user, body) for body in bodies], request, server)


async def _begin(server: Server, user: User, body: bytes) -> Promise | None:
    """None for one that is refused: sent by itself, it is told why."""
    try:
        return await begin_sample(server, user, body)
    except MintError:
        return None


class Batch(Response):
    """A frame for each sample: its number in the request, its id, the media type, a line break and the result; without
    an id where it has to be polled for, and without anything after the line where it was refused."""

    def __init__(self, promises: Sequence[Promise | None], request: Request, server: Server) -> None:
        super().__init__(media_type=wire.FRAMES)
        del self.headers["content-length"]
        self._promises, self._request, self._server = promises, request, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(frames: Sequence[bytes], more: bool = True) -> None:
            await send({"type": "http.response.body", "body": wire.framed(frames), "more_body": more})

        news = asyncio.Event()
        settled: list[int] = []

        def note(index: int, _: object) -> None:
            settled.append(index)
            news.set()

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        left = {index: promise for index, promise in enumerate(self._promises) if promise is not None}
        if refused := [f"{index} - -\n".encode() for index in range(len(self._promises)) if index not in left]:
            await tell(refused)  # at once: they may have to wait for their turn by themselves
        for index, promise in left.items():
            promise.settled.add_done_callback(partial(note, index))
        try:
            async with asyncio.timeout(self._server.limits.poll_seconds):
                while left:
                    await news.wait()
                    news.clear()
                    ready, settled[:] = settled[:], []
                    frames = [await self._result(index, left.pop(index)) for index in ready]
                    await tell(frames, more=bool(left))
        except TimeoutError:
            pass
        if left or not any(self._promises):
            await tell([_envelope(index, promise) for index, promise in left.items()], more=False)

    async def _result(self, index: int, promise: Promise) -> bytes:
        answer = await self._server.futures.wait(promise)
        assert answer is not None, "it has settled"
        media_type, body = form(answer, self._request)
        return f"{index} {promise.request_id} {media_type}\n".encode() + body


def _envelope(index: int, promise: Promise) -> bytes:
    told = json.dumps({"request_id": promise.request_id, **promise.envelope})
    return f"{index} - {wire.JSON}\n{told}".encode()
