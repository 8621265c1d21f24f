"""What can be sampled: policies in the backend's memory, and the sampling sessions that pin them.

A policy is a base model, a saved checkpoint or a snapshot. The first two are shared by whoever asks for them, leave
memory when idle and come back from disk on use; a snapshot lives as long as the session that took it. When the engine
is lost, each policy comes back on its next use, and the samples that were under way are sampled anew.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from mint.backend import Backend, ModelFacts, OnTokens
from mint.checks import check_sample
from mint.doorbell import arriving
from mint.errors import BadRequest, Internal, Interrupted, Lost, NotFound
from mint.server.auth import User
from mint.server.catalogue import Catalogue, sizes
from mint.server.checkpoints import Checkpoints
from mint.server.futures import Answer, Promise, sample_answer
from mint.server.limits import Limits
from mint.server.meter import Meter
from mint.server.queues import Load, Queues
from mint.server.room import is_full
from mint.server.sessions import Session, Sessions
from mint.server.store import CheckpointRow, Row, SamplerRow, Store
from mint.server.tenant_rows import SnapshotRow
from mint.server.trial import Trial
from mint.types import SampleRequest, SampleResponse

log = logging.getLogger("mint.server")

CLONE_BLOCK = 10**9
"""Clones of a sampling client number their requests from here, block by block."""
DEATHS = 10
"""A sample during which the engine died this often is given up: it may be what kills the engine."""


@dataclass(eq=False)
class Policy:
    name: str
    base_model: str
    folder: str | None = None
    """Of a snapshot; a checkpoint's files are fetched when they are needed."""
    checkpoint: CheckpointRow | None = None
    ephemeral: bool = False
    run: str | None = None
    """The run whose weights they are; None for a base model."""
    facts: ModelFacts | None = None
    """Set once it can be sampled, in the engine of this `generation`."""
    generation: int = 0
    used: float = field(default_factory=time.monotonic)
    loading: asyncio.Task[None] | None = None

    @property
    def is_loading(self) -> bool:
        return self.loading is not None and not self.loading.done()


@dataclass(eq=False)
class Sampler:
    row: SamplerRow
    policy: Policy
    clones: int = 0


class Samplers:
    def __init__(
        self,
        backend: Backend,
        store: Store,
        catalogue: Catalogue,
        sessions: Sessions,
        checkpoints: Checkpoints,
        limits: Limits,
        queues: Queues,
        snapshots: Path,
        trial: Trial,
        meter: Meter,
    ) -> None:
        self._backend = backend
        self._store = store
        self._catalogue = catalogue
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._limits = limits
        self._queues = queues
        self._snapshots = snapshots
        self._trial = trial
        self._meter = meter
        self._policies: dict[str, Policy] = {}
        self._live: dict[str, Sampler] = {}
        self._used: dict[str, set[str]] = {}
        """Ids of the sampling sessions that a session has had, so that a new one need not be looked for."""
        self._awaited: defaultdict[str, set[asyncio.Future[SampleResponse]]] = defaultdict(set)
        """Samples that a connection waits for, by owner."""

    # Sampling sessions ----------------------------------------------------------------------------------------------

    async def create(self, session: Session, number: int, base_model: str | None, model_path: str | None) -> Sampler:
        """The sampling session of this number, made if need be; refused if its model is soon known not to exist."""
        sampler_id = f"{session.id}:sample:{number}"
        user = User(session.row.owner)
        policy, path = self.policy(base_model, model_path, user)
        loading = self._start_loading(policy)
        await asyncio.wait([loading], timeout=self._limits.load_wait_seconds)
        if loading.done():
            loading.result()
        if self._store.get(SamplerRow, sampler_id) is None:
            return self._add(session, sampler_id, policy, path)
        known = self.find(sampler_id, user)
        if known.policy is not policy:
            raise BadRequest(f"sampling_session_seq_id {number} of session {session.id} was already used for another.")
        return known

    def new_id(self, session: Session, number: int) -> str:
        sampler_id = f"{session.id}:sample:{number}"
        if sampler_id in self._used_in(session.id):
            raise BadRequest(f"sampling_session_seq_id {number} was already used in session {session.id}.")
        return sampler_id

    def _used_in(self, session_id: str) -> set[str]:
        if session_id not in self._used:
            self._used[session_id] = set(self.of_session(session_id))
        return self._used[session_id]

    def add_snapshot(self, session: Session, sampler_id: str, facts: ModelFacts, run: str) -> Sampler:
        """The sampling session of a snapshot the backend took under the same name; it may be taken again."""
        policy = self._snapshot(sampler_id, facts.name, run)
        policy.facts, policy.generation = facts, self._backend.generation
        used = sampler_id in self._used_in(session.id)
        if used and (row := self._store.get(SamplerRow, sampler_id)) is not None:
            self._live[sampler_id] = Sampler(row, policy)
            return self._live[sampler_id]
        return self._add(session, sampler_id, policy, None, SnapshotRow(sampler_id=sampler_id, run_id=run))

    def snapshot_folder(self, sampler_id: str) -> Path:
        return self._snapshots / quote(sampler_id, safe="")

    def _snapshot(self, sampler_id: str, base_model: str, run: str | None) -> Policy:
        return Policy(sampler_id, base_model, str(self.snapshot_folder(sampler_id)), ephemeral=True, run=run)

    def _add(self, session: Session, sampler_id: str, policy: Policy, path: str | None, *more: Row) -> Sampler:
        row = SamplerRow(
            id=sampler_id,
            session_id=session.id,
            owner=session.row.owner,
            base_model=policy.base_model,
            model_path=path,
            ephemeral=policy.ephemeral,
            created=time.time(),
        )
        try:
            self._store.insert(row, *more)
        except OperationalError as error:
            if not (policy.ephemeral and is_full(error)):
                raise
            log.warning("sampling session %s is in memory only: %s", sampler_id, error.orig)
        self._used_in(session.id).add(sampler_id)
        self._live[sampler_id] = Sampler(row, policy)
        return self._live[sampler_id]

    def find(self, sampler_id: str, user: User) -> Sampler:
        """The sampler, its session seen just now; one of a base model or saved path comes back after a restart."""
        sampler = self._live.get(sampler_id)
        row = sampler.row if sampler else self._store.get(SamplerRow, sampler_id)
        if row is None or row.owner != user.name:
            raise NotFound(f"no sampling session {sampler_id!r} on this server; create a new sampling client.")
        if sampler is None:
            if not row.ephemeral:
                policy, _ = self.policy(None if row.model_path else row.base_model, row.model_path, user)
            elif self.snapshot_folder(sampler_id).is_dir():
                taken = self._store.get(SnapshotRow, sampler_id)
                policy = self._snapshot(sampler_id, row.base_model, None if taken is None else taken.run_id)
            else:
                raise NotFound(
                    f"sampling session {sampler_id} was a snapshot, and is gone: the server was restarted without it "
                    "or its session silent for too long. Take a new one, or save with save_weights_for_sampler(name)."
                )
            # Clients that joined before the restart keep their numbers: later ones get numbers nobody had by then.
            sampler = self._live[sampler_id] = Sampler(row, policy, clones=int(time.time()))
        self._sessions.touch(row.session_id, user)
        return sampler

    def join(self, sampler: Sampler) -> int:
        """A number for one more client of this sampler; the first client is 0."""
        sampler.clones += 1
        return sampler.clones

    def of_session(self, session_id: str) -> list[str]:
        query = select(SamplerRow).where(SamplerRow.session_id == session_id).order_by(SamplerRow.created)
        return [row.id for row in self._store.all(query)]

    # Policies -------------------------------------------------------------------------------------------------------

    def policy(self, base_model: str | None, model_path: str | None, user: User) -> tuple[Policy, str | None]:
        """The policy of a base model or a saved path, and the path as we spell it."""
        if (base_model is None) == (model_path is None):
            raise BadRequest("give either base_model or model_path to sample from, not both and not neither.")
        if model_path is None:
            assert base_model is not None
            self._catalogue.check(base_model)
            return self._shared(Policy(f"base:{base_model}", base_model)), None
        row = self._checkpoints.resolve(model_path, user)
        return self._shared(self._saved(row)), row.path

    def _saved(self, row: CheckpointRow) -> Policy:
        base_model = self._checkpoints.run_of(row).base_model
        # The row's number, not its path: a name that is deleted and saved again is another policy.
        return Policy(f"checkpoint:{row.id}", base_model, checkpoint=row, run=row.run_id)

    def _shared(self, policy: Policy) -> Policy:
        return self._policies.setdefault(policy.name, policy)

    def _start_loading(self, policy: Policy) -> asyncio.Task[None]:
        if policy.loading is None or (policy.loading.done() and not self._is_there(policy)):
            policy.loading = asyncio.get_running_loop().create_task(self._load(policy))
            policy.loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # told to who asks
        return policy.loading

    async def _load(self, policy: Policy) -> None:
        facts = await self._catalogue.load(policy.base_model)
        folder = policy.folder
        if policy.checkpoint is not None:
            folder = str(await asyncio.to_thread(self._checkpoints.fetch, policy.checkpoint))
        generation = self._backend.generation
        await arriving(self._backend.load_policy(policy.name, policy.base_model, folder))
        policy.facts, policy.generation, policy.used = facts, generation, time.monotonic()

    def _is_there(self, policy: Policy) -> bool:
        return policy.facts is not None and policy.generation == self._backend.generation

    async def ready(self, policy: Policy) -> ModelFacts:
        await self._trial.wait_until_calm()
        while not self._is_there(policy):
            await asyncio.shield(self._start_loading(policy))
        policy.used = time.monotonic()
        assert policy.facts is not None
        return policy.facts

    # Samples --------------------------------------------------------------------------------------------------------

    def check(self, policy: Policy, request: SampleRequest) -> None:
        """As much as can be said before the model is there."""
        check_sample(request, *sizes(policy.facts))

    def sample(self, policy: Policy, request: SampleRequest, promise: Promise, leave: Callable[[], None]) -> None:
        """Settles the promise with the samples, and then leaves the queues."""
        promise.settled.add_done_callback(lambda _: leave())
        policy.used = time.monotonic()
        promise.run(self._sample(policy, request, promise.owner))

    async def _sample(self, policy: Policy, request: SampleRequest, owner: str) -> Answer:
        for _ in range(DEATHS):
            facts = await self.ready(policy)
            check_sample(request, *sizes(facts))
            generation = self._backend.generation
            try:
                work = self._backend.sample(policy.name, request)
                return sample_answer(await arriving(self._meter.sampled(owner, policy.run, request, work)))
            except Lost:
                policy.facts = None  # it is loaded again
            except Interrupted:
                while self._backend.generation == generation:
                    await asyncio.sleep(0.05)
        raise Internal(
            f"the engine died {DEATHS} times while it worked on this sample, among others; it was given up. The "
            "server's log says how the engine died."
        )

    async def admit(self, policy: Policy, owner: str) -> None:
        """One request, whatever number of samples it asks for; or the limit it meets."""
        await self._meter.admit_sample(owner, policy.run, policy.ephemeral)

    async def begin(
        self, policy: Policy, request: SampleRequest, owner: str, on_tokens: OnTokens | None = None
    ) -> asyncio.Future[SampleResponse]:
        """Starts a sample that its own connection waits for; cancelling what this returns frees its place."""
        await self.ready(policy)
        self.check(policy, request)
        leave = self._queues.enter(Load(None, samples=request.num_samples))
        drawing = self._backend.sample(policy.name, request, on_tokens)
        work = arriving(self._meter.sampled(owner, policy.run, request, drawing))
        work.add_done_callback(lambda _: leave())
        self._awaited[owner].add(work)
        work.add_done_callback(partial(self._arrived, owner))
        return work

    def _arrived(self, owner: str, work: asyncio.Future[SampleResponse]) -> None:
        self._awaited[owner].discard(work)
        if not self._awaited[owner]:
            del self._awaited[owner]

    def owners(self) -> set[str]:
        """Those for whom a connection waits."""
        return set(self._awaited)

    def cancel_of(self, owner: str) -> None:
        for work in list(self._awaited.get(owner, ())):
            work.cancel()

    def hold(self, owner: str, work: asyncio.Future[Any]) -> None:
        """A request that was let in is under way until this is done."""
        self._meter.quotas.hold(owner, work)

    # Ending ---------------------------------------------------------------------------------------------------------

    def end_sessions(self, session_ids: Iterable[str]) -> None:
        ended = set(session_ids)
        for session_id in ended:
            self._used.pop(session_id, None)
        for sampler in [s for s in self._live.values() if s.row.session_id in ended]:
            del self._live[sampler.row.id]
            if sampler.policy.ephemeral:
                self._backend.release(sampler.policy.name)
        for session_id, folder in self.snapshots_on_disk() if ended else ():
            if session_id in ended:
                shutil.rmtree(folder, ignore_errors=True)

    def snapshots_on_disk(self) -> list[tuple[str, Path]]:
        """The session of each snapshot and its folder, those of an earlier server included."""
        return [(unquote(folder.name).partition(":sample:")[0], folder) for folder in self._snapshots.iterdir()]

    def sweep(self) -> None:
        """What was not sampled for long leaves memory; `find` brings it back from where it is written."""
        self._sweep_snapshots(time.monotonic() - self._limits.snapshot_idle_seconds)
        idle = time.monotonic() - self._limits.policy_idle_seconds
        for sampler in [s for s in self._live.values() if not s.policy.ephemeral and s.policy.used < idle]:
            del self._live[sampler.row.id]
        for policy in [p for p in self._policies.values() if p.used < idle and not p.is_loading]:
            del self._policies[policy.name]
            if policy.facts is not None:
                policy.facts, policy.loading = None, None
                self._backend.release(policy.name)

    def _sweep_snapshots(self, idle: float) -> None:
        for sampler in [s for s in self._live.values() if s.policy.ephemeral and s.policy.used < idle]:
            if self.snapshot_folder(sampler.row.id).is_dir():  # else it lives in the engine's memory alone
                del self._live[sampler.row.id]
                sampler.policy.facts, sampler.policy.loading = None, None
                self._backend.release(sampler.policy.name)
