"""Carries out a plan: its tokens are read, prompts scored and the next tokens drawn.

It makes no choices: who runs is the scheduler's, what the tokens mean the sampler's, and how the model is called the
reader's (`torch_reader`, `native_reader`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mint.engine.lora import Adapter, Rows
from mint.engine.model import BaseModel
from mint.engine.sampler.drawing import Drawn, runs_of
from mint.engine.sampler.paged import Blocks
from mint.engine.sampler.scheduler import Plan, Work
from mint.engine.sampler.sequence import Sequence

# Numbers in one piece of logits, 64 MiB of float32: the vocabulary-sized work of a step goes through in such pieces.
LOGITS_PIECE = 2**24


class Reader(Protocol):
    """How a step's tokens get through the model."""

    @property
    def store(self) -> Blocks: ...

    def hidden(self, works: list[Work]) -> Tensor:
        """The hidden states of every token of the step, its keys and values now in the cache."""
        ...

    def logits(self, hidden_NH: Tensor, rows: Rows) -> Tensor: ...

    def drawn(self, logits_NV: Tensor, sequences: list[Sequence]) -> list[Drawn]:
        """A token for each sequence from its row, and what else was asked for."""
        ...

    def decoded(self, works: list[Work]) -> list[Drawn] | None:
        """All of a step in which every sequence reads the one token it drew last and draws the next, in one go; None
        where the step has to be taken apart."""
        ...

    def forget(self, adapter: Adapter) -> None: ...


class Runner:
    burst = 1

    def __init__(self, model: BaseModel, reader: Reader) -> None:
        self._device = model.device
        self._reader = reader
        self._piece = max(1, LOGITS_PIECE // model.facts.vocab_size)

    @property
    def store(self) -> Blocks:
        return self._reader.store

    def forget(self, adapter: Adapter) -> None:
        self._reader.forget(adapter)

    @torch.no_grad()
    def run(self, plan: Plan) -> list[Drawn]:
        self.store.grow(plan.blocks)
        self.store.copy(plan.copies)
        self.store.clear(plan.fresh)
        if not plan.work:
            return []
        if plan.decodes and (drawn := self._reader.decoded(plan.work)) is not None:
            return drawn
        hidden_TH = self._reader.hidden(plan.work)
        starts = np.cumsum([0, *(work.count for work in plan.work)]).tolist()
        for work, start in zip(plan.work, starts, strict=False):
            self._score(work, hidden_TH[start : start + work.count])
        drawing = [(work, start + work.count - 1) for work, start in zip(plan.work, starts, strict=False) if work.draws]
        return [drawn for piece in self._pieces(drawing) for drawn in self._draw(piece, hidden_TH)]

    def _score(self, work: Work, hidden_CH: Tensor) -> None:
        scores, start = work.sequence.scores, work.sequence.computed
        positions = scores.positions(start, start + work.count) if scores else range(0)
        for first in range(positions.start, positions.stop, self._piece):
            piece = range(first, min(first + self._piece, positions.stop))
            rows_NH = hidden_CH[piece.start - 1 - start : piece.stop - 1 - start]
            assert scores is not None
            scores.write(piece, self._reader.logits(rows_NH, [(work.sequence.group.adapter, len(piece))]))

    def _pieces(self, drawing: list[tuple[Work, int]]) -> Iterator[list[tuple[Work, int]]]:
        """Runs of work whose draws together fit in one piece of logits, or single ones that do not."""
        piece: list[tuple[Work, int]] = []
        size = 0
        for item in drawing:
            if piece and size + len(item[0].draws) > self._piece:
                yield piece
                piece, size = [], 0
            piece.append(item)
            size += len(item[0].draws)
        if piece:
            yield piece

    def _draw(self, piece: list[tuple[Work, int]], hidden_TH: Tensor) -> list[Drawn]:
        places = [place for _, place in piece]
        rows = runs_of((work.sequence.group.adapter, 1) for work, _ in piece)
        if len(places) < len(hidden_TH):
            hidden_TH = hidden_TH.index_select(0, torch.tensor(places, device=self._device))
        logits_NV = self._reader.logits(hidden_TH, rows)
        sequences = [sequence for work, _ in piece for sequence in work.draws]
        if len(sequences) > len(piece):  # the samples of a group draw their first token from the same row
            owners = np.repeat(np.arange(len(piece)), [len(work.draws) for work, _ in piece])
            logits_NV = logits_NV.index_select(0, torch.from_numpy(owners).to(self._device))
        return self._reader.drawn(logits_NV, sequences)
