"""`Engine`: a `Backend` on this machine's device. Says what each call does; when it is done is the worker's business.

Every call becomes a task in the lane of the adapter or policy it names (`lanes.py`), so each one's work is done in
order. Base models and their loading are in `runtimes.py`, what is sampled in `policies.py`; here are the calls, and the
adapters in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from mint.backend import AdapterFacts, ModelFacts, OnTokens
from mint.columns import token_count
from mint.engine import checkpoint
from mint.engine.combining import combine
from mint.engine.device import Device
from mint.engine.holdings import Room
from mint.engine.lanes import Steps
from mint.engine.memory import used_memory
from mint.engine.optimizer import AdamW
from mint.engine.outcomes import after
from mint.engine.passes import Passes
from mint.engine.policies import Policies
from mint.engine.residence import Residence
from mint.engine.runtimes import Runtimes
from mint.engine.tenants import Runtime, Tenant, Trained
from mint.engine.verify import Proof, check_copy
from mint.engine.worker import Worker
from mint.errors import BadRequest, Lost, NotFound
from mint.machine import process_memory
from mint.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig, SampleRequest, SampleResponse


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
        self._runtimes = Runtimes(models, device, lean, self._measure_room)
        # One thread, so that what was written later is there only after what was written before.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mint-writer")
        self._tenants: dict[str, Tenant] = {}
        self._tokens_trained = 0
        self._passes = Passes(self._runtimes.are_narrow)
        self._worker = Worker(lambda: [runtime.sampler for runtime in self._runtimes.loaded.values()])
        self._room = room
        self._residence = Residence(self._worker.call_soon, spill)
        self._policies = Policies(self._worker, self._residence)
        for runtime in self._runtimes.loaded.values():
            self._measure_room(runtime)

    # ----------------------------------------------------------------------------------------------------------------
    # The calls, from any thread

    def models(self) -> list[str]:
        return self._runtimes.names()

    def load_model(self, base_model: str) -> Future[ModelFacts]:
        def work() -> Steps:
            runtime = yield from self._runtimes.get(base_model)
            return runtime.model.facts

        return self._worker.submit(f"model {base_model}", work)

    def create_adapter(self, adapter: str, base_model: str, lora: LoraConfig) -> Future[AdapterFacts]:
        def work() -> Steps:
            if adapter in self._tenants:
                raise BadRequest(f"there is already an adapter {adapter!r}; release it first or choose another name.")
            runtime = yield from self._runtimes.get(base_model)
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

        return after(self._train(adapter, work))

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
            pin = self._policies.add(policy, tenant.runtime, copy, Proof(copy, version, tenant.history))
            took = {"snapshot_seconds": time.perf_counter() - started, "optimizer_steps": float(version)}

            def keep() -> dict[str, float]:
                self._policies.keep(policy, copy, pin, folder)
                return took

            return self._writer.submit(keep)

        taken = self._train(adapter, work, quick=True)

        def wait() -> Steps:
            yield taken

        self._worker.submit(policy, wait, quick=True)  # samples asked for in the meantime come after it
        return after(taken)

    def load_policy(self, policy: str, base_model: str, folder: str | None) -> Future[None]:
        def work() -> Steps:
            runtime = yield from self._runtimes.get(base_model)
            saved = None if folder is None else checkpoint.read(folder)
            if saved is None:
                self._policies.add_base(policy, runtime)
            else:
                adapter = saved.policy(runtime.model.linears, runtime.model.dtype)
                self._policies.add(policy, runtime, adapter, Proof(adapter)).release()

        return self._worker.submit(policy, work)

    def combine(self, folders: Sequence[str], coefficients: Sequence[float], folder: str) -> Future[LoraConfig]:
        def work() -> Steps:
            writing = self._writer.submit(combine, folders, coefficients, folder)
            yield writing
            return writing.result()

        return self._worker.submit(folder, work, quick=True)

    def sample(self, policy: str, request: SampleRequest, on_tokens: OnTokens | None = None) -> Future[SampleResponse]:
        return self._policies.sample(policy, request, on_tokens)

    def release(self, name: str) -> Future[None]:
        def work() -> None:
            self._forget_tenant(name)
            self._policies.forget(name)

        return self._worker.submit(name, work, quick=True)

    def stats(self) -> Future[dict[str, float]]:
        return self._worker.submit("stats", self._stats, quick=True)

    def close(self) -> None:
        self._runtimes.close()
        self._policies.close()
        self._worker.close()
        self._passes.close()
        self._writer.shutdown()
        self._residence.close()

    # ----------------------------------------------------------------------------------------------------------------
    # On the worker

    def _measure_room(self, runtime: Runtime) -> None:
        """After each base model, as it leaves less."""
        room = self._room
        self._residence.room = room if isinstance(room, Room) else Room.measured(runtime.model.device, room)

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
        steps = tenant.runtime.trainer.forward_backward(
            tenant.adapter, data, loss_fn, config, backward, self._worker.others_wait
        )
        output = yield from self._passes.run(steps)
        self._tokens_trained += token_count(data) if backward else 0
        return output

    def _forget_tenant(self, name: str) -> None:
        if tenant := self._tenants.pop(name, None):
            self._residence.remove(tenant.holding)

    def _stats(self) -> dict[str, float]:
        runtimes = list(self._runtimes.loaded.values())
        samplers = [runtime.sampler for runtime in runtimes]
        devices = {runtime.model.device for runtime in runtimes}
        return {
            "models": len(runtimes),
            "adapters": len(self._tenants),
            "policies": len(self._policies.by_name),
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
            "policies_proved": sum(r.verifier.proved for r in runtimes),
            "policies_refused": sum(r.verifier.refused for r in runtimes),
            "policy_logprob_gap_max": max((r.verifier.largest_gap for r in runtimes), default=0.0),
            **self._residence.figures(),
        }


def _update(tenant: Tenant, params: AdamParams) -> dict[str, float]:
    tenant.runtime.model.use_threads()
    return tenant.optimizer.step(params)
