"""The table of advantage estimators: pure functions of the rewards of one group.

Each takes `rewards_G` (float64) and gives one advantage per member, all zero when the rewards are all equal. Which
trajectories and which tokens an advantage reaches is decided in `mint.rl.data_processing`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import comb

import numpy as np

from mint.errors import BadRequest

Estimator = Callable[[np.ndarray], np.ndarray]

STD_FLOOR = 1e-6  # added to the deviation; as in verl, and small beside any reward difference worth learning from


def group_mean(rewards_G: np.ndarray) -> np.ndarray:
    """r - mean(r): the group is its own baseline. Not divided by the deviation, after Dr. GRPO (arXiv 2503.20783)."""
    return rewards_G - rewards_G.mean()


def group_std(rewards_G: np.ndarray) -> np.ndarray:
    """(r - mean(r)) / (std(r) + 1e-6), the sample deviation: GRPO as first published (arXiv 2402.03300)."""
    if len(rewards_G) < 2:
        return np.zeros_like(rewards_G)
    return group_mean(rewards_G) / (rewards_G.std(ddof=1) + STD_FLOOR)


def rloo(rewards_G: np.ndarray) -> np.ndarray:
    """r - mean(the others' r), an unbiased baseline (arXiv 2402.14740); the group mean times G / (G - 1)."""
    if len(rewards_G) < 2:
        return np.zeros_like(rewards_G)
    return group_mean(rewards_G) * len(rewards_G) / (len(rewards_G) - 1)


def max_rl(rewards_G: np.ndarray) -> np.ndarray:
    """(r - mean(r)) / mean(r) for rewards of at least 0: rare successes count for more."""
    if (rewards_G < 0).any():
        raise BadRequest(f"the max_rl advantage needs rewards of at least 0; got {rewards_G.min()}.")
    mean = rewards_G.mean()
    return group_mean(rewards_G) / mean if mean > 0 else np.zeros_like(rewards_G)


def pass_at_k(rewards_G: np.ndarray, k: int) -> np.ndarray:
    """What a member adds to the best of k: E[max of k drawn with it] - E[max of k drawn without it].

    Draws are from the group, without replacement, in closed form over the sorted rewards (arXiv 2505.15201), so
    rewards need not be binary. Unbiased for the gradient of the expected best of k; k = 1 is `rloo`.
    """
    size = len(rewards_G)
    if not 1 <= k < size:
        raise BadRequest(f"pass@{k} needs groups of more than {k} members and k of at least 1; this group has {size}.")
    order = np.argsort(rewards_G, kind="stable")
    sorted_G = rewards_G[order]
    advantages_G = np.empty(size)
    for i in range(size):
        with_it = comb(i, k - 1) * sorted_G[i]
        if k > 1:
            with_it += sum(comb(j - 1, k - 2) * sorted_G[j] for j in range(i + 1, size))
        others = np.delete(sorted_G, i)
        without_it = sum(comb(j, k - 1) * others[j] for j in range(size - 1))
        advantages_G[order[i]] = with_it / comb(size - 1, k - 1) - without_it / comb(size - 1, k)
    return advantages_G


ESTIMATORS: dict[str, Callable[..., np.ndarray]] = {
    "group_mean": group_mean,
    "group_std": group_std,
    "rloo": rloo,
    "max_rl": max_rl,
    "pass@k": pass_at_k,
}


def get_estimator(name: str) -> Estimator:
    """By name; of pass@k the number is part of it, as in `pass@4`."""
    stem, at, k = name.partition("@")
    if at and k.isdecimal() and f"{stem}@k" in ESTIMATORS:
        return partial(ESTIMATORS[f"{stem}@k"], k=int(k))
    if name in ESTIMATORS and not at:
        return ESTIMATORS[name]
    raise BadRequest(
        f"no advantage estimator is called {name!r}; there are {', '.join(ESTIMATORS)} (k being a number)."
    )
