"""Named algorithms: for each, the fields of `mint.rl.train.Config` that make it up.

    Config(**get_algorithm("dapo", max_tokens=512), learning_rate=1e-5, ...)

Every choice is one field, so a name is only a starting point. The formulas are where the tables are, in
`mint.rl.advantages`, `mint.rl.aggregation` and, on the server, the losses. Thresholds bound the ratio itself: 0.8 to
1.2 is what papers write as epsilon 0.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mint.errors import BadRequest


def _clip(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


def _mint(max_tokens: int) -> dict[str, Any]:
    """The default, as in MinT's and Tinker's documents: centred rewards, summed tokens, plain ratios."""
    return {"advantage": "group_mean", "aggregation": "token_sum", "loss_fn": "importance_sampling"}


def _grpo(max_tokens: int) -> dict[str, Any]:
    """arXiv 2402.03300: rewards over their deviation, mean over each sequence's tokens, clipped."""
    return {
        "advantage": "group_std",
        "aggregation": "sequence_mean",
        "loss_fn": "ppo",
        "loss_fn_config": _clip(0.8, 1.2),
    }


def _dr_grpo(max_tokens: int) -> dict[str, Any]:
    """arXiv 2503.20783: GRPO without its biases for short right answers and for questions of little deviation."""
    return {
        "advantage": "group_mean",
        "aggregation": "constant",
        "aggregation_divisor": float(max_tokens),
        "loss_fn": "ppo",
        "loss_fn_config": _clip(0.8, 1.2),
    }


def _dapo(max_tokens: int) -> dict[str, Any]:
    """arXiv 2503.14476: clip-higher, dynamic sampling, token mean, truncated answers masked and long ones penalised."""
    return {
        "advantage": "group_std",
        "aggregation": "token_mean",
        "loss_fn": "ppo",
        "loss_fn_config": _clip(0.8, 1.28),
        "dynamic_sampling": 10,
        "mask_truncated": True,
        "overlong_buffer": max(1, max_tokens // 5),
    }


def _gspo(max_tokens: int) -> dict[str, Any]:
    """arXiv 2507.18071: one ratio for a whole sequence, hence the far tighter thresholds."""
    return {
        "advantage": "group_std",
        "aggregation": "sequence_mean",
        "loss_fn": "gspo",
        "loss_fn_config": _clip(1 - 3e-4, 1 + 4e-4),
    }


def _rloo(max_tokens: int) -> dict[str, Any]:
    """arXiv 2402.14740: REINFORCE with the other members of the group as baseline."""
    return {"advantage": "rloo", "loss_fn": "importance_sampling"}


def _cispo(max_tokens: int) -> dict[str, Any]:
    """arXiv 2506.13585: the ratio is clipped as a weight on the gradient, so no token loses its own."""
    return {
        "advantage": "group_std",
        "aggregation": "token_mean",
        "loss_fn": "cispo",
        "loss_fn_config": _clip(0.0, 4.0),
    }


def _tis(max_tokens: int) -> dict[str, Any]:
    """Truncated importance ratios, for rollouts that lag: min(ratio, 2) weighs the gradient. CISPO's loss says it."""
    return {"advantage": "group_mean", "loss_fn": "cispo", "loss_fn_config": _clip(0.0, 2.0)}


def _pass_at_4(max_tokens: int) -> dict[str, Any]:
    """arXiv 2505.15201: learns to be right once in four tries; for other numbers set `advantage` to pass@k."""
    return {"advantage": "pass@4", "loss_fn": "importance_sampling"}


def _starting_point(max_tokens: int) -> dict[str, Any]:
    """The tutorial's first setting for a new task: a careful rate and a KL penalty towards the base model. It goes with
    groups of 4, which are the dataset's to make; a very small model wants a hundred times the rate."""
    return {**_mint(max_tokens), **STARTING_POINT}


STARTING_POINT: dict[str, Any] = {"learning_rate": 1e-5, "kl_penalty_coef": 0.05}
STARTING_GROUP_SIZE = 4

ALGORITHMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "mint": _mint,
    "starting_point": _starting_point,
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "dapo": _dapo,
    "gspo": _gspo,
    "rloo": _rloo,
    "cispo": _cispo,
    "tis": _tis,
    "pass@4": _pass_at_4,
}


def get_algorithm(name: str, max_tokens: int) -> dict[str, Any]:
    if name not in ALGORITHMS:
        raise BadRequest(f"no algorithm is called {name!r}; there are {', '.join(ALGORITHMS)}.")
    return {**ALGORITHMS[name](max_tokens), "max_tokens": max_tokens}
