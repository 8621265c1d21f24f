"""Where `mint train` takes a configuration from: a recipe by name, a TOML file, a Python file or module, a run to go on
with; then presets, then options. Remembers which of them decided a field.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mint.cli.failures import Code, Failure
from mint.cli.settings import BUILDER, Settings, apply, from_words, merged
from mint.errors import NotFound

if TYPE_CHECKING:
    from mint.rl.config import Config

NOT_VALUES = ("dataset_builder", "dataset_source", "evaluator_builders", "rollout_error_tolerance", "termination")
"""Keys of a run's config.json that stand for code, which `mint.rl.recheck` makes again or refuses."""


@dataclass(frozen=True)
class Resolved:
    config: Config
    decided: dict[str, str]
    """By field, who set it: the recipe, a file, a preset, an option."""


def resolve(source: str, presets: Sequence[str], words: Sequence[str]) -> Resolved:
    """The configuration that these words mean."""
    try:
        return _resolve(source, presets, words)
    except NotFound as error:
        raise Failure(str(error), "`mint train --list` lists recipes and presets.", Code.NOT_FOUND) from error


def _resolve(source: str, presets: Sequence[str], words: Sequence[str]) -> Resolved:
    from mint.recipes.presets import get_preset

    path = Path(source)
    table = _read(path) if path.suffix == ".toml" else {}
    recipe = _text(table.pop("recipe", "addition"), path, "recipe") if path.suffix == ".toml" else source
    named = table.pop("preset", [])
    config = _base(recipe, path.parent if path.suffix == ".toml" else Path())
    decided = dict.fromkeys(_names(config.to_json()), recipe)
    layers: list[tuple[str, Settings]] = [
        (f"preset {name}", get_preset(name, config.max_tokens))
        for name in (*([named] if isinstance(named, str) else named), *presets)
    ]
    layers += [(source, table), ("option", from_words(words, config))]
    for who, settings in layers:
        decided |= dict.fromkeys(_names(settings), who)
    return Resolved(apply(config, merged(*(settings for _, settings in layers))), decided)


def _text(value: object, path: Path, name: str) -> str:
    if isinstance(value, str):
        return value
    raise Failure(f"{name} in {path} is {value!r}; it takes the name of one.", "`mint train --list` lists them.")


def _base(source: str, beside: Path) -> Config:
    from mint.recipes import RECIPES, get_recipe
    from mint.rl.recheck import find_config
    from mint.rl.rundir import RunDir

    file, _, name = source.partition(":")
    if source in RECIPES:
        return get_recipe(source)
    if file.endswith(".py"):
        return find_config(f"{beside / file}:{name}" if name else str(beside / file))
    if (Path(source) / "config.json").is_file():
        return _from_run(RunDir(source))
    if name:
        return find_config(source)
    if Path(source).is_dir():
        raise Failure(
            f"{source} is a folder, and not one with a run to go on with.", "`mint train --list` lists the recipes."
        )
    return get_recipe(source)


def _from_run(run: Any) -> Config:
    """The configuration of a run, to go on with it: values from config.json, code from where it came from."""
    from mint.rl.recheck import load_config

    saved = run.config()
    values = {
        name: {key: item for key, item in value.items() if key != "type"} if isinstance(value, Mapping) else value
        for name, value in saved.items()
        if isinstance(value, Mapping | list) and name not in NOT_VALUES
    }
    return apply(load_config(run), values | {"log_path": str(run.path)})


def _read(path: Path) -> Settings:
    if not path.is_file():
        raise Failure(
            f"there is no file {path}.", "`mint train --list` lists the recipes that need none.", Code.NOT_FOUND
        )
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise Failure(f"{path} is not TOML: {error}", 'Text goes in quotes: model_name = "mint/tiny".') from error


def _names(settings: Mapping[str, Any]) -> list[str]:
    """Fields, those of the dataset builder by their own name after a dot."""
    builder = settings.get(BUILDER)
    within = [f"{BUILDER}.{name}" for name in builder] if isinstance(builder, Mapping) else []
    return [*(name for name in settings if name != BUILDER), *within]
