"""The border between the server and whatever computes.

A server is handed a `Backend`: the engine in a child process, engines on a cluster, or a fake in tests. Every call
returns at once with a `concurrent.futures.Future`; the work of one adapter is done in the order it was submitted, work
of different adapters and samples in any order. A future that fails holds a `MintError`: `BadRequest` when the request
is at fault, `Interrupted` when the engine was lost on the way, `Internal` otherwise. Cancelling the future of a sample
frees its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from mint.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig, SampleRequest, SampleResponse


@dataclass(frozen=True)
class ModelFacts:
    """What there is to know about a loaded base model without touching a tensor."""

    name: str
    folder: str
    """Where weights and tokenizer lie on this machine."""
    architecture: str
    vocab_size: int
    """Rows of the embedding: token ids run from 0 to vocab_size - 1."""
    max_context: int
    parameters: int
    dtype: str
    device: str


@dataclass(frozen=True)
class AdapterFacts:
    """What an adapter trains: the shape of every LoRA matrix pair, by the linear it sits on."""

    trainable_parameters: int
    modules: tuple[str, ...]


OnTokens = Callable[[int, Sequence[int], Sequence[float]], None]
"""Called with (index of the sample, new tokens, their log-probs) while a sample runs."""


class Backend(Protocol):
    @property
    def generation(self) -> int:
        """Counts the lives of the engine: adapters and policies made in an earlier one are gone."""
        ...

    def models(self) -> list[str]:
        """Names that may be asked for; with an open catalogue, the bundled ones and those asked for so far."""
        ...

    def load_model(self, base_model: str) -> Future[ModelFacts]:
        """Loads the base model if need be. `NotFound` says which models there are."""
        ...

    def create_adapter(self, adapter: str, base_model: str, lora: LoraConfig) -> Future[AdapterFacts]: ...

    def forward(
        self, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str]
    ) -> Future[ForwardBackwardOutput]:
        """Losses and log-probs without touching gradients."""
        ...

    def forward_backward(
        self, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str]
    ) -> Future[ForwardBackwardOutput]:
        """The same, adding to the adapter's gradients."""
        ...

    def reverse_kl(
        self,
        adapter: str,
        reference: str | None,
        data: Sequence[Datum],
        reference_data: Sequence[Datum],
        temperature: float,
    ) -> Future[ForwardBackwardOutput]:
        """Adds the gradient of the sum of weight * KL(adapter || reference) over the whole vocabulary, at the positions
        that have a weight; the loss at each of them comes back. `reference` is a saved folder, or None for the base
        model; it reads `reference_data`, which ends with the same weights as `data`."""
        ...

    def optim_step(self, adapter: str, params: AdamParams) -> Future[dict[str, float]]:
        """Applies and clears the gradients; without any, a no-op that says so in its metrics."""
        ...

    def save_adapter(self, adapter: str, folder: str, optimizer: bool) -> Future[int]:
        """Writes a PEFT-readable folder, whole or not at all; the bytes it takes."""
        ...

    def load_adapter(self, adapter: str, folder: str, optimizer: bool) -> Future[None]:
        """Replaces the adapter's weights (and optimizer state, or a fresh one) and drops pending gradients."""
        ...

    def save_state(self, adapter: str, folder: str) -> Future[int]:
        """Writes all that later work depends on: weights, optimizer, pending gradients; the bytes it takes. What is
        written is the state when its turn comes; work submitted later does not wait for the disk."""
        ...

    def load_state(self, adapter: str, folder: str) -> Future[None]:
        """Brings the adapter back to exactly what `save_state` wrote."""
        ...

    def snapshot(self, adapter: str, policy: str, folder: str | None = None) -> Future[dict[str, float]]:
        """Freezes the adapter's present weights as a policy that can be sampled; samples that are asked for meanwhile
        wait for that. With a folder the weights are also written there, from where `load_policy` reads them; if the
        disk is full, the policy lives in memory alone."""
        ...

    def load_policy(self, policy: str, base_model: str, folder: str | None) -> Future[None]:
        """A policy from a saved folder, or the base model itself."""
        ...

    def combine(self, folders: Sequence[str], coefficients: Sequence[float], folder: str) -> Future[LoraConfig]:
        """Writes the sum of saved adapters, each times its coefficient, as an adapter of its own; its shape."""
        ...

    def sample(
        self, policy: str, request: SampleRequest, on_tokens: OnTokens | None = None
    ) -> Future[SampleResponse]: ...

    def release(self, name: str) -> Future[None]:
        """Forgets an adapter or a policy; samples under way finish first. Unknown names are fine."""
        ...

    def stats(self) -> Future[dict[str, float]]:
        """Figures for people: queue lengths, tokens so far, memory."""
        ...

    def close(self) -> None: ...
