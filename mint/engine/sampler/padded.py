"""Passes of a `FusedDecoder` over rows that fill whole multiples, run by run (see `mint.engine.steady`).

The caller sees its own tokens only: filled up before the layers, taken out for attention and after them.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.attention import Attend
from mint.engine.fused import FusedDecoder, padded
from mint.engine.lora import Rows


class Passes(Protocol):
    """What a runner needs of a model; `BaseModel` has it too."""

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, rows: Rows) -> Tensor: ...

    def logits(self, hidden_NH: Tensor, rows: Rows) -> Tensor: ...


class PaddedPasses:
    def __init__(self, fused: FusedDecoder, multiple: int) -> None:
        self._fused = fused
        self._multiple = multiple

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, rows: Rows) -> Tensor:
        """The final hidden states of the tokens, after the last norm."""
        rows, layout = self._lay_out(rows, len(tokens_T))
        if layout is None:
            return self._fused.hidden(tokens_T, positions_T, attend, rows)
        out = self._fused.hidden(layout.fill(tokens_T), layout.fill(positions_T), layout.inside(attend), rows)
        return layout.take(out)

    def logits(self, hidden_NH: Tensor, rows: Rows) -> Tensor:
        rows, layout = self._lay_out(rows, len(hidden_NH))
        if layout is None:
            return self._fused.logits(hidden_NH, rows)
        return layout.take(self._fused.logits(layout.fill(hidden_NH), rows))

    def _lay_out(self, rows: Rows, count: int) -> tuple[Rows, _Layout | None]:
        runs, places = padded(rows, self._multiple)
        total = sum(count for _, count in runs)
        return runs, None if total == count else _Layout(
            None if len(runs) == 1 else places, count, total, self._fused.embedding.device
        )


class _Layout:
    """Where `count` tokens stand among `total` rows: at their `places`, or first of all."""

    def __init__(self, places: list[int] | None, count: int, total: int, device: torch.device) -> None:
        self._count, self._total = count, total
        self._index = None if places is None else torch.tensor(places, device=device)

    def fill(self, x_T: Tensor) -> Tensor:
        if self._index is None:
            return F.pad(x_T, [0, 0] * (x_T.dim() - 1) + [0, self._total - self._count])
        return x_T.new_zeros(self._total, *x_T.shape[1:]).index_copy_(0, self._index, x_T)

    def take(self, x_N: Tensor) -> Tensor:
        return x_N[: self._count] if self._index is None else x_N.index_select(0, self._index)

    def inside(self, attend: Attend) -> Attend:
        def attend_to_tokens(
            layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
        ) -> Tensor:
            q, k, v = (self.take(x) for x in (q_THD, k_TKD, v_TKD))
            return self.fill(attend(layer, q, k, v, scale, window))

        return attend_to_tokens
