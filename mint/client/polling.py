"""Results that take their time: they come as the rest of the server's answer where it can, by long polls elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from mint.client.http import Headers, Listener, Response
from mint.client.transport import Transport
from mint.errors import Internal, RequestFailed, RequestRejected
from mint.types import ForwardBackwardOutput, SampleResponse
from mint.wire import (
    HELD,
    HOLD,
    JSON,
    LATER,
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


class Accepted(NamedTuple, Generic[T]):
    """A request the server has, and will carry out."""

    head: Headers
    """What it told at once."""
    result: asyncio.Task[T]


async def submit(
    transport: Transport, path: str, body: bytes, headers: Mapping[str, str], kind: str, read: Callable[[Response], T]
) -> Accepted[T]:
    """Returns when the server has accepted the request. `kind` and `read` as in `retrieve`."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[Headers] = loop.create_future()

    def accept(head: Headers) -> None:
        if not accepted.done():
            accepted.set_result(head)

    async def work() -> T:
        answer = await _post(transport, path, body, headers, accept)
        accept(answer.headers)
        if answer.headers.get("content-type") != LATER:
            return await retrieve(transport, answer.json()["request_id"], kind, read)
        media, _, content = answer.content.partition(b"\n")
        if not media:
            return await retrieve(transport, answer.headers[HELD], kind, read)
        result = Response(200, {"content-type": media.decode()}, content)
        finished(result)
        return read(result)

    task = loop.create_task(work())
    either: list[asyncio.Future[Any]] = [accepted, task]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not accepted.done():
        task.result()  # raises why it was refused
    return Accepted(accepted.result(), task)


async def _post(
    transport: Transport, path: str, body: bytes, headers: Mapping[str, str], accept: Callable[[Headers], None]
) -> Response:
    """Asks for the result as the rest of the answer, where a connection may be spared for the wait."""
    if transport.may_hold:
        named = {**headers, HOLD: "1", "Accept": f"{PROTOBUF}, {JSON}"}
        answer = await transport.send("POST", path, content=body, headers=named, held=True, listener=Listener(accept))
        if answer.status_code != 408:
            return answer
    return await transport.send("POST", path, content=body, headers=headers)


async def retrieve(transport: Transport, request_id: str, kind: str, read: Callable[[Response], T]) -> T:
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


def finished(response: Response) -> bool:
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


def _notice_queue(response: Response) -> None:
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


def json_as(cls: type[T]) -> Callable[[Response], T]:
    return lambda response: from_json(cls, response.json())


def json_field(name: str) -> Callable[[Response], Any]:
    return lambda response: response.json()[name]


def read_forward_backward(response: Response) -> ForwardBackwardOutput:
    if _is_protobuf(response):
        return forward_backward_output_from_proto(response.content)
    return forward_backward_output_from_json(response.json())


def read_reverse_kl(response: Response) -> ForwardBackwardOutput:
    told = response.json()
    return forward_backward_output_from_json(
        {"loss_fn_outputs": told["outputs"], "metrics": told["metrics"], "loss_fn_output_type": "TensorDict"}
    )


def read_sample(response: Response) -> SampleResponse:
    if _is_protobuf(response):
        return sample_response_from_proto(response.content)
    return sample_response_from_json(response.json())


def _is_protobuf(response: Response) -> bool:
    return response.headers.get("content-type", "").startswith(PROTOBUF)
