"""Forward and backward passes over a list of datums, in micro-batches.

A call is a generator that pauses after each micro-batch, so that its caller can let sampling steps in between. It is
all or nothing: gradients reach the adapter only when the whole call went well. The update itself lives in
`mint.engine.optimizer`, the formulas in `mint.engine.losses`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mint.checks import check_loss
from mint.engine.batch import Batch, Example, Part, pack, read_data
from mint.engine.device import cores
from mint.engine.lora import Adapter
from mint.engine.losses import LOSSES
from mint.engine.model import BaseModel
from mint.engine.pass_graphs import CudaRecording, PassGraphs, Recorder
from mint.engine.planning import plan, plan_evenly, plan_for_cores
from mint.engine.reverse_kl import reverse_kl
from mint.engine.shared_passes import Offer, Running, SharedPasses
from mint.engine.side_by_side import SideBySide
from mint.engine.token_budget import TokenBudget
from mint.engine.training_pass import Figures, Pass, Work
from mint.errors import BadRequest
from mint.types import Datum, ForwardBackwardOutput, TensorData


class Trainer:
    """Runs forward and backward passes of adapters over one base model."""

    def __init__(
        self,
        model: BaseModel,
        token_budget: int | None = None,
        lean: bool = False,
        recorder: Recorder = CudaRecording,
    ) -> None:
        """`lean`: keeps one hidden state a layer and token for the backward pass, and computes the rest again: a third
        more work for a fraction of the memory."""
        self._model = model
        self._lean = lean
        self._budget = TokenBudget(model, lean, token_budget)
        self._run = PassGraphs(model, recorder)
        self._shared = SharedPasses(model, self._run, self._budget)
        self._side_by_side = SideBySide(self._budget.lanes)

    @property
    def recorded_bytes(self) -> int:
        """Memory of a GPU that recorded passes keep for themselves."""
        return self._run.bytes

    def forward_backward(
        self,
        adapter: Adapter | None,
        data: Sequence[Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        backward: bool,
        others_wait: Callable[[], bool] = lambda: False,
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Pauses after each micro-batch; returns losses and log-probs in the order of `data`. With `backward` the
        gradients are added to the adapter's, at the end and only if everything is finite. Without an adapter, which is
        for scoring alone, it is the base model. `others_wait`: whether there is somebody to have a turn at a pause; if
        so, a small micro-batch pauses before its pass as well, for theirs to join it."""
        options = check_loss(loss_fn, config)
        examples = read_data(data, loss_fn, options, self._model.facts)
        work = Work(LOSSES[loss_fn], tuple(options.items()), backward, self._lean)
        outcome = _Outcome()
        if self._budget.lanes > 1:
            yield from self._on_cores(adapter, examples, work, outcome)
        else:
            yield from self._one_by_one(adapter, examples, work, outcome, others_wait)
        if adapter is not None and outcome.gradients_P is not None:
            adapter.accumulate(outcome.gradients_P)
        logprobs = [{"logprobs": outcome.logprobs[i]} for i in range(len(data))]
        return ForwardBackwardOutput(logprobs, outcome.tally.metrics())

    def reverse_kl(
        self,
        adapter: Adapter,
        reference: Adapter | None,
        data: Sequence[Datum],
        reference_data: Sequence[Datum],
        temperature: float,
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """See `mint.engine.reverse_kl`."""
        return reverse_kl(
            self._model, adapter, reference, data, reference_data, temperature, self._budget.tokens, self._lean
        )

    def _on_cores(
        self, adapter: Adapter | None, examples: Sequence[Example], work: Work, outcome: _Outcome
    ) -> Generator[None, None, None]:
        """On a CPU: as many micro-batches at once as there are cores for, or several cores for one. How many is no
        matter to the result: they are cut by the call's data alone, and added in their order."""
        budget = self._budget
        threads = max(1, cores().count // budget.lanes)
        adapters = [] if adapter is None else [adapter]

        def call(indices: list[int], sharing: int) -> Running:
            self._model.use_threads(threads)
            batch = pack([Part(indices, examples)], self._model.trains_filled)
            return Running(batch, self._run(adapters, batch, replace(work, threads=sharing)))

        sequences = [example.tokens_N for example in examples]
        pending = plan_for_cores(sequences, budget.tokens, budget.choices, budget.lanes, budget.pair_cost)
        while pending:
            tokens = sum(len(sequences[index]) for indices in pending for index in indices)
            with cores().lend(max(min(len(pending), budget.lanes) * threads, budget.sharing(tokens))) as lent:
                now = max(1, min(len(pending), budget.lanes, lent // threads))
                found = self._side_by_side([partial(call, indices, lent // now) for indices in pending[:now]])
            for running in found:
                outcome.add(running)
            pending = pending[now:]
            yield

    def _one_by_one(
        self,
        adapter: Adapter | None,
        examples: Sequence[Example],
        work: Work,
        outcome: _Outcome,
        others_wait: Callable[[], bool],
    ) -> Generator[None, None, None]:
        last: Offer | None = None
        pending = self._planned([example.tokens_N for example in examples])
        while pending:
            indices = pending.pop(0)
            offer = self._shared.offer(adapter, Part(indices, examples), work)
            try:
                company = 0
                while others_wait() and self._shared.may_grow(offer, company):
                    company = self._shared.company(offer)
                    yield
                launched = offer.running is not None or self._shared.launch(offer)
            finally:
                self._shared.withdraw(offer)
            if not launched:
                middle = len(indices) // 2
                pending[:0] = [indices[:middle], indices[middle:]]
                continue
            # A GPU has the next micro-batch, of this call or of somebody else's, before the last one is waited for.
            if last is not None and last.running is not None:
                outcome.add(last.running, last.call)
            last = offer
            yield
        if last is not None and last.running is not None:
            outcome.add(last.running, last.call)

    def _planned(self, sequences: Sequence[np.ndarray]) -> list[list[int]]:
        """Micro-batches one after the other: on a GPU of like size, so that few are recorded and none is small."""
        if self._model.device.type == "cuda":
            return plan_evenly(sequences, self._budget.tokens, self._budget.parts)
        return plan(sequences, self._budget.tokens)


class _Outcome:
    """What the micro-batches of a call have given so far."""

    def __init__(self) -> None:
        self.logprobs: dict[int, TensorData] = {}
        self.gradients_P: Tensor | None = None
        self.tally = _Tally()

    def add(self, running: Running, call: int = 0) -> None:
        """What a pass has for this call, which may be one of several."""
        figures, logprobs_S = running.read(call)
        _check_finite(running.batch, running.found, figures, call)
        self.tally.add(figures)
        for datum, logprobs in running.batch.of_call(call, logprobs_S):
            self.logprobs[datum] = TensorData.of(logprobs)
        found_P = running.gradients(call)
        if self.gradients_P is None:
            self.gradients_P = found_P
        elif found_P is not None:
            self.gradients_P += found_P


class _Tally:
    """Sums over a call's micro-batches, for its metrics. Means are over the tokens that count (see `Example`)."""

    def __init__(self) -> None:
        self._loss = 0.0
        self._count = 0
        self._sums: dict[str, float] = {}
        self._ratio_range: tuple[float, float] | None = None

    def add(self, figures: Figures) -> None:
        self._loss += figures.loss
        self._count += int(figures.tokens)
        if figures.ratio is None or not figures.tokens:
            return
        low, high = self._ratio_range or (float("inf"), float("-inf"))
        self._ratio_range = min(low, figures.ratio_min), max(high, figures.ratio_max)
        self._add("ratio:mean", figures.ratio)
        self._add("kl_sample_train:mean", figures.kl)
        self._add("entropy_sampled:mean", figures.entropy)
        if figures.clipped is not None:
            self._add("clip_fraction:mean", figures.clipped)

    def _add(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        """Every name ends in how the metrics of several calls combine."""
        metrics = {"loss:sum": self._loss, "tokens:sum": float(self._count)}
        metrics |= {name: total / self._count for name, total in self._sums.items()}
        if self._ratio_range is not None:
            metrics["ratio:min"], metrics["ratio:max"] = self._ratio_range
        return metrics


def _check_finite(batch: Batch, found: Pass, figures: Figures, call: int) -> None:
    if not figures.finite_logprobs:
        raise BadRequest(
            "the adapter gives log-probs that are not finite, so its weights have diverged; load an earlier checkpoint "
            "and lower the learning rate. Nothing was accumulated."
        )
    if not figures.finite_loss:
        mine_C = batch.call_S.index_select(0, batch.cells_C) == call
        cell = int((~torch.isfinite(found.loss_C.cpu()) & mine_C).nonzero()[0])
        datum, position = batch.locate(cell)
        raise BadRequest(
            f"datum {datum}: the loss is {found.loss_C[cell].item()} at position {position}, where the recorded "
            f"log-prob is {batch.inputs_C['logprobs'][cell].item():.4g}, the trainer's {found.p_C[cell].item():.4g}, "
            f"the advantage {batch.inputs_C['advantages'][cell].item():.4g} and the weight "
            f"{batch.weights_C[cell].item():.4g}. "
            "Check the log-probs and the size of advantages and weights. Nothing was accumulated."
        )
    if not figures.finite_gradients:
        raise BadRequest(
            "the loss is finite but its gradient is not: advantages, weights or ratios are too large. "
            "Nothing was accumulated."
        )
