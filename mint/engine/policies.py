"""Policies by name: frozen weights, and the samples that are asked of them.

A sample leaves its policy's lane as soon as the sampler has it, and is answered when the policy has been proved. While
it runs its weights are pinned to the device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from mint.backend import OnTokens
from mint.engine import checkpoint
from mint.engine.lanes import Steps
from mint.engine.lora import Adapter
from mint.engine.outcomes import settle
from mint.engine.residence import Pin, Residence
from mint.engine.sampler.grammar import Grammar
from mint.engine.tenants import Frozen, Policy, Runtime, SnapshotFolder
from mint.engine.verify import Proof
from mint.engine.worker import Worker
from mint.errors import Lost, MintError, NotFound
from mint.types import SampleRequest, SampleResponse

log = logging.getLogger(__name__)


class Policies:
    """Belongs to the worker; `sample` may be called, and `keep` is called, from another thread."""

    def __init__(self, worker: Worker, residence: Residence) -> None:
        self._worker = worker
        self._residence = residence
        self.by_name: dict[str, Policy] = {}
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mint-grammars")

    def add_base(self, name: str, runtime: Runtime) -> None:
        """The base model itself, without an adapter."""
        self._set(name, Policy(runtime, None, None, Proof(None)))

    def add(self, name: str, runtime: Runtime, adapter: Adapter, proof: Proof) -> Pin:
        holding, pin = self._residence.add(Frozen(adapter, runtime.sampler))
        self._set(name, Policy(runtime, adapter, holding, proof))
        return pin

    def _set(self, name: str, policy: Policy) -> None:
        self.forget(name)
        self.by_name[name] = policy

    def forget(self, name: str) -> None:
        policy = self.by_name.pop(name, None)
        if policy is not None and policy.adapter is not None and policy.holding is not None:
            policy.runtime.sampler.forget(policy.adapter)  # the base model's prefixes serve every other base policy
            self._residence.remove(policy.holding)

    def keep(self, name: str, copy: Adapter, pin: Pin, folder: str | None) -> None:
        """On the writer's thread: writes a snapshot, unflushed, as it matters to its client for minutes and flushing
        can take longer than writing."""
        stored: SnapshotFolder | None = None
        if folder is not None:
            try:
                checkpoint.Contents(copy).write(Path(folder), flush=False)
                stored = SnapshotFolder(Path(folder), copy.paths, copy.values_P.dtype)
            except (OSError, SafetensorError) as error:
                log.warning("the snapshot %s could not be written, and lives in memory alone: %s", folder, error)

        def written() -> None:
            policy = self.by_name.get(name)
            if stored is not None and policy is not None and policy.adapter is copy and policy.holding is not None:
                self._residence.keep_copy(policy.holding, stored)
            pin.release()

        self._worker.call_soon(written)

    def sample(self, name: str, request: SampleRequest, on_tokens: OnTokens | None) -> Future[SampleResponse]:
        """Its future stays pending until the end, so it can be cancelled all along."""
        future: Future[SampleResponse] = Future()

        def refuse(started: Future[None]) -> None:
            if error := started.exception():
                settle(future, error)

        started = self._worker.submit(name, lambda: self._start(name, request, on_tokens, future), quick=True)
        started.add_done_callback(refuse)
        return future

    def _start(
        self, name: str, request: SampleRequest, on_tokens: OnTokens | None, future: Future[SampleResponse]
    ) -> Steps:
        if future.cancelled():
            return
        if name not in self.by_name:
            raise NotFound(f"there is no policy {name!r}; it was never made, or released.")
        policy = self.by_name[name]
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
                self.forget(name)
                raise
        try:
            self._hand_over(policy, request, on_tokens, future, pin, grammar)
        except Exception:
            if pin is not None:
                pin.release()
            raise

    def _hand_over(
        self,
        policy: Policy,
        request: SampleRequest,
        on_tokens: OnTokens | None,
        future: Future[SampleResponse],
        pin: Pin | None,
        grammar: Grammar | None,
    ) -> None:
        """To the sampler. The pin is released when it is done with the weights."""
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

    def close(self) -> None:
        """Before the worker, which fails what is under way."""
        self._compiler.shutdown(wait=False, cancel_futures=True)


def _settle_proved(proof: Proof, future: Future[Any], answer: Any) -> None:
    """Not before it is known that the answer comes from the right weights."""
    if isinstance(answer, BaseException):
        settle(future, answer)
    else:
        proof.verdict.add_done_callback(lambda verdict: settle(future, verdict.exception() or answer))


def _guarded(on_tokens: OnTokens) -> OnTokens:
    """A listener that fails is heard of in the log; the others' tokens go on."""

    def call(index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        try:
            on_tokens(index, tokens, logprobs)
        except Exception:
            log.exception("a listener to sampled tokens failed")

    return call
