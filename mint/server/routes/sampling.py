"""Sampling sessions and samples."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request, Response

from mint import wire
from mint.backend import ModelFacts
from mint.errors import BadRequest
from mint.server import requests
from mint.server.auth import User
from mint.server.bodies import fingerprint, in_passing, read_body
from mint.server.futures import SAMPLE, Promise
from mint.server.queues import Load
from mint.server.routes import Caller, State, Uncounted, answer, delivery, envelope
from mint.server.samplers import CLONE_BLOCK
from mint.server.state import Server
from mint.types import GetSamplerResponse

router = APIRouter()

OFFICIAL_SDK = "AsyncTinker/"
BUNDLED = "mint/"
"""Models that ship with MinT: their names are no Hub ids."""


@router.post("/create_sampling_session")
async def create_sampling_session(body: requests.CreateSamplingSession, server: State, user: Caller) -> dict[str, str]:
    session = server.sessions.touch(body.session_id, user)
    sampler = await server.samplers.create(session, body.sampling_session_seq_id, body.base_model, body.model_path)
    return {"sampling_session_id": sampler.row.id, "type": "create_sampling_session"}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, request: Request, server: State, user: Caller) -> Response:
    sampler = server.samplers.find(sampler_id, user)
    facts = await server.catalogue.load(sampler.row.base_model)
    official = request.headers.get("user-agent", "").startswith(OFFICIAL_SDK)
    base_model = _loadable_name(facts) if official else sampler.row.base_model
    found = GetSamplerResponse(sampler_id, base_model, sampler.row.model_path)
    return answer(wire.to_json(found) | {"tokenizer_id": facts.folder})


def _loadable_name(facts: ModelFacts) -> str:
    """A name from which transformers finds the tokenizer: the official SDK looks at nothing else. That SDK takes a name
    with exactly two slashes for org/model/variant and cuts it, so a folder gets one more."""
    name = facts.folder if facts.name.startswith(BUNDLED) else facts.name
    return f"/.{name}" if name.startswith("/") and name.count("/") == 2 else name


@router.post("/join_sampling_session")
async def join_sampling_session(body: requests.SamplingSessionBody, server: State, user: Caller) -> dict[str, Any]:
    sampler = server.samplers.find(body.sampling_session_id, user)
    return {"client_counter": server.samplers.join(sampler), "type": "join_sampling_session"}


@router.post("/asample")
async def asample(request: Request, server: State, user: Uncounted) -> Response:
    promise = await begin_sample(server, user, await read_body(request, server.limits))
    if wire.HOLD in request.headers and (result := await server.futures.wait(promise)) is not None:
        return delivery(result, request, {wire.HELD: promise.request_id})
    return envelope(promise)


async def begin_sample(server: Server, user: User, body: bytes) -> Promise:
    call = await in_passing(lambda: wire.sample_call_from_json(wire.read_json(body)), len(body))
    named = call.base_model is not None or call.model_path is not None
    if call.sampling_session_id is not None and named:
        raise BadRequest("a sampling session is given, and base_model or model_path as well; give one of them.")
    return await _sample(server, user, call, body)


async def _sample(server: Server, user: User, call: wire.SampleCall, body: bytes) -> Promise:
    """Starts the sample, unless it was asked for before under the same number."""
    key, group, session, same = None, None, None, fingerprint(body)
    if call.sampling_session_id is None:
        policy, _ = server.policies.named(call.base_model, call.model_path, user)
    else:
        sampler = server.samplers.find(call.sampling_session_id, user)
        policy, session = sampler.policy, sampler.row.session_id
        if call.seq_id is not None:
            key = f"seq_id {call.seq_id} of sampling session {call.sampling_session_id}"
            group = (call.sampling_session_id, call.seq_id // CLONE_BLOCK)
    if known := server.futures.repeated(key, same):
        return known
    server.samplers.check(policy, call.request)
    await server.samplers.admit(policy, user.name)
    leave = server.queues.enter(Load(session, samples=call.request.num_samples, bytes=len(body)))
    promise = server.futures.open(user.name, key, same, group, f"{SAMPLE}{uuid.uuid4().hex}", session)
    server.samplers.hold(user.name, promise.settled)
    promise.envelope["sample_sequence_ids"] = [f"{promise.request_id}:{n}" for n in range(call.request.num_samples)]
    server.samplers.sample(policy, call.request, promise, leave)
    return promise
