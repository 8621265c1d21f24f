"""A flat dataclass from the command line: `name=value` for every field that should differ from its default."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import TypeVar

T = TypeVar("T")


def from_command_line(config: type[T], arguments: list[str] | None = None) -> T:
    """Values take the type of the field's default; an unknown name ends the program with those there are."""
    defaults = {field.name: field.default for field in fields(config)}  # type: ignore[arg-type]
    given = {}
    for argument in sys.argv[1:] if arguments is None else arguments:
        name, separator, text = argument.partition("=")
        if not separator or name not in defaults:
            known = ", ".join(f"{name}={default}" for name, default in defaults.items())
            raise SystemExit(f"{argument!r} is not a setting. Write name=value, for these names: {known}")
        given[name] = type(defaults[name])(text)
    return config(**given)
