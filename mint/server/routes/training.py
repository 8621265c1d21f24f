"""Training models: create, forward, forward_backward, optim_step, save, load, unload."""

from __future__ import annotations

import uuid
from functools import partial

from fastapi import APIRouter, Request, Response

from mint import wire
from mint.errors import BadRequest
from mint.server import requests, steps
from mint.server.auth import User
from mint.server.bodies import fingerprint, read_body
from mint.server.checkpoints import UPLOADS, lora_of
from mint.server.futures import Promise
from mint.server.routes import Caller, State, answer, envelope
from mint.server.state import Server
from mint.types import GetInfoResponse, ModelData

router = APIRouter()


@router.post("/create_model")
async def create_model(body: requests.CreateModel, server: State, user: Caller) -> Response:
    if body.optimizer_config is not None:
        body.optimizer_config.check()
    lora = (body.lora_config or requests.Lora()).config()
    session = server.sessions.touch(body.session_id, user)
    promise = server.models.create(
        session, body.model_seq_id, body.base_model, lora, body.user_metadata or {}, _same(body)
    )
    return envelope(promise)


@router.post("/forward_backward")
async def forward_backward(request: Request, server: State, user: Caller) -> Response:
    return envelope(await _forward_backward(request, server, user, "forward_backward_input"))


@router.post("/forward")
async def forward(request: Request, server: State, user: Caller) -> Response:
    return envelope(await _forward_backward(request, server, user, "forward_input"))


async def _forward_backward(request: Request, server: Server, user: User, input_field: str) -> Promise:
    body = await read_body(request, server.limits)
    protobuf = request.headers.get("content-type", "").startswith(wire.PROTOBUF)
    try:
        if protobuf:
            call = wire.forward_backward_from_proto(body)
        else:
            call = wire.forward_backward_from_json(wire.read_json(body), input_field)
    except BadRequest:
        if spent := wire.sequence_of(body, protobuf):
            server.models.refuse(*spent, user)
        raise
    model = server.models.find(call.model_id, user)

    prepare = partial(steps.forward_backward, server, model, call)
    return server.models.submit(model, call.seq_id or None, fingerprint(body), prepare)


@router.post("/optim_step")
async def optim_step(body: requests.OptimStep, server: State, user: Caller) -> Response:
    model = server.models.find(body.model_id, user)
    prepare = partial(steps.optim_step, server, model, body.adam_params, body.optimizer_params)
    return envelope(server.models.submit(model, body.seq_id, _same(body), prepare))


@router.post("/save_weights")
async def save_weights(body: requests.SaveWeights, server: State, user: Caller) -> Response:
    model = server.models.find(body.model_id, user)
    target = steps.Target("weights", _name(body), body.ttl_seconds, body.user_metadata, body.overwrite)
    prepare = partial(steps.save, server, model, target)
    return envelope(server.models.submit(model, body.seq_id, _same(body), prepare))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(body: requests.SaveWeightsForSampler, server: State, user: Caller) -> Response:
    model = server.models.find(body.model_id, user)
    number = body.sampling_session_seq_id
    if number is None:
        target = steps.Target("sampler_weights", _name(body), body.ttl_seconds, body.user_metadata, body.overwrite)
        prepare = partial(steps.save, server, model, target)
    else:
        prepare = partial(steps.snapshot, server, model, user, number, body.path)
    # Sent again, the same snapshot is asked for under a new number of its sampling session.
    same = _same(body, {"sampling_session_seq_id"})
    return envelope(server.models.submit(model, body.seq_id, same, prepare))


@router.post("/save_weights_external")
async def save_weights_external(body: requests.SaveWeightsExternal, server: State, user: Caller) -> Response:
    model = server.models.find(body.model_id, user)
    target = steps.Target("external_weights", _name(body), body.ttl_seconds)
    prepare = partial(steps.export, server, model, target, body.age_encryption_recipients)
    return envelope(server.models.submit(model, body.seq_id, _same(body), prepare))


@router.post("/load_weights")
async def load_weights(body: requests.LoadWeights, server: State, user: Caller) -> Response:
    if body.optimizer_config is not None:
        body.optimizer_config.check()
    if body.weights_access_token is not None:
        raise BadRequest("weights_access_token: this server shares checkpoints by publishing them; leave it out.")
    if body.model_id is not None and body.session_id is None and body.model_seq_id is None:
        if body.base_model is not None or body.user_metadata is not None:
            raise BadRequest("base_model and user_metadata are for a new model; loading into one that exists, drop them.")
        model = server.models.find(body.model_id, user)
        prepare = partial(steps.load, server, model, user, body.path, body.optimizer)
        return envelope(server.models.submit(model, body.seq_id, _same(body), prepare))
    if body.model_id is not None or body.session_id is None or body.model_seq_id is None:
        raise BadRequest("give either model_id (and seq_id), or session_id and model_seq_id for a new model.")
    session = server.sessions.touch(body.session_id, user)
    source = server.checkpoints.resolve(body.path, user)
    run = server.checkpoints.run_of(source)
    # An upload may call the same base model by another name.
    if body.base_model not in (None, run.base_model) and not source.run_id.startswith(UPLOADS):
        raise BadRequest(f"{body.path} was trained on {run.base_model}, not on {body.base_model}; leave base_model out.")
    promise = server.models.create(
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


def _name(body: requests.SaveBody) -> str:
    """The name asked for, else one by the request's number."""
    return body.path or (uuid.uuid4().hex[:8] if body.seq_id is None else f"{body.seq_id:06d}")


def _same(body: requests.Body, but: set[str] | None = None) -> bytes:
    return fingerprint(f"{type(body).__name__} {body.model_dump_json(exclude=but)}".encode())
