"""Clients that tell what passes through them: everything else they hand on to the client they stand for.

What is done with it is `mint.rl.recorder`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mint
from mint.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
)


@dataclass(frozen=True)
class SampleCall:
    prompt: list[int]
    params: SamplingParams
    num_samples: int
    updates: int
    """Optimizer steps the sampled weights had seen."""
    future: mint.APIFuture[SampleResponse]


@dataclass(frozen=True)
class TrainCall:
    data_D: list[Datum]
    loss_fn: str
    future: mint.APIFuture[ForwardBackwardOutput]


@dataclass(frozen=True)
class OptimCall:
    params: AdamParams
    future: mint.APIFuture[OptimStepResponse]


Note = Callable[[SampleCall | TrainCall | OptimCall], None]


class WatchedSampler:
    """A `SamplingClient` whose samples are noted."""

    def __init__(self, client: mint.SamplingClient, note: Note, updates: int) -> None:
        self._client = client
        self._note = note
        self._updates = updates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def sample(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> mint.APIFuture[SampleResponse]:
        future = self._client.sample(prompt, num_samples, sampling_params, *args, **kwargs)
        self._note(SampleCall(prompt.to_ints(), sampling_params, num_samples, self._updates, future))
        return future

    async def sample_async(
        self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> SampleResponse:
        return await self.sample(prompt, num_samples, sampling_params, *args, **kwargs)


class WatchedTrainer:
    """A `TrainingClient` whose gradients, optimizer steps and new policies are noted."""

    def __init__(self, client: mint.TrainingClient, note: Note) -> None:
        self._client = client
        self._note = note
        self._updates = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> mint.APIFuture[ForwardBackwardOutput]:
        data_D = list(data)
        future = self._client.forward_backward(data_D, loss_fn, loss_fn_config)
        self._note(TrainCall(data_D, loss_fn, future))
        return future

    async def forward_backward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> mint.APIFuture[ForwardBackwardOutput]:
        return self.forward_backward(data, loss_fn, loss_fn_config)

    def optim_step(self, adam_params: AdamParams) -> mint.APIFuture[OptimStepResponse]:
        future = self._client.optim_step(adam_params)
        self._updates += 1
        self._note(OptimCall(adam_params, future))
        return future

    async def optim_step_async(self, adam_params: AdamParams) -> mint.APIFuture[OptimStepResponse]:
        return self.optim_step(adam_params)

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> WatchedSampler:
        updates = self._updates
        return WatchedSampler(self._client.save_weights_and_get_sampling_client(name), self._note, updates)

    async def save_weights_and_get_sampling_client_async(self, name: str | None = None) -> WatchedSampler:
        updates = self._updates
        client = await self._client.save_weights_and_get_sampling_client_async(name)
        return WatchedSampler(client, self._note, updates)

    def create_sampling_client(self, model_path: str) -> WatchedSampler:
        """Of saved weights, which are taken for the newest: which they are is not known here."""
        return WatchedSampler(self._client.create_sampling_client(model_path), self._note, self._updates)

    async def create_sampling_client_async(self, model_path: str) -> WatchedSampler:
        client = await self._client.create_sampling_client_async(model_path)
        return WatchedSampler(client, self._note, self._updates)
