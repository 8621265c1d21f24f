"""Management: runs, sessions, checkpoints, downloads."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from mint.errors import BadRequest, NotFound
from mint.server import requests
from mint.server.archive import files_of, tar_gz
from mint.server.checkpoints import cursor, expiry, moment
from mint.server.models import run_id
from mint.server.routes import Caller, State, answer, note_address, sdk_release
from mint.server.state import Server
from mint.server.store import CheckpointRow, RunRow
from mint.types import CHECKPOINT_KINDS, CheckpointsListResponse, TrainingRunsResponse, WeightsInfoResponse

router = APIRouter()


async def _hosted_only(request: Request, user: Caller) -> None:
    await request.body()
    raise NotFound(f"{request.url.path} belongs to the hosted service; a self-hosted server has no such thing.")


Limit = Annotated[int, Query(ge=0, le=1000)]
Offset = Annotated[int, Query(ge=0)]
Scope = Literal["owned", "accessible"]
CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"


@router.post("/weights_info")
async def weights_info(body: requests.WeightsInfo, server: State, user: Caller) -> Response:
    run = server.checkpoints.run_of(server.checkpoints.resolve(body.tinker_path, user))
    return answer(
        WeightsInfoResponse(
            base_model=run.base_model,
            lora_rank=run.rank,
            train_unembed=run.train_unembed,
            train_mlp=run.train_mlp,
            train_attn=run.train_attn,
        )
    )


@router.get("/training_runs")
async def training_runs(
    server: State,
    user: Caller,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: str | None = None,
) -> Response:
    if project_id is not None:
        raise BadRequest("project_id: this server has no projects; leave it out to list all runs.")
    runs, total = server.models.runs(user, access_scope == "accessible", limit, offset)
    described = [server.models.describe(run, user) for run in runs]
    return answer(TrainingRunsResponse(described, cursor(limit, offset, total)))


@router.get("/training_runs/{run}")
async def training_run(run: str, server: State, user: Caller, access_scope: Scope = "owned") -> Response:
    row = server.models.run(run, user, access_scope == "accessible")
    return answer(server.models.describe(row, user))


@router.get("/training_runs/{run}/checkpoints")
async def run_checkpoints(run: str, request: Request, server: State, user: Caller) -> Response:
    row = server.models.run(run, user)
    kinds = _kinds_known_to(request)

    def listed() -> Response:
        rows = server.checkpoints.of_run(row.id)
        visible = [c for c in rows if c.kind in kinds and (user.sees(c.owner) or c.public)]
        return answer(CheckpointsListResponse([server.checkpoints.describe(c) for c in visible]))

    return await asyncio.to_thread(listed)  # the protocol has no pages here, and a long list takes seconds


@router.get("/checkpoints")
async def checkpoints(
    request: Request, server: State, user: Caller, limit: Limit = 100, offset: Offset = 0
) -> Response:
    rows, total = server.checkpoints.of_user(user, limit, offset, _kinds_known_to(request))
    described = [server.checkpoints.describe(row) for row in rows]
    return answer(CheckpointsListResponse(described, cursor(limit, offset, total)))


def _kinds_known_to(request: Request) -> list[str]:
    """Before 0.28 the tinker SDK knows no external weights, and refuses a whole list that has one in it."""
    release = sdk_release(request.headers.get("user-agent", "").removeprefix("AsyncTinker/Python "))
    return [kind for kind in CHECKPOINT_KINDS if kind != "external_weights" or release >= 28]


@router.delete(CHECKPOINT)
async def delete_checkpoint(run: str, kind: str, name: str, server: State, user: Caller) -> dict[str, Any]:
    row = server.checkpoints.own(run, kind, name, user)
    server.checkpoints.delete(row)
    server.audit.write("checkpoint_deleted", user.name, row.path)
    return {}


@router.post(CHECKPOINT + "/publish")
async def publish(run: str, kind: str, name: str, server: State, user: Caller) -> dict[str, Any]:
    row = server.checkpoints.own(run, kind, name, user)
    server.store.update(row, public=True)
    server.audit.write("checkpoint_published", user.name, row.path)
    return {}


@router.delete(CHECKPOINT + "/publish")
async def unpublish(run: str, kind: str, name: str, server: State, user: Caller) -> dict[str, Any]:
    row = server.checkpoints.own(run, kind, name, user)
    server.store.update(row, public=False)
    server.audit.write("checkpoint_unpublished", user.name, row.path)
    return {}


@router.put(CHECKPOINT + "/ttl")
async def set_ttl(run: str, kind: str, name: str, body: requests.SetTtl, server: State, user: Caller) -> dict[str, Any]:
    row = server.checkpoints.own(run, kind, name, user)
    server.store.update(row, expires=expiry(body.ttl_seconds))
    return {}


@router.post("/copy_weights")
async def copy_weights(body: requests.CopyWeights, server: State, user: Caller) -> dict[str, str]:
    """A copy under a training run of its own, so that it outlives its source."""
    if body.destination_project_id is not None or body.session_id is None or body.model_seq_id is None:
        raise BadRequest("give session_id and model_seq_id as the destination; this server has no projects.")
    if body.weights_access_token is not None:
        raise BadRequest("weights_access_token: this server shares checkpoints by publishing them; leave it out.")
    session = server.sessions.touch(body.session_id, user)
    source = server.checkpoints.resolve(body.source_path, user)
    target = run_id(session.id, body.model_seq_id)
    if server.store.get(RunRow, target) is not None:  # asked for before
        return {"tinker_path": server.checkpoints.resolve(f"tinker://{target}/{source.kind}/{source.name}", user).path}
    server.meter.room(user.name)
    old = server.checkpoints.run_of(source)
    run = RunRow(
        id=target,
        session_id=session.id,
        owner=user.name,
        base_model=old.base_model,
        rank=old.rank,
        train_unembed=old.train_unembed,
        train_mlp=old.train_mlp,
        train_attn=old.train_attn,
        user_metadata={"source": source.path},
    )
    server.store.add(run)
    copied = await asyncio.to_thread(server.checkpoints.copy, source, run, expiry(body.ttl_seconds))
    server.audit.write("checkpoint_copied", user.name, copied.path, source=source.path)
    return {"tinker_path": copied.path}


# Downloads ----------------------------------------------------------------------------------------------------------


@router.get(CHECKPOINT + "/archive")
async def archive(run: str, kind: str, name: str, request: Request, server: State, user: Caller) -> Response:
    row = server.checkpoints.resolve(f"tinker://{run}/{kind}/{name}", user)
    seconds = server.limits.link_seconds
    url = request.url_for("download_archive", token=server.signer.link(str(row.id), user.name, seconds))
    expires = formatdate(time.time() + seconds, usegmt=True)
    return Response(status_code=302, headers={"location": str(url), "expires": expires})


@router.get("/downloads/{token}/checkpoint.tar.gz")
async def download_archive(token: str, request: Request, server: State) -> Response:
    target, holder = server.signer.target(token)
    row = _linked(server, target, holder)
    note_address(request)
    server.audit.write("checkpoint_downloaded", holder, row.path)
    folder = await asyncio.to_thread(server.checkpoints.fetch, row)
    return StreamingResponse(tar_gz(folder), media_type="application/gzip")


@router.get(CHECKPOINT + "/external_weights_urls")
async def external_weights_urls(
    run: str, kind: str, name: str, request: Request, server: State, user: Caller
) -> Response:
    row = server.checkpoints.resolve(f"tinker://{run}/{kind}/{name}", user)
    seconds = server.limits.link_seconds
    folder = await asyncio.to_thread(server.checkpoints.fetch, row)
    urls = {
        file: str(request.url_for("download_file", token=server.signer.link(f"{row.id}/{file}", user.name, seconds)))
        for file in files_of(folder)
    }
    return answer({"urls": urls, "expires": moment(time.time() + seconds)})


@router.get("/downloads/{token}/file")
async def download_file(token: str, request: Request, server: State) -> Response:
    target, holder = server.signer.target(token)
    checkpoint, _, file = target.partition("/")
    row = _linked(server, checkpoint, holder)
    path = (await asyncio.to_thread(server.checkpoints.fetch, row)) / file
    if not path.is_file():
        raise NotFound(f"{file} of this checkpoint is missing.")
    note_address(request)
    server.audit.write("checkpoint_downloaded", holder, row.path, file=file)
    return FileResponse(path, filename=quote(path.name))


def _linked(server: Server, target: str, holder: str) -> CheckpointRow:
    """The checkpoint a link leads to, if whoever asked for the link may still have it."""
    row, user = server.store.get(CheckpointRow, int(target)), server.keys.holder(holder)
    if row is None or user is None or (row.expires is not None and row.expires < time.time()):
        raise NotFound("the checkpoint of this link was deleted, or the key it was made with is let in no more.")
    if not (user.sees(row.owner) or row.public):
        raise NotFound("the checkpoint of this link is no longer published.")
    return row


# Sessions -----------------------------------------------------------------------------------------------------------


@router.get("/sessions")
async def sessions(
    server: State, user: Caller, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> dict[str, list[str]]:
    return {"sessions": server.sessions.page(user, access_scope == "accessible", limit, offset)}


@router.get("/sessions/{session_id}")
async def session(session_id: str, server: State, user: Caller, access_scope: Scope = "owned") -> dict[str, Any]:
    row = server.sessions.row(session_id, user)
    return {
        "training_run_ids": server.models.of_session(session_id),
        "sampler_ids": server.samplers.of_session(session_id),
        "user_metadata": row.user_metadata,
        "display_name": row.display_name,
        "tags": row.tags,
        "sdk_version": row.sdk_version,
        "project_id": row.project_id,
    }


for method, path in (
    ("PUT", "/sessions/{session_id}/project"),
    ("GET", "/sessions/{session_id}/trace_export"),
    ("POST", "/sessions/search"),
    ("GET", "/audit"),
    ("GET", "/billing/{rest:path}"),
    ("GET", "/auth/apikey/me"),
    ("DELETE", "/auth/apikey/me"),
    ("POST", "/create_custom_loss"),
):
    router.add_api_route(path, _hosted_only, methods=[method], include_in_schema=False)
