"""Forward and backward passes over a list of datums, in micro-batches.

A call is a generator that pauses after each micro-batch, so that its caller can let sampling steps in between. It is
all or nothing: gradients reach the adapter only when the whole call went well. The update itself lives in
`mint.engine.optimizer`, the formulas in `mint.engine.losses`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor

from mint.checks import check_loss
from mint.engine.batch import Batch, pack, plan, read_data
from mint.engine.logprobs import target_logprobs
from mint.engine.lora import Adapter
from mint.engine.losses import LOSSES, LossFn, LossTokens, Terms
from mint.engine.memory import used_memory
from mint.engine.model import BaseModel
from mint.engine.token_budget import TokenBudget
from mint.errors import BadRequest
from mint.types import Datum, ForwardBackwardOutput, TensorData


class Trainer:
    """Runs forward and backward passes of adapters over one base model."""

    def __init__(self, model: BaseModel, token_budget: int | None = None, lean: bool = False) -> None:
        """`lean`: keeps one hidden state a layer and token for the backward pass, and computes the rest again: a third
        more work for a fraction of the memory."""
        self._model = model
        self._lean = lean
        self._budget = TokenBudget(model, lean, token_budget)

    def forward_backward(
        self,
        adapter: Adapter | None,
        data: Sequence[Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        backward: bool,
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Pauses after each micro-batch; returns losses and log-probs in the order of `data`. With `backward` the
        gradients are added to the adapter's, at the end and only if everything is finite. Without an adapter, which is
        for scoring alone, it is the base model."""
        options = check_loss(loss_fn, config)
        examples = read_data(data, loss_fn, options, self._model.facts)
        logprobs: dict[int, TensorData] = {}
        gradients: list[Tensor] | None = None
        tally = _Tally()
        pending = plan([example.tokens_N for example in examples], self._budget.tokens)
        while pending:
            indices = pending.pop(0)
            batch = pack(indices, examples, self._model.device)
            passed = self._within_memory(adapter, batch, LOSSES[loss_fn], options, backward, tally)
            if passed is None:
                torch.cuda.empty_cache()
                middle = len(indices) // 2
                pending[:0] = [indices[:middle], indices[middle:]]
                continue
            logprobs_S, found = passed
            logprobs.update(zip(indices, map(TensorData.of, batch.split(logprobs_S)), strict=True))
            if gradients is None:
                gradients = found
            elif found is not None:
                torch._foreach_add_(gradients, found)
            yield
        if gradients is not None and adapter is not None:
            _check_gradients(gradients)
            adapter.accumulate(gradients)
        return ForwardBackwardOutput([{"logprobs": logprobs[i]} for i in range(len(data))], tally.metrics())

    def _within_memory(
        self,
        adapter: Adapter | None,
        batch: Batch,
        loss: LossFn,
        options: Mapping[str, float],
        backward: bool,
        tally: _Tally,
    ) -> tuple[Tensor, list[Tensor] | None] | None:
        """None where a GPU's memory ran out and fewer datums at once may do."""
        try:
            return self._micro_batch(adapter, batch, loss, options, backward, tally)
        except torch.OutOfMemoryError:
            self._budget.halve()
            if len(batch.indices) == 1:
                raise
            return None

    def _micro_batch(
        self,
        adapter: Adapter | None,
        batch: Batch,
        loss: LossFn,
        options: Mapping[str, float],
        backward: bool,
        tally: _Tally,
    ) -> tuple[Tensor, list[Tensor] | None]:
        model = self._model
        model.use_threads()
        before = used_memory(model.device)
        with torch.set_grad_enabled(backward):
            hidden_TM = model.hidden_of_tree(batch.tokens_T, batch.positions_T, batch.tree, adapter, self._lean)
            logprobs_S = target_logprobs(model, adapter, hidden_TM, batch.targets, options.get("temperature", 1.0))
            tokens = batch.loss_tokens(logprobs_S)
            terms = loss(tokens, options)
            loss_C = batch.weights_C * terms.loss
            total = loss_C.sum()
        if backward:
            self._budget.measured(batch.tree.size, used_memory(model.device) - before)
        found: list[Tensor] | None = None
        if backward and adapter is not None:
            # Before anything is looked at: a GPU should know the whole pass before it is waited for.
            found = list(torch.autograd.grad(total, adapter.parameters(), materialize_grads=True, allow_unused=True))
        _check_finite(batch, logprobs_S, tokens, loss_C)
        tally.add(batch, tokens, terms, loss_C)
        return logprobs_S, found


class _Tally:
    """Sums over a call's micro-batches, for its metrics. Means are over the tokens that count (see `Example`)."""

    def __init__(self) -> None:
        self._loss = 0.0
        self._count = 0
        self._sums: dict[str, float] = {}
        self._ratio_range: tuple[float, float] | None = None

    @torch.no_grad()
    def add(self, batch: Batch, tokens: LossTokens, terms: Terms, loss_C: Tensor) -> None:
        self._loss += float(loss_C.sum())
        counted = batch.counted_C
        self._count += int(counted.sum())
        if terms.ratio is None or not bool(counted.any()):
            return
        ratio = terms.ratio[counted]
        low, high = self._ratio_range or (float("inf"), float("-inf"))
        self._ratio_range = min(low, float(ratio.min())), max(high, float(ratio.max()))
        self._add("ratio:mean", ratio)
        self._add("kl_sample_train:mean", (tokens.q - tokens.p)[counted])
        self._add("entropy_sampled:mean", -tokens.p[counted])
        if terms.clipped is not None:
            self._add("clip_fraction:mean", terms.clipped[counted])

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.sum())

    def metrics(self) -> dict[str, float]:
        """Every name ends in how the metrics of several calls combine."""
        metrics = {"loss:sum": self._loss, "tokens:sum": float(self._count)}
        metrics |= {name: total / self._count for name, total in self._sums.items()}
        if self._ratio_range is not None:
            metrics["ratio:min"], metrics["ratio:max"] = self._ratio_range
        return metrics


def _check_finite(batch: Batch, logprobs_S: Tensor, tokens: LossTokens, loss_C: Tensor) -> None:
    if not bool(torch.isfinite(logprobs_S).all()):
        raise BadRequest(
            "the adapter gives log-probs that are not finite, so its weights have diverged; load an earlier checkpoint "
            "and lower the learning rate. Nothing was accumulated."
        )
    bad = (~torch.isfinite(loss_C)).nonzero()
    if len(bad):
        cell = int(bad[0])
        datum, position = batch.locate(cell)
        raise BadRequest(
            f"datum {datum}: the loss is {loss_C[cell].item()} at position {position}, where the recorded log-prob is "
            f"{tokens.q[cell].item():.4g}, the trainer's {tokens.p[cell].item():.4g}, the advantage "
            f"{tokens.advantages[cell].item():.4g} and the weight {batch.weights_C[cell].item():.4g}. "
            "Check the log-probs and the size of advantages and weights. Nothing was accumulated."
        )


def _check_gradients(gradients: Sequence[Tensor]) -> None:
    if not bool(torch.isfinite(torch.cat([gradient.reshape(-1) for gradient in gradients])).all()):
        raise BadRequest(
            "the loss is finite but its gradient is not: advantages, weights or ratios are too large. "
            "Nothing was accumulated."
        )
