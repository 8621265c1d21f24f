"""Tasks that come with the package: `mint train NAME` runs one, offline, on the bundled model.

One file a task, each with a `CONFIG`. Importing this module loads none of them. Tasks of your own are Python files with
a `mint.rl.train.Config` in them; `mint.recipes.addition` is the one to copy.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from mint.errors import NotFound

if TYPE_CHECKING:
    from mint.rl.config import Config


@dataclass(frozen=True)
class Recipe:
    module: str
    """Below `mint.recipes`."""
    summary: str
    reward: str
    """What earns a point."""


RECIPES: dict[str, Recipe] = {
    "addition": Recipe("addition", "Additions of two numbers below 100.", "the right number"),
    "math": Recipe("arithmetic", "Sums, differences and small products, after a worked example.", "the right number"),
    "agentic": Recipe(
        "calculator", "Arithmetic too large to guess, with a calculator to ask.", "the right final answer"
    ),
    "code": Recipe("functions", "One-line Python functions, run in a sandbox.", "passing every test"),
    "preference": Recipe("chat", "Short chats before a judge.", "polite, short, on topic, said once"),
}


def get_recipe(name: str) -> Config:
    """The configuration of a recipe that comes with the package."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(RECIPES)}."
        raise NotFound(f"no recipe is called {name!r}{hint}")
    config: Config = import_module(f"mint.recipes.{RECIPES[name].module}").CONFIG
    return config
