"""The numbers a run logs, by name. Names are an API: dashboards, doctors and plots read them.

Pure functions of groups and datums. Give the trajectory metrics every group that was rolled out: computed after
filtering they would hide that a task is solved, or hopeless. Who logs them and where is not decided here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mint.rl.data_processing import has_signal
from mint.rl.kl import ScoringClient, score_datums
from mint.rl.types import Metrics, RolloutError, Trajectory, TrajectoryGroup, WrappedTrajectoryGroup
from mint.types import Datum

GOOD_REWARD = 0.5
"""From here up a reward counts as a success, and a group whose rewards are all equal as all good."""

# --------------------------------------------------------------------------------------------------------------------
# Environments: what the rollouts were like


def compute_trajectory_metrics(
    trajectory_groups_P: Sequence[TrajectoryGroup], taglist_P: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Under `env/all/`, and under `env/<tag>/` for every tag that not all groups share."""
    groups_by_tag: dict[str, list[TrajectoryGroup]] = defaultdict(list)
    for group, tags in zip(trajectory_groups_P, taglist_P, strict=True):
        for tag in dict.fromkeys(tags):
            groups_by_tag[tag].append(group)
    selections = {tag: some for tag, some in groups_by_tag.items() if len(some) < len(trajectory_groups_P)}
    selections["all"] = list(trajectory_groups_P)
    return {
        f"env/{tag}/{name}": value
        for tag, groups in selections.items()
        for name, value in _group_metrics(groups).items()
    }


def _group_metrics(groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    trajectories = [trajectory for group in groups_P for trajectory in group.trajectories_G]
    rewards = [reward for group in groups_P for reward in group.get_total_rewards()]
    return {
        **_length_metrics(trajectories),
        **_mean_of_each([t.metrics for trajectory in trajectories for t in trajectory.transitions], groups_P),
        **_signal_metrics(groups_P),
        **_ending_metrics(trajectories, rewards),
        **_diversity_metrics(groups_P),
        "reward/total": _mean(rewards),
        "reward/success": _mean([reward >= GOOD_REWARD for reward in rewards]),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    turns = [transition for trajectory in trajectories for transition in trajectory.transitions]
    ac_tokens = sum(len(turn.ac.tokens) for turn in turns)
    ob_tokens = sum(turn.ob.length for turn in turns)
    return {
        "ac_tokens_per_turn": ac_tokens / len(turns) if turns else 0.0,
        "ob_tokens_per_turn": ob_tokens / len(turns) if turns else 0.0,
        "turns_per_episode": len(turns) / len(trajectories) if trajectories else 0.0,
        "total_episodes": len(trajectories),
        "total_turns": len(turns),
        "total_ac_tokens": ac_tokens,
        "total_ob_tokens": ob_tokens,
    }


def _mean_of_each(step_metrics: list[Metrics], groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Every metric that environments and group rewards reported, averaged over those that reported it."""
    values: dict[str, list[float]] = defaultdict(list)
    for metrics in step_metrics + [metrics for group in groups_P for metrics in group.metrics_G]:
        for name, value in metrics.items():
            values[name].append(float(value))
    return {name: _mean(some) for name, some in values.items()}


def _signal_metrics(groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    kinds: Counter[str] = Counter()
    for group in groups_P:
        if has_signal(group):
            kinds["mixed"] += 1
        else:
            kinds["all_good" if _mean(group.get_total_rewards()) >= GOOD_REWARD else "all_bad"] += 1
    return {
        f"by_group/frac_{kind}": kinds[kind] / len(groups_P) if groups_P else 0.0
        for kind in ("mixed", "all_good", "all_bad")
    }


def _ending_metrics(trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> dict[str, float]:
    """How episodes ended: `stop/<reason>`, `truncated` and `empty` are shares of episodes."""
    if not trajectories:
        return {}
    ended = Counter(str(trajectory.stop_reason) for trajectory in trajectories if trajectory.stop_reason)
    truncated = [trajectory.is_truncated for trajectory in trajectories]
    metrics = {f"stop/{reason}": count / len(trajectories) for reason, count in ended.items()}
    metrics["truncated"] = _mean(truncated)
    metrics["empty"] = _mean([trajectory.num_action_tokens == 0 for trajectory in trajectories])
    for name, wanted in (("reward/truncated", True), ("reward/complete", False)):
        some = [reward for reward, cut in zip(rewards, truncated, strict=True) if cut is wanted]
        if some:
            metrics[name] = _mean(some)
    return metrics


def _action_tokens(trajectory: Trajectory) -> tuple[int, ...]:
    return tuple(token for transition in trajectory.transitions for token in transition.ac.tokens)


def distinct_n(completions: Sequence[Sequence[int]], n: int) -> float:
    """Different n-grams / all n-grams: near 1 when completions vary, towards 0 when they repeat."""
    ngrams = [tuple(c[i : i + n]) for c in completions for i in range(len(c) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _diversity_metrics(groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Within groups, since members answer one prompt; averaged over groups. `duplicates` is the share of members whose
    completion an earlier member gave already."""
    completions_P = [[_action_tokens(trajectory) for trajectory in group.trajectories_G] for group in groups_P]
    return {
        "distinct_1": _mean([distinct_n(completions_G, 1) for completions_G in completions_P]),
        "distinct_2": _mean([distinct_n(completions_G, 2) for completions_G in completions_P]),
        "duplicates": _mean([1 - len(set(c_G)) / len(c_G) for c_G in completions_P if c_G]),
    }


# --------------------------------------------------------------------------------------------------------------------
# Policies: how far apart sampler, trainer and the updated weights are


def _masked_differences(
    data_D: Sequence[Datum], other_logprobs_D: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Sampled minus other log-probs, and sampled ones, over all unmasked tokens."""
    sampled, other = [np.zeros(0)], [np.zeros(0)]
    for datum, logprobs in zip(data_D, other_logprobs_D, strict=True):
        trained = datum.loss_fn_inputs["mask"].to_numpy() > 0
        sampled.append(datum.loss_fn_inputs["logprobs"].to_numpy()[trained])
        other.append(np.asarray(logprobs)[trained])
    return np.concatenate(sampled) - np.concatenate(other), np.concatenate(sampled)


def compute_kl_sample_train(data_D: Sequence[Datum], training_logprobs_D: Sequence[np.ndarray]) -> dict[str, float]:
    """Sampler against trainer: v1 the mean difference of log-probs, v2 half its mean square, and the entropy estimate
    (minus the mean sampled log-prob). `kl_sample_train_max` is the largest single difference."""
    diffs, sampled = _masked_differences(data_D, training_logprobs_D)
    if not len(diffs):
        return {}
    return {
        "optim/kl_sample_train_v1": float(diffs.mean()),
        "optim/kl_sample_train_v2": float((diffs**2).mean() / 2),
        "optim/kl_sample_train_max": float(np.abs(diffs).max()),
        "optim/entropy": float(-sampled.mean()),
    }


async def compute_post_kl(data_D: Sequence[Datum], post_sampling_client: ScoringClient) -> dict[str, float]:
    """The policy before and after the update, on the same tokens."""
    diffs, _ = _masked_differences(data_D, await score_datums(post_sampling_client, data_D))
    if not len(diffs):
        return {}
    return {"kl_pre_post_v1": float(diffs.mean()), "kl_pre_post_v2": float((diffs**2).mean() / 2)}


def compute_sampling_client_metrics(groups_P: Sequence[WrappedTrajectoryGroup]) -> dict[str, float]:
    """Which steps' weights sampled this batch, and how long a group took."""
    if not groups_P:
        return {}
    series: dict[str, list[float]] = {
        "sampling_client/step": [group.sampling_client_step for group in groups_P],
        "time/sampling_time": [group.sampling_seconds for group in groups_P],
    }
    metrics: dict[str, float] = {}
    for name, values in series.items():
        metrics |= {f"{name}_max": max(values), f"{name}_min": min(values), f"{name}_mean": _mean(values)}
    return metrics


# --------------------------------------------------------------------------------------------------------------------
# Failures


@dataclass
class RolloutErrorCounter:
    """Failures so far in a run: `rollout_errors/<type>`, `/total`, `/groups_skipped`; nothing while there are none."""

    counts: Counter[str] = field(default_factory=Counter)
    groups_skipped: int = 0

    def add(self, errors: Sequence[RolloutError], group_skipped: bool = False) -> None:
        self.counts.update(error.error_type for error in errors)
        self.groups_skipped += group_skipped

    def get_metrics(self, prefix: str = "rollout_errors") -> dict[str, float]:
        if not self.counts and not self.groups_skipped:
            return {}
        return {
            **{f"{prefix}/{kind}": float(count) for kind, count in self.counts.items()},
            f"{prefix}/total": float(self.counts.total()),
            f"{prefix}/groups_skipped": float(self.groups_skipped),
        }
