"""What each training request does: its last checks, its work in the backend, and what its result is told as.

`prepare` is called when a request arrives, and again when a crash makes it necessary to repeat it. The `Step` it
returns runs when its turn comes. What is decided on arrival and must not be decided differently the second time (a
folder, a date) is put in `Call.fixed`, which the journal keeps.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mint import wire
from mint.checks import check_data, check_loss
from mint.errors import BadRequest, Internal
from mint.mistakes import check_plausible
from mint.server import requests
from mint.server.auth import User
from mint.server.bodies import decompress, fingerprint
from mint.server.catalogue import sizes
from mint.server.checkpoints import UPLOADS, expiry
from mint.server.futures import Answer, Promise, forward_answer, json_answer
from mint.server.runner import Step
from mint.server.store import CheckpointRow, RunRow
from mint.types import ForwardBackwardOutput, OptimStepResponse

if TYPE_CHECKING:
    from mint.server.models import Model
    from mint.server.state import Server

T = TypeVar("T")


@dataclass
class Call:
    """A training request as it came, which is how the journal keeps it."""

    op: str
    seq_id: int | None
    same: bytes
    """Fingerprint by which the same request sent again is known."""
    payload: bytes
    body: Any
    """What the payload says."""
    size: int = 0
    """Bytes of the payload, unpacked."""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    fixed: dict[str, Any] = field(default_factory=dict)
    by_server: bool = False
    """Made by the server itself, so no limit of its owner's holds it up."""

    def head(self) -> dict[str, Any]:
        return {
            "kind": "request",
            "id": self.request_id,
            "op": self.op,
            "seq": self.seq_id,
            "same": self.same.hex(),
            "fixed": self.fixed,
        }


def call_from(server: Server, head: Mapping[str, Any], payload: bytes) -> Call:
    """The call a journal kept."""
    fixed = dict(head["fixed"])
    if head["op"] in FORWARDS:
        body: Any = read_forward_backward(payload, fixed, server.limits.body_bytes)
    elif head["op"] == REVERSE_KL:
        body = requests.ReverseKL.model_validate(json.loads(payload)).call()
    else:
        body = BODIES[head["op"]].model_validate(json.loads(payload))
    same = bytes.fromhex(head["same"])
    return Call(head["op"], head["seq"], same, payload, body, len(payload), head["id"], fixed)


def small_call(op: str, body: requests.NumberedBody | requests.LoadWeights, but: set[str] | None = None) -> Call:
    """The call of a body that is JSON; `but` are the fields in which the same request sent again may differ."""
    same = fingerprint(f"{type(body).__name__} {body.model_dump_json(exclude=but)}".encode())
    payload = json.dumps(body.model_dump()).encode()
    return Call(op, body.seq_id, same, payload, body, len(payload))


def reverse_kl_call(body: requests.ReverseKL) -> Call:
    return replace(small_call(REVERSE_KL, body), body=body.call())


def read_forward_backward(payload: bytes, fixed: Mapping[str, Any], limit: int) -> wire.ForwardBackwardCall:
    plain = decompress(payload, fixed["encoding"], limit)
    if fixed["protobuf"]:
        return wire.forward_backward_from_proto(plain)
    return wire.forward_backward_from_json(wire.read_json(plain), fixed["field"])


def prepare(server: Server, model: Model, call: Call) -> Step:
    return server.meter.metered(model, call, _PREPARE[call.op](server, model, call))


def forward_backward(server: Server, model: Model, call: Call) -> Step:
    body: wire.ForwardBackwardCall = call.body
    if len(body.data) > server.limits.datums:
        raise BadRequest(
            f"the request has {len(body.data)} datums and at most {server.limits.datums} may be sent at once; split it."
        )
    check_loss(body.loss_fn, body.loss_fn_config)
    check_data(body.data, body.loss_fn, *sizes(model.facts))
    check_plausible(body.data, body.loss_fn, body.loss_fn_config)
    work = server.backend.forward if body.forward_only else server.backend.forward_backward
    return Step(lambda: work(model.id, body.data, body.loss_fn, body.loss_fn_config), forward_answer)


def reverse_kl(server: Server, model: Model, call: Call) -> Step:
    body: wire.ReverseKLCall = call.body
    if len(body.data) > server.limits.datums:
        raise BadRequest(
            f"the request has {len(body.data)} datums and at most {server.limits.datums} may be sent at once; split it."
        )
    check_data(body.data, "cross_entropy", *sizes(model.facts))
    try:
        check_data(body.reference_data, "cross_entropy", *sizes(model.facts))
    except BadRequest as error:
        raise BadRequest(f"reference_input: {error}") from error
    if not call.fixed:
        call.fixed["pin"] = _pinned_reference(server, model, call)
    pin = call.fixed["pin"]
    folder = None if pin is None else str(model.journal.folder / pin)

    def told(output: ForwardBackwardOutput) -> Answer:
        kind = "mint_forward_backward_reverse_kl"
        return json_answer({"outputs": output.loss_fn_outputs, "metrics": output.metrics, "type": kind})

    return Step(
        lambda: server.backend.reverse_kl(model.id, folder, body.data, body.reference_data, body.temperature), told
    )


def _pinned_reference(server: Server, model: Model, call: Call) -> str | None:
    """None for the base model itself, by its name."""
    path: str = call.body.reference
    if path == model.run.base_model:
        return None
    source = server.checkpoints.resolve(path, User(model.run.owner))
    run = server.checkpoints.run_of(source)
    if run.base_model != model.run.base_model and not source.run_id.startswith(UPLOADS):
        raise BadRequest(f"{path} was trained on {run.base_model}, this model on {model.run.base_model}.")
    return model.journal.pin(call.request_id, server.checkpoints.fetch(source)).name


def optim_step(server: Server, model: Model, call: Call) -> Step:
    adam, other = call.body.adam_params, call.body.optimizer_params
    if other is not None:
        raise BadRequest(f"optimizer_params of type {other.get('type')!r}: this server has AdamW; send adam_params.")
    if adam is None:
        raise BadRequest("optim_step needs adam_params, for example {'learning_rate': 1e-4}.")
    params = wire.adam_params_from_json(adam)
    return Step(
        lambda: server.backend.optim_step(model.id, params),
        lambda metrics: json_answer(OptimStepResponse(metrics)),
    )


def save_weights(server: Server, model: Model, call: Call) -> Step:
    return _save(server, model, call, "weights", call.body.user_metadata, call.body.overwrite)


def save_weights_for_sampler(server: Server, model: Model, call: Call) -> Step:
    return _save(server, model, call, "sampler_weights", call.body.user_metadata, call.body.overwrite)


def save_weights_external(server: Server, model: Model, call: Call) -> Step:
    if call.body.age_encryption_recipients:
        raise BadRequest("age_encryption_recipients: this server does not encrypt what it exports; leave it out.")
    return _save(server, model, call, "external_weights")


def _save(
    server: Server,
    model: Model,
    call: Call,
    kind: str,
    user_metadata: dict[str, str] | None = None,
    overwrite: bool = False,
) -> Step:
    """Weights under a name; training checkpoints take the optimizer's state along."""
    checkpoints, fixed = server.checkpoints, call.fixed
    entered: CheckpointRow | None = None
    origin = contextvars.copy_context()  # of the request, for the audit log: the save comes later
    if fixed:
        entered = checkpoints.reserve_again(model.id, kind, fixed["name"], fixed["folder"])
    else:
        name, expires = _name(call.body), expiry(call.body.ttl_seconds)
        folder = checkpoints.reserve(model.id, kind, name, overwrite)
        fixed.update(name=name, expires=expires, folder=folder)

    def save() -> Future[int]:
        if entered is not None:  # the server died before it could tell
            return done(entered.size_bytes)
        draft = str(checkpoints.draft(fixed["folder"]))
        return checkpoints.kept(fixed["folder"], server.backend.save_adapter(model.id, draft, kind == "weights"))

    def record(size_bytes: int) -> Answer:
        try:
            row = entered or checkpoints.record(
                model.run, kind, fixed["name"], fixed["folder"], size_bytes, fixed["expires"], user_metadata
            )
        except Exception:
            checkpoints.discard(fixed["folder"])
            raise
        origin.run(server.audit.write, "checkpoint_saved", row.owner, row.path, size_bytes=size_bytes)
        return json_answer({"path": row.path, "size_bytes": size_bytes, "type": call.op})

    return Step(
        save,
        record,
        lambda: checkpoints.release_name(model.id, kind, fixed["name"]),
    )


def done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _name(body: requests.SaveBody) -> str:
    """The name asked for, else one by the request's number."""
    return body.path or (uuid.uuid4().hex[:8] if body.seq_id is None else f"{body.seq_id:06d}")


def snapshot(server: Server, model: Model, call: Call) -> Step:
    """The present weights, kept under a sampling session of their own."""
    if call.body.path is not None:
        raise BadRequest("give either path (a named checkpoint) or sampling_session_seq_id (a snapshot), not both.")
    if not call.fixed:
        assert model.run.session_id is not None
        session = server.sessions.touch(model.run.session_id, User(model.run.owner))
        call.fixed["sampler"] = server.samplers.new_id(session, call.body.sampling_session_seq_id)
    sampler_id = call.fixed["sampler"]

    def record(_: Mapping[str, float]) -> Answer:
        server.samplers.record(model.run, sampler_id)
        return json_answer({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})

    return Step(
        partial(server.samplers.take, model.run, sampler_id),
        record,
        accepted=partial(announce_snapshot, server, model.run, sampler_id),
    )


def announce_snapshot(server: Server, run: RunRow, sampler_id: str, promise: Promise) -> None:
    """The request for it is safe: its client is told what to sample, and need not wait until it has been taken."""
    sampler = server.samplers.announce(run, sampler_id)
    promise.head[wire.SAMPLER] = sampler_id
    promise.settled.add_done_callback(partial(server.samplers.settle, sampler))


async def save_and_stop(server: Server, name: str, run_id: str) -> str | None:
    """The state of a run that may not go on, saved under this name; None if it is not in memory."""
    model = server.models.live(run_id)
    if model is None:
        return None
    call = small_call("save_weights", requests.SaveWeights(model_id=run_id, path=name, overwrite=True))
    call.by_server = True
    promise = await server.models.submit(model, call)
    answer = json.loads((await asyncio.shield(promise.settled)).as_json())
    if "error" in answer:
        raise Internal(f"run {run_id} was stopped, and its state could not be saved: {answer['error']}")
    return str(answer["path"])


def load_weights(server: Server, model: Model, call: Call) -> Step:
    path, optimizer = call.body.path, call.body.optimizer
    if not call.fixed:
        source = server.checkpoints.resolve(path, User(model.run.owner))
        run = server.checkpoints.run_of(source)
        # An upload may call the same base model by another name; what does not fit, the backend refuses.
        if run.base_model != model.run.base_model and not source.run_id.startswith(UPLOADS):
            raise BadRequest(f"{path} was trained on {run.base_model}, this model on {model.run.base_model}.")
        if run.rank != model.run.rank:
            raise BadRequest(
                f"{path} has LoRA rank {run.rank}, this model has {model.run.rank}; create one of equal rank."
            )
        if optimizer and source.kind != "weights":
            raise BadRequest(f"{path} holds no optimizer state; load_state takes its weights alone.")
        pin = model.journal.pin(call.request_id, server.checkpoints.fetch(source))
        call.fixed.update(pin=pin.name, path=source.path)
    folder: Path = model.journal.folder / call.fixed["pin"]
    return Step(
        lambda: server.backend.load_adapter(model.id, str(folder), optimizer),
        lambda _: json_answer({"path": call.fixed["path"], "model_id": model.id, "type": "load_weights"}),
    )


REVERSE_KL = "reverse_kl"
_PREPARE: dict[str, Callable[[Server, Model, Call], Step]] = {
    "forward": forward_backward,
    "forward_backward": forward_backward,
    REVERSE_KL: reverse_kl,
    "optim_step": optim_step,
    "save_weights": save_weights,
    "save_weights_for_sampler": save_weights_for_sampler,
    "save_weights_external": save_weights_external,
    "snapshot": snapshot,
    "load_weights": load_weights,
}
FORWARDS = ("forward", "forward_backward")
BODIES: dict[str, type[requests.Body]] = {
    "optim_step": requests.OptimStep,
    "save_weights": requests.SaveWeights,
    "save_weights_for_sampler": requests.SaveWeightsForSampler,
    "save_weights_external": requests.SaveWeightsExternal,
    "snapshot": requests.SaveWeightsForSampler,
    "load_weights": requests.LoadWeights,
}
CHANGE_WEIGHTS = ("forward_backward", REVERSE_KL, "optim_step", "load_weights")
"""What has to be repeated to bring a model back."""
CHANGE_FILES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
"""What must not be repeated once its answer was given: a checkpoint may have been deleted since."""
