"""Settings by name, to lay over any recipe: the published algorithms and the starting point of MinT's guide."""

from __future__ import annotations

import difflib
from typing import Any

from mint.errors import NotFound
from mint.rl.algorithms import ALGORITHMS, get_algorithm

STARTING_POINT: dict[str, Any] = {
    "learning_rate": 1e-5,
    "kl_penalty_coef": 0.05,
    "dataset_builder": {"group_size": 4},
}
"""For a real model of some size, where nothing is known yet: small steps, small groups, held near the base model. For
the bundled model the rate is too small to see much in twenty steps."""

PRESETS = ("starting_point", *ALGORITHMS)


def get_preset(name: str, max_tokens: int) -> dict[str, Any]:
    """Fields of `mint.rl.train.Config`, those of the dataset builder in a dictionary of their own."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(PRESETS)}."
        raise NotFound(f"no preset is called {name!r}; {hint}")
    return dict(STARTING_POINT) if name == "starting_point" else get_algorithm(name, max_tokens)
