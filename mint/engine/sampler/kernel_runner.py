"""Carries out plans in kernels of our own: steps that only decode as recorded graphs, several tokens at a time without
the host between them; steps that read prompts as one pass over packed rows (`prompt_pass`).

Rows of one adapter stand together and fill whole tiles (`mint.engine.kernels.rows`). `runner.Runner` is the reference,
and does what this one does not.

Shapes: N rows, T tokens, A sequences, L lines of the block tables, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mint.engine.fused import FusedDecoder, padded
from mint.engine.kernels import draw as draw_kernel
from mint.engine.kernels.rows import TILE
from mint.engine.lora import Adapter, Rows
from mint.engine.model import BaseModel
from mint.engine.sampler.decode_graphs import Batch, DecodeGraphs, Rest, Size
from mint.engine.sampler.drawing import Drawn, drawn_from, runs_of, uniforms_of
from mint.engine.sampler.kernel_pass import KernelPass
from mint.engine.sampler.paged import BlockStore
from mint.engine.sampler.prompt_pass import PromptPass, block_tables
from mint.engine.sampler.scheduler import Plan, Work
from mint.engine.sampler.sequence import Sequence
from mint.engine.sampler.slots import AdapterSlots, adapts_unembedding
from mint.engine.sampler.transfer import Fetched, to_device

# Tokens a sequence draws before the host looks at them. The next burst has begun by then: both are what a stop may
# cost, and what a request that arrives may wait for.
BURST = 8
# Rows of logits in one piece, by their numbers: half a gigabyte of bfloat16.
LOGITS_PIECE = 2**28
SCORES_PIECE = 2**26


class KernelRunner:
    burst = BURST

    def __init__(self, model: BaseModel, fused: FusedDecoder, block_size: int) -> None:
        self._model = model
        self.store = BlockStore(model, block_size)
        self._slots = AdapterSlots(fused)
        self._pass = KernelPass(fused, self.store, self._slots, model.fixed_rows)
        vocabulary = model.facts.vocab_size
        most = -(-model.facts.max_context // block_size) + 1
        self._prompts = PromptPass(self._pass, self.store, most)
        self._graphs = DecodeGraphs(self._pass, self.store, vocabulary, most)
        self._rows_a_piece = max(1, LOGITS_PIECE // vocabulary)
        self._scores_a_piece = max(1, SCORES_PIECE // vocabulary)
        self._decoding: list[Sequence] = []  # in the graphs' buffers, in the order of their columns...
        self._decoding_rows: Rows = []  # ...and their rows

    def forget(self, adapter: Adapter) -> None:
        self._slots.forget(adapter)

    @torch.no_grad()
    def run(self, plan: Plan) -> Iterable[Drawn]:
        self.store.grow(plan.blocks)
        self.store.copy(plan.copies)  # and nothing to clear: the kernels never load what a sequence did not write
        if not plan.work:
            return []
        return self._decode(plan.work, plan.follows) if plan.decodes else self._read(plan.work)

    # ------------------------------------------------------------------------------------------------------ decoding

    def _decode(self, works: list[Work], follows: bool) -> Iterable[Drawn]:
        sequences = [work.sequence for work in works]
        size = self._graphs.go_on(self._rest(works), self._slots.tables) if follows else self._load(works)
        if not all(sequence.group.plain for sequence in sequences):
            logits_NV = self._graphs.logits(size)
            places = self._places(runs_of((sequence.group.adapter, 1) for sequence in sequences))
            return drawn_from(logits_NV.index_select(0, places).float(), sequences)
        columns = self._columns(sequences)
        steps, ahead = max(work.steps for work in works), works[0].ahead
        uniform = np.zeros((steps, size.sequences), dtype=np.float32)
        uniform[:, columns] = _below_one(uniforms_of(sequences, steps, ahead))
        temperature = np.ones(size.sequences, dtype=np.float32)
        temperature[columns] = [sequence.group.params.temperature for sequence in sequences]
        uniform_SA, temperature_A = self._on_device(uniform), self._on_device(temperature)
        ids_SA = torch.zeros(steps, size.sequences, dtype=torch.int64, device=uniform_SA.device)
        logprobs_SA = torch.zeros_like(uniform_SA)
        for step in range(steps):
            self._graphs.logits(size)
            self._graphs.draw(size, temperature_A, uniform_SA[step], ids_SA[step], logprobs_SA[step])
        return _Burst(works, columns, Fetched(ids_SA, logprobs_SA))

    def _load(self, works: list[Work]) -> Size:
        """Puts the sequences into the graphs' buffers."""
        sequences = self._decoding = [work.sequence for work in works]
        self._decoding_rows, places = padded(runs_of((sequence.group.adapter, 1) for sequence in sequences), TILE)
        batch = Batch(
            place_A=np.array(places),
            slot_of_tile=self._tiles(self._decoding_rows),
            token_A=np.array([sequence.tokens[-1] for sequence in sequences]),
            position_A=np.array([sequence.computed for sequence in sequences]),
            left_A=np.array([work.steps for work in works]),
            table_AM=block_tables([sequence.blocks for sequence in sequences]),
            longest=_longest(works),
            adapted=adapts_unembedding(adapter for adapter, _ in self._decoding_rows),
        )
        return self._graphs.load(batch, self._slots.tables)

    def _rest(self, works: list[Work]) -> Rest:
        """What goes on of those in the buffers. Lines of adapters may have changed meanwhile."""
        left = {work.sequence: work.steps for work in works}
        return Rest(
            slot_of_tile=self._tiles(self._decoding_rows),
            left_A=np.array([left.get(sequence, 0) for sequence in self._decoding]),
            table_AM=block_tables([sequence.blocks for sequence in self._decoding]),
            longest=_longest(works),
        )

    def _columns(self, sequences: list[Sequence]) -> list[int]:
        """Of the draws of these among those in the buffers."""
        if len(sequences) == len(self._decoding):
            return list(range(len(sequences)))
        column = {sequence: n for n, sequence in enumerate(self._decoding)}
        return [column[sequence] for sequence in sequences]

    # ------------------------------------------------------------------------------------------------ reading prompts

    def _read(self, works: list[Work]) -> list[Drawn]:
        rows, places = padded(runs_of((work.sequence.group.adapter, work.count) for work in works), TILE)
        place_T = np.array(places)
        starts = np.cumsum([0, *(work.count for work in works)])[:-1].tolist()
        hidden_NH = self._prompts.hidden(works, place_T, self._tiles(rows), self._slots.tables)
        for work, start in zip(works, starts, strict=True):
            self._score(work, hidden_NH[place_T[start] : place_T[start] + work.count])
        drawing = [
            (work, places[start + work.count - 1]) for work, start in zip(works, starts, strict=True) if work.draws
        ]
        return [
            drawn
            for first in range(0, len(drawing), self._rows_a_piece)
            for drawn in self._draw(drawing[first : first + self._rows_a_piece], hidden_NH)
        ]

    def _score(self, work: Work, hidden_CH: Tensor) -> None:
        scores, start = work.sequence.scores, work.sequence.computed
        positions = scores.positions(start, start + work.count) if scores else range(0)
        for first in range(positions.start, positions.stop, self._scores_a_piece):
            piece = range(first, min(first + self._scores_a_piece, positions.stop))
            rows_NH = hidden_CH[piece.start - 1 - start : piece.stop - 1 - start]
            assert scores is not None
            rows, _ = padded([(work.sequence.group.adapter, len(piece))], TILE)
            scores.write(piece, self._logits(rows_NH, rows)[: len(piece)].float())

    def _draw(self, piece: list[tuple[Work, int]], hidden_NH: Tensor) -> list[Drawn]:
        rows, places = padded(runs_of((work.sequence.group.adapter, 1) for work, _ in piece), TILE)
        index = np.zeros(sum(count for _, count in rows), dtype=np.int64)
        index[places] = [place for _, place in piece]
        logits_NV = self._logits(hidden_NH.index_select(0, self._on_device(index)), rows)
        sequences = [sequence for work, _ in piece for sequence in work.draws]
        # The samples of a group draw their first token from the same row.
        source = np.repeat(places, [len(work.draws) for work, _ in piece]).astype(np.int32)
        source_A = self._on_device(source)
        if not all(sequence.group.plain for sequence in sequences):
            return drawn_from(logits_NV.index_select(0, source_A).float(), sequences)
        uniform_A = self._on_device(_below_one(uniforms_of(sequences, 1))[0])
        temperature = [sequence.group.params.temperature for sequence in sequences]
        temperature_A = self._on_device(np.array(temperature, dtype=np.float32))
        ids_A = torch.zeros(len(sequences), dtype=torch.int64, device=source_A.device)
        logprobs_A = torch.zeros_like(uniform_A)
        draw_kernel.draw(logits_NV, source_A, temperature_A, uniform_A, ids_A, logprobs_A)
        drawn = zip(sequences, ids_A[:, None].tolist(), logprobs_A[:, None].tolist(), strict=True)
        return [Drawn(*each) for each in drawn]

    def _logits(self, hidden_NH: Tensor, rows: Rows) -> Tensor:
        """Of rows in whole tiles, or of the first of them."""
        count = sum(count for _, count in rows)
        if len(hidden_NH) < count:
            hidden_NH = torch.cat((hidden_NH, hidden_NH.new_zeros(count - len(hidden_NH), hidden_NH.shape[1])))
        adapted = adapts_unembedding(adapter for adapter, _ in rows)
        return self._pass.logits(hidden_NH, self._on_device(self._tiles(rows)), adapted)

    # ---------------------------------------------------------------------------------------------------------- both

    def _tiles(self, rows: Rows) -> np.ndarray:
        lines = self._slots.lines(adapter for adapter, _ in rows)
        return np.repeat([lines[adapter] for adapter, _ in rows], [count // TILE for _, count in rows]).astype(np.int32)

    def _places(self, runs: Rows) -> Tensor:
        return self._on_device(np.array(padded(runs, TILE)[1]))

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._model.device)


@dataclass(frozen=True)
class _Burst:
    """Tokens that are being drawn; read them and wait for them."""

    works: list[Work]
    columns: list[int]
    fetched: Fetched
    """Token ids and log-probs, [steps, columns]."""

    def __iter__(self) -> Iterator[Drawn]:
        ids, logprobs = (array.T[self.columns].tolist() for array in self.fetched.arrays())
        for work, ids_S, logprobs_S in zip(self.works, ids, logprobs, strict=True):
            yield Drawn(work.sequence, ids_S[: work.steps], logprobs_S[: work.steps])


def _longest(works: list[Work]) -> int:
    """Tokens of the longest sequence, those it will draw included."""
    return max(work.sequence.computed + work.ahead + work.steps for work in works)


def _below_one(uniform: np.ndarray) -> np.ndarray:
    """In float32, where the largest of them round to 1."""
    return np.minimum(uniform.astype(np.float32), np.nextafter(np.float32(1), np.float32(0)))
