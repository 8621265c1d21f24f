"""Every number a run logs, in a sentence: the table behind docs/metrics.md and behind explanations in tools.

A name is matched piece by piece; `<...>` stands for any one piece. Names under `env/<tag>/` are the same figures as
under `env/all/` for the groups with that tag, and names under `test/` those of the evaluation. What an environment
itself reports as a metric is under `env/<tag>/` by the name it gave.
"""

from __future__ import annotations

from collections.abc import Mapping

TABLE: dict[str, dict[str, str]] = {
    "Progress": {
        "step": "Number of the step, from 0. The line after the last step holds the evaluation of the final weights.",
        "progress/batch": "The same number, under the name the Tinker cookbook gives it.",
        "progress/done_frac": "Share of the run that is done.",
        "training_client/step": "Version of the policy after this step.",
        "sampling_client/<step_min|step_mean|step_max>": "Versions of the policy that sampled this step's groups.",
    },
    "Rewards and groups": {
        "env/all/reward/total": "Mean reward of all rollouts of the step. The curve to look at first.",
        "env/all/reward/complete": "Mean reward of the answers that ended by themselves.",
        "env/all/reward/truncated": "Mean reward of the answers cut off by a limit; high means a lenient grader.",
        "env/all/reward/<term>": "Mean of one term of a composed reward, before weights.",
        "env/all/penalized/<term>": "Share of rollouts that this penalty took something from.",
        "env/all/reward_clipped": "Share of rollouts whose total was held to the reward's range.",
        "env/all/by_group/frac_mixed": "Share of groups whose members earned different rewards: only these teach.",
        "env/all/by_group/frac_all_good": "Share of groups without signal and right: too easy, or solved.",
        "env/all/by_group/frac_all_bad": "Share of groups without signal and wrong: too hard, or a broken grader.",
        "env/all/correct": "Mean of the environment's check of the answer.",
        "env/all/format": "Mean of the environment's check of the form.",
        "env/all/grader_error": "Share of rollouts whose grader failed, where the environment reports it.",
        "env/all/<metric>": "Mean of what the environment reported under this name, over those that reported it.",
        "env/all/<part>/<metric>": "The same, for names with a slash, such as `episode/turns`.",
    },
    "Lengths and endings": {
        "env/all/ac_tokens_per_turn": "Mean length of the model's turns, in tokens.",
        "env/all/ob_tokens_per_turn": "Mean length of what the model saw before a turn.",
        "env/all/turns_per_episode": "Mean number of turns.",
        "env/all/total_episodes": "Rollouts in the step.",
        "env/all/total_turns": "Turns in the step.",
        "env/all/total_ac_tokens": "Tokens sampled in the step.",
        "env/all/total_ob_tokens": "Tokens of prompts and observations in the step.",
        "env/all/truncated": "Share of rollouts cut off by a token limit. Above a tenth, raise max_tokens.",
        "env/all/empty": "Share of rollouts in which the model wrote nothing.",
        "env/all/stop/<reason>": "Share of rollouts that ended for this reason.",
    },
    "Diversity": {
        "env/all/distinct_1": "Different tokens over all tokens, within a group; falls as answers become alike.",
        "env/all/distinct_2": "The same for pairs of tokens.",
        "env/all/duplicates": "Share of members whose answer an earlier member of the group gave already.",
        "optim/entropy": "Mean of minus the log-prob of sampled tokens, in nats: how unsure the policy is.",
    },
    "Evaluation": {
        "test/<...>": "The same figures for the held-out problems, of the weights before this step.",
        "test/gap": "Training reward less holdout reward of this step; a growing gap is learning by heart, or hacking.",
        "data/holdout_overlap": "Problems of this step that are also held out; must be 0.",
    },
    "Policies: how far apart": {
        "kl_policy_base": "Mean log-ratio of policy and reference on sampled tokens, where a KL reference is set.",
        "kl_pre_post_v1": "How far the update moved the policy: mean log-ratio before and after (`compute_post_kl`).",
        "kl_pre_post_v2": "The same as half the mean square.",
        "optim/kl_sample_train_v1": "Sampler against trainer on the same tokens, mean log-ratio; 0 on policy.",
        "optim/kl_sample_train_v2": "The same as half the mean square, which cannot cancel.",
        "optim/kl_sample_train_max": "The largest single difference of log-probs.",
        "policy/version": "Version of the policy that was proved to be what the sampler holds.",
        "policy/logprob_gap_mean": "Mean difference of log-probs between sampler and trainer in that proof.",
        "policy/logprob_gap_max": "The largest one.",
        "policy/distance_from_base": "Mean difference of log-probs between policy and base model there.",
    },
    "Training": {
        "train/datums": "Sequences sent to the trainer.",
        "train/tokens": "Tokens in them that carry an advantage.",
        "train/optim_steps": "Optimizer steps taken in this step of the loop.",
        "train/skipped": "1 where nothing had a signal and no optimizer step was taken.",
        "train/loss:sum": "The loss as it is defined: a sum over tokens. Near 0 on policy, and no measure of progress.",
        "train/tokens:sum": "Tokens the trainer counted.",
        "train/<ratio:min|ratio:mean|ratio:max>": "Importance ratios trainer / sampler; 1 when on policy.",
        "train/clip_fraction:mean": "Share of tokens whose ratio was clipped (ppo, cispo, gspo).",
        "train/kl_sample_train:mean": "Mean of sampler's minus trainer's log-prob, as the engine sees it.",
        "train/entropy_sampled:mean": "Mean of minus the trainer's log-prob of the sampled tokens.",
        "optim/lr": "Learning rate of this step.",
        "optim/step": "Optimizer steps so far.",
        "optim/skipped": "1 where the optimizer was asked to step without a gradient and did not.",
        "optim/grad_norm": "Norm of the gradient before clipping.",
        "optim/update_norm": "Norm of the change of the weights.",
        "optim/weight_norm": "Norm of the adapter's weights.",
    },
    "Sampling and data": {
        "sampling/temperature": "Temperature of this step.",
        "sampling/lag_mean": "Mean number of versions the rollouts lag behind.",
        "sampling/lag_max": "The largest.",
        "sampling/groups_replaced": "Groups without signal that dynamic sampling replaced.",
        "ledger/solved": "Problems so far whose latest rollouts were all right.",
        "ledger/learning": "Problems with signal, or too few rollouts to tell.",
        "ledger/dead": "Problems whose latest rollouts were all wrong.",
        "rollout_errors/total": "Rollouts that failed.",
        "rollout_errors/groups_skipped": "Groups left out because of that.",
        "rollout_errors/<type>": "Failures by kind of exception.",
    },
    "Time": {
        "time/total": "Seconds of the step.",
        "time/<span>": "Seconds of one part of it: sample, prepare, train, refresh, evaluate; `:total`, and with "
        "several of a kind `:count`, `:mean`, `:max`.",
        "time/<sampling_time_min|sampling_time_mean|sampling_time_max>": "Seconds a group took to be sampled.",
    },
}


def explain(metric: str) -> str | None:
    """The sentence about a metric; None for a name nobody knows."""
    name = metric.removeprefix("test/") if metric != "test/gap" else metric
    parts = name.split("/")
    if parts[0] == "env" and len(parts) > 2:
        parts[1] = "all"
    best: tuple[int, str] | None = None
    for pattern, sentence in _patterns().items():
        exact = _match(pattern.split("/"), parts)
        if exact is not None and (best is None or exact > best[0]):
            best = (exact, sentence)
    return None if best is None else best[1]


def _patterns() -> Mapping[str, str]:
    return {pattern: sentence for some in TABLE.values() for pattern, sentence in some.items()}


def _match(pattern: list[str], parts: list[str]) -> int | None:
    """How many pieces agree to the letter, if all agree."""
    if len(pattern) != len(parts):
        return None
    exact = 0
    for wanted, given in zip(pattern, parts, strict=True):
        options = wanted.strip("<>").split("|") if wanted.startswith("<") else [wanted]
        if given in options:
            exact += 1
        elif not wanted.startswith("<") or len(options) > 1:
            return None
    return exact
