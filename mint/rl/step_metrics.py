"""Numbers about the groups of a step as they were sampled, before anything is filtered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mint.rl.metrics import RolloutErrorCounter, compute_sampling_client_metrics, compute_trajectory_metrics
from mint.rl.sampler import SampledGroup


def mean_of_each(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    names = {name: None for one in metrics for name in one}
    return {name: float(np.mean([one[name] for one in metrics if name in one])) for name in names}


def group_metrics(step: int, sampled_P: Sequence[SampledGroup]) -> dict[str, float]:
    """Of everything rolled out for a step, whatever becomes of it."""
    errors = RolloutErrorCounter()
    for sampled in sampled_P:
        errors.add(sampled.errors, group_skipped=sampled.wrapped is None)
    metrics = errors.get_metrics()
    metrics["sampling/groups_replaced"] = sum(sampled.replaced for sampled in sampled_P)
    wrapped_P = [sampled.wrapped for sampled in sampled_P if sampled.wrapped is not None]
    if wrapped_P:
        tags_P = [wrapped.env_group_builder.logging_tags() for wrapped in wrapped_P]
        metrics |= compute_trajectory_metrics([wrapped.trajectory_group for wrapped in wrapped_P], tags_P)
        metrics |= compute_sampling_client_metrics(wrapped_P)
        lags = [step - wrapped.sampling_client_step for wrapped in wrapped_P]
        metrics |= {"sampling/lag_mean": float(np.mean(lags)), "sampling/lag_max": max(lags)}
    return metrics


def why_no_signal(sampled_P: Sequence[SampledGroup]) -> str:
    groups = [sampled.group for sampled in sampled_P if sampled.wrapped is not None]
    if not groups:
        return f"all {len(sampled_P)} groups failed; see rollout_errors in the metrics."
    if all(len(group.trajectories_G) < 2 for group in groups):
        return "every group has one member, whose advantage is always 0; use a group size of 4 or more."
    rewards = [reward for group in groups for reward in group.get_total_rewards()]
    earned = f"between {min(rewards):.3g} and {max(rewards):.3g}"
    return (
        f"within each of the {len(groups)} groups all members earned the same, {earned}. Harder or easier problems, "
        "partial credit or larger groups would help."
    )
