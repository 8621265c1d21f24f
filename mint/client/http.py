"""HTTP/1.1 to one server, as much of it as its client needs: connections that are kept, and used one request at a time.

A request takes a tenth of a millisecond of processor time here, and a whole one in httpx, which was half of what the
client added to a step. What has to go through a proxy is left to httpx all the same. What is said, and what becomes of
a failure, is not known here.
"""

from __future__ import annotations

import asyncio
import http
import json
import ssl
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import SplitResult, quote, urlencode, urlsplit

from mint.errors import BadRequest

KEEP_IDLE = 4.0
"""Seconds an unused connection is kept: less than the 5 after which common servers close it from their side."""
CONNECT_WITHIN = 5.0
ANSWER_WITHIN = 60.0
"""Seconds of silence after which an answer is given up."""
PIECE = 1 << 18
"""Bytes that are sent at a time."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

Headers = Mapping[str, str]


@dataclass(frozen=True)
class Listener:
    """Hears of an answer while it is on its way, if it tells of success."""

    on_head: Callable[[Headers], None]
    """It begins, with these headers."""
    on_data: Callable[[bytes], None] | None = None
    """A piece of its body has come, which is then not kept for the end."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    content: bytes | None = None
    headers: Headers = field(default_factory=dict)
    timeout: float = ANSWER_WITHIN
    """Seconds of silence after which it is given up."""
    listener: Listener | None = None


class Unreachable(Exception):
    """There is no connection, or it ended before the answer did."""


class Silent(Exception):
    """No answer in time."""


class NotConnected(Unreachable):
    """No connection in time."""


@dataclass
class Response:
    status_code: int
    headers: Headers
    """By their names in lower case."""
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status_code < 300

    @property
    def reason_phrase(self) -> str:
        try:
            return http.HTTPStatus(self.status_code).phrase
        except ValueError:
            return ""

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        return json.loads(self.content)


class Connection(Protocol):
    async def request(self, asked: Request) -> Response:
        """After anything but an answer the connection opens anew."""
        ...

    async def close(self) -> None: ...


class Direct:
    """One connection to the server itself, opened on use."""

    def __init__(self, address: SplitResult, context: ssl.SSLContext | None) -> None:
        self._address, self._context = address, context
        self._port = address.port or (80 if context is None else 443)
        self._host = address.netloc.rpartition("@")[2]
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._used = 0.0

    async def request(self, asked: Request) -> Response:
        message = self._message(asked)
        reader, writer = await self._open()
        whole = False
        try:
            await _write(writer, message, asked.timeout)
            response, keep = await _read(reader, asked.timeout, asked.listener, bodyless=asked.method == "HEAD")
            whole = keep
            return response
        except TimeoutError as error:
            raise Silent(f"no answer within {asked.timeout:g} s") from error
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        finally:
            self._used = time.monotonic()
            if not whole:  # also when cancelled: what comes next would be the rest of this answer
                await self.close()

    def _message(self, asked: Request) -> bytes:
        content = asked.content or b""
        lines = [f"{asked.method} {asked.path} HTTP/1.1", f"Host: {self._host}"]
        lines += [f"{name}: {value}" for name, value in asked.headers.items()]
        if asked.content is not None or asked.method not in ("GET", "HEAD"):
            lines.append(f"Content-Length: {len(content)}")
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) - 1 or not head.isascii():
            raise BadRequest("a header or the path holds a line break or a letter that is not ASCII; is the key right?")
        return head.encode() + b"\r\n\r\n" + content

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is not None:
            reader = self._streams[0]
            if time.monotonic() - self._used < KEEP_IDLE and not reader.at_eof() and reader.exception() is None:
                return self._streams
            await self.close()
        try:
            async with asyncio.timeout(CONNECT_WITHIN):
                self._streams = await asyncio.open_connection(self._address.hostname, self._port, ssl=self._context)
        except TimeoutError as error:
            raise NotConnected(f"no connection within {CONNECT_WITHIN:g} s") from error
        except OSError as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        return self._streams

    async def close(self) -> None:
        if self._streams is not None:
            writer, self._streams = self._streams[1], None
            writer.close()


async def _write(writer: asyncio.StreamWriter, message: bytes, timeout: float) -> None:
    """In pieces, as the time is for silence and not for the whole."""
    try:
        for start in range(0, len(message), PIECE):
            writer.write(message[start : start + PIECE] if len(message) > PIECE else message)
            if len(message) > PIECE:
                async with asyncio.timeout(timeout):
                    await writer.drain()
    except OSError:
        return  # there may be an answer all the same, which says why it was not read


async def _read(
    reader: asyncio.StreamReader, timeout: float, listener: Listener | None, bodyless: bool
) -> tuple[Response, bool]:
    """The answer, and whether another may come over the same connection."""
    status = 100
    while status < 200:  # interim answers
        async with asyncio.timeout(timeout):
            head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].decode("latin-1").split("\r\n")
        status = int(first.split(" ", 2)[1])
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    kept: list[bytes] = []
    take = kept.append
    if listener is not None and 200 <= status < 300:
        listener.on_head(headers)
        take = listener.on_data or take
    keep = headers.get("connection", "").lower() != "close" and not first.startswith("HTTP/1.0")
    if bodyless or status in (204, 304):
        pass
    elif "chunked" in headers.get("transfer-encoding", "").lower():
        await _read_chunks(reader, timeout, take)
    elif (length := headers.get("content-length")) is not None:
        await _read_exactly(reader, int(length), timeout, take)
    else:
        keep = False
        await _read_to_end(reader, timeout, take)
    return Response(status, headers, b"".join(kept)), keep


Take = Callable[[bytes], None]


async def _read_exactly(reader: asyncio.StreamReader, length: int, timeout: float, take: Take) -> None:
    """In pieces, as the time is for silence and not for the whole."""
    while length > 0:
        async with asyncio.timeout(timeout):
            piece = await reader.read(length)
        if not piece:
            raise EOFError(f"the connection ended {length} bytes too early")
        take(piece)
        length -= len(piece)


async def _read_to_end(reader: asyncio.StreamReader, timeout: float, take: Take) -> None:
    while True:
        async with asyncio.timeout(timeout):
            piece = await reader.read(PIECE)
        if not piece:
            return
        take(piece)


async def _read_chunks(reader: asyncio.StreamReader, timeout: float, take: Take) -> None:
    while True:
        async with asyncio.timeout(timeout):
            line = await reader.readuntil(b"\r\n")
        if (size := int(line.partition(b";")[0], 16)) == 0:
            break
        await _read_exactly(reader, size, timeout, take)
        await _read_exactly(reader, 2, timeout, _drop)
    while line != b"\r\n":  # trailers
        async with asyncio.timeout(timeout):
            line = await reader.readuntil(b"\r\n")


def _drop(piece: bytes) -> None:
    return


class Proxied:
    """The same by httpx, which knows proxies."""

    def __init__(self, origin: str) -> None:
        import httpx

        limits = httpx.Limits(max_connections=1, keepalive_expiry=KEEP_IDLE)
        self._origin, self._client = origin, httpx.AsyncClient(limits=limits)

    async def request(self, asked: Request) -> Response:
        import httpx

        limit, listener = httpx.Timeout(asked.timeout, connect=CONNECT_WITHIN), asked.listener
        exchange = self._client.stream(
            asked.method,
            self._origin + asked.path,
            content=asked.content,
            headers=dict(asked.headers),
            timeout=limit,
        )
        try:
            async with exchange as answer:
                if listener is None or not answer.is_success:
                    return Response(answer.status_code, dict(answer.headers), await answer.aread())
                listener.on_head(answer.headers)
                kept: list[bytes] = []
                async for piece in answer.aiter_bytes():
                    (listener.on_data or kept.append)(piece)
                return Response(answer.status_code, dict(answer.headers), b"".join(kept))
        except httpx.ConnectTimeout as error:
            raise NotConnected(str(error)) from error
        except httpx.TimeoutException as error:
            raise Silent(str(error)) from error
        except httpx.TransportError as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        await self._client.aclose()


class Lanes:
    """Up to `size` connections, each used by one request at a time, the last one used first."""

    def __init__(self, size: int, connect: Callable[[], Connection]) -> None:
        self._size, self._used = size, 0
        self._slots = asyncio.Semaphore(size)
        self._connect = connect
        self._idle: list[Connection] = []
        self._all: list[Connection] = []

    async def request(self, asked: Request) -> Response:
        async with self._slots:
            connection = self._idle.pop() if self._idle else self._open()
            self._used += 1
            try:
                return await connection.request(asked)
            finally:
                self._used -= 1
                self._idle.append(connection)

    def _open(self) -> Connection:
        self._all.append(self._connect())
        return self._all[-1]

    @property
    def free(self) -> int:
        return self._size - self._used

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._all))


def connector(base_url: str) -> Callable[[], Connection]:
    """What opens connections to this address."""
    address = urlsplit(base_url)
    if _needs_proxy(address):
        return lambda: Proxied(f"{address.scheme}://{address.netloc}")
    context = _trust() if address.scheme == "https" else None
    return lambda: Direct(address, context)


def target(path: str, params: Mapping[str, Any] | None) -> str:
    """What stands behind the method: the path, safe to send, and the query."""
    path = quote(path, safe="/:%@!$&'()*+,;=~")
    given = {key: str(value).lower() if isinstance(value, bool) else value for key, value in (params or {}).items()}
    return f"{path}?{urlencode(given)}" if given else path


def _needs_proxy(address: SplitResult) -> bool:
    """A proxy meant for the outside world must not stand between this machine and itself."""
    host = address.hostname or ""
    proxies = urllib.request.getproxies()
    known = address.scheme in proxies or "all" in proxies
    return host not in _LOOPBACK and known and not urllib.request.proxy_bypass(host)


def _trust() -> ssl.SSLContext:
    """Who may sign: certifi's authorities, or SSL_CERT_FILE's."""
    import httpx

    return httpx.create_ssl_context()
