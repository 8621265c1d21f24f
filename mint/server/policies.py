"""What can be sampled, in the backend's memory and out of it.

A policy is a base model, a saved checkpoint or a snapshot. The first two are shared by whoever asks for them, leave
memory when idle and come back from disk on use; a snapshot belongs to one sampling session, and may be sampled as soon
as the backend has been asked for it. When the engine is lost, each policy comes back on its next use.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from mint.backend import Backend, ModelFacts
from mint.doorbell import arriving
from mint.errors import BadRequest
from mint.server.auth import User
from mint.server.catalogue import Catalogue
from mint.server.checkpoints import Checkpoints
from mint.server.store import CheckpointRow
from mint.server.trial import Trial

LOOK_AGAIN = 0.05
"""Seconds between two looks at whether a snapshot has been asked for; nearly always it has been at the first."""


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
    generation: int | None = None
    """Of the engine in which it can be sampled."""
    used: float = field(default_factory=time.monotonic)
    loading: asyncio.Task[None] | None = None
    taken: asyncio.Future[None] | None = None
    """Of a snapshot its run is asked for: done when there is a file of it, or with the reason why there is none."""

    @property
    def is_loading(self) -> bool:
        return self.loading is not None and not self.loading.done()

    @property
    def is_coming(self) -> bool:
        return self.taken is not None and not self.taken.done()


class Policies:
    def __init__(self, backend: Backend, catalogue: Catalogue, checkpoints: Checkpoints, trial: Trial) -> None:
        self._backend = backend
        self._catalogue = catalogue
        self._checkpoints = checkpoints
        self._trial = trial
        self._shared: dict[str, Policy] = {}

    def named(self, base_model: str | None, model_path: str | None, user: User) -> tuple[Policy, str | None]:
        """The policy of a base model or a saved path, and the path as we spell it."""
        if (base_model is None) == (model_path is None):
            raise BadRequest("give either base_model or model_path to sample from, not both and not neither.")
        if model_path is None:
            assert base_model is not None
            self._catalogue.check(base_model)
            return self._share(Policy(f"base:{base_model}", base_model)), None
        row = self._checkpoints.resolve(model_path, user)
        return self._share(self._saved(row)), row.path

    def _saved(self, row: CheckpointRow) -> Policy:
        base_model = self._checkpoints.run_of(row).base_model
        # The row's number, not its path: a name that is deleted and saved again is another policy.
        return Policy(f"checkpoint:{row.id}", base_model, checkpoint=row, run=row.run_id)

    def _share(self, policy: Policy) -> Policy:
        return self._shared.setdefault(policy.name, policy)

    def facts(self, policy: Policy) -> ModelFacts | None:
        """Of its base model, if that has been loaded."""
        return self._catalogue.known(policy.base_model)

    def take(self, policy: Policy) -> Future[dict[str, float]]:
        """Asks the backend for a snapshot; samples that are asked of it from now on wait for that there."""
        assert policy.run is not None
        policy.generation = self._backend.generation
        return self._backend.snapshot(policy.run, policy.name, policy.folder)

    async def ready(self, policy: Policy) -> ModelFacts:
        """When it can be sampled."""
        await self._trial.wait_until_calm()
        while not self._is_there(policy):
            await asyncio.shield(self.start_loading(policy))
        policy.used = time.monotonic()
        return await self._catalogue.load(policy.base_model)

    def start_loading(self, policy: Policy) -> asyncio.Task[None]:
        if policy.loading is None or (policy.loading.done() and not self._is_there(policy)):
            policy.loading = asyncio.get_running_loop().create_task(self._load(policy))
            policy.loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # told to who asks
        return policy.loading

    async def _load(self, policy: Policy) -> None:
        if policy.taken is not None:
            while policy.is_coming and not self._is_there(policy):  # its run asks for it, maybe once more
                await asyncio.wait([policy.taken], timeout=LOOK_AGAIN)
            if self._is_there(policy):
                return
            policy.taken.result()  # raises why there is none
        await self._catalogue.load(policy.base_model)
        folder = policy.folder
        if policy.checkpoint is not None:
            folder = str(await asyncio.to_thread(self._checkpoints.fetch, policy.checkpoint))
        generation = self._backend.generation
        await arriving(self._backend.load_policy(policy.name, policy.base_model, folder))
        policy.generation, policy.used = generation, time.monotonic()

    def _is_there(self, policy: Policy) -> bool:
        return policy.generation == self._backend.generation

    def release(self, policy: Policy) -> None:
        """Out of the backend's memory; it comes back on use."""
        policy.generation, policy.loading = None, None
        self._backend.release(policy.name)

    def sweep(self, idle: float) -> None:
        """What was shared and has not been used since then is forgotten."""
        for policy in [p for p in self._shared.values() if p.used < idle and not p.is_loading]:
            del self._shared[policy.name]
            if policy.generation is not None:
                self.release(policy)
