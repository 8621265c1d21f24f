"""Fields of a configuration from words and files: `--learning-rate 1e-4`, `--group-size 8`, a TOML table.

Everything becomes one dictionary of fields, nested where a field is itself a configuration, and is laid over a `Config`
by `apply`. Names of the dataset builder's fields may be given without saying whose they are.
"""

from __future__ import annotations

import ast
import difflib
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Union, get_args, get_origin, get_type_hints

from mint.cli.failures import Failure

if TYPE_CHECKING:
    from mint.rl.config import Config

Settings = dict[str, Any]
BUILDER = "dataset_builder"
ALSO = {"batch_size": "groups_per_batch"}
"""Other spellings, of MinT's overview."""
WORDS = {"true": True, "yes": True, "false": False, "no": False, "none": None}


def from_words(words: Sequence[str], config: Config) -> Settings:
    """`--name value`, `--name=value`, `--flag` and `--no-flag`; a dot reaches into a field, dashes are underscores."""
    settings: Settings = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise Failure(f"{word!r} is not a setting.", "Write --field value, such as --learning-rate 1e-4.")
        name, equals, text = word[2:].partition("=")
        path = name.replace("-", "_").split(".")
        if path[0].startswith("no_") and not _known(path, config):
            path[0], equals, text = path[0].removeprefix("no_"), "=", "false"
        if not _known(path, config):
            path[0] = ALSO.get(path[0], path[0])
        path = _whose(path, config)
        if not equals:
            text = rest.pop(0) if rest and not _is_option(rest[0]) else "true"
        _put(settings, path, text)
    return settings


def apply(config: Config, settings: Mapping[str, Any]) -> Config:
    """`config` with these fields; the dataset builder and the KL reference follow a new model."""
    changed: Config = _replaced(config, settings, "")
    builder = changed.dataset_builder
    told = isinstance(settings.get(BUILDER), Mapping) and "model_name" in settings[BUILDER]
    if getattr(builder, "model_name", changed.model_name) != changed.model_name and not told:
        changed = replace(changed, dataset_builder=replace(builder, model_name=changed.model_name))  # type: ignore[type-var]
    return changed


def merged(*layers: Mapping[str, Any]) -> Settings:
    """Later ones win; dictionaries are merged field by field."""
    result: Settings = {}
    for layer in layers:
        for name, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
            result[name] = merged(result[name], value) if both else value
    return result


def own_fields(config: Config) -> Settings:
    """What can be set beside `Config`'s own fields: the dataset builder's."""
    builder = config.dataset_builder
    return {f.name: getattr(builder, f.name) for f in fields(builder)} if is_dataclass(builder) else {}


# --------------------------------------------------------------------------------------------------------------------


def _is_option(word: str) -> bool:
    return word.startswith("--")


def _known(path: list[str], config: Config) -> bool:
    return path[0] in {f.name for f in fields(config)} or path[0] in own_fields(config)


def _whose(path: list[str], config: Config) -> list[str]:
    """Where a field is; an error with the nearest name where it is nowhere."""
    ours, builders = {f.name for f in fields(config)}, own_fields(config)
    if path[0] in ours:
        return path
    if path[0] in builders:
        return [BUILDER, *path]
    _refuse(path[0], [*ours, *builders], "of the recipe")


def _refuse(name: str, known: Sequence[str], whose: str) -> NoReturn:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean --{near[0].replace('_', '-')}?" if near else "."
    raise Failure(f"{name!r} is not a field {whose}{hint}", "`mint train --fields` lists them all.")


def _put(settings: Settings, path: list[str], text: str) -> None:
    for part in path[:-1]:
        settings = settings.setdefault(part, {})
    if settings.setdefault(path[-1], Text(text)) != text:
        raise Failure(f"{path[-1]} is given as {settings[path[-1]]} and as {text}.", "Give it once.")


class Text(str):
    """A value as it was typed: what it means depends on the field."""


def _replaced(config: Any, settings: Mapping[str, Any], where: str) -> Any:
    hints = get_type_hints(type(config))
    for name in settings:
        if name not in hints:
            _refuse(name, list(hints), f"of {type(config).__name__}")
    values = {
        name: _value(value, hints[name], getattr(config, name), f"{where}{name}") for name, value in settings.items()
    }
    return replace(config, **values)


def _value(value: Any, hint: Any, before: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        if is_dataclass(before) and not isinstance(before, type):
            return _replaced(before, value, f"{name}.")
        kind = next((option for option in _options(hint) if is_dataclass(option)), None)
        if kind is not None:
            return _made(kind, value, name)
        value = {key: _meant(item) for key, item in value.items()}
    elif isinstance(value, Text):
        value = str(value) if hint is str else _meant(value)
    if isinstance(value, list):
        value = tuple(value)
    if any(_fits(value, option) for option in _options(hint)):
        return value
    raise Failure(f"{name} is {value!r}; it takes {_spelled(hint)}.", "`mint train --fields` says what each field is.")


def _made(kind: Any, value: Mapping[str, Any], name: str) -> Any:
    try:
        return kind(**{key: _meant(item) for key, item in value.items()})
    except TypeError as error:
        needed, option = ", ".join(f.name for f in fields(kind)), name.replace("_", "-")
        raise Failure(f"{name}: {error}", f"It takes {needed}; write --{option}.FIELD value.") from error


def _meant(text: Any) -> Any:
    """A Python literal, true or false, else the text."""
    if not isinstance(text, Text):
        return text
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return str(text)


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and not getattr(kind, "_is_protocol", False) and isinstance(value, kind)


def _spelled(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "none"}
    return " or ".join(names.get(option, getattr(option, "__name__", str(option))) for option in _options(hint))
