"""A whole service in memory over the bigram model of `fakes`, with checkpoints in a folder so that processes may die.

`events` counts every call and every line written; `kill_at` ends the process there, as `kill -9` does.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mint.errors import NotFound
from mint.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from mint.types import ModelInput, SampleResponse, SamplingParams, SaveWeightsForSamplerResponse, SaveWeightsResponse
from tests.rl.fakes import ALPHABET, CharTokenizer, FakeSamplingClient, FakeTrainingClient, Ready

VOCAB = len(ALPHABET)


@dataclass
class Clock:
    """Counts what happens, and ends the process when its time has come."""

    events: int = 0
    kill_at: int | None = None

    def tick(self) -> None:
        self.events += 1
        if self.events == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class ServedSampler(FakeSamplingClient):
    """Takes a random while to answer, so that requests overtake each other."""

    clock: Clock = field(default_factory=Clock)
    jitter: float = 0.0
    version: int = 0

    async def sample_async(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams
    ) -> SampleResponse:
        self.clock.tick()
        await asyncio.sleep(random.random() * self.jitter)
        return await super().sample_async(prompt, num_samples, sampling_params)


@dataclass
class ServedTrainer(FakeTrainingClient):
    service: FakeService = None  # type: ignore[assignment]
    model_id: str = ""

    async def forward_backward_async(self, *args: Any, **kwargs: Any) -> Any:
        self.service.clock.tick()
        return await super().forward_backward_async(*args, **kwargs)

    async def optim_step_async(self, adam_params: Any) -> Any:
        self.service.clock.tick()
        self.service.adam.append(adam_params)
        return await super().optim_step_async(adam_params)

    async def save_weights_and_get_sampling_client_async(self, name: str | None = None) -> ServedSampler:
        self.calls.append("save_weights_and_get_sampling_client")
        return self.service.sampler(self.table, self.steps)

    async def save_state_async(self, name: str, ttl_seconds: int | None = None) -> Ready[SaveWeightsResponse]:
        self.service.clock.tick()
        self.calls.append(f"save_state {name} {ttl_seconds}")
        path = self.service.store(f"tinker://{self.model_id}/weights/{name}", (self.table, self.moments, self.steps))
        return Ready(SaveWeightsResponse(path))

    async def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None = None
    ) -> Ready[SaveWeightsForSamplerResponse]:
        self.service.clock.tick()
        path = self.service.store(f"tinker://{self.model_id}/sampler_weights/{name}", (self.table, None, self.steps))
        return Ready(SaveWeightsForSamplerResponse(path))


class FakeService:
    """What `mint.ServiceClient` offers to the loop."""

    def __init__(self, folder: Path, jitter: float = 0.0, kill_at: int | None = None) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.jitter = jitter
        self.clock = Clock(kill_at=kill_at)
        self.trainers: list[ServedTrainer] = []
        self.samplers: list[ServedSampler] = []
        self.adam: list[Any] = []
        self.deleted: list[str] = []

    @property
    def trainer(self) -> ServedTrainer:
        return self.trainers[-1]

    def sampler(self, table: np.ndarray, version: int = 0) -> ServedSampler:
        self.samplers.append(ServedSampler(table.copy(), clock=self.clock, jitter=self.jitter, version=version))
        return self.samplers[-1]

    def store(self, path: str, content: Any) -> str:
        (self.folder / path.replace("/", "_")).write_bytes(pickle.dumps(content))
        return path

    def load(self, path: str) -> Any:
        file = self.folder / path.replace("/", "_")
        if not file.is_file():
            raise NotFound(f"no checkpoint {path}")
        return pickle.loads(file.read_bytes())

    def _trainer(self, table: np.ndarray) -> ServedTrainer:
        model_id = f"model-{os.getpid()}-{len(self.trainers)}"
        self.trainers.append(ServedTrainer(table.copy(), service=self, model_id=model_id))
        return self.trainers[-1]

    async def create_lora_training_client_async(self, base_model: str, rank: int, seed: int | None) -> ServedTrainer:
        return self._trainer(base_table())

    async def create_training_client_from_state_async(self, path: str) -> ServedTrainer:
        return self._trainer(self.load(path)[0])

    async def create_training_client_from_state_with_optimizer_async(self, path: str) -> ServedTrainer:
        trainer = self._trainer(self.load(path)[0])
        _, trainer.moments, trainer.steps = self.load(path)
        return trainer

    async def create_sampling_client_async(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> ServedSampler:
        return self.sampler(base_table() if model_path is None else self.load(model_path)[0])

    def create_rest_client(self) -> FakeService:
        return self

    async def delete_checkpoint_from_tinker_path_async(self, path: str) -> None:
        self.load(path)
        (self.folder / path.replace("/", "_")).unlink()
        self.deleted.append(path)


def base_table() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(VOCAB, VOCAB)) * 0.1


# --------------------------------------------------------------------------------------------------------------------
# A task the bigram model can learn: after each letter, say a token from the first half of the alphabet


@dataclass
class HalfEnv(Env):
    prompt: str

    async def initial_observation(self) -> tuple[ModelInput, None]:
        return ModelInput.from_ints(CharTokenizer().encode(self.prompt)), None

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        reward = float(np.mean([token < VOCAB // 2 for token in action])) if action else 0.0
        return StepResult(reward, True, ModelInput.empty(), None, metrics={"first_half": reward})


@dataclass(frozen=True)
class HalfBuilder(EnvGroupBuilder):
    prompt: str
    group_size: int = 4
    named: bool = True

    async def make_envs(self) -> Sequence[Env]:
        return [HalfEnv(self.prompt) for _ in range(self.group_size)]

    def logging_tags(self) -> list[str]:
        return ["half"]

    def problem_id(self) -> str | None:
        return self.prompt if self.named else None


@dataclass
class Batches(RLDataset):
    batches: list[list[EnvGroupBuilder]]

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)


@dataclass(frozen=True)
class HalfDataset(RLDatasetBuilder):
    """Batches of distinct prompts; few last letters, which are all a bigram model sees, so that what is learnt carries
    over to the test prompts."""

    num_batches: int = 6
    groups_per_batch: int = 4
    group_size: int = 4
    tests: int = 2
    named: bool = True

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        letters = "abcdefghijklmnopqrstuvwxyz"
        prompts = iter(a + b + c for a in letters for b in letters for c in "abc")
        train = [
            [HalfBuilder(next(prompts), self.group_size, self.named) for _ in range(self.groups_per_batch)]
            for _ in range(self.num_batches)
        ]
        tests = [HalfBuilder(next(prompts), 2, self.named) for _ in range(self.tests)]
        return Batches(train), Batches([tests]) if tests else None
