"""One step's work for the trainer: gradients in as many calls as come, optimizer steps where there is a gradient.

Calls are sent without waiting for the results of earlier ones, except where the loss has a KL term, which needs the
trainer's log-probs first. Nothing is sent for datums that carry no gradient, and no optimizer step is taken without
any: a zero gradient would still move the weights through Adam's momentum.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import mint
from mint.client.chunks import combine
from mint.rl.aggregation import aggregation_scales, scale_advantages, unmasked_tokens
from mint.rl.config import Config
from mint.rl.data_processing import drop_zero_advantages, wire_datums
from mint.rl.kl_modes import KLTerm
from mint.rl.metrics import compute_kl_sample_train
from mint.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse


@dataclass
class Trained:
    """What was sent, and the trainer's log-probs for it, from before the step it was part of."""

    data_D: list[Datum] = field(default_factory=list)
    metadata_D: list[dict[str, int]] = field(default_factory=list)
    logprobs_D: list[np.ndarray] = field(default_factory=list)
    optim_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class Update:
    def __init__(self, client: mint.TrainingClient, config: Config, kl: KLTerm, adam: AdamParams) -> None:
        self.client = client
        self.config = config
        self.kl = kl
        self.adam = adam
        self.trained = Trained()
        self._gradients: list[mint.APIFuture[ForwardBackwardOutput]] = []
        self._kl_gradients: list[mint.APIFuture[ForwardBackwardOutput]] = []
        self._kl_metrics: list[dict[str, float]] = []
        self._steps: list[mint.APIFuture[OptimStepResponse]] = []
        self._has_gradient = False

    async def accumulate(self, data_D: list[Datum], metadata_D: list[dict[str, int]]) -> None:
        """Adds the gradient of these datums to the optimizer step under way."""
        config = self.config
        divisor = config.aggregation_divisor or config.max_tokens
        scales_D = aggregation_scales(data_D, metadata_D, config.aggregation, divisor)
        data_D = scale_advantages(data_D, scales_D)
        if config.linear_in_advantage and not self.kl.in_loss:
            data_D, metadata_D = drop_zero_advantages(data_D, metadata_D)
        if not data_D:
            return
        sent_D = wire_datums(data_D, config.send_weights)
        future = await self.client.forward_backward_async(sent_D, config.loss_fn, config.loss_fn_config)
        self._gradients.append(future)
        self.trained.data_D += data_D
        self.trained.metadata_D += metadata_D
        self._has_gradient = True
        if self.kl.in_loss:
            kl_D, metrics = await self.kl.loss_datums(data_D, _logprobs(await future), scales_D)
            self._kl_gradients.append(await self.client.forward_backward_async(kl_D, "cross_entropy"))
            self._kl_metrics.append(metrics)

    async def step(self) -> None:
        """An optimizer step, if there is a gradient to take."""
        if self._has_gradient:
            self._steps.append(await self.client.optim_step_async(self.adam))
            self._has_gradient = False

    @property
    def moved(self) -> bool:
        return bool(self._steps)

    async def results(self) -> Trained:
        """Waits for everything sent."""
        outputs = [await future for future in self._gradients]
        for future in self._kl_gradients:
            await future
        steps = [await future for future in self._steps]
        trained = self.trained
        trained.logprobs_D = [logprobs for output in outputs for logprobs in _logprobs(output)]
        trained.optim_steps = len(steps)
        trained.metrics = {
            "train/datums": len(trained.data_D),
            "train/tokens": sum(unmasked_tokens(datum) for datum in trained.data_D),
            "train/optim_steps": len(steps),
            "train/skipped": 0.0 if steps else 1.0,
        }
        if outputs:
            trained.metrics |= {f"train/{name}": value for name, value in combine(outputs).metrics.items()}
            trained.metrics |= compute_kl_sample_train(trained.data_D, trained.logprobs_D)
            trained.metrics |= steps[-1].metrics if steps else {}
        for name in {name for metrics in self._kl_metrics for name in metrics}:
            trained.metrics[name] = float(np.mean([metrics[name] for metrics in self._kl_metrics]))
        return trained


def _logprobs(output: ForwardBackwardOutput) -> list[np.ndarray]:
    return [np.asarray(datum["logprobs"].to_numpy(), dtype=np.float64) for datum in output.loss_fn_outputs]
