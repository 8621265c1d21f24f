"""What each training request does: its last checks, its work in the backend, and what its result is told as.

Each function is called when the request arrives; the `Step` it returns runs when its turn comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mint import wire
from mint.checks import check_data, check_loss
from mint.errors import BadRequest
from mint.mistakes import check_plausible
from mint.server.auth import User
from mint.server.catalogue import sizes
from mint.server.checkpoints import UPLOADS, expiry
from mint.server.futures import Answer, forward_answer, json_answer
from mint.server.models import Model, Step
from mint.server.state import Server
from mint.types import OptimStepResponse


def forward_backward(server: Server, model: Model, call: wire.ForwardBackwardCall) -> Step:
    check_loss(call.loss_fn, call.loss_fn_config)
    check_data(call.data, call.loss_fn, *sizes(model.facts))
    check_plausible(call.data, call.loss_fn, call.loss_fn_config)
    work = server.backend.forward if call.forward_only else server.backend.forward_backward
    return Step(lambda: work(model.id, call.data, call.loss_fn, call.loss_fn_config), forward_answer)


def optim_step(server: Server, model: Model, adam: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> Step:
    if other is not None:
        raise BadRequest(f"optimizer_params of type {other.get('type')!r}: this server has AdamW; send adam_params.")
    if adam is None:
        raise BadRequest("optim_step needs adam_params, for example {'learning_rate': 1e-4}.")
    params = wire.adam_params_from_json(adam)
    return Step(
        lambda: server.backend.optim_step(model.id, params),
        lambda metrics: json_answer(OptimStepResponse(metrics)),
    )


@dataclass(frozen=True)
class Target:
    """Under what name to save."""

    kind: str
    name: str
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    overwrite: bool = False


_SAVE_TYPES = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}


def save(server: Server, model: Model, target: Target) -> Step:
    """Weights under a name; training checkpoints take the optimizer's state along."""
    expires = expiry(target.ttl_seconds)
    folder = server.checkpoints.reserve(model.id, target.kind, target.name, target.overwrite)

    def record(size_bytes: int) -> Answer:
        row = server.checkpoints.record(
            model.run, target.kind, target.name, folder, size_bytes, expires, target.user_metadata
        )
        return json_answer({"path": row.path, "size_bytes": size_bytes, "type": _SAVE_TYPES[target.kind]})

    return Step(
        lambda: server.backend.save_adapter(model.id, str(folder), target.kind == "weights"),
        record,
        lambda: server.checkpoints.release_name(model.id, target.kind, target.name),
    )


def export(server: Server, model: Model, target: Target, recipients: list[str] | None) -> Step:
    if recipients:
        raise BadRequest("age_encryption_recipients: this server does not encrypt what it exports; leave it out.")
    return save(server, model, target)


def snapshot(server: Server, model: Model, user: User, number: int, path: str | None) -> Step:
    """The present weights, kept in memory under a sampling session of their own."""
    if path is not None:
        raise BadRequest("give either path (a named checkpoint) or sampling_session_seq_id (a snapshot), not both.")
    assert model.run.session_id is not None
    session = server.sessions.touch(model.run.session_id, user)
    sampler_id = server.samplers.new_id(session, number)

    def record(_: Mapping[str, float]) -> Answer:
        assert model.facts is not None
        server.samplers.add_snapshot(session, sampler_id, model.facts)
        return json_answer({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})

    return Step(lambda: server.backend.snapshot(model.id, sampler_id), record)


def load(server: Server, model: Model, user: User, path: str, optimizer: bool) -> Step:
    source = server.checkpoints.resolve(path, user)
    run = server.checkpoints.run_of(source)
    # An upload may call the same base model by another name; what does not fit, the backend refuses.
    if run.base_model != model.run.base_model and not source.run_id.startswith(UPLOADS):
        raise BadRequest(f"{path} was trained on {run.base_model}, this model on {model.run.base_model}.")
    if run.rank != model.run.rank:
        raise BadRequest(f"{path} has LoRA rank {run.rank}, this model has {model.run.rank}; create one of equal rank.")
    if optimizer and source.kind != "weights":
        raise BadRequest(f"{path} holds no optimizer state; load_state takes its weights alone.")
    folder = str(server.checkpoints.folder(source))
    return Step(
        lambda: server.backend.load_adapter(model.id, folder, optimizer),
        lambda _: json_answer({"path": source.path, "model_id": model.id, "type": "load_weights"}),
    )
