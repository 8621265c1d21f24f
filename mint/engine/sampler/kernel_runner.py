"""Carries out plans in kernels of our own: steps that only decode as recorded graphs, several tokens at a time without
the host between them; steps that read prompts as one pass over packed rows (`prompt_pass`).

Rows of one adapter stand together and fill whole tiles (`mint.engine.kernels.low_rank`). `runner.Runner` is the
reference, and does what this one does not.

Shapes: N rows, T tokens, A sequences, L lines of the block tables, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mint.engine.fused import FusedDecoder, padded
from mint.engine.kernels.draw import Draws, draw
from mint.engine.kernels.filters import Filters
from mint.engine.kernels.low_rank import TILE
from mint.engine.lora import Adapter, Rows
from mint.engine.model import BaseModel
from mint.engine.sampler.decode_graphs import Batch, DecodeGraphs, Rest, Size
from mint.engine.sampler.drawing import Drawn, drawn_from, likeliest, params_of, runs_of, uniforms_of
from mint.engine.sampler.kernel_pass import KernelPass
from mint.engine.sampler.paged import BlockStore
from mint.engine.sampler.prompt_pass import PromptPass, block_tables
from mint.engine.sampler.scheduler import Plan, Work
from mint.engine.sampler.sequence import Sequence
from mint.engine.sampler.slots import AdapterSlots, adapts_unembedding
from mint.engine.sampler.transfer import Fetched, to_device
from mint.types import TopkRow

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
        self._graphs = DecodeGraphs(self._pass, self.store, vocabulary, most, BURST)
        self._rows_a_piece = max(1, LOGITS_PIECE // vocabulary)
        self._scores_a_piece = max(1, SCORES_PIECE // vocabulary)
        self._decoding: list[Sequence] = []  # in the graphs' buffers...
        self._decoding_rows: Rows = []  # ...the runs of rows there...
        self._place_of: dict[Sequence, int] = {}  # ...and each one's own
        # Who drew a token in the last step that read prompts, and the tokens, which the host may not have seen yet.
        self._first_tokens: list[tuple[list[Sequence], Tensor]] = []

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
        places = [self._place_of[sequence] for sequence in sequences]
        steps = max(work.steps for work in works)
        uniform_SN = np.zeros((steps, size.rows), dtype=np.float32)
        uniform_SN[:, places] = _below_one(uniforms_of(sequences, steps, [work.ahead for work in works]))
        ids_SN, logprobs_SN, logits_NV = self._graphs.draw(size, uniform_SN, self._filters(sequences))
        fetched = Fetched(ids_SN, logprobs_SN)
        return _Tokens(
            sequences, [work.steps for work in works], places, fetched, self._likeliest(logits_NV, places, sequences),
            self._steered(logits_NV, places, sequences),
        )  # fmt: skip

    def _load(self, works: list[Work]) -> Size:
        """Puts the sequences into the graphs' buffers."""
        sequences = self._decoding = [work.sequence for work in works]
        self._decoding_rows, places = padded(runs_of((sequence.group.adapter, 1) for sequence in sequences), TILE)
        self._place_of = dict(zip(sequences, places, strict=True))
        batch = Batch(
            place_A=np.array(places),
            slot_of_tile=self._tiles(self._decoding_rows),
            token_A=np.array([sequence.tokens[-1] for sequence in sequences]),
            position_A=np.array([sequence.computed for sequence in sequences]),
            left_A=np.array([work.steps for work in works]),
            table_AM=block_tables([sequence.blocks for sequence in sequences]),
            longest=_longest(works),
            adapted=adapts_unembedding(adapter for adapter, _ in self._decoding_rows),
            joined=self._join(self._decoding_rows),
            draws=params_of(sequences),
        )
        size = self._graphs.load(batch, self._slots.tables)
        if any(work.ahead for work in works):
            self._put_first_tokens()
        return size

    def _put_first_tokens(self) -> None:
        for drawing, ids_1A in self._first_tokens:
            columns = [column for column, sequence in enumerate(drawing) if sequence in self._place_of]
            if columns:  # otherwise those wanted no more than this token
                rows = [self._place_of[drawing[column]] for column in columns]
                self._graphs.put_tokens(np.array(rows), ids_1A[0, self._on_device(np.array(columns))])

    def _rest(self, works: list[Work]) -> Rest:
        """What goes on of those in the buffers. Lines of adapters may have changed meanwhile."""
        left = {work.sequence: work.steps for work in works}
        return Rest(
            slot_of_tile=self._tiles(self._decoding_rows),
            left_A=np.array([left.get(sequence, 0) for sequence in self._decoding]),
            table_AM=block_tables([sequence.blocks for sequence in self._decoding]),
            longest=_longest(works),
            joined=self._join(self._decoding_rows),
        )

    # ------------------------------------------------------------------------------------------------ reading prompts

    def _read(self, works: list[Work]) -> Iterable[Drawn]:
        rows, places = padded(runs_of((work.sequence.group.adapter, work.count) for work in works), TILE)
        place_T = np.array(places)
        starts = np.cumsum([0, *(work.count for work in works)])[:-1].tolist()
        tiles, joined = self._tiles(rows), self._join(rows)
        hidden_NH = self._prompts.hidden(works, place_T, tiles, joined, self._slots.tables)
        for work, start in zip(works, starts, strict=True):
            self._score(work, hidden_NH[place_T[start] : place_T[start] + work.count])
        drawing = [
            (work, places[start + work.count - 1]) for work, start in zip(works, starts, strict=True) if work.draws
        ]
        self._first_tokens = []
        pieces = [drawing[first : first + self._rows_a_piece] for first in range(0, len(drawing), self._rows_a_piece)]
        return chain.from_iterable([self._draw(piece, hidden_NH) for piece in pieces])

    def _score(self, work: Work, hidden_CH: Tensor) -> None:
        scores, start = work.sequence.scores, work.sequence.computed
        positions = scores.positions(start, start + work.count) if scores else range(0)
        for first in range(positions.start, positions.stop, self._scores_a_piece):
            piece = range(first, min(first + self._scores_a_piece, positions.stop))
            rows_NH = hidden_CH[piece.start - 1 - start : piece.stop - 1 - start]
            assert scores is not None
            rows, _ = padded([(work.sequence.group.adapter, len(piece))], TILE)
            scores.write(piece, self._logits(rows_NH, rows)[: len(piece)].float())

    def _draw(self, piece: list[tuple[Work, int]], hidden_NH: Tensor) -> Iterable[Drawn]:
        rows, places = padded(runs_of((work.sequence.group.adapter, 1) for work, _ in piece), TILE)
        index = np.zeros(sum(count for _, count in rows), dtype=np.int64)
        index[places] = [place for _, place in piece]
        logits_NV = self._logits(hidden_NH.index_select(0, self._on_device(index)), rows)
        sequences = [sequence for work, _ in piece for sequence in work.draws]
        # The samples of a group draw their first token from the same row.
        source = np.repeat(places, [len(work.draws) for work, _ in piece]).astype(np.int32)
        source_A = self._on_device(source)
        params = params_of(sequences)
        numbers = (params.temperature_N, params.top_p_N, params.min_p_N)
        temperature_A, top_p_A, min_p_A = (self._on_device(values.astype(np.float32)) for values in numbers)
        filters = None
        if self._filters(sequences):
            filters = Filters(self._on_device(params.top_k_N.astype(np.int32)), top_p_A, min_p_A)
        uniform_1A = self._on_device(_below_one(params.uniform_N)[None])
        ids_1A = torch.zeros_like(uniform_1A, dtype=torch.int64)
        logprobs_1A = torch.zeros_like(uniform_1A)
        turn = torch.zeros(1, dtype=torch.int32, device=source_A.device)
        draw(logits_NV, Draws(source_A, temperature_A, uniform_1A, ids_1A, logprobs_1A, turn, filters))
        self._first_tokens.append((sequences, ids_1A))
        fetched, columns = Fetched(ids_1A, logprobs_1A), list(range(len(sequences)))
        return _Tokens(
            sequences, [1] * len(columns), columns, fetched, self._likeliest(logits_NV, source, sequences),
            self._steered(logits_NV, source, sequences),
        )  # fmt: skip

    def _filters(self, sequences: list[Sequence]) -> bool:
        """Whether a draw goes through the filters, or for the sake of whole logits as if it did; always where no bit
        may depend on who else is there."""
        return self._pass.steady or not all(sequence.group.plain for sequence in sequences)

    def _likeliest(
        self, logits_NV: Tensor, rows: list[int] | np.ndarray, sequences: list[Sequence]
    ) -> list[list[TopkRow]]:
        if not any(sequence.group.request.topk_sample_logprobs for sequence in sequences):
            return [[]] * len(sequences)
        return likeliest(logits_NV.index_select(0, self._on_device(np.array(rows))).float(), sequences)

    def _steered(
        self, logits_NV: Tensor, rows: list[int] | np.ndarray, sequences: list[Sequence]
    ) -> dict[Sequence, Drawn]:
        """Draws of those whose logits are moved first, in torch. What the kernels drew for them is nobody's: they draw
        one token at a time, and the graphs' buffers are loaded anew for the next."""
        wanted = [place for place, sequence in enumerate(sequences) if sequence.group.steered]
        if not wanted:
            return {}
        logits_AV = logits_NV.index_select(0, self._on_device(np.array([rows[place] for place in wanted]))).float()
        return {drawn.sequence: drawn for drawn in drawn_from(logits_AV, [sequences[place] for place in wanted])}

    def _logits(self, hidden_NH: Tensor, rows: Rows) -> Tensor:
        """Of rows in whole tiles, or of the first of them."""
        count = sum(count for _, count in rows)
        if len(hidden_NH) < count:
            hidden_NH = torch.cat((hidden_NH, hidden_NH.new_zeros(count - len(hidden_NH), hidden_NH.shape[1])))
        adapted = adapts_unembedding(adapter for adapter, _ in rows)
        return self._pass.logits(hidden_NH, self._on_device(self._tiles(rows)), adapted, self._join(rows))

    # ---------------------------------------------------------------------------------------------------------- both

    def _tiles(self, rows: Rows) -> np.ndarray:
        lines = self._slots.lines(adapter for adapter, _ in rows)
        return np.repeat([lines[adapter] for adapter, _ in rows], [count // TILE for _, count in rows]).astype(np.int32)

    def _join(self, rows: Rows) -> int | None:
        """As in `PassRows`. Never where no bit may depend on who else is there."""
        return None if self._pass.steady else self._slots.join(adapter for adapter, _ in rows)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._model.device)


@dataclass(frozen=True)
class _Tokens:
    """Tokens that are being drawn; read them and wait for them."""

    sequences: list[Sequence]
    steps: list[int]
    """How many of them are each one's..."""
    columns: list[int]
    """...and where."""
    fetched: Fetched
    """Token ids and log-probs, [steps, columns]."""
    topk: list[list[TopkRow]]
    steered: dict[Sequence, Drawn]
    """Instead of what was fetched, for these."""

    def __iter__(self) -> Iterator[Drawn]:
        ids, logprobs = (array.T[self.columns].tolist() for array in self.fetched.arrays())
        of_each = zip(self.sequences, self.steps, ids, logprobs, self.topk, strict=True)
        for sequence, steps, ids_S, logprobs_S, topk in of_each:
            yield self.steered.get(sequence) or Drawn(sequence, ids_S[:steps], logprobs_S[:steps], topk)


def _longest(works: list[Work]) -> int:
    """Tokens of the longest sequence, those it will draw included."""
    return max(work.sequence.computed + work.steps for work in works)


def _below_one(uniform: np.ndarray) -> np.ndarray:
    """In float32, where the largest of them round to 1."""
    return np.minimum(uniform.astype(np.float32), np.nextafter(np.float32(1), np.float32(0)))
