"""Fetching results: one by its id, or the news of one sampling client."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from mint.server import requests
from mint.server.routes import State, Uncounted, delivery

router = APIRouter()


@router.post("/retrieve_future")
async def retrieve_future(body: requests.RetrieveFuture, request: Request, server: State, user: Uncounted) -> Response:
    """Held until the result is there; 408 asks the client to poll again, and makes it log nothing."""
    answer = await server.futures.wait(server.futures.find(body.request_id, user.name))
    if answer is None:
        waiting = server.queues.waiting()
        told = {"type": "try_again", "request_id": body.request_id, "queue_state": waiting.queue_state}
        return JSONResponse(told | ({"queue_state_reason": waiting.reason} if waiting.reason else {}), 408)
    return delivery(answer, request)


@router.post("/retrieve_futures")
async def retrieve_futures(body: requests.RetrieveFutures, server: State, user: Uncounted) -> dict[str, Any]:
    sampler = server.samplers.find(body.target.sampling_session_id, user)
    log = server.futures.completions((sampler.row.id, body.target.cloned_sampler_id))
    seconds = server.limits.poll_seconds if body.timeout is None else min(body.timeout, server.limits.poll_seconds)
    return await log.since(body.prev_cursor, seconds)


@router.post("/cancel_future")
async def cancel_future(body: requests.CancelFuture, server: State, user: Uncounted) -> dict[str, str]:
    server.futures.find(body.request_id, user.name).cancel()
    return {"request_id": body.request_id}
