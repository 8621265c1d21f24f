"""`Engine`: a `Backend` on this machine's device. Says what each call does; when it is done is the worker's business.

Every call becomes a task in the lane of the adapter or policy it names (`lanes.py`), so each one's work is done in
order; samples leave their lane as soon as the sampler has them. Models load in a thread of their own, so that a
download holds up nobody else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from mint.backend import AdapterFacts, ModelFacts, OnTokens
from mint.engine import checkpoint
from mint.engine.device import Device
from mint.engine.faults import as_mint_error
from mint.engine.hub import BUNDLED
from mint.engine.lanes import Steps
from mint.engine.lora import Adapter
from mint.engine.memory import used_memory
from mint.engine.model import BaseModel
from mint.engine.optimizer import AdamW
from mint.engine.sampler.sampler import Sampler
from mint.engine.trainer import Trainer
from mint.engine.verify import History, Proof, Verifier, check_copy
from mint.engine.worker import Worker
from mint.errors import BadRequest, NotFound
from mint.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig, SampleRequest, SampleResponse

T = TypeVar("T")
log = logging.getLogger(__name__)


class Runtime:
    """A base model with its trainer and its sampler."""

    def __init__(self, name: str, device: Device | None, lean: bool = False) -> None:
        self.model = BaseModel.load(name, device)
        self.trainer = Trainer(self.model, lean=lean)
        self.sampler = Sampler(self.model)
        self.verifier = Verifier(self.model, self.trainer, self.sampler)


@dataclass(frozen=True)
class Tenant:
    """An adapter in training."""

    runtime: Runtime
    adapter: Adapter
    optimizer: AdamW
    history: History = field(default_factory=History)


@dataclass(frozen=True)
class Policy:
    """Weights that do not change any more; without an adapter, the base model's own."""

    runtime: Runtime
    adapter: Adapter | None
    proof: Proof


class Engine:
    """Implements `mint.backend.Backend`, which says what each call means."""

    generation = 0

    def __init__(self, models: Sequence[str] | None = None, device: Device | None = None, lean: bool = False) -> None:
        """`models`: exactly these, loaded now; None: any model may be asked for and is loaded then. `lean`: training
        computes activations again rather than keeping them."""
        self._catalogue = None if models is None else tuple(models)
        self._device = device
        self._lean = lean
        self._runtimes = {name: Runtime(name, device, lean) for name in models or ()}
        self._loading: dict[str, Future[Runtime]] = {}
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mint-loader")
        # One thread, so that what was written later is there only after what was written before.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mint-writer")
        self._tenants: dict[str, Tenant] = {}
        self._policies: dict[str, Policy] = {}
        self._tokens_trained = 0
        self._worker = Worker(lambda: [runtime.sampler for runtime in self._runtimes.values()])

    # ----------------------------------------------------------------------------------------------------------------
    # The calls, from any thread

    def models(self) -> list[str]:
        return list(dict.fromkeys([*BUNDLED, *self._runtimes])) if self._catalogue is None else list(self._catalogue)

    def load_model(self, base_model: str) -> Future[ModelFacts]:
        def work() -> Steps:
            runtime = yield from self._runtime(base_model)
            return runtime.model.facts

        return self._worker.submit(f"model {base_model}", work)

    def create_adapter(self, adapter: str, base_model: str, lora: LoraConfig) -> Future[AdapterFacts]:
        def work() -> Steps:
            if adapter in self._tenants:
                raise BadRequest(f"there is already an adapter {adapter!r}; release it first or choose another name.")
            runtime = yield from self._runtime(base_model)
            weights = runtime.model.new_adapter(lora)
            self._tenants[adapter] = Tenant(runtime, weights, AdamW(weights))
            return weights.facts()

        return self._worker.submit(adapter, work)

    def forward(
        self, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str]
    ) -> Future[ForwardBackwardOutput]:
        return self._worker.submit(adapter, partial(self._pass, adapter, data, loss_fn, config, False))

    def forward_backward(
        self, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str]
    ) -> Future[ForwardBackwardOutput]:
        return self._worker.submit(adapter, partial(self._pass, adapter, data, loss_fn, config, True))

    def optim_step(self, adapter: str, params: AdamParams) -> Future[dict[str, float]]:
        def work() -> dict[str, float]:
            tenant = self._tenant(adapter)
            tenant.runtime.model.use_threads()
            return tenant.optimizer.step(params) | tenant.history.figures

        return self._worker.submit(adapter, work)

    def save_adapter(self, adapter: str, folder: str, optimizer: bool) -> Future[int]:
        def work() -> int:
            tenant = self._tenant(adapter)
            return checkpoint.save(folder, tenant.adapter, tenant.optimizer if optimizer else None)

        return self._worker.submit(adapter, work)

    def load_adapter(self, adapter: str, folder: str, optimizer: bool) -> Future[None]:
        def work() -> None:
            tenant = self._tenant(adapter)
            checkpoint.read(folder).load_into(tenant.adapter, tenant.optimizer, optimizer)
            tenant.history.forget()

        return self._worker.submit(adapter, work)

    def save_state(self, adapter: str, folder: str) -> Future[int]:
        def work() -> Future[int]:
            tenant = self._tenant(adapter)
            return self._writer.submit(checkpoint.state_of(tenant.adapter, tenant.optimizer).write, Path(folder))

        return _after(self._worker.submit(adapter, work))

    def load_state(self, adapter: str, folder: str) -> Future[None]:
        def work() -> None:
            tenant = self._tenant(adapter)
            checkpoint.load_state(folder, tenant.adapter, tenant.optimizer)

        return self._worker.submit(adapter, work)

    def snapshot(self, adapter: str, policy: str, folder: str | None = None) -> Future[dict[str, float]]:
        def work() -> Future[dict[str, float]]:
            started = time.perf_counter()
            tenant = self._tenant(adapter)
            copy = tenant.adapter.snapshot(tenant.runtime.model.dtype)
            check_copy(tenant.adapter, copy)
            version = tenant.optimizer.steps
            self._set_policy(policy, Policy(tenant.runtime, copy, Proof(copy, version, tenant.history)))
            took = {"snapshot_seconds": time.perf_counter() - started, "optimizer_steps": float(version)}
            return self._writer.submit(_keep, copy, folder, took)

        taken = self._worker.submit(adapter, work, quick=True)

        def wait() -> Steps:
            yield taken

        self._worker.submit(policy, wait, quick=True)  # samples asked for in the meantime come after it
        return _after(taken)

    def load_policy(self, policy: str, base_model: str, folder: str | None) -> Future[None]:
        def work() -> Steps:
            runtime = yield from self._runtime(base_model)
            saved = None if folder is None else checkpoint.read(folder)
            adapter = None if saved is None else saved.policy(runtime.model.linears, runtime.model.dtype)
            self._set_policy(policy, Policy(runtime, adapter, Proof(adapter)))

        return self._worker.submit(policy, work)

    def sample(self, policy: str, request: SampleRequest, on_tokens: OnTokens | None = None) -> Future[SampleResponse]:
        future: Future[SampleResponse] = Future()

        def refuse(started: Future[None]) -> None:
            if error := started.exception():
                _settle(future, error)

        started = self._worker.submit(policy, lambda: self._start(policy, request, on_tokens, future), quick=True)
        started.add_done_callback(refuse)
        return future

    def release(self, name: str) -> Future[None]:
        def work() -> None:
            self._tenants.pop(name, None)
            if policy := self._policies.pop(name, None):
                self._forget(policy)

        return self._worker.submit(name, work, quick=True)

    def stats(self) -> Future[dict[str, float]]:
        return self._worker.submit("stats", self._stats, quick=True)

    def close(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._worker.close()
        self._writer.shutdown()

    # ----------------------------------------------------------------------------------------------------------------
    # On the worker

    def _runtime(self, name: str) -> Steps:
        """The base model's runtime, waiting until it is loaded if need be."""
        if name in self._runtimes:
            return self._runtimes[name]
        if self._catalogue is not None:
            raise NotFound(f"there is no model {name!r} here; there is {', '.join(self._catalogue) or 'none'}.")
        if name not in self._loading:
            self._loading[name] = self._loader.submit(Runtime, name, self._device, self._lean)
        loading = self._loading[name]
        yield loading
        if self._loading.get(name) is loading:
            del self._loading[name]  # after a failure the next call tries again
        if name not in self._runtimes:
            self._runtimes[name] = loading.result()
        return self._runtimes[name]

    def _tenant(self, name: str) -> Tenant:
        if name not in self._tenants:
            raise NotFound(f"there is no adapter {name!r}; it was never created, or released.")
        return self._tenants[name]

    def _pass(
        self, name: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str], backward: bool
    ) -> Steps:
        tenant = self._tenant(name)
        output = yield from tenant.runtime.trainer.forward_backward(tenant.adapter, data, loss_fn, config, backward)
        self._tokens_trained += sum(datum.model_input.length for datum in data) if backward else 0
        return output

    def _set_policy(self, name: str, policy: Policy) -> None:
        if old := self._policies.get(name):
            self._forget(old)
        self._policies[name] = policy

    def _forget(self, policy: Policy) -> None:
        if policy.adapter is not None:  # the base model's prefixes serve every other base policy
            policy.runtime.sampler.forget(policy.adapter)

    def _start(
        self, name: str, request: SampleRequest, on_tokens: OnTokens | None, future: Future[SampleResponse]
    ) -> None:
        """Hands a sample to its sampler. Its future stays pending until the end, so it can be cancelled all along."""
        if future.cancelled():
            return
        if name not in self._policies:
            raise NotFound(f"there is no policy {name!r}; it was never made, or released.")
        policy = self._policies[name]
        if policy.proof.verdict.done():
            policy.proof.verdict.result()  # raises why the policy was refused
        policy.runtime.verifier.begin(policy.proof, policy.adapter)
        sampler = policy.runtime.sampler
        settle = partial(_settle_proved, policy.proof, future)
        group = sampler.add(request, policy.adapter, settle, on_tokens and _guarded(on_tokens))

        def ended(future: Future[SampleResponse]) -> None:
            if future.cancelled():
                self._worker.call_soon(lambda: sampler.cancel(group))

        future.add_done_callback(ended)

    def _stats(self) -> dict[str, float]:
        samplers = [runtime.sampler for runtime in self._runtimes.values()]
        devices = {runtime.model.device for runtime in self._runtimes.values()}
        return {
            "models": len(self._runtimes),
            "adapters": len(self._tenants),
            "policies": len(self._policies),
            "tasks_queued": len(self._worker.lanes),
            "samples_running": sum(len(s.scheduler.running) for s in samplers),
            "samples_waiting": sum(q.copies for s in samplers for q in s.scheduler.waiting),
            "tokens_trained": self._tokens_trained,
            "tokens_sampled": sum(s.tokens_sampled for s in samplers),
            "tokens_read_by_sampler": sum(s.tokens_read for s in samplers),
            "kv_blocks_used": sum(s.cache.used for s in samplers),
            "kv_blocks_total": sum(s.cache.max_blocks for s in samplers),
            "kv_bytes": sum(s.runner.store.bytes for s in samplers),
            "memory_bytes": sum(used_memory(device) for device in devices),
        }


def _keep(policy: Adapter, folder: str | None, took: dict[str, float]) -> dict[str, float]:
    """Writes a snapshot, unflushed: it matters to its client for minutes, and flushing can take longer than writing."""
    if folder is not None:
        try:
            checkpoint.Contents(policy).write(Path(folder), flush=False)
        except (OSError, SafetensorError) as error:
            log.warning("the snapshot %s could not be written, and lives in memory alone: %s", folder, error)
    return took


def _after(first: Future[Future[T]]) -> Future[T]:
    """The result of the future that `first` results in."""
    last: Future[T] = Future()

    def pass_on(done: Future[T]) -> None:
        error = done.exception()
        _settle(last, done.result() if error is None else as_mint_error(error))

    def follow(done: Future[Future[T]]) -> None:
        if (error := done.exception()) is not None:
            _settle(last, error)
        else:
            done.result().add_done_callback(pass_on)

    first.add_done_callback(follow)
    return last


def _settle(future: Future[Any], answer: Any) -> None:
    """Unless somebody cancelled it in time."""
    if future.set_running_or_notify_cancel():
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _settle_proved(proof: Proof, future: Future[Any], answer: Any) -> None:
    """Not before it is known that the answer comes from the right weights."""
    if isinstance(answer, BaseException):
        _settle(future, answer)
    else:
        proof.verdict.add_done_callback(lambda verdict: _settle(future, verdict.exception() or answer))


def _guarded(on_tokens: OnTokens) -> OnTokens:
    """A listener that fails is heard of in the log; the others' tokens go on."""

    def call(index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        try:
            on_tokens(index, tokens, logprobs)
        except Exception:
            log.exception("a listener to sampled tokens failed")

    return call
