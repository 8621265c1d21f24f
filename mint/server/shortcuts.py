"""The addresses that every step of every client asks for, without the router's search and injection.

Those took more than half of the server's processor time. The endpoints are the router's own, which still documents them
and answers whatever is not plain here (another method, a body that is not declared as JSON).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mint.server.requests import Body, OptimStep, RetrieveFuture, SaveWeightsForSampler
from mint.server.routes import futures, known_user, sample_batches, sampling, training
from mint.wire import JSON, read_json

PREFIX = "/api/v1"


class Shortcut(NamedTuple):
    route: APIRoute
    endpoint: Callable[..., Awaitable[Response]]
    """Takes the request, the server, the user and, where there is one, the body."""
    body: type[Body] | None


def _shortcut(router: APIRouter, endpoint: Callable[..., Awaitable[Response]], body: type[Body] | None) -> Shortcut:
    route = next(r for r in router.routes if isinstance(r, APIRoute) and r.endpoint is endpoint)
    return Shortcut(route, endpoint, body)


SHORTCUTS = {
    f"{PREFIX}{found.route.path}": found
    for found in (
        _shortcut(sampling.router, sampling.asample, None),
        _shortcut(sample_batches.router, sample_batches.samples, None),
        _shortcut(training.router, training.forward_backward, None),
        _shortcut(training.router, training.forward, None),
        _shortcut(training.router, training.optim_step, OptimStep),
        _shortcut(training.router, training.save_weights_for_sampler, SaveWeightsForSampler),
        _shortcut(futures.router, futures.retrieve_future, RetrieveFuture),
    )
}


class Shortcuts:
    """ASGI middleware, the innermost."""

    def __init__(self, app: ASGIApp, answer_error: Callable[[Request, Exception], Awaitable[Response]]) -> None:
        self._app = app
        self._answer_error = answer_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = SHORTCUTS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            return await self._app(scope, receive, send)
        request = Request(scope, receive)
        if found.body is not None and not request.headers.get("content-type", "").startswith(JSON):
            return await self._app(scope, receive, send)
        scope["route"] = found.route
        try:
            response = await _answer(found, request)
        except Exception as error:  # the border, as the router's own handler is
            response = await self._answer_error(request, error)
        await response(scope, receive, send)


async def _answer(found: Shortcut, request: Request) -> Response:
    if found.body is None:
        return await found.endpoint(request=request, server=request.app.state.server, user=await known_user(request))
    given = read_json(await request.body())
    user = await known_user(request)
    try:
        body = found.body.model_validate(given, from_attributes=True)  # as the router does
    except ValidationError as error:
        raise RequestValidationError(error.errors(), body=given) from error
    return await found.endpoint(body=body, request=request, server=request.app.state.server, user=user)
