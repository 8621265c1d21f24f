"""Reads a step's tokens through the model in torch: any family, any device. The reference of the native reader."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mint.engine.lora import Adapter, Rows
from mint.engine.model import BaseModel
from mint.engine.sampler.cache import NULL_BLOCK
from mint.engine.sampler.drawing import Drawn, drawn_from, runs_of
from mint.engine.sampler.gathered import Gathered
from mint.engine.sampler.padded import PaddedPasses, Passes
from mint.engine.sampler.paged import BlockStore, Decodes, Fresh, PagedAttention, Span
from mint.engine.sampler.scheduler import Work
from mint.engine.sampler.sequence import Sequence
from mint.engine.sampler.tables import BlockTables


class TorchReader:
    def __init__(self, model: BaseModel, block_size: int) -> None:
        self._model = model
        self.store = BlockStore(model, block_size)
        self._tables = BlockTables()
        self._gathered = Gathered(self.store) if model.device.type == "cpu" else None
        self._passes: Passes = model if model.fused is None else PaddedPasses(model.fused, self.store.row_multiple)

    def decoded(self, works: list[Work]) -> None:
        return None

    def forget(self, adapter: Adapter) -> None:
        """Nothing of an adapter is kept here that does not go with it."""

    def logits(self, hidden_NH: Tensor, rows: Rows) -> Tensor:
        return self._passes.logits(hidden_NH, rows)

    def drawn(self, logits_NV: Tensor, sequences: list[Sequence]) -> list[Drawn]:
        return drawn_from(logits_NV, sequences)

    def hidden(self, works: list[Work]) -> Tensor:
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
            lengths_N = np.array([sequence.computed + 1 for sequence in decoding])
            width = self.store.blocks_for(int(lengths_N.max()))
            table_NM = self._tables.update([sequence.blocks for sequence in decoding], width)[:, :width]
            index_N = None if len(decode_places) == start else self._tensor(decode_places)
            keeps = self._gathered and self._gathered.begin([s.blocks for s in decoding], table_NM, lengths_N)
            read = self._gathered.read if self._gathered and keeps else None
            decodes = Decodes(index_N, self._on_device(table_NM), self._on_device(lengths_N), read)
        if lengths:
            fresh = Fresh(None if len(fresh_places) == start else self._tensor(fresh_places), lengths)
        return PagedAttention(self.store, slots_T, decodes, fresh, spans)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._model.device)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._model.device)
