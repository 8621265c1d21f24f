"""`Engine`: a `Backend` on this machine's device. Says what each call does; when it is done is the worker's business.

Every call becomes a task in the lane of the adapter or policy it names (`lanes.py`), so each one's work is done in
order; samples leave their lane as soon as the sampler has them. Models load in a thread of their own, so that a
download holds up nobody else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from mint.backend import AdapterFacts, ModelFacts, OnTokens
from mint.columns import token_count
from mint.engine import checkpoint
from mint.engine.combining import combine
from mint.engine.device import Device, choose_threads
from mint.engine.faults import as_mint_error
from mint.engine.holdings import Room
from mint.engine.hub import BUNDLED
from mint.engine.lanes import Steps
from mint.engine.lora import Adapter
from mint.engine.memory import used_memory
from mint.engine.optimizer import AdamW
from mint.engine.passes import Passes
from mint.engine.residence import Pin, Residence
from mint.engine.sampler.grammar import Grammar
from mint.engine.tenants import Frozen, Policy, Runtime, SnapshotFolder, Tenant, Trained
from mint.engine.verify import Proof, check_copy
from mint.engine.worker import Worker
from mint.errors import BadRequest, Lost, MintError, NotFound
from mint.machine import process_memory
from mint.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig, SampleRequest, SampleResponse

T = TypeVar("T")
log = logging.getLogger(__name__)


class Engine:
    """Implements `mint.backend.Backend`, which says what each call means."""

    generation = 0

    def __init__(
        self,
        models: Sequence[str] | None = None,
        device: Device | None = None,
        room: Room | int | None = None,
        spill: Path | None = None,
        lean: bool = False,
    ) -> None:
        """`models`: exactly these, loaded now; None: any model may be asked for and is loaded then. `room`: how many
        adapters may be on the device at once, where a number leaves the bytes to be measured; `spill`: the folder in
        which the others wait. `lean`: training computes activations again rather than keeping them."""
        self._catalogue = None if models is None else tuple(models)
        self._device = device
        self._lean = lean
        self._runtimes = {name: Runtime(name, device, lean) for name in models or ()}
        self._loading: dict[str, Future[Runtime]] = {}
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mint-loader")
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mint-grammars")
        # One thread, so that what was written later is there only after what was written before.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mint-writer")
        self._tenants: dict[str, Tenant] = {}
        self._policies: dict[str, Policy] = {}
        self._tokens_trained = 0
        self._passes = Passes(self._are_narrow)
        self._worker = Worker(lambda: [runtime.sampler for runtime in self._runtimes.values()])
        self._room = room
        self._residence = Residence(self._worker.call_soon, spill)
        for runtime in self._runtimes.values():
            self._measure_room(runtime)

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
            optimizer = AdamW(weights)
            holding, pin = self._residence.add(Trained(weights, optimizer))
            self._tenants[adapter] = Tenant(runtime, weights, optimizer, holding)
            pin.release()
            return weights.facts()

        return self._worker.submit(adapter, work)

    def forward(
        self, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str]
    ) -> Future[ForwardBackwardOutput]:
        return self._train(adapter, partial(self._pass, data, loss_fn, config, False))

    def forward_backward(
        self, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str]
    ) -> Future[ForwardBackwardOutput]:
        return self._train(adapter, partial(self._pass, data, loss_fn, config, True))

    def reverse_kl(
        self,
        adapter: str,
        reference: str | None,
        data: Sequence[Datum],
        reference_data: Sequence[Datum],
        temperature: float,
    ) -> Future[ForwardBackwardOutput]:
        def work(tenant: Tenant) -> Steps:
            model, trainer = tenant.runtime.model, tenant.runtime.trainer
            other = None if reference is None else checkpoint.read(reference).policy(model.linears, model.dtype)
            steps = trainer.reverse_kl(tenant.adapter, other, data, reference_data, temperature)
            output = yield from self._passes.run(steps)
            self._tokens_trained += token_count(data)
            return output

        return self._train(adapter, work)

    def optim_step(self, adapter: str, params: AdamParams) -> Future[dict[str, float]]:
        def work(tenant: Tenant) -> Steps:
            figures = yield from self._passes.call(partial(_update, tenant, params))
            return figures | tenant.history.figures

        return self._train(adapter, work)

    def save_adapter(self, adapter: str, folder: str, optimizer: bool) -> Future[int]:
        def work(tenant: Tenant) -> int:
            return checkpoint.save(folder, tenant.adapter, tenant.optimizer if optimizer else None)

        return self._train(adapter, work)

    def load_adapter(self, adapter: str, folder: str, optimizer: bool) -> Future[None]:
        def work(tenant: Tenant) -> None:
            checkpoint.read(folder).load_into(tenant.adapter, tenant.optimizer, optimizer)
            tenant.history.forget()

        return self._train(adapter, work)

    def save_state(self, adapter: str, folder: str) -> Future[int]:
        def work(tenant: Tenant) -> Future[int]:
            return self._writer.submit(checkpoint.state_of(tenant.adapter, tenant.optimizer).write, Path(folder))

        return _after(self._train(adapter, work))

    def load_state(self, adapter: str, folder: str) -> Future[None]:
        def work(tenant: Tenant) -> None:
            checkpoint.load_state(folder, tenant.adapter, tenant.optimizer)

        return self._train(adapter, work)

    def snapshot(self, adapter: str, policy: str, folder: str | None = None) -> Future[dict[str, float]]:
        def work(tenant: Tenant) -> Future[dict[str, float]]:
            started = time.perf_counter()
            copy = tenant.adapter.snapshot(tenant.runtime.model.dtype)
            check_copy(tenant.adapter, copy)
            version = tenant.optimizer.steps
            pin = self._add_policy(policy, tenant.runtime, copy, Proof(copy, version, tenant.history))
            took = {"snapshot_seconds": time.perf_counter() - started, "optimizer_steps": float(version)}
            return self._writer.submit(self._keep, policy, copy, pin, folder, took)

        taken = self._train(adapter, work, quick=True)

        def wait() -> Steps:
            yield taken

        self._worker.submit(policy, wait, quick=True)  # samples asked for in the meantime come after it
        return _after(taken)

    def load_policy(self, policy: str, base_model: str, folder: str | None) -> Future[None]:
        def work() -> Steps:
            runtime = yield from self._runtime(base_model)
            saved = None if folder is None else checkpoint.read(folder)
            if saved is None:
                self._set_policy(policy, Policy(runtime, None, None, Proof(None)))
            else:
                adapter = saved.policy(runtime.model.linears, runtime.model.dtype)
                self._add_policy(policy, runtime, adapter, Proof(adapter)).release()

        return self._worker.submit(policy, work)

    def combine(self, folders: Sequence[str], coefficients: Sequence[float], folder: str) -> Future[LoraConfig]:
        def work() -> Steps:
            writing = self._writer.submit(combine, folders, coefficients, folder)
            yield writing
            return writing.result()

        return self._worker.submit(folder, work, quick=True)

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
            self._forget_tenant(name)
            self._forget_policy(name)

        return self._worker.submit(name, work, quick=True)

    def stats(self) -> Future[dict[str, float]]:
        return self._worker.submit("stats", self._stats, quick=True)

    def close(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._worker.close()
        self._passes.close()
        self._writer.shutdown()
        self._residence.close()

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
            self._measure_room(self._runtimes[name])
        return self._runtimes[name]

    def _measure_room(self, runtime: Runtime) -> None:
        """After each base model, as it leaves less."""
        room = self._room
        self._residence.room = room if isinstance(room, Room) else Room.measured(runtime.model.device, room)

    def _are_narrow(self) -> bool:
        """Whether every model computes in one thread of a CPU: then several can at once. One that takes all cores
        would wait for the slowest of them at every step."""
        models = [runtime.model for runtime in self._runtimes.values()]
        return all(m.device.type == "cpu" and choose_threads(m.hidden_size).count == 1 for m in models)

    def _train(self, name: str, work: Callable[[Tenant], Any], quick: bool = False) -> Future[Any]:
        """Work on an adapter in training, which is on the device meanwhile."""

        def held() -> Steps:
            tenant = self._tenant(name)
            try:
                pin = yield from self._residence.acquire(tenant.holding)
            except Lost:
                self._forget_tenant(name)
                raise
            try:
                result = work(tenant)
                return (yield from result) if isinstance(result, Generator) else result
            finally:
                pin.release()

        return self._worker.submit(name, held, quick)

    def _tenant(self, name: str) -> Tenant:
        if name not in self._tenants:
            raise NotFound(f"there is no adapter {name!r}; it was never created, or released.")
        return self._tenants[name]

    def _pass(
        self, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str], backward: bool, tenant: Tenant
    ) -> Steps:
        steps = tenant.runtime.trainer.forward_backward(tenant.adapter, data, loss_fn, config, backward)
        output = yield from self._passes.run(steps)
        self._tokens_trained += token_count(data) if backward else 0
        return output

    def _forget_tenant(self, name: str) -> None:
        if tenant := self._tenants.pop(name, None):
            self._residence.remove(tenant.holding)

    def _add_policy(self, name: str, runtime: Runtime, adapter: Adapter, proof: Proof) -> Pin:
        holding, pin = self._residence.add(Frozen(adapter, runtime.sampler))
        self._set_policy(name, Policy(runtime, adapter, holding, proof))
        return pin

    def _set_policy(self, name: str, policy: Policy) -> None:
        self._forget_policy(name)
        self._policies[name] = policy

    def _forget_policy(self, name: str) -> None:
        policy = self._policies.pop(name, None)
        if policy is not None and policy.adapter is not None and policy.holding is not None:
            policy.runtime.sampler.forget(policy.adapter)  # the base model's prefixes serve every other base policy
            self._residence.remove(policy.holding)

    def _keep(self, name: str, copy: Adapter, pin: Pin, folder: str | None, took: dict[str, float]) -> dict[str, float]:
        """On the writer's thread: writes a snapshot, unflushed, as it matters to its client for minutes and flushing
        can take longer than writing."""
        stored: SnapshotFolder | None = None
        if folder is not None:
            try:
                checkpoint.Contents(copy).write(Path(folder), flush=False)
                dtype = copy.parameters()[0].dtype
                stored = SnapshotFolder(Path(folder), tuple(copy.weights), dtype)
            except (OSError, SafetensorError) as error:
                log.warning("the snapshot %s could not be written, and lives in memory alone: %s", folder, error)

        def written() -> None:
            policy = self._policies.get(name)
            if stored is not None and policy is not None and policy.adapter is copy and policy.holding is not None:
                self._residence.keep_copy(policy.holding, stored)
            pin.release()

        self._worker.call_soon(written)
        return took

    def _start(
        self, name: str, request: SampleRequest, on_tokens: OnTokens | None, future: Future[SampleResponse]
    ) -> Steps:
        """Hands a sample to its sampler. Its future stays pending until the end, so it can be cancelled all along."""
        if future.cancelled():
            return
        if name not in self._policies:
            raise NotFound(f"there is no policy {name!r}; it was never made, or released.")
        policy = self._policies[name]
        if policy.proof.verdict.done():
            policy.proof.verdict.result()  # raises why the policy was refused
        grammar: Grammar | None = None
        if request.sampling_params.constrained:
            compiling = self._compiler.submit(policy.runtime.grammars.compiled, request.sampling_params)
            yield compiling
            grammar = compiling.result()
        pin: Pin | None = None
        if policy.holding is not None:
            try:
                pin = yield from self._residence.acquire(policy.holding)
            except Lost:
                self._forget_policy(name)
                raise
        try:
            self._sample(policy, request, on_tokens, future, pin, grammar)
        except Exception:
            if pin is not None:
                pin.release()
            raise

    def _sample(
        self,
        policy: Policy,
        request: SampleRequest,
        on_tokens: OnTokens | None,
        future: Future[SampleResponse],
        pin: Pin | None,
        grammar: Grammar | None,
    ) -> None:
        """The pin is released when the sampler is done with the weights."""
        sampler, proof = policy.runtime.sampler, policy.proof

        def done(answer: SampleResponse | MintError) -> None:
            if pin is not None:
                pin.release()
            _settle_proved(proof, future, answer)

        group = sampler.add(request, policy.adapter, done, on_tokens and _guarded(on_tokens), grammar=grammar)
        if not proof.verdict.done():  # the proof computes with the same weights, and may outlast the sample
            self._hold_until(proof.verdict, policy)
        policy.runtime.verifier.begin(proof, policy.adapter)

        def give_up() -> None:
            sampler.cancel(group)
            if pin is not None:
                pin.release()

        def ended(future: Future[SampleResponse]) -> None:
            if future.cancelled():
                self._worker.call_soon(give_up)

        future.add_done_callback(ended)

    def _hold_until(self, verdict: Future[None], policy: Policy) -> None:
        if policy.holding is not None:
            pin = self._residence.pin(policy.holding)
            verdict.add_done_callback(lambda _: self._worker.call_soon(pin.release))

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
            "process_bytes": process_memory(),
            "policies_proved": sum(r.verifier.proved for r in self._runtimes.values()),
            "policies_refused": sum(r.verifier.refused for r in self._runtimes.values()),
            "policy_logprob_gap_max": max((r.verifier.largest_gap for r in self._runtimes.values()), default=0.0),
            **self._residence.figures(),
        }


def _update(tenant: Tenant, params: AdamParams) -> dict[str, float]:
    tenant.runtime.model.use_threads()
    return tenant.optimizer.step(params)


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
