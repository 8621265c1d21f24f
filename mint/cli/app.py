"""The command as a whole: verbs loaded when they are asked for, and the one border where errors become two lines."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from mint.cli.failures import Code, tell
from mint.cli.verbs import VERBS, Verb

TRACEBACK = "--traceback"


class LazyGroup(TyperGroup):
    """Lists verbs from the table; imports the one that runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What help needs of a verb, from the table."""
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        return TyperCommand(
            cmd_name, help=verb.summary, rich_help_panel=verb.panel, rich_markup_mode=self.rich_markup_mode
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb itself. The nearest names are offered for one that is not there."""
        self.commands = {name: self.get_command(ctx, name) for name in VERBS}  # where typer looks for near names
        name, _, rest = super().resolve_command(ctx, args)
        if name is None:  # while completing a half-typed line
            return name, None, rest
        return name, load(name, VERBS[name]), rest

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        wanted = TRACEBACK in given
        given = [word for word in given if word != TRACEBACK] or ["--help"]
        extra |= {"prog_name": "mint", "standalone_mode": False}
        try:
            sys.exit(super().main(given, **extra) or Code.OK)
        except KeyboardInterrupt:
            sys.exit(Code.INTERRUPTED)
        except Exception as error:
            if wanted:
                traceback.print_exc()
            sys.exit(tell(error, f"mint {given[0]}" if given[0] in VERBS else "mint"))


def load(name: str, verb: Verb) -> Any:
    """The verb's command, from its own file."""
    module, _, target = verb.target.partition(":")
    found = getattr(import_module(f"mint.cli.{module}"), target)
    if not isinstance(found, typer.Typer):
        settings = {"ignore_unknown_options": True, "allow_extra_args": True} if verb.takes_fields else None
        one = typer.Typer(add_completion=False)
        one.command(name, context_settings=settings)(found)
        found = one
    command = typer.main.get_command(found)
    command.name = name
    return command
