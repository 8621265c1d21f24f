"""Training models: create, forward, forward_backward, optim_step, save, load, unload."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from fastapi import APIRouter, Request, Response

from mint import wire
from mint.errors import BadRequest, MintError
from mint.server import requests, steps
from mint.server.auth import User
from mint.server.bodies import encoding_of, fingerprint, in_passing, read_body
from mint.server.checkpoints import UPLOADS, lora_of
from mint.server.futures import Promise
from mint.server.routes import Caller, State, Uncounted, accepted, answer, envelope
from mint.server.state import Server
from mint.types import GetInfoResponse, ModelData

router = APIRouter()


@router.post("/create_model")
async def create_model(body: requests.CreateModel, server: State, user: Uncounted) -> Response:
    if body.optimizer_config is not None:
        body.optimizer_config.check()
    lora = (body.lora_config or requests.Lora()).config()
    session = server.sessions.touch(body.session_id, user)
    promise = await server.models.create(
        session, body.model_seq_id, body.base_model, lora, body.user_metadata or {}, _same(body)
    )
    return envelope(promise)


@router.post("/forward_backward")
async def forward_backward(request: Request, server: State, user: Uncounted) -> Response:
    return accepted(await _forward_backward(request, server, user, "forward_backward_input"), request, server)


@router.post("/forward")
async def forward(request: Request, server: State, user: Uncounted) -> Response:
    return accepted(await _forward_backward(request, server, user, "forward_input"), request, server)


async def _forward_backward(request: Request, server: Server, user: User, input_field: str) -> Promise:
    plain = await read_body(request, server.limits)
    protobuf = request.headers.get("content-type", "").startswith(wire.PROTOBUF)
    form = {"protobuf": protobuf, "encoding": encoding_of(request), "field": input_field}
    payload = await request.body()
    try:
        read = partial(steps.read_forward_backward, plain, form | {"encoding": "identity"}, server.limits.body_bytes)
        body = await in_passing(read, len(plain))
    except BadRequest:
        if spent := wire.sequence_of(plain, protobuf):
            server.models.refuse(*spent, user)
        raise
    model = server.models.find(body.model_id, user)
    op = "forward" if body.forward_only else "forward_backward"
    call = steps.Call(op, body.seq_id or None, fingerprint(plain), payload, body, len(plain), fixed=form)
    return await server.models.submit(model, call)


@router.post("/optim_step")
async def optim_step(body: requests.OptimStep, request: Request, server: State, user: Uncounted) -> Response:
    return await _submit(request, server, user, "optim_step", body)


@router.post("/save_weights")
async def save_weights(body: requests.SaveWeights, request: Request, server: State, user: Uncounted) -> Response:
    return await _submit(request, server, user, "save_weights", body)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    body: requests.SaveWeightsForSampler, request: Request, server: State, user: Uncounted
) -> Response:
    if body.sampling_session_seq_id is None:
        return await _submit(request, server, user, "save_weights_for_sampler", body)
    # Sent again, the same snapshot is asked for under a new number of its sampling session.
    return await _submit(request, server, user, "snapshot", body, {"sampling_session_seq_id"})


@router.post("/save_weights_external")
async def save_weights_external(
    body: requests.SaveWeightsExternal, request: Request, server: State, user: Uncounted
) -> Response:
    return await _submit(request, server, user, "save_weights_external", body)


async def _submit(
    request: Request, server: Server, user: User, op: str, body: requests.NumberedBody, but: set[str] | None = None
) -> Response:
    model = server.models.find(body.model_id, user)
    return accepted(await server.models.submit(model, steps.small_call(op, body, but)), request, server)


@router.post("/load_weights")
async def load_weights(body: requests.LoadWeights, request: Request, server: State, user: Uncounted) -> Response:
    if body.optimizer_config is not None:
        body.optimizer_config.check()
    if body.weights_access_token is not None:
        raise BadRequest("weights_access_token: this server shares checkpoints by publishing them; leave it out.")
    if body.model_id is not None and body.session_id is None and body.model_seq_id is None:
        if body.base_model is not None or body.user_metadata is not None:
            raise BadRequest("base_model and user_metadata are for a new model; leave them out for one that exists.")
        model = server.models.find(body.model_id, user)
        with contextlib.suppress(MintError):  # told by the checks that follow, which spend the number
            await asyncio.to_thread(server.checkpoints.fetch, server.checkpoints.resolve(body.path, user))
        return accepted(await server.models.submit(model, steps.small_call("load_weights", body)), request, server)
    if body.model_id is not None or body.session_id is None or body.model_seq_id is None:
        raise BadRequest("give either model_id (and seq_id), or session_id and model_seq_id for a new model.")
    session = server.sessions.touch(body.session_id, user)
    source = server.checkpoints.resolve(body.path, user)
    run = server.checkpoints.run_of(source)
    # An upload may call the same base model by another name.
    if body.base_model not in (None, run.base_model) and not source.run_id.startswith(UPLOADS):
        raise BadRequest(f"{body.path} was trained on {run.base_model}, not {body.base_model}; leave base_model out.")
    promise = await server.models.create(
        session,
        body.model_seq_id,
        body.base_model or run.base_model,
        lora_of(run),
        body.user_metadata or {},
        _same(body),
        (source, body.optimizer),
    )
    return envelope(promise)


@router.post("/get_info")
async def get_info(body: requests.ModelBody, server: State, user: Caller) -> Response:
    model = server.models.find(body.model_id, user)
    facts = await server.catalogue.load(model.run.base_model)
    # The tokenizer's folder, so that clients on this machine need no network.
    data = ModelData(facts.architecture, facts.name, facts.folder)
    return answer(GetInfoResponse(model.id, data, is_lora=True, lora_rank=model.run.rank, model_name=facts.name))


@router.post("/unload_model")
async def unload_model(body: requests.ModelBody, server: State, user: Caller) -> Response:
    return envelope(server.models.unload(server.models.find(body.model_id, user)))


def _same(body: requests.Body) -> bytes:
    return fingerprint(f"{type(body).__name__} {body.model_dump_json()}".encode())
