"""Connections, before there is a request and after there is an answer: how many, how long a client may take to say what
it wants, and how long to take what it is sent. Bodies are bounded in `mint.server.bodies`.

uvicorn closes connections that are idle between requests; it has no bounds for those that are slow.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mint.server.limits import Limits


class BoundedConnection(HttpToolsProtocol):
    def __init__(self, *args: Any, limits: Limits, **more: Any) -> None:
        super().__init__(*args, **more)
        self._limits = limits
        self._heading = 0  # bytes of a request whose headers are not complete
        self._patience: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(503, f"the server has {self._limits.connections} connections, as many as it takes")
        else:
            self._wait_for("headers", self._limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        for kind in list(self._patience):
            self._has_come(kind)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if "headers" in self._patience and not self.transport.is_closing():
            self._heading += len(data)
            if self._heading > self._limits.header_bytes:
                self._refuse(
                    431, f"the headers are larger than the {self._limits.header_bytes} bytes this server takes"
                )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._heading = 0
        self._wait_for("headers", self._limits.header_seconds)

    def on_headers_complete(self) -> None:
        self._has_come("headers")
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for("reading", self._limits.send_seconds)

    def resume_writing(self) -> None:
        self._has_come("reading")
        super().resume_writing()

    def _wait_for(self, kind: str, seconds: float) -> None:
        if kind not in self._patience:
            self._patience[kind] = self.loop.call_later(seconds, self._give_up, kind)

    def _has_come(self, kind: str) -> None:
        if (timer := self._patience.pop(kind, None)) is not None:
            timer.cancel()

    def _give_up(self, kind: str) -> None:
        del self._patience[kind]
        if kind == "headers":
            self._refuse(408, f"the headers did not come within {self._limits.header_seconds:g} s")
        else:
            self.transport.abort()  # closing would wait for what was written to be read

    def _refuse(self, status: int, why: str) -> None:
        """Said without an application, to a connection that ends with it."""
        body = f'{{"detail": "{why}; connect again."}}'.encode()
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        again = "retry-after: 1\r\n" if status == 503 else ""
        self.transport.write(f"{head}{again}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


def bounded(limits: Limits) -> type[asyncio.Protocol]:
    """What uvicorn takes as `http`; it makes one for each connection."""
    return functools.partial(BoundedConnection, limits=limits)  # type: ignore[return-value]
