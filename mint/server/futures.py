"""Results that are fetched later: opened by a request, settled by the backend, kept for a while after delivery.

A request that is sent again under the same key is the same future. Results of training and sampling are kept in their
protobuf form, which is a tenth of the Python objects' size, and turned into JSON for the clients that ask for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mint import wire
from mint.doorbell import arriving
from mint.errors import BadRequest, Busy, Forbidden, Gone, MintError, NotFound
from mint.server.limits import Limits
from mint.types import ForwardBackwardOutput, SampleResponse

T = TypeVar("T")
log = logging.getLogger("mint.server")

SAMPLE = "sample-"
"""How the ids of samples begin: they are not kept on disk, so that one nobody knows may be one a crash has lost."""


@dataclass(frozen=True)
class Answer:
    body: bytes
    media_type: str = wire.JSON
    read: Callable[[bytes], Any] | None = None
    """Turns a protobuf body back into what it says."""
    failed: bool = False

    @property
    def error(self) -> str:
        """Of one that failed: what is told of it."""
        return str(json.loads(self.body)["error"])

    def as_json(self) -> bytes:
        return self.body if self.read is None else json.dumps(wire.to_json(self.read(self.body))).encode()


def json_answer(value: Any) -> Answer:
    return Answer(json.dumps(wire.to_json(value)).encode())


def forward_answer(output: ForwardBackwardOutput) -> Answer:
    body = wire.forward_backward_output_to_proto(output)
    return Answer(body, wire.PROTOBUF, wire.forward_backward_output_from_proto)


def sample_answer(response: SampleResponse) -> Answer:
    return Answer(wire.sample_response_to_proto(response), wire.PROTOBUF, wire.sample_response_from_proto)


def error_answer(error: BaseException) -> Answer:
    """A failure as clients read it: 200 with `error`, and whose fault it was."""
    if isinstance(error, (CancelledError, asyncio.CancelledError)):
        error = BadRequest("the request was cancelled.")
    if isinstance(error, (BadRequest, NotFound, Forbidden, Busy)):
        category, text = "user", str(error)
    elif isinstance(error, MintError):
        category, text = "server", str(error)
    else:
        log.error("a request failed", exc_info=error)
        category, text = "server", f"the server failed: {type(error).__name__}: {error}"
    return Answer(json.dumps({"error": text, "category": category}).encode(), failed=True)


@dataclass(eq=False, slots=True)
class Promise:
    """One request under way. It settles once; what comes after is dropped."""

    owner: str
    key: str | None = None
    """In words, for it is shown: "seq_id 3 of <model>"."""
    fingerprint: bytes = b""
    session: str | None = None
    """Whose end is the end of it."""
    group: tuple[str, int] | None = None
    """Sampling session and clone, for clients that ask which of their samples are done."""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    accepted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when the request is safe from a crash, where it is to be: nobody hears of its id before."""
    settled: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    asked: float = field(default_factory=time.monotonic)
    """When somebody last asked for it."""
    finished: float = 0.0
    delivered: bool = False
    head: dict[str, str] = field(default_factory=dict)
    """What is known of the result before it is there, for clients that wait for that on the same connection."""
    envelope: dict[str, Any] = field(default_factory=dict)
    """What the first answer to the request says besides the id; a repeated request gets the same."""
    on_cancel: Callable[[], None] | None = None
    """What cancelling does instead, for requests that others depend on."""
    _work: Future[Any] | asyncio.Task[None] | None = None

    def settle(self, answer: Answer) -> None:
        if not self.settled.done():
            self.finished = time.monotonic()
            self.settled.set_result(answer)
            self.on_cancel = self._work = None  # they hold the request, and the result is kept for minutes

    def fail(self, error: BaseException) -> None:
        self.settle(error_answer(error))

    def start(self, work: Callable[[], Future[T]], answer: Callable[[T], Answer]) -> None:
        """Begins the work and settles with what `answer` makes of its result; a border, so no error passes."""
        if self.settled.done():  # cancelled before its turn came
            return
        try:
            self._work = work()
        except Exception as error:
            self.fail(error)
            return

        def settle(done: asyncio.Future[T]) -> None:
            try:
                self.settle(answer(done.result()))
            except (Exception, asyncio.CancelledError) as error:
                self.fail(error)

        arriving(self._work).add_done_callback(settle)

    def run(self, work: Coroutine[Any, Any, Answer]) -> None:
        """The same for work of several steps."""

        async def guarded(work: Awaitable[Answer]) -> None:
            try:
                self.settle(await work)
            except (Exception, asyncio.CancelledError) as error:
                self.fail(error)

        self._work = asyncio.get_running_loop().create_task(guarded(work))

    def cancel(self) -> None:
        if self.settled.done():
            return
        if self.on_cancel is not None:
            self.on_cancel()
            return
        if self._work is not None:
            self._work.cancel()
        self.fail(CancelledError())


class Futures:
    """Every promise by its id and, where it has one, by the key that makes a repeated request the same."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_id: dict[str, Promise] = {}
        self._by_key: dict[str, Promise] = {}
        self._delivered: deque[Promise] = deque()
        self._delivered_bytes = 0
        self._logs: dict[tuple[str, int], CompletionLog] = {}

    def repeated(self, key: str | None, fingerprint: bytes) -> Promise | None:
        """The promise an earlier request opened under this key; its payload must have been the same."""
        known = self._by_key.get(key) if key is not None else None
        if known is not None and known.fingerprint != fingerprint:
            raise BadRequest(
                f"{key} was already used for a request with another payload; give each new request a number of its own."
            )
        return known

    def open(
        self,
        owner: str,
        key: str | None = None,
        fingerprint: bytes = b"",
        group: tuple[str, int] | None = None,
        request_id: str | None = None,
        session: str | None = None,
    ) -> Promise:
        promise = Promise(owner, key, fingerprint, session, group, request_id or uuid.uuid4().hex)
        self._by_id[promise.request_id] = promise
        if group in self._logs:
            self._logs[group].watch(promise)
        if key is not None:
            self._by_key[key] = promise
        return promise

    def find(self, request_id: str, owner: str) -> Promise:
        promise = self._by_id.get(request_id)
        if promise is not None and promise.owner != owner:
            promise = None  # what is another's is answered as if it were not there
        if promise is None and request_id.startswith(SAMPLE):
            raise Gone("the server was restarted before it had this sample, or it was fetched long ago; ask again.")
        if promise is None:
            raise NotFound(
                f"no request {request_id!r} on this server; it may have been restarted since, or the result fetched "
                f"more than {self._limits.delivered_seconds:.0f} s ago. Send the request again."
            )
        return promise

    async def wait(self, promise: Promise) -> Answer | None:
        """The answer, or None if it has not come within one poll."""
        promise.asked = time.monotonic()
        if not promise.settled.done():
            await asyncio.wait([promise.settled], timeout=self._limits.poll_seconds)
            if not promise.settled.done():
                return None
        answer = promise.settled.result()
        if not promise.delivered:
            promise.delivered = True
            self._delivered.append(promise)
            self._delivered_bytes += len(answer.body)
        return answer

    def completions(self, group: tuple[str, int]) -> CompletionLog:
        """The log of this group, begun when somebody first asks for it."""
        if group not in self._logs:
            self._logs[group] = CompletionLog()
            for promise in self._by_id.values():
                if promise.group == group:
                    self._logs[group].watch(promise)
        return self._logs[group]

    def sweep(self) -> None:
        now = time.monotonic()
        while self._delivered and (
            self._delivered_bytes > self._limits.delivered_bytes
            or now - self._delivered[0].finished > self._limits.delivered_seconds
        ):
            promise = self._delivered.popleft()
            self._delivered_bytes -= len(promise.settled.result().body)
            self._forget(promise)
        for promise in list(self._by_id.values()):
            if not promise.settled.done():
                if promise.session is None and now - promise.asked > self._limits.session_idle_seconds:
                    promise.cancel()  # nobody wants it any more
            elif not promise.delivered and now - promise.finished > self._limits.undelivered_seconds:
                self._forget(promise)

    def end_sessions(self, session_ids: Iterable[str]) -> None:
        """Nobody will ask for what these sessions are owed: what has not been done need not be."""
        ended = set(session_ids)
        if not ended:
            return
        for promise in [p for p in self._by_id.values() if p.session in ended]:
            promise.cancel()
            if not promise.delivered:
                self._forget(promise)
        for group in [g for g in self._logs if g[0].partition(":sample:")[0] in ended]:
            del self._logs[group]

    def owners(self) -> set[str]:
        """Those who are owed something."""
        return {promise.owner for promise in self._by_id.values() if not promise.settled.done()}

    def cancel_of(self, owner: str) -> None:
        for promise in [p for p in self._by_id.values() if p.owner == owner]:
            promise.cancel()

    def __len__(self) -> int:
        return len(self._by_id)

    def holds(self, request_id: str) -> bool:
        return request_id in self._by_id

    def drop(self, promise: Promise) -> None:
        """A request that was refused after all."""
        self._forget(promise)

    def _forget(self, promise: Promise) -> None:
        self._by_id.pop(promise.request_id, None)
        if promise.key is not None and self._by_key.get(promise.key) is promise:
            del self._by_key[promise.key]


class CompletionLog:
    """The finished requests of one sampler's clone, for clients that ask what is done rather than for one result."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, dict[str, Any]]] = []
        self._cursor = 0
        self._news = asyncio.Event()

    def watch(self, promise: Promise) -> None:
        promise.settled.add_done_callback(lambda settled: self._add(promise.request_id, settled.result()))

    def _add(self, request_id: str, answer: Answer) -> None:
        self._cursor += 1
        entry: dict[str, Any] = {"state": "failed" if answer.failed else "finished", "request_id": request_id}
        if not answer.failed:
            entry["response_payload_uncompressed_size"] = len(answer.body)
        self._entries.append((self._cursor, entry))
        self._news.set()

    async def since(self, cursor: int, seconds: float) -> dict[str, Any]:
        """What finished after this cursor, waiting for the first one; what lies before it is forgotten."""
        self._entries = [(n, entry) for n, entry in self._entries if n > cursor]
        if not self._entries:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), seconds)
            except TimeoutError:
                return {"completions": [], "cursor": self._cursor}
        return {"completions": [entry for _, entry in self._entries], "cursor": self._cursor}
