"""The loop: sample groups, turn them into datums, train, refresh the policy; log, evaluate and save on the way.

One loop for all: `max_lag=0` is synchronous, more lets sampling run ahead (`mint.rl.sampler` keeps the pace), and
`stream_minibatch_config` starts training on the first groups of a step while the others are still being sampled.
What is computed is chosen from tables by `Config`; here is only the order of things.

    config = Config(learning_rate=1e-5, dataset_builder=..., model_name="mint/tiny", recipe_name="my_task",
                    max_tokens=64, log_path="runs/my_task")
    train(config)                # or, inside a running event loop:  await main(config)

The same call on the same `log_path` resumes an unfinished run (`mint.rl.resume`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np

import mint
from mint.errors import BudgetReached
from mint.rl.adviser import advise
from mint.rl.band import BandDataset
from mint.rl.budget import Spent
from mint.rl.config import AsyncConfig, Config, KLReferenceConfig, StreamMinibatchConfig
from mint.rl.doctor import Finding, Watch
from mint.rl.evaluate import HoldoutGuard, RLTestSetEvaluator
from mint.rl.hashing import stable_hash
from mint.rl.interrupt import Interrupted, StopRequest
from mint.rl.kl_modes import KLTerm
from mint.rl.ledger import Ledger
from mint.rl.loggers import MetricsLogger, RunInfo, make_logger
from mint.rl.metrics import compute_post_kl
from mint.rl.prepare import prepare
from mint.rl.recheck import source_of
from mint.rl.resume import Checkpoints, find_start, read_pending
from mint.rl.rollback import BrokeDown, breakdown, go_back, rollbacks
from mint.rl.rollout_log import TextOf, best_worst_random, choose_groups, rollout_records, shown
from mint.rl.rundir import CheckpointRecord, RunDir
from mint.rl.sampler import BatchSampler, SampledGroup, StepBatch
from mint.rl.schedules import as_schedule
from mint.rl.setup import build_datasets, build_evaluators, kl_term, log_to_file, open_trainer, record_code
from mint.rl.step_metrics import group_metrics, mean_of_each, why_no_signal
from mint.rl.timing import Timer
from mint.rl.update import Trained, Update
from mint.types import AdamParams

__all__ = ["AsyncConfig", "Config", "KLReferenceConfig", "StreamMinibatchConfig", "main", "train"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


def train(config: Config, service: mint.ServiceClient | None = None) -> RunDir:
    """Runs to the end, or from where it stopped to the end. The run directory says how it went."""
    return asyncio.run(main(config, service))


async def main(config: Config, service: mint.ServiceClient | None = None) -> RunDir:
    """`train` for those who have an event loop. A service given is used and left open."""
    run_dir = RunDir(config.log_path)
    start = find_start(run_dir, config)
    with log_to_file(run_dir):
        own = None
        if service is None:
            service = own = mint.ServiceClient(config.base_url, user_metadata={"recipe_name": config.recipe_name})
        try:
            while True:
                try:
                    await _run(config, run_dir, service, start)
                    break
                except BrokeDown as broke:
                    logger.warning("%s", broke)
                    start = go_back(run_dir, broke)
        finally:
            if own is not None:
                await own.close()
    return run_dir


async def _run(config: Config, run_dir: RunDir, service: mint.ServiceClient, start: CheckpointRecord | None) -> None:
    dataset, test_set = await build_datasets(config)
    num_steps = config.max_steps or len(dataset)
    first_step = start.batch if start else 0
    if start and first_step >= num_steps:
        logger.warning("%s is finished: %d steps. Raise max_steps to go on from there.", run_dir.path, first_step)
        return
    run_dir.rewind(first_step)
    run_dir.write_config(config.to_json() | {"dataset_source": source_of(config.dataset_builder)})
    logger.info("Configuration: %s", config.to_json())
    record_code(run_dir)
    ledger = Ledger(run_dir, first_step)
    if config.difficulty_band is not None:
        dataset = BandDataset(dataset, ledger, config.difficulty_band, num_steps, config.groups_per_batch)
    client = await open_trainer(config, service, start)
    info = RunInfo(run_dir, num_steps, config.to_json(), config.wandb_project, config.wandb_name)
    sampler = BatchSampler(
        config,
        dataset,
        num_steps,
        first_step,
        start.position if start else (0, 0),
        read_pending(run_dir, start, dataset) if start else (),
    )
    loop = _Loop(
        config=config,
        run_dir=run_dir,
        client=client,
        num_steps=num_steps,
        sampler=sampler,
        ledger=ledger,
        kl=await kl_term(config, service),
        evaluators=build_evaluators(config, test_set),
        checkpoints=Checkpoints(config, run_dir, service, client),
        metrics_logger=make_logger(config.logger_names, info),
        watch=Watch(run_dir, config.to_json(), config.doctor_every),
        text=TextOf(await asyncio.to_thread(client.get_tokenizer)),
    )
    with StopRequest() as stop:
        try:
            await loop.run(first_step, stop)
        except Exception:
            await loop.checkpoints.settle()
            raise
        finally:
            loop.checkpoints.abandon()
            await sampler.close()
            loop.metrics_logger.close()


@dataclass
class _Step:
    """What is known of a step by the time it is logged."""

    batch: StepBatch
    sampled: list[SampledGroup] = field(default_factory=list)
    advantages: dict[int, np.ndarray] = field(default_factory=dict)
    ledger_metrics: dict[str, float] = field(default_factory=dict)
    prepared_metrics: list[dict[str, float]] = field(default_factory=list)
    trained: Trained = field(default_factory=Trained)


@dataclass
class _Loop:
    config: Config
    run_dir: RunDir
    client: mint.TrainingClient
    num_steps: int
    sampler: BatchSampler
    ledger: Ledger
    kl: KLTerm
    evaluators: list[RLTestSetEvaluator]
    checkpoints: Checkpoints
    metrics_logger: MetricsLogger
    watch: Watch
    text: TextOf

    def __post_init__(self) -> None:
        config = self.config
        self.learning_rate = as_schedule(config.learning_rate)
        self.slowed = 0.5 ** rollbacks(self.run_dir)
        self.holdout = HoldoutGuard(self.run_dir)
        self.spent = Spent.in_all(self.run_dir.metrics())
        self.timer = Timer(self.run_dir, config.enable_trace, config.span_chart_every)
        self.extra_evaluators = [build() for build in config.evaluator_builders]

    async def run(self, first_step: int, stop: StopRequest) -> None:
        policy = await self.client.save_weights_and_get_sampling_client_async()
        self.sampler.advance(first_step, policy)
        if self.config.rollback and not self.run_dir.checkpoints():
            await self.checkpoints.save(0, self.sampler)  # a run may break down before its first checkpoint
        for number in range(first_step, self.num_steps):
            await self._stop_at_budget(number)
            evaluation = asyncio.create_task(self._evaluate_if_due(number, policy))
            try:
                step, update = await self._train(self.sampler.batch(number), stop)
            except BaseException as error:
                evaluation.cancel()
                if not isinstance(error, Interrupted):
                    raise
                await self._stop_at(number)
                raise KeyboardInterrupt from None
            step.ledger_metrics = self.ledger.record(number, step.sampled)  # before the next batch is chosen
            if update.moved:
                with self.timer.span("refresh"):
                    policy = await self.client.save_weights_and_get_sampling_client_async()
            self.sampler.advance(number + 1, policy)
            with self.timer.span("train"):
                step.trained = await update.results()
            await self._log(number, step, policy, await evaluation)
            self.sampler.forget(number + 1)
            if number + 1 < self.num_steps:
                await self.checkpoints.save_if_due(number + 1, self.sampler)
        if self.config.eval_every:
            metrics = await self._evaluate(self.num_steps, policy)
            self._write(self.num_steps, {"progress/done_frac": 1.0} | metrics)
        self._tell(self.watch.look(self.num_steps))
        await self.checkpoints.save(self.num_steps, self.sampler, final=True)
        await self.checkpoints.finish()

    # ------------------------------------------------------------------------------------------------ training

    async def _train(self, batch: StepBatch, stop: StopRequest) -> tuple[_Step, Update]:
        """Sends everything for this step without waiting for answers. It may be stopped until its first gradient."""
        config, step = self.config, _Step(batch)
        update = Update(self.client, config, self.kl, self._adam(batch.step))
        stream = config.stream_minibatch_config
        for substep in split_evenly(batch.parts, config.num_substeps if stream else 1):
            for parts in split_evenly(substep, stream.num_minibatches if stream else 1):
                with self.timer.span("sample"):
                    if not step.sampled:
                        await stop.unless_asked(asyncio.wait(parts))
                    sampled = [group for part in await asyncio.gather(*parts) for group in part]
                step.sampled += sampled
                with self.timer.span("prepare"):
                    prepared = await prepare(sampled, config, self.kl)
                step.advantages |= prepared.advantages
                step.prepared_metrics.append(prepared.metrics)
                data = list(zip(prepared.data_D, prepared.metadata_D, strict=True))
                for chunk in split_evenly(data, 1 if stream else config.num_substeps):
                    await update.accumulate([datum for datum, _ in chunk], [meta for _, meta in chunk])
                    if not stream:
                        await update.step()
            await update.step()
        return step, update

    def _adam(self, step: int) -> AdamParams:
        config = self.config
        return AdamParams(
            learning_rate=self._learning_rate(step),
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.grad_clip_norm,
        )

    def _learning_rate(self, step: int) -> float:
        return self.slowed * self.learning_rate(step, self.num_steps)

    async def _stop_at(self, version: int) -> None:
        if version > 0:
            await self.checkpoints.save(version, self.sampler)
            await self.checkpoints.finish()
        logger.warning(
            "Stopped after %d of %d steps. To go on, run the same again with log_path=%r.",
            version,
            self.num_steps,
            self.config.log_path,
        )

    async def _stop_at_budget(self, version: int) -> None:
        if (told := self.spent.reached(self.config)) is None:
            return
        await self._stop_at(version)
        raise BudgetReached(
            f"The run in {self.config.log_path} has used {told}; it was stopped and saved after {version} of "
            f"{self.num_steps} steps. To go on, run the same again with a larger budget."
        )

    # ------------------------------------------------------------------------------------------------ evaluation

    async def _evaluate_if_due(self, version: int, policy: mint.SamplingClient) -> dict[str, float]:
        due = self.config.eval_every and version % self.config.eval_every == 0
        return await self._evaluate(version, policy) if due else {}

    async def _evaluate(self, version: int, policy: mint.SamplingClient) -> dict[str, float]:
        with self.timer.span("evaluate"):
            results = await asyncio.gather(*(evaluator.evaluate(policy, version) for evaluator in self.evaluators))
            metrics = await asyncio.gather(*(evaluator(policy) for evaluator in self.extra_evaluators))
        merged = {name: value for one in metrics for name, value in one.items()}
        for evaluator, (own_metrics, groups) in zip(self.evaluators, results, strict=True):
            merged |= own_metrics
            self.holdout.hold_out(groups)
            records = rollout_records(version, 1.0, self._to_write(groups, version), self.text)
            self.run_dir.write_rollouts(version, records, evaluator.name)
            self.watch.add_evaluation(version, evaluator.name, records)
        return merged

    # ------------------------------------------------------------------------------------------------ logging

    async def _log(self, number: int, step: _Step, policy: mint.SamplingClient, evaluation: dict[str, float]) -> None:
        batch, config = step.batch, self.config
        metrics: dict[str, float] = {
            "progress/batch": number,
            "progress/done_frac": (number + 1) / self.num_steps,
            "optim/lr": self._learning_rate(number),
            "sampling/temperature": batch.temperature,
            "training_client/step": number + 1,
        }
        metrics |= group_metrics(number, step.sampled)
        metrics |= self.holdout.check(step.sampled) | step.ledger_metrics
        metrics |= mean_of_each(step.prepared_metrics)
        metrics |= step.trained.metrics
        if config.compute_post_kl and step.trained.data_D:
            metrics |= await compute_post_kl(step.trained.data_D, policy)
        metrics |= evaluation
        if {"env/all/reward/total", "test/env/all/reward/total"} <= metrics.keys():
            metrics["test/gap"] = metrics["env/all/reward/total"] - metrics["test/env/all/reward/total"]
        if not step.trained.optim_steps:
            logger.warning("Step %d has no learning signal and was skipped: %s", number, why_no_signal(step.sampled))
        chosen = self._to_write(step.sampled, number)
        records = rollout_records(number, batch.temperature, chosen, self.text, step.advantages, step.trained)
        self.run_dir.write_rollouts(number, records)
        for index in best_worst_random([r.reward for r in records], config.samples_per_step, self._seed(number)):
            logger.info("Step %d, %s", number, shown(records[index]))
        self._write(number, metrics)
        self.watch.add_step(number, metrics, records)
        self._consult(number)

    def _consult(self, number: int) -> None:
        findings = self.watch.look_if_due(number)
        self._tell(findings)
        if number + 1 == self.config.doctor_every and self.ledger.visits:
            self.metrics_logger.say(str(advise(*self.ledger.measured_rates())))
        broke = breakdown(self.run_dir, findings) if self.config.rollback else None
        if broke is not None:
            raise broke

    def _tell(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            text = "\n".join(finding.lines())
            logger.info("Doctor: %s", text)
            self.metrics_logger.say(text)

    def _write(self, number: int, metrics: dict[str, float]) -> None:
        metrics = metrics | self.timer.finish_step(number)
        self.spent.add(metrics)
        self.metrics_logger.log(number, metrics)

    def _to_write(self, groups: Sequence[SampledGroup], number: int) -> Sequence[SampledGroup]:
        if self.config.rollout_json_export:
            return groups
        return choose_groups(groups, self.config.num_groups_to_log, self._seed(number))

    def _seed(self, number: int) -> int:
        return stable_hash(self.config.seed, "shown", number)


# --------------------------------------------------------------------------------------------------------------------


def split_evenly(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Consecutive pieces whose sizes differ by at most one; fewer than `parts` rather than an empty one."""
    parts = min(parts, len(items))
    edges = [len(items) * i // parts for i in range(parts + 1)] if parts else []
    return [items[a:b] for a, b in pairwise(edges)]
