"""What MinT's own clients ask for beyond the Tinker protocol."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from fastapi import APIRouter, UploadFile

from mint.errors import BadRequest
from mint.server import requests
from mint.server.archive import read_adapter, unpack
from mint.server.auth import User
from mint.server.routes import Caller, State
from mint.server.state import Server
from mint.server.store import CheckpointRow

router = APIRouter()


@router.post("/checkpoints/upload")
async def upload(file: UploadFile, server: State, user: Caller) -> dict[str, str]:
    row = await asyncio.to_thread(_adopt, server, user, file)
    return {"path": row.path, "checkpoint_id": row.run_id}


def _adopt(server: Server, user: User, file: UploadFile) -> CheckpointRow:
    server.config.data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=server.config.data, prefix="upload-") as folder:
        found = unpack(file.file, Path(folder), server.limits.upload_bytes)
        base_model, lora = read_adapter(found)
        return server.checkpoints.adopt(found, base_model, lora, user)


@router.post("/mint/forward_backward_reverse_kl")
async def reverse_kl(body: requests.ReverseKL, server: State, user: Caller) -> None:
    model = server.models.find(body.model_id, user)

    if body.seq_id is not None:
        server.models.refuse(model.id, body.seq_id, user)
    raise BadRequest(
        "forward_backward_reverse_kl needs a backend that computes a divergence over the whole vocabulary, and this "
        "one does not yet; use forward_backward with importance_sampling and a KL term in the advantages."
    )


@router.post("/mint/checkpoints/interpolate")
async def interpolate(body: requests.Interpolate, user: Caller) -> None:
    raise BadRequest(
        "interpolating checkpoints needs a backend that combines saved adapters, and this one does not yet; download "
        "them with the archive links and combine the safetensors files."
    )
