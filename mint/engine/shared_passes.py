"""Passes of training one after the other, each for the micro-batches of as many tenants as fit into it.

A GPU takes nearly as long for a few hundred tokens as for a few thousand. So a small micro-batch is offered first, and
whoever comes next launches a pass for all offers that go together: one base model, adapters of one shape, the same
loss. What a tenant gets is what it would have got alone, but for the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mint.engine.batch import Batch, Part, pack
from mint.engine.lora import Adapter
from mint.engine.memory import free_memory
from mint.engine.model import BaseModel
from mint.engine.pass_graphs import PassGraphs
from mint.engine.token_budget import TokenBudget
from mint.engine.training_pass import Figures, Pass, Work

# Beyond this rank sums of a tile do not fit into a GPU's registers.
MOST_RANK = 64
# Of adapters and losses, for which it is remembered who came last.
MOST_KINDS = 64
# What a shared pass needs for each number of each adapter (copies, gradients in both precisions), and the share of the
# free memory that all of that may take.
BYTES_PER_VALUE, SHARE_OF_FREE = 16, 0.15


class Running:
    """A pass that a GPU may still be at. What will be read of it is on its way from the start: asked for later, it
    would come after whatever the GPU was given since."""

    def __init__(self, batch: Batch, found: Pass) -> None:
        self.batch, self.found = batch, found
        self._read = [_on_its_way(tensor) for tensor in (found.figures, found.logprobs_S)]
        self._arrived = torch.cuda.Event() if found.figures.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self, call: int) -> tuple[Figures, Tensor]:
        """The figures of one of the calls, and everybody's log-probs."""
        if self._arrived is not None:
            self._arrived.synchronize()
        figures, logprobs_S = self._read
        return Figures(*figures[call].tolist()), logprobs_S

    def gradients(self, call: int) -> Tensor | None:
        """Given away: nobody else has that memory."""
        return self.found.gradients[call] if self.found.gradients else None


def _on_its_way(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class Offer:
    """A micro-batch, and the pass it is in as soon as somebody has launched one."""

    def __init__(self, adapter: Adapter | None, part: Part, work: Work, kind: Hashable | None) -> None:
        self.adapter, self.part, self.work, self.kind = adapter, part, work, kind
        self.tokens = part.tree.size
        self.alone = False
        """The last small one of its kind was of the same adapter: nobody else is there, it seems."""
        self.running: Running | None = None
        self.call = 0
        """Which of those that share the pass this is."""


class SharedPasses:
    def __init__(self, model: BaseModel, run: PassGraphs, budget: TokenBudget) -> None:
        self._model, self._run, self._budget = model, run, budget
        self._waiting: dict[Hashable, list[Offer]] = {}
        """By what those have in common that may share a pass."""
        self._last: WeakValueDictionary[Hashable, Adapter] = WeakValueDictionary()
        """Whose adapter was the last that had a small one of a kind."""

    def offer(self, adapter: Adapter | None, part: Part, work: Work) -> Offer:
        """Until it is withdrawn others may take it into their pass."""
        offer = Offer(adapter, part, work, self._kind(adapter, part, work))
        if adapter is None or offer.kind is None:
            return offer
        self._waiting.setdefault(offer.kind, []).append(offer)
        if self._is_small(offer):
            offer.alone = self._last.get(offer.kind) is adapter
            if len(self._last) > MOST_KINDS:
                self._last.clear()
            self._last[offer.kind] = adapter
        return offer

    def withdraw(self, offer: Offer) -> None:
        alike = self._alike(offer)
        if offer in alike:
            alike.remove(offer)
            if not alike:
                del self._waiting[offer.kind]

    def company(self, offer: Offer) -> int:
        """How many wait for a pass that it may be in, itself included."""
        return len(self._alike(offer))

    def may_grow(self, offer: Offer, company: int) -> bool:
        """Whether it is worth letting others have their turn first: it waits for a pass in which there is room, others
        train such adapters, and somebody has come since it had so much company."""
        if offer.kind is None or offer.running is not None or offer.alone or self.company(offer) <= company:
            return False
        return self._is_small(offer) and sum(other.tokens for other in self._alike(offer)) < self._budget.tokens

    def _is_small(self, offer: Offer) -> bool:
        return 2 * offer.tokens <= self._budget.tokens

    def launch(self, offer: Offer) -> bool:
        """With whoever fits. False where memory ran out and fewer datums at once may do."""
        together = self._together(offer)
        return (len(together) > 1 and self._launched(together)) or self._launched([offer])

    def _alike(self, offer: Offer) -> list[Offer]:
        return self._waiting.get(offer.kind, [])

    def _together(self, offer: Offer) -> list[Offer]:
        others = [other for other in self._alike(offer) if other is not offer]
        if offer.adapter is None or not others:
            return [offer]
        spare = SHARE_OF_FREE * free_memory(self._model.device)
        most = int(spare / (BYTES_PER_VALUE * len(offer.adapter.values_P)))
        found, room = [offer], self._budget.tokens - offer.tokens
        for other in others:
            if len(found) < most and other.tokens <= room:
                found.append(other)
                room -= other.tokens
        return found

    def _kind(self, adapter: Adapter | None, part: Part, work: Work) -> Hashable | None:
        """None for one that shares no pass."""
        if adapter is None or not self._model.trains_shared or adapter.config.rank > MOST_RANK:
            return None
        return self._run.shape(adapter), work, tuple(part.chosen[0].inputs_NK)

    def _launched(self, offers: list[Offer]) -> bool:
        batch = pack([offer.part for offer in offers], self._model.trains_filled)
        adapters = [offer.adapter for offer in offers if offer.adapter is not None]
        if (found := self._within_memory(adapters, batch, offers[0].work)) is None:
            torch.cuda.empty_cache()
            return False
        running = Running(batch, found)
        for call, offer in enumerate(offers):
            offer.running, offer.call = running, call
            self.withdraw(offer)
        return True

    def _within_memory(self, adapters: list[Adapter], batch: Batch, work: Work) -> Pass | None:
        self._model.use_threads()
        try:
            found = self._run(adapters, batch, work)
        except torch.OutOfMemoryError:
            if self._run.give_back():
                torch.cuda.empty_cache()
                return self._within_memory(adapters, batch, work)
            self._budget.halve()
            if len(batch.indices) == 1:
                raise
            return None
        if work.backward:
            self._budget.measured(len(batch.tokens_T), found.kept)
        return found
