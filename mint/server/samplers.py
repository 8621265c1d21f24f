"""Sampling sessions, each on one policy, and the samples that are asked of them.

A snapshot has its sampling session from the moment its request is safe: it may be sampled before it has been taken, and
lives as long as the client's session. Samples that were under way when the engine was lost are sampled anew.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from mint.backend import Backend, OnTokens
from mint.checks import check_sample
from mint.doorbell import arriving
from mint.errors import BadRequest, Internal, Interrupted, Lost, NotFound
from mint.server.auth import User
from mint.server.catalogue import sizes
from mint.server.futures import Answer, Promise, sample_answer
from mint.server.limits import Limits
from mint.server.meter import Meter
from mint.server.policies import Policies, Policy
from mint.server.queues import Load, Queues
from mint.server.room import is_full
from mint.server.sessions import Session, Sessions
from mint.server.store import Row, RunRow, SamplerRow, Store
from mint.server.tenant_rows import SnapshotRow
from mint.types import SampleRequest, SampleResponse

log = logging.getLogger("mint.server")

CLONE_BLOCK = 10**9
"""Clones of a sampling client number their requests from here, block by block."""
DEATHS = 10
"""A sample during which the engine died this often is given up: it may be what kills the engine."""


@dataclass(eq=False)
class Sampler:
    row: SamplerRow
    policy: Policy
    clones: int = 0
    stored: bool = False
    """Whether there is a row of it in the database."""


class Samplers:
    def __init__(
        self,
        backend: Backend,
        policies: Policies,
        store: Store,
        sessions: Sessions,
        limits: Limits,
        queues: Queues,
        snapshots: Path,
        meter: Meter,
    ) -> None:
        self._backend = backend
        self._policies = policies
        self._store = store
        self._sessions = sessions
        self._limits = limits
        self._queues = queues
        self._snapshots = snapshots
        self._meter = meter
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
        policy, path = self._policies.named(base_model, model_path, user)
        loading = self._policies.start_loading(policy)
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

    def announce(self, run: RunRow, sampler_id: str) -> Sampler:
        """The sampling session of a snapshot that this run is going to take under the same name."""
        assert run.session_id is not None
        policy = self._snapshot(sampler_id, run.base_model, run.id)
        policy.taken = asyncio.get_running_loop().create_future()
        used = self._used_in(run.session_id)
        # There is a row of it already if the server died before the answer was written down.
        known = self._store.get(SamplerRow, sampler_id) if sampler_id in used else None
        used.add(sampler_id)
        row = known or _row(run.session_id, run.owner, sampler_id, policy, None)
        self._live[sampler_id] = Sampler(row, policy, stored=known is not None)
        return self._live[sampler_id]

    def take(self, run: RunRow, sampler_id: str) -> Future[dict[str, float]]:
        """Asks the backend for the snapshot of an announced session."""
        sampler = self._live.get(sampler_id)
        policy = self._snapshot(sampler_id, run.base_model, run.id) if sampler is None else sampler.policy
        return self._policies.take(policy)

    def record(self, run: RunRow, sampler_id: str) -> None:
        """The snapshot has been taken."""
        sampler = self._live.get(sampler_id)
        if sampler is None:  # its session has ended meanwhile
            self._backend.release(sampler_id)
            shutil.rmtree(self.snapshot_folder(sampler_id), ignore_errors=True)
        elif not sampler.stored:
            self._insert(sampler, SnapshotRow(sampler_id=sampler_id, run_id=run.id))

    def settle(self, sampler: Sampler, answer: asyncio.Future[Answer]) -> None:
        """Whoever samples a snapshot that could not be taken hears why."""
        taken = sampler.policy.taken
        assert taken is not None
        if not answer.result().failed:
            taken.set_result(None)
            return
        sampler.policy.generation = None
        taken.set_exception(
            NotFound(f"{sampler.row.id} cannot be sampled: the snapshot failed. {answer.result().error}")
        )
        taken.exception()  # told to who samples

    def snapshot_folder(self, sampler_id: str) -> Path:
        return self._snapshots / quote(sampler_id, safe="")

    def _snapshot(self, sampler_id: str, base_model: str, run: str | None) -> Policy:
        return Policy(sampler_id, base_model, str(self.snapshot_folder(sampler_id)), ephemeral=True, run=run)

    def _add(self, session: Session, sampler_id: str, policy: Policy, path: str | None) -> Sampler:
        sampler = Sampler(_row(session.id, session.row.owner, sampler_id, policy, path), policy)
        self._insert(sampler)
        self._used_in(session.id).add(sampler_id)
        self._live[sampler_id] = sampler
        return sampler

    def _insert(self, sampler: Sampler, *more: Row) -> None:
        try:
            self._store.insert(sampler.row, *more)
            sampler.stored = True
        except OperationalError as error:
            if not (sampler.policy.ephemeral and is_full(error)):
                raise
            log.warning("sampling session %s is in memory only: %s", sampler.row.id, error.orig)

    def find(self, sampler_id: str, user: User) -> Sampler:
        """The sampler, its session seen just now; one of a base model or saved path comes back after a restart."""
        sampler = self._live.get(sampler_id)
        row = sampler.row if sampler else self._store.get(SamplerRow, sampler_id)
        if row is None or row.owner != user.name:
            raise NotFound(f"no sampling session {sampler_id!r} on this server; create a new sampling client.")
        if sampler is None:
            if not row.ephemeral:
                policy, _ = self._policies.named(None if row.model_path else row.base_model, row.model_path, user)
            elif self.snapshot_folder(sampler_id).is_dir():
                taken = self._store.get(SnapshotRow, sampler_id)
                policy = self._snapshot(sampler_id, row.base_model, None if taken is None else taken.run_id)
            else:
                raise NotFound(
                    f"sampling session {sampler_id} was a snapshot, and is gone: the server was restarted without it "
                    "or its session silent for too long. Take a new one, or save with save_weights_for_sampler(name)."
                )
            # Clients that joined before the restart keep their numbers: later ones get numbers nobody had by then.
            sampler = self._live[sampler_id] = Sampler(row, policy, clones=int(time.time()), stored=True)
        self._sessions.touch(row.session_id, user)
        return sampler

    def join(self, sampler: Sampler) -> int:
        """A number for one more client of this sampler; the first client is 0."""
        sampler.clones += 1
        return sampler.clones

    def of_session(self, session_id: str) -> list[str]:
        query = select(SamplerRow).where(SamplerRow.session_id == session_id).order_by(SamplerRow.created)
        return [row.id for row in self._store.all(query)]

    # Samples --------------------------------------------------------------------------------------------------------

    def check(self, policy: Policy, request: SampleRequest) -> None:
        """As much as can be said before the model is there."""
        check_sample(request, *sizes(self._policies.facts(policy)))

    def sample(self, policy: Policy, request: SampleRequest, promise: Promise, leave: Callable[[], None]) -> None:
        """Settles the promise with the samples, and then leaves the queues."""
        promise.settled.add_done_callback(lambda _: leave())
        policy.used = time.monotonic()
        promise.run(self._sample(policy, request, promise.owner))

    async def _sample(self, policy: Policy, request: SampleRequest, owner: str) -> Answer:
        for _ in range(DEATHS):
            facts = await self._policies.ready(policy)
            check_sample(request, *sizes(facts))
            generation = self._backend.generation
            try:
                work = self._backend.sample(policy.name, request)
                return sample_answer(await arriving(self._meter.sampled(owner, policy.run, request, work)))
            except NotFound:
                if policy.taken is not None:
                    await asyncio.shield(policy.taken)  # raises why there is none
                raise
            except Lost:
                policy.generation = None  # it is loaded again
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
        await self._policies.ready(policy)
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
        self._policies.sweep(idle)

    def _sweep_snapshots(self, idle: float) -> None:
        for sampler in [s for s in self._live.values() if s.policy.ephemeral and s.policy.used < idle]:
            # Else it is still to be taken, or lives in the engine's memory alone.
            if not sampler.policy.is_coming and self.snapshot_folder(sampler.row.id).is_dir():
                del self._live[sampler.row.id]
                self._policies.release(sampler.policy)


def _row(session_id: str, owner: str, sampler_id: str, policy: Policy, path: str | None) -> SamplerRow:
    return SamplerRow(
        id=sampler_id,
        session_id=session_id,
        owner=owner,
        base_model=policy.base_model,
        model_path=path,
        ephemeral=policy.ephemeral,
        created=time.time(),
    )
