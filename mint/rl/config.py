"""The configuration of a training run: one flat class, names and defaults of the Tinker cookbook's `rl.train.Config`.

Everything is checked when the object is made, before anything costs time. What the fields mean for the loop is in
`mint.rl.train`, how they are written to config.json here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

import mint
from mint.checks import check_loss
from mint.errors import BadRequest
from mint.rl.advantages import get_estimator
from mint.rl.aggregation import AGGREGATIONS
from mint.rl.kl_modes import choose_kl
from mint.rl.loggers import LOGGERS
from mint.rl.rollout_limits import TerminationRewardPolicy
from mint.rl.schedules import Schedule, as_schedule
from mint.rl.strategies import RolloutStrategy
from mint.rl.types import RLDatasetBuilder

NOT_LINEAR_IN_ADVANTAGE = frozenset({"dro"})
"""Losses for which scaling an advantage does not scale the loss, and a zero advantage still has a gradient."""


class Evaluator(Protocol):
    """Any measure of a policy, as metrics by name."""

    def __call__(self, sampling_client: mint.SamplingClient) -> Awaitable[dict[str, float]]: ...


@dataclass(frozen=True)
class KLReferenceConfig:
    """The policy that KL is measured against."""

    base_model: str
    load_checkpoint_path: str | None = None
    """None: the base model's own weights."""


@dataclass(frozen=True)
class AsyncConfig:
    """The cookbook's spelling of `max_lag`."""

    max_steps_off_policy: int
    """As `max_lag`; here the cap is kept by pacing, and no group is sampled in vain."""
    groups_per_batch: int
    """Groups a step trains on, whatever the size of the dataset's batches."""


@dataclass(frozen=True)
class StreamMinibatchConfig:
    """Training starts on the first groups of a step while the others are still being sampled."""

    groups_per_batch: int
    """Groups a step trains on, whatever the size of the dataset's batches."""
    num_minibatches: int
    """Calls of `forward_backward` for each optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run of `mint.rl.train`. `mint.rl.algorithms` has the fields of published algorithms by name."""

    learning_rate: float | str | Schedule
    """A number or a schedule, such as "cosine 2e-5 -> 0, warmup 10"; `mint.rl.lr.get_lr` suggests one."""
    dataset_builder: RLDatasetBuilder
    """Makes the training set and, if it has one, the test set."""
    model_name: str
    """Base model."""
    recipe_name: str
    """What this run is, for the server's list of runs."""
    max_tokens: int
    """Most tokens the policy may sample in a turn."""
    log_path: str
    """The run directory; one that holds an unfinished run is resumed."""

    eval_every: int = 20
    """Steps between evaluations, which also happen before the first step and on the final weights; 0: never."""
    save_every: int = 20
    """Steps between checkpoints, of which the last one is always made; 0: only that one."""
    max_steps: int | None = None
    """Steps in all; more than the dataset has batches go through it again. None: once through."""
    budget_tokens: int | None = None
    """Tokens read, sampled and trained, over every resume, after which the run is saved and stopped at the end of the
    step; raise it and run the same again to go on."""
    budget_seconds: float | None = None
    """The same in seconds."""
    seed: int = 0
    """Of the initial adapter and of every rollout: the same seed repeats the run."""
    evaluator_builders: Sequence[Callable[[], Evaluator]] = ()
    """Further evaluators, run beside the test set's."""
    holdout: float = 0.1
    """Share of the training batches kept for evaluation where the dataset builder has no test set; 0: none."""
    load_checkpoint_path: str | None = None
    """Start from these weights, with a fresh optimizer."""
    renderer_name: str | None = None
    """Noted in every checkpoint, for whoever loads it."""
    lora_rank: int = 32
    base_url: str | None = None
    """The server; None: from the environment, else one on this machine."""

    loss_fn: str = "importance_sampling"
    loss_fn_config: Mapping[str, float] | None = None
    """The loss's options: clip range (clip-higher, truncated ratios), beta."""
    advantage: str = "group_mean"
    """Estimator, from `mint.rl.advantages`: group_mean, group_std, rloo, max_rl, pass@4 ..."""
    aggregation: str = "token_sum"
    """What sum or mean of token losses is optimised, from `mint.rl.aggregation`."""
    aggregation_divisor: float | None = None
    """Of the constant aggregation; None: max_tokens."""
    num_substeps: int = 1
    """Optimizer steps a batch is split into."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest norm of the gradient; 0 leaves it alone."""
    send_weights: bool = True
    """Send each datum's mask as `weights`; False for services that refuse keys beyond Tinker's three."""

    kl_penalty_coef: float = 0.0
    kl_discount_factor: float = 0.0
    """Above 0, a token's KL term in the advantage is the discounted sum of its own and all later ones."""
    kl_reference_config: KLReferenceConfig | None = None
    """None: the base model, where the coefficient is above 0. Given with a coefficient of 0, the KL is only logged."""
    kl_mode: str = "advantage"
    """Where the term enters: advantage or loss."""
    kl_estimator: str | None = None
    """None: the mode's own; the loss takes k2 or k3."""
    entropy_coef: float = 0.0
    """Of an entropy bonus in the advantage, which keeps the policy trying other answers; 0.001 to 0.05 is usual."""

    temperature: float | str | Schedule = 1.0
    """Of sampling; a number or a schedule, such as "linear 1.0 -> 0.7"."""
    remove_constant_reward_groups: bool = False
    """Leave out groups whose rewards are all equal; metrics count them all the same."""
    dynamic_sampling: int = 0
    """Most extra rounds of sampling in which groups without signal are replaced by new problems; 0: none."""
    difficulty_band: tuple[float, float] | None = None
    """Choose problems whose recent pass rate lies in here, such as (0.2, 0.8): see `mint.rl.band`. None: in order."""
    mask_truncated: bool = False
    """Do not learn from answers cut off by a token limit; their rewards still count in the group."""
    overlong_buffer: int = 0
    """The last tokens before max_tokens over which a growing length penalty applies; 0: no penalty."""
    overlong_penalty: float = 1.0
    """The penalty at max_tokens."""
    rollout_error_tolerance: bool | RolloutStrategy | None = None
    """What a failed rollout does: None or False raises, True retries three times, or a strategy."""
    termination: TerminationRewardPolicy | None = None
    """What a rollout that ran into a limit earns."""

    max_lag: int = 0
    """Policy versions that sampling may lag behind training; 0 is synchronous. See `mint.rl.sampler`."""
    async_config: AsyncConfig | None = None
    stream_minibatch_config: StreamMinibatchConfig | None = None

    compute_post_kl: bool = False
    """Measure how far each update moved the policy, at the price of scoring the batch once more."""
    loggers: tuple[str, ...] = ("console",)
    """Beside metrics.jsonl: console, tensorboard, wandb, trackio."""
    wandb_project: str | None = None
    """Turns the wandb logger on."""
    wandb_name: str | None = None
    samples_per_step: int = 3
    """Rollouts shown in logs.log after every step: the best, the worst, then random ones."""
    rollout_json_export: bool = True
    """Write every rollout to the run directory; False: only those of `num_groups_to_log` groups."""
    num_groups_to_log: int = 4
    """The best, the worst and random groups, where not all are written."""
    ttl_seconds: int | None = 604800
    """Life of periodic checkpoints on the server; the last one stays."""
    rolling_save_every: int = 0
    """Steps between further checkpoints that serve only to resume, each replacing the one before; 0: none."""
    rolling_ttl_seconds: int = 7200
    doctor_every: int = 5
    """Steps between looks of the doctor (`mint.rl.doctor`): findings go to health.jsonl and the console; 0: never."""
    rollback: bool = False
    """When the doctor finds that the policy broke down, go back to the best checkpoint and on from there with half the
    learning rate, at most three times."""
    enable_trace: bool = False
    """Also write trace_events.jsonl, for Perfetto."""
    span_chart_every: int = 0
    """Steps between charts of where the time went (timing_NNNNNN.html); 0: none."""

    def __post_init__(self) -> None:
        self._check_numbers()
        check_loss(self.loss_fn, self.loss_fn_config)
        get_estimator(self.advantage)
        choose_kl(self.kl_mode, self.kl_estimator, self.kl_discount_factor)
        as_schedule(self.learning_rate), as_schedule(self.temperature)
        self._check_aggregation()
        self._check_pace()
        self._check_band()
        self._check_rollback()
        for name in self.loggers:
            if name not in LOGGERS:
                raise BadRequest(f"loggers names {name!r}; there are {', '.join(LOGGERS)}.")

    # ------------------------------------------------------------------------------------------------ what follows

    @property
    def lag(self) -> int:
        return self.async_config.max_steps_off_policy if self.async_config else self.max_lag

    @property
    def groups_per_batch(self) -> int | None:
        """None: the dataset's batches as they are."""
        given = self.async_config or self.stream_minibatch_config
        return given.groups_per_batch if given else None

    @property
    def linear_in_advantage(self) -> bool:
        return self.loss_fn not in NOT_LINEAR_IN_ADVANTAGE

    @property
    def logger_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.loggers, *(["wandb"] if self.wandb_project else []))))

    def to_json(self) -> dict[str, Any]:
        return {f.name: describe(getattr(self, f.name)) for f in fields(self)}

    # ------------------------------------------------------------------------------------------------ checks

    def _check_numbers(self) -> None:
        least = {"max_tokens": 1, "num_substeps": 1, "lora_rank": 1}
        zero = (
            "eval_every save_every doctor_every rolling_save_every span_chart_every max_lag dynamic_sampling "
            "overlong_buffer overlong_penalty num_groups_to_log samples_per_step kl_penalty_coef kl_discount_factor "
            "entropy_coef holdout seed"
        )
        least |= dict.fromkeys(zero.split(), 0)
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise BadRequest(f"{name} is {getattr(self, name)}; it must be at least {bound}.")
        for name in ("holdout", "kl_discount_factor"):
            if getattr(self, name) >= 1:
                raise BadRequest(f"{name} is {getattr(self, name)}; it must be below 1.")
        if self.max_steps is not None and self.max_steps < 1:
            raise BadRequest(
                f"max_steps is {self.max_steps}; it must be at least 1, or None for once through the data."
            )
        for name in ("budget_tokens", "budget_seconds"):
            if (budget := getattr(self, name)) is not None and not budget > 0:
                raise BadRequest(f"{name} is {budget}; it must be above 0, or None for no budget.")
        if self.overlong_buffer > self.max_tokens:
            raise BadRequest(f"overlong_buffer is {self.overlong_buffer}, more than max_tokens ({self.max_tokens}).")

    def _check_aggregation(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            raise BadRequest(f"aggregation is {self.aggregation!r}; there are {', '.join(AGGREGATIONS)}.")
        if self.aggregation == "token_sum":
            return
        if not self.linear_in_advantage:
            raise BadRequest(f"{self.loss_fn} is not linear in the advantage, so it can only be summed: token_sum.")
        if self.stream_minibatch_config:
            raise BadRequest(
                f"aggregation {self.aggregation!r} needs a whole optimizer step's tokens, which streamed minibatches "
                "do not know in advance; use token_sum, or leave stream_minibatch_config out."
            )

    def _check_band(self) -> None:
        if self.difficulty_band is None:
            return
        if len(self.difficulty_band) != 2 or not 0 <= self.difficulty_band[0] < self.difficulty_band[1] <= 1:
            raise BadRequest(f"difficulty_band is {self.difficulty_band}; it must be (low, high) within 0..1.")
        if self.dynamic_sampling:
            raise BadRequest(
                "difficulty_band chooses problems before they are sampled and dynamic_sampling replaces them after; "
                "turn one of them off."
            )

    def _check_rollback(self) -> None:
        if self.rollback and (self.lag or not self.doctor_every or not self.save_every):
            raise BadRequest(
                f"rollback needs a doctor, checkpoints and a synchronous loop; doctor_every is {self.doctor_every}, "
                f"save_every {self.save_every} and the lag {self.lag}."
            )

    def _check_pace(self) -> None:
        stream, ahead = self.stream_minibatch_config, self.async_config
        if ahead and self.max_lag not in (0, ahead.max_steps_off_policy):
            raise BadRequest(f"max_lag is {self.max_lag} but async_config says {ahead.max_steps_off_policy}; give one.")
        if stream and ahead and stream.groups_per_batch != ahead.groups_per_batch:
            raise BadRequest(
                f"groups_per_batch is {stream.groups_per_batch} in stream_minibatch_config and "
                f"{ahead.groups_per_batch} in async_config; they must agree."
            )
        if stream and self.dynamic_sampling:
            raise BadRequest("dynamic_sampling fills a batch in rounds, so it cannot stream; turn one of them off.")
        if self.groups_per_batch is not None and self.groups_per_batch < 1:
            raise BadRequest(f"groups_per_batch is {self.groups_per_batch}; it must be at least 1.")
        if stream:
            parts = stream.num_minibatches * self.num_substeps
            if stream.num_minibatches < 1 or stream.groups_per_batch < parts:
                raise BadRequest(
                    f"{stream.groups_per_batch} groups cannot fill {self.num_substeps} substeps of "
                    f"{stream.num_minibatches} minibatches each; each minibatch needs at least one group."
                )


LONGEST_IN_CONFIG = 64


def describe(value: Any) -> Any:
    """A value as JSON that is the same from process to process: no addresses, long data by digest."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__qualname__} | {f.name: describe(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        described = {str(key): describe(item) for key, item in value.items()}
        return described if len(described) <= LONGEST_IN_CONFIG else _digest(described, len(described))
    if isinstance(value, list | tuple | set | frozenset):
        items = [describe(item) for item in value]
        return items if len(items) <= LONGEST_IN_CONFIG else _digest(items, len(items))
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return {"type": type(value).__qualname__}


def _digest(value: Any, length: int) -> dict[str, Any]:
    return {"length": length, "sha256": hashlib.sha256(json.dumps(value).encode()).hexdigest()}
