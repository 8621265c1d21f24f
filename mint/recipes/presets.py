"""Settings by name, to lay over any recipe: the published algorithms and the starting point of MinT's guide.

What each sets is in `mint.rl.algorithms`; here it meets the dataset, which makes the groups."""

from __future__ import annotations

import difflib
from typing import Any

from mint.errors import NotFound
from mint.rl.algorithms import ALGORITHMS, STARTING_GROUP_SIZE, STARTING_POINT, get_algorithm

PRESETS = tuple(ALGORITHMS)


def get_preset(name: str, max_tokens: int) -> dict[str, Any]:
    """Fields of `mint.rl.train.Config`, those of the dataset builder in a dictionary of their own."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(PRESETS)}."
        raise NotFound(f"no preset is called {name!r}; {hint}")
    if name == "starting_point":  # which may be laid over an algorithm, so it sets nothing of one
        return {**STARTING_POINT, "dataset_builder": {"group_size": STARTING_GROUP_SIZE}}
    return get_algorithm(name, max_tokens)
