"""Request bodies as bytes: bounded before they are read, decompressed without trusting their declared size."""

from __future__ import annotations

import asyncio
import hashlib
import time
import zlib
from collections.abc import Callable
from typing import TypeVar

import zstandard
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mint.errors import BadRequest
from mint.server.limits import Limits

T = TypeVar("T")

BULK = ("/forward", "/forward_backward", "/asample", "/completions")
UPLOAD = "/checkpoints/upload"
LARGE = 1 << 18
"""Bytes whose reading is noticed by others: as JSON they take milliseconds."""
PACKED = ("/forward", "/forward_backward", "/asample", "/samples", "/telemetry")
"""Addresses that take a packed body; the last throws it away unread."""


class TooLarge(BadRequest):
    status = 413


class TooSlow(BadRequest):
    status = 408


def limit_for(path: str, limits: Limits) -> int:
    if path.endswith(UPLOAD):
        return limits.upload_bytes
    return limits.body_bytes if path.endswith(BULK) or "/mint/" in path else limits.small_body_bytes


class BodyLimit:
    """ASGI middleware: answers 413 to a body that declares too many bytes, stops reading one that has them, and gives
    up on one that does not come."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._limits.header_bytes:
            text = f"the headers are larger than the {self._limits.header_bytes} bytes this server takes."
            return await JSONResponse({"detail": text}, 431, headers={"connection": "close"})(scope, receive, send)
        encoding = next((value for name, value in scope["headers"] if name == b"content-encoding"), b"identity")
        if encoding != b"identity" and not scope["path"].endswith(PACKED):
            text = f"content-encoding {encoding.decode('latin-1')!r:.40} is not taken here; send the body as it is."
            return await JSONResponse({"detail": text}, 415, headers={"connection": "close"})(scope, receive, send)
        limit = limit_for(scope["path"], self._limits)
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > limit:  # what is no number, the protocol layer has refused
            refusal = JSONResponse({"detail": _too_large(limit)}, 413, headers={"connection": "close"})
            return await refusal(scope, receive, send)
        received, whole, began = 0, False, time.monotonic()

        async def counted() -> Message:
            nonlocal received, whole
            seconds = self._limits.body_seconds
            left = began + seconds + received / self._limits.body_rate - time.monotonic()
            try:  # after the body there is only the end of the connection to wait for, which may take its time
                async with asyncio.timeout(None if whole else min(seconds, left)):
                    message = await receive()
            except TimeoutError:
                raise TooSlow(
                    f"no more of the body came for {seconds:g} s, or less than {self._limits.body_rate} bytes a second "
                    f"({received} in all); send the request again."
                ) from None
            whole = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > limit:
                raise TooLarge(_too_large(limit))
            return message

        await self._app(scope, counted, send)


def _too_large(limit: int) -> str:
    return f"the body is larger than the {limit} bytes this server takes here; send less at a time."


async def read_body(request: Request, limits: Limits) -> bytes:
    body, encoding = await request.body(), encoding_of(request)
    if encoding == "identity":
        return body
    # In a thread: a few kilobytes may take seconds to unpack, or to be found too large.
    return await asyncio.to_thread(decompress, body, encoding, limits.body_bytes)


async def in_passing(read: Callable[[], T], size: int) -> T:
    """What is read from so many bytes; in a thread where that would hold up everybody else for long."""
    return read() if size < LARGE else await asyncio.to_thread(read)


def encoding_of(request: Request) -> str:
    return request.headers.get("content-encoding", "identity")


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding == "identity":
        return body
    if encoding not in _INFLATE:
        raise BadRequest(f"content-encoding {encoding!r} is not understood; send zstd, gzip or none.")
    plain = _INFLATE[encoding](body, limit)
    if len(plain) > limit:
        raise TooLarge(_too_large(limit))
    return plain


def _inflate_gzip(body: bytes, limit: int) -> bytes:
    unpack = zlib.decompressobj(wbits=31)
    try:
        plain = unpack.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is not valid gzip: {error}.") from error
    if not unpack.eof and len(plain) <= limit:
        raise BadRequest("the body is not valid gzip: it ends too early.")
    return plain


def _inflate_zstd(body: bytes, limit: int) -> bytes:
    """Streams the frame out up to the limit: `max_output_size` is ignored for frames that declare their own size."""
    try:
        with zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True) as reader:
            plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise BadRequest(f"the body is not valid zstd: {error}.") from error
    return plain


_INFLATE = {"zstd": _inflate_zstd, "gzip": _inflate_gzip}


def fingerprint(body: bytes) -> bytes:
    """Tells whether a request sent again under the same number is the same request."""
    return hashlib.sha256(body).digest()
