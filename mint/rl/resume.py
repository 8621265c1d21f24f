"""Exact resume: what is written when, and what a run continued from it has in common with one never stopped.

A checkpoint after step v holds everything step v + 1 depends on:
- the weights and the optimizer's state, saved on the server under the name in checkpoints.jsonl;
- the groups that older policies have already sampled for later steps (there are some if max_lag > 0), token by token,
  in pending/;
- the place in the data after them.
Its line in checkpoints.jsonl is written last, after the server has acknowledged the save and the pending groups are
complete and on disk; a process killed before that resumes from the checkpoint before. All else is a function of the
configuration and the step: schedules, seeds, the order of the data. Resuming forgets the metrics and rollouts of steps
after the checkpoint and does those steps again. Nothing is ever skipped, and nothing is trained on twice in the
weights that count.

Guaranteed, for a kill at any point, synchronous or not, given a dataset whose batches are a function of their index:
- every step trains on the same problems with the same seeds, by policies of the same versions: the multiset of groups
  is that of the uninterrupted run (with dynamic sampling, if rollouts repeat, as below);
- if the service repeats itself (same weights, prompt and seed give the same tokens and log-probs, whatever else it is
  doing; the same datums the same gradients) and the environments do, then rollouts, metrics and weights are equal to
  the last bit, times aside. Where log-probs depend on what shares a batch, they are equal but for that rounding.
  Pending groups are restored rather than sampled again, so they are the same on any service.

A changed configuration is refused, apart from fields that do not touch training. Raising `max_steps` continues a
finished run; schedules then follow the new length.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import mint
from mint.errors import BadRequest, MintError
from mint.rl.config import Config
from mint.rl.rundir import CheckpointRecord, Json, RunDir, plain, read_jsonl, write_jsonl
from mint.rl.sampler import BatchSampler, SampledGroup, StepBatch, finished_batch
from mint.rl.types import (
    RLDataset,
    RolloutError,
    StopReason,
    TokensWithLogprobs,
    Trajectory,
    TrajectoryGroup,
    Transition,
    WrappedTrajectoryGroup,
)
from mint.types import ModelInput

logger = logging.getLogger(__name__)

MAY_CHANGE = frozenset(
    {
        *("log_path", "base_url", "recipe_name", "renderer_name", "max_steps"),
        *("budget_tokens", "budget_seconds"),
        *("eval_every", "evaluator_builders", "compute_post_kl"),
        *("save_every", "ttl_seconds", "rolling_save_every", "rolling_ttl_seconds"),
        *("loggers", "wandb_project", "wandb_name", "samples_per_step", "rollout_json_export", "num_groups_to_log"),
        *("enable_trace", "span_chart_every", "doctor_every", "rollback"),
    }
)
"""Fields that leave what is trained alone."""

SETTLE_WITHIN = 10.0
"""Seconds a failed run waits for a checkpoint that is nearly done."""


def find_start(run_dir: RunDir, config: Config) -> CheckpointRecord | None:
    """Where a run with this configuration goes on; None: from the beginning."""
    before, now = run_dir.config(), json.loads(json.dumps(config.to_json(), default=plain))
    if before is None:
        return None
    for name in now:
        if name not in MAY_CHANGE and before.get(name) != now[name]:
            raise BadRequest(
                f"{run_dir.path} holds a run with {name}={before.get(name)!r}, and now it is {now[name]!r}. Resume it "
                "with the settings it had or choose another log_path; load_checkpoint_path can start from its weights."
            )
    return run_dir.last_checkpoint()


class Checkpoints:
    """Saves the run as it goes. A save is sent at once, in order with the training calls; its line follows later."""

    def __init__(
        self, config: Config, run_dir: RunDir, service: mint.ServiceClient, client: mint.TrainingClient
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.service = service
        self.client = client
        self._last_version: int | None = None
        self._completion: asyncio.Task[None] | None = None

    async def save_if_due(self, version: int, sampler: BatchSampler) -> None:
        if self.config.save_every and version % self.config.save_every == 0:
            await self.save(version, sampler)
        elif self.config.rolling_save_every and version % self.config.rolling_save_every == 0:
            await self.save(version, sampler, rolling=True)

    async def save(self, version: int, sampler: BatchSampler, rolling: bool = False, final: bool = False) -> None:
        await self.finish()
        if version == self._last_version:
            return
        name = f"{version:06d}"
        ttl = None if final else self.config.rolling_ttl_seconds if rolling else self.config.ttl_seconds
        state = await self.client.save_state_async(name, ttl_seconds=ttl)
        weights = None if rolling else await self.client.save_weights_for_sampler_async(name, ttl_seconds=ttl)

        async def complete() -> None:
            batches, position = await sampler.ahead(version)
            pending = self.run_dir.pending_file(version)
            if batches:
                write_jsonl(pending, (line for batch in batches for line in batch_to_json(batch)))
            record = CheckpointRecord(
                name=name,
                batch=version,
                state_path=(await state).path,
                sampler_path=(await weights).path if weights else None,
                epoch=position[0] // len(sampler.dataset),
                final=final,
                rolling=rolling,
                position=position,
                pending=str(pending.relative_to(self.run_dir.path)) if batches else None,
                renderer_name=self.config.renderer_name,
            )
            await self._replace_rolling(record)

        self._last_version = version
        self._completion = asyncio.create_task(complete())

    async def finish(self) -> None:
        """Waits for the save under way."""
        if self._completion is not None:
            await self._completion
            self._completion = None

    async def settle(self) -> None:
        """After a failure: gives the save under way a moment, since the run will want it."""
        if self._completion is not None:
            await asyncio.wait({self._completion}, timeout=SETTLE_WITHIN)

    def abandon(self) -> None:
        if self._completion is not None:
            self._completion.cancel()

    async def _replace_rolling(self, record: CheckpointRecord) -> None:
        """Writes the line, then lets go of what only the checkpoint before it needed."""
        before = self.run_dir.last_checkpoint()
        self.run_dir.append_checkpoint(record)
        logger.info("Checkpoint %s: %s", record.name, record.state_path)
        for file in self.run_dir.pending_folder.glob("*.jsonl"):
            if file != self.run_dir.pending_file(record.batch):
                file.unlink()
        if before is not None and before.rolling:
            try:
                rest = self.service.create_rest_client()
                await rest.delete_checkpoint_from_tinker_path_async(before.state_path)
            except MintError as error:  # it expires by itself
                logger.warning("The rolling checkpoint %s could not be deleted: %s", before.state_path, error)


# --------------------------------------------------------------------------------------------------------------------
# Pending groups as JSON, exact to the bit


def read_pending(run_dir: RunDir, record: CheckpointRecord, dataset: RLDataset) -> list[StepBatch]:
    """The batches a checkpoint kept; group builders come from the dataset again."""
    if record.pending is None:
        return []
    path = run_dir.path / record.pending
    if not path.is_file():
        raise BadRequest(
            f"checkpoint {record.name} needs {path}, which is gone; without it the run cannot go on exactly."
        )
    heads: dict[int, Json] = {}
    groups: dict[int, list[SampledGroup]] = {}
    for line in read_jsonl(path):
        heads[line["step"]] = line
        groups.setdefault(line["step"], []).append(_group_from_json(line, dataset))
    return [
        finished_batch(step, head["policy_version"], head["temperature"], groups[step], tuple(head["end"]))
        for step, head in sorted(heads.items())
    ]


def batch_to_json(batch: StepBatch) -> Iterator[Json]:
    """One line a group; the batch must be complete."""
    head = {
        "step": batch.step,
        "policy_version": batch.policy_version,
        "temperature": batch.temperature,
        "end": batch.end,
    }
    for part in batch.parts:
        for sampled in part.result():
            yield head | _group_to_json(sampled)


def _group_to_json(sampled: SampledGroup) -> Json:
    line: Json = {
        "number": sampled.number,
        "place": sampled.place,
        "replaced": sampled.replaced,
        "errors": [vars(error) for error in sampled.errors],
    }
    if sampled.wrapped is not None:
        group = sampled.group
        line["seconds"] = sampled.wrapped.sampling_seconds
        line["sampling_client_step"] = sampled.wrapped.sampling_client_step
        line["final_rewards"] = group.final_rewards_G
        line["metrics"] = group.metrics_G
        line["trajectories"] = [_trajectory_to_json(trajectory) for trajectory in group.trajectories_G]
    return line


def _group_from_json(line: Json, dataset: RLDataset) -> SampledGroup:
    errors = [RolloutError(**error) for error in line["errors"]]
    wrapped = None
    batch, offset = line["place"]
    if "trajectories" in line:
        trajectories_G = [_trajectory_from_json(trajectory) for trajectory in line["trajectories"]]
        wrapped = WrappedTrajectoryGroup(
            TrajectoryGroup(trajectories_G, line["final_rewards"], line["metrics"], errors),
            dataset.get_batch(batch % len(dataset))[offset],
            line["sampling_client_step"],
            line["seconds"],
        )
    return SampledGroup(line["number"], (batch, offset), wrapped, errors, line["replaced"])


def _trajectory_to_json(trajectory: Trajectory) -> Json:
    return {
        "transitions": [
            {
                "ob": transition.ob.to_ints(),
                "tokens": transition.ac.tokens,
                "logprobs": transition.ac.maybe_logprobs,
                "stop_reason": transition.ac.stop_reason,
                "reward": transition.reward,
                "episode_done": transition.episode_done,
                "metrics": transition.metrics,
                "logs": transition.logs,
                "trained": transition.trained,
            }
            for transition in trajectory.transitions
        ],
        "final_ob": None if trajectory.final_ob is None else trajectory.final_ob.to_ints(),
        "stop_reason": trajectory.stop_reason,
    }


def _trajectory_from_json(saved: Json) -> Trajectory:
    def transition(step: dict[str, Any]) -> Transition:
        action = TokensWithLogprobs(step["tokens"], step["logprobs"], step["stop_reason"])
        return Transition(
            ModelInput.from_ints(step["ob"]),
            action,
            step["reward"],
            step["episode_done"],
            step["metrics"],
            step["logs"],
            step["trained"],
        )

    transitions: Sequence[Json] = saved["transitions"]
    return Trajectory(
        [transition(step) for step in transitions],
        None if saved["final_ob"] is None else ModelInput.from_ints(saved["final_ob"]),
        None if saved["stop_reason"] is None else StopReason(saved["stop_reason"]),
    )
