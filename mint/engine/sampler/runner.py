"""Carries out a plan: packs its tokens, runs the model over them, scores prompts and draws the next tokens.

The only file of the sampler that touches the model. It makes no choices: who runs is the scheduler's, what the tokens
mean the sampler's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.sampler.cache import NULL_BLOCK
from mint.engine.sampler.drawing import Drawn, drawn_from, runs_of
from mint.engine.sampler.gathered import Gathered
from mint.engine.sampler.padded import PaddedPasses, Passes
from mint.engine.sampler.paged import BlockStore, Decodes, Fresh, PagedAttention, Span
from mint.engine.sampler.scheduler import Plan, Work
from mint.engine.sampler.sequence import Sequence

# Numbers in one piece of logits, 64 MiB of float32: the vocabulary-sized work of a step goes through in such pieces.
LOGITS_PIECE = 2**24


class Runner:
    burst = 1

    def __init__(self, model: BaseModel, block_size: int) -> None:
        self._model = model
        self.store = BlockStore(model, block_size)
        self._tables = BlockTables()
        self._gathered = Gathered(self.store) if model.device.type == "cpu" else None
        self._passes: Passes = model if model.fused is None else PaddedPasses(model.fused, self.store.row_multiple)
        self._piece = max(1, LOGITS_PIECE // model.facts.vocab_size)

    def forget(self, adapter: Adapter) -> None:
        """Nothing of an adapter is kept here that does not go with it."""

    @torch.no_grad()
    def run(self, plan: Plan) -> list[Drawn]:
        self.store.grow(plan.blocks)
        self.store.copy(plan.copies)
        self.store.clear(plan.fresh)
        hidden_TH = self._read(plan.work)
        starts = np.cumsum([0, *(work.count for work in plan.work)]).tolist()
        for work, start in zip(plan.work, starts, strict=False):
            self._score(work, hidden_TH[start : start + work.count])
        drawing = [(work, start + work.count - 1) for work, start in zip(plan.work, starts, strict=False) if work.draws]
        return [drawn for piece in self._pieces(drawing) for drawn in self._draw(piece, hidden_TH)]

    def _read(self, works: list[Work]) -> Tensor:
        """The hidden states of every token of the step, its keys and values now in the cache."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        size = self.store.block_size
        for work in works:
            sequence, first = work.sequence, work.sequence.computed
            if work.count == 1:
                tokens.append(sequence.tokens[first])
                positions.append(first)
                slots.append(sequence.blocks[first // size] * size + first % size)
            else:
                span = np.arange(first, first + work.count)
                tokens += sequence.tokens[first : first + work.count]
                positions += span.tolist()
                slots += (np.asarray(sequence.blocks)[span // size] * size + span % size).tolist()
        attend = self._attention(works, self._tensor(slots))
        rows = runs_of((work.sequence.group.adapter, work.count) for work in works)
        return self._passes.hidden(self._tensor(tokens), self._tensor(positions), attend, rows)

    def _attention(self, works: list[Work], slots_T: Tensor) -> PagedAttention:
        decoding: list[Sequence] = []
        decode_places: list[int] = []
        fresh_places: list[int] = []
        lengths: list[int] = []
        spans: list[Span] = []
        start = 0
        for work in works:
            sequence, stop = work.sequence, start + work.count
            if work.count == 1:
                decoding.append(sequence)
                decode_places.append(start)
            elif sequence.computed == 0:
                lengths.append(work.count)
                fresh_places.extend(range(start, stop))
            else:
                count = self.store.blocks_for(sequence.computed + work.count)
                blocks = sequence.blocks[:count] + [NULL_BLOCK] * (count - len(sequence.blocks))
                spans.append(Span(start, stop, sequence.computed, self._tensor(blocks)))
            start = stop
        decodes = fresh = None
        if decoding:
            table_NM, lengths_N = self._tables.update(decoding, self.store)
            index_N = None if len(decode_places) == start else self._tensor(decode_places)
            keeps = self._gathered and self._gathered.begin([s.blocks for s in decoding], table_NM, lengths_N)
            read = self._gathered.read if self._gathered and keeps else None
            decodes = Decodes(index_N, self._on_device(table_NM), self._on_device(lengths_N), read)
        if lengths:
            fresh = Fresh(None if len(fresh_places) == start else self._tensor(fresh_places), lengths)
        return PagedAttention(self.store, slots_T, decodes, fresh, spans)

    def _score(self, work: Work, hidden_CH: Tensor) -> None:
        scores, start = work.sequence.scores, work.sequence.computed
        positions = scores.positions(start, start + work.count) if scores else range(0)
        for first in range(positions.start, positions.stop, self._piece):
            piece = range(first, min(first + self._piece, positions.stop))
            rows_NH = hidden_CH[piece.start - 1 - start : piece.stop - 1 - start]
            assert scores is not None
            scores.write(piece, self._passes.logits(rows_NH, [(work.sequence.group.adapter, len(piece))]))

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
        places = self._tensor([place for _, place in piece])
        rows = runs_of((work.sequence.group.adapter, 1) for work, _ in piece)
        logits_NV = self._passes.logits(hidden_TH.index_select(0, places), rows)
        sequences = [sequence for work, _ in piece for sequence in work.draws]
        if len(sequences) > len(piece):  # the samples of a group draw their first token from the same row
            owners = np.repeat(np.arange(len(piece)), [len(work.draws) for work, _ in piece])
            logits_NV = logits_NV.index_select(0, self._on_device(owners))
        return drawn_from(logits_NV, sequences)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._model.device)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)


class BlockTables:
    """The block tables of the sequences that decode, kept from step to step: most steps change a few cells."""

    def __init__(self) -> None:
        self._blocks: list[list[int]] = []
        self._lasts: list[int] = []
        self._table_NM = np.zeros((0, 0), dtype=np.int64)

    def update(self, sequences: list[Sequence], store: BlockStore) -> tuple[np.ndarray, np.ndarray]:
        """The tables, as wide as the longest, and how many tokens each sequence looks at."""
        lengths_N = np.array([sequence.computed + 1 for sequence in sequences])
        width = store.blocks_for(int(lengths_N.max()))
        blocks = [sequence.blocks for sequence in sequences]
        # While a sequence keeps its list, only the last block is ever new (or replaced by a copy of its own).
        lasts = [held[-1] for held in blocks]
        longest = max(width, *map(len, blocks))
        same = len(blocks) == len(self._blocks) and all(map(operator.is_, blocks, self._blocks))
        if not same or longest > self._table_NM.shape[1]:
            self._table_NM = np.full((len(blocks), 2 * longest), NULL_BLOCK, dtype=np.int64)
            for row, held in enumerate(blocks):
                self._table_NM[row, : len(held)] = held
        elif lasts != self._lasts:
            for row, held in enumerate(blocks):
                self._table_NM[row, len(held) - 1] = held[-1]
        self._blocks, self._lasts = blocks, lasts
        return self._table_NM[:, :width], lengths_N
