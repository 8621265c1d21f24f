"""What MinT's own clients ask for beyond the Tinker protocol."""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response, UploadFile

from mint.doorbell import arriving
from mint.errors import BadRequest, MintError, NotFound
from mint.server import requests, steps
from mint.server.archive import read_adapter, unpack
from mint.server.auth import User
from mint.server.bodies import in_passing
from mint.server.checkpoints import check_name
from mint.server.futures import Answer, json_answer
from mint.server.routes import Caller, State, Uncounted, accepted, answer, envelope
from mint.server.state import Server
from mint.server.store import CheckpointRow
from mint.server.usage import report
from mint.types import UsageResponse

router = APIRouter()
ALL = "all"
Moment = Annotated[float, Query(ge=0, lt=2**53)]
"""Seconds since 1970."""


@router.post("/checkpoints/upload")
async def upload(file: UploadFile, server: State, user: Caller) -> dict[str, str]:
    row = await asyncio.to_thread(_adopt, server, user, file, server.meter.room(user.name))
    server.audit.write("checkpoint_uploaded", user.name, row.path, size_bytes=row.size_bytes)
    return {"path": row.path, "checkpoint_id": row.run_id}


def _adopt(server: Server, user: User, file: UploadFile, room: int | None) -> CheckpointRow:
    """`room`: bytes that the user may still save, None for any number."""
    server.config.data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=server.config.data, prefix="upload-") as folder:
        found = unpack(file.file, Path(folder), min(server.limits.upload_bytes, room or math.inf))
        base_model, lora = read_adapter(found)
        return server.checkpoints.adopt(found, base_model, lora, user)


@router.get("/mint/usage")
async def usage(
    server: State, user: Caller, key: str | None = None, run: str | None = None, since: Moment | None = None
) -> Response:
    """What this key used, by run; administrators may ask for another key, by name or id, or with `all` for all."""
    owner: str | None = user.name
    if key is not None and not (user.admin and key == ALL):
        owner = server.keys.owner(key)
        if owner is None or not user.sees(owner):
            raise NotFound(f"no key {key!r}; leave it out to see your own usage.")
    elif key is not None:
        owner = None
    server.meter.usage.flush()
    return answer(UsageResponse(report(server.store, server.keys.label, owner, run, since)))


@router.post("/mint/forward_backward_reverse_kl")
async def reverse_kl(body: requests.ReverseKL, request: Request, server: State, user: Uncounted) -> Response:
    model = server.models.find(body.model_id, user)
    with contextlib.suppress(MintError):  # told by the checks that follow, which spend the number
        row = server.checkpoints.resolve(body.reference_model_path, user)
        await asyncio.to_thread(server.checkpoints.fetch, row)
    try:
        call = await in_passing(partial(steps.reverse_kl_call, body), len(await request.body()))
    except BadRequest:
        if body.seq_id is not None:
            server.models.refuse(model.id, body.seq_id, user)
        raise
    return accepted(await server.models.submit(model, call), request, server)


@router.post("/mint/checkpoints/interpolate")
async def interpolate(body: requests.Interpolate, server: State, user: Caller) -> Response:
    """The weighted sum of what saved adapters do to the base model's weights, as sampler weights of a run of their own.
    `output_path` is the name they get."""
    if not body.source_paths or len(body.source_paths) != len(body.coefficients):
        raise BadRequest(
            f"{len(body.source_paths)} source_paths and {len(body.coefficients)} coefficients were given; give one "
            "coefficient for each path, and at least one of both."
        )
    if not all(map(math.isfinite, body.coefficients)):
        raise BadRequest("coefficients hold a number that is not finite.")
    check_name(name := body.output_path or "interpolated")
    rows = [server.checkpoints.resolve(path, user) for path in body.source_paths]
    promise = server.futures.open(user.name)
    promise.run(_combined(server, user, rows, body, name))
    return envelope(promise)


async def _combined(
    server: Server, user: User, rows: list[CheckpointRow], body: requests.Interpolate, name: str
) -> Answer:
    base_model = server.checkpoints.run_of(rows[0]).base_model
    folders = [str(await asyncio.to_thread(server.checkpoints.fetch, row)) for row in rows]
    with tempfile.TemporaryDirectory(dir=server.config.data, prefix="combined-") as scratch:
        made = Path(scratch) / "adapter"
        lora = await arriving(server.backend.combine(folders, body.coefficients, str(made)))
        size, room = sum(file.stat().st_size for file in made.iterdir()), server.meter.room(user.name)
        if room is not None and size > room:
            raise BadRequest(f"the result takes {size} bytes, and this key may save {room} more.")
        adopt = partial(server.checkpoints.adopt, kind="sampler_weights", source="interpolation")
        row = await asyncio.to_thread(adopt, made, base_model, lora, user, name=name)
    server.audit.write("checkpoints_interpolated", user.name, row.path, size_bytes=row.size_bytes)
    return json_answer(
        {
            "path": row.path,
            "checkpoint_type": "sampler",
            "source_paths": body.source_paths,
            "coefficients": body.coefficients,
            "has_rank_shards": False,
            "type": "mint_interpolate_checkpoints",
        }
    )
