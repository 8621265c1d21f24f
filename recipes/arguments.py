"""Settings from the command line: `name=value` for every field of a dataclass that should differ.

Fields of a dataclass within are reached by a dot, as in `dataset_builder.group_size=8`. Values are Python literals;
what is none is text.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import fields, replace
from typing import Any, TypeVar

T = TypeVar("T")


def configured(config: T, arguments: list[str] | None = None) -> T:
    """`config` with the program's arguments applied; an unknown name ends the program with those there are."""
    for argument in sys.argv[1:] if arguments is None else arguments:
        name, separator, text = argument.partition("=")
        if not separator:
            raise SystemExit(f"{argument!r} is not a setting; write name=value.")
        config = _set(config, name, text)
    return config


def _set(config: Any, name: str, text: str) -> Any:
    first, _, rest = name.partition(".")
    known = [field.name for field in fields(config)]
    if first not in known:
        raise SystemExit(f"{first!r} is not a setting of {type(config).__name__}; there are {', '.join(known)}.")
    before = getattr(config, first)
    return replace(config, **{first: _set(before, rest, text) if rest else _value(before, text)})


def _value(before: Any, text: str) -> Any:
    if isinstance(before, str):
        return text
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
