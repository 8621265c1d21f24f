"""Samples asked for together go out together, where the server understands that: one request for many.

A loop that asks for a group of prompts makes its calls within a millisecond or two. Each result comes back as soon as
it is there. Whatever goes wrong with a batch, its samples are asked for one by one, under the numbers they have: the
server knows which of them it has already.
"""

from __future__ import annotations

import asyncio
import math

from mint.client.http import Listener, Response
from mint.client.transport import Transport
from mint.errors import MintError
from mint.wire import FRAMES, HELD, JSON, PROTOBUF, FrameReader, framed

GATHER = 0.001
"""Seconds in which samples come together, if nobody asks for a result before, and between two requests."""
MOST, MOST_BYTES = 64, 1 << 20
"""Samples, and about so many bytes, in one request."""

Asked = tuple[bytes, "asyncio.Future[Response | None]"]


class Batches:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._waiting: list[Asked] = []
        self._bytes = 0
        self._sent = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._posts: set[asyncio.Task[None]] = set()

    async def ask(self, content: bytes) -> Response | None:
        """The answer a held `asample` with this body would give; None if it has to be asked for by itself."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Response | None] = loop.create_future()
        if not self._waiting:
            self._timer = loop.call_later(GATHER, self._send)
        self._waiting.append((content, answer))
        self._bytes += len(content)
        if len(self._waiting) == MOST or self._bytes > MOST_BYTES:
            self._send()
        return await answer

    def hurry(self) -> None:
        """Somebody waits, so no more are about to come from there, and what has been asked for leaves. Not if others
        left just now: many who wait, each for its own, come together too."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._sent >= GATHER:
            loop.call_soon(self._send)  # after those that have begun and not got here yet

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waiting = [asked for asked in self._waiting if not asked[1].done()]  # some may have been given up
        self._waiting, self._bytes = [], 0
        if not waiting:
            return
        loop = asyncio.get_running_loop()
        self._sent = loop.time()
        if len(waiting) == 1:
            waiting[0][1].set_result(None)
            return
        post = loop.create_task(self._post(waiting))
        self._posts.add(post)
        post.add_done_callback(self._posts.discard)

    async def _post(self, waiting: list[Asked]) -> None:
        reader = FrameReader()

        def begin(_: object) -> None:
            nonlocal reader
            reader = FrameReader()

        def take(data: bytes) -> None:
            for frame in reader.feed(data):
                _settle(waiting, frame)

        headers = {"Content-Type": FRAMES, "Accept": f"{PROTOBUF}, {JSON}", "X-Tinker-Sampling-Backpressure": "1"}
        body = framed(content for content, _ in waiting)
        try:
            await self._transport.send(
                "POST", "mint/samples", content=body, headers=headers, held=True, listener=Listener(begin, take)
            )
        except MintError:
            pass  # what is wrong is told to each by itself
        finally:
            for _, answer in waiting:
                if not answer.done():
                    answer.set_result(None)


def _settle(waiting: list[Asked], frame: bytes) -> None:
    """A frame: which one, its id if this is its result, the media type; a line break; the body, none if refused."""
    line, _, body = frame.partition(b"\n")
    index, request_id, media = line.decode().split(" ")
    answer = waiting[int(index)][1]
    if answer.done():
        return
    headers = {"content-type": media} | ({} if request_id == "-" else {HELD: request_id})
    answer.set_result(Response(200, headers, body) if body else None)
