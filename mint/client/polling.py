"""Fetching the result of a request the server has accepted: long polls until it is there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from mint.client.transport import Transport
from mint.errors import Internal, RequestFailed, RequestRejected
from mint.types import ForwardBackwardOutput, SampleResponse
from mint.wire import (
    JSON,
    PROTOBUF,
    forward_backward_output_from_json,
    forward_backward_output_from_proto,
    from_json,
    sample_response_from_json,
    sample_response_from_proto,
)

T = TypeVar("T")

logger = logging.getLogger("mint")

_BUSY_NOTICE_EVERY = 60.0
_last_notice = 0.0


class ResultLost(Internal):
    """The server no longer has the result; a sample may be asked for again."""


async def retrieve(transport: Transport, request_id: str, kind: str, read: Callable[[httpx.Response], T]) -> T:
    """Polls until the request is done. `kind` is its name in the protocol's headers, `read` decodes the result."""
    pause = 0.0
    iteration = 0
    while True:
        asked = time.monotonic()
        response = await transport.poll(
            "retrieve_future",
            {"request_id": request_id, "allow_metadata_only": False},
            {
                "Accept": f"{PROTOBUF}, {JSON}",
                "X-Tinker-Request-Type": kind,
                "X-Tinker-Request-Iteration": str(iteration),
            },
        )
        if response.status_code == 410:
            raise ResultLost(f"the server no longer knows the result of {kind} {request_id}; it may have restarted.")
        if response.status_code != 408 and finished(response):
            return read(response)
        _notice_queue(response)
        iteration += 1
        # A server that does not hold the poll open must not be asked in a tight loop.
        pause = min(1.0, max(0.02, pause * 2)) if time.monotonic() - asked < 1.0 else 0.0
        await asyncio.sleep(pause)


def finished(response: httpx.Response) -> bool:
    """False for "try again"; raises what the server reports as a failure."""
    if not response.headers.get("content-type", "").startswith(JSON):
        return True
    body = response.json()
    if not isinstance(body, dict):
        return True
    if "error" in body:
        message, category = str(body["error"]), str(body.get("category", "unknown")).lower()
        if category == "user":
            raise RequestRejected(message)
        raise RequestFailed(message, category)
    return body.get("type") != "try_again"


def _notice_queue(response: httpx.Response) -> None:
    """Tells the user, once a minute at most, that the server has paused the request."""
    global _last_notice
    try:
        body = response.json()
    except ValueError:
        return
    state = body.get("queue_state", "active") if isinstance(body, dict) else "active"
    if state != "active" and time.monotonic() - _last_notice > _BUSY_NOTICE_EVERY:
        _last_notice = time.monotonic()
        logger.warning("the server has paused this request: %s", body.get("queue_state_reason") or state)


# --------------------------------------------------------------------------------------------------------------------
# Readers of results


def json_as(cls: type[T]) -> Callable[[httpx.Response], T]:
    return lambda response: from_json(cls, response.json())


def json_field(name: str) -> Callable[[httpx.Response], Any]:
    return lambda response: response.json()[name]


def read_forward_backward(response: httpx.Response) -> ForwardBackwardOutput:
    if _is_protobuf(response):
        return forward_backward_output_from_proto(response.content)
    return forward_backward_output_from_json(response.json())


def read_sample(response: httpx.Response) -> SampleResponse:
    if _is_protobuf(response):
        return sample_response_from_proto(response.content)
    return sample_response_from_json(response.json())


def _is_protobuf(response: httpx.Response) -> bool:
    return response.headers.get("content-type", "").startswith(PROTOBUF)
