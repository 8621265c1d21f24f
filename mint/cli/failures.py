"""What the command says when it fails, and with which status it ends: two lines, never a traceback unless asked.

The first line is what happened, the second what to do. Verbs raise `Failure` or let a `MintError` rise; the border in
`mint.cli.app` hands whatever arrives to `explain`.
"""

from __future__ import annotations

import sys
from enum import IntEnum

import typer

from mint import errors


class Code(IntEnum):
    """Exit statuses, an API for scripts: docs/cli.md has the same table."""

    OK = 0
    ALARM = 1
    """The command worked and its answer is bad: the doctor is alarmed, the engine under a server gave up."""
    USAGE = 2
    """What was asked cannot be done as written: an unknown option, a value out of range, a broken file."""
    NOT_FOUND = 3
    """A run, recipe, model or checkpoint is not there."""
    UNREACHABLE = 4
    """No server answered."""
    REFUSED = 5
    """The server answered and will not: the key, a right, no room."""
    FAULT = 70
    """A bug in mint or a fault of the server."""
    INTERRUPTED = 130
    """Ctrl-C."""


class Failure(Exception):
    """Told as two lines: what happened, then what to do."""

    def __init__(self, message: str, remedy: str, code: Code = Code.USAGE) -> None:
        super().__init__(message)
        self.remedy = remedy
        self.code = code


# typer carries its own click in newer versions and imports click in older ones; this is the error class of either.
USAGE_ERROR = typer.BadParameter.__bases__[0]

NO_SERVER = "Start a server with `mint serve`, or unset MINT_BASE_URL and TINKER_BASE_URL to use one on this machine."
REMEDIES: tuple[tuple[type[errors.MintError], Code, str], ...] = (
    (errors.Unauthorized, Code.REFUSED, "Set MINT_API_KEY to a key that the server knows."),
    (errors.BudgetReached, Code.REFUSED, "Raise the budget and run the same again: it goes on from there."),
    (errors.Forbidden, Code.REFUSED, "Use a key that may do this, or ask whoever runs the server."),
    (errors.Busy, Code.REFUSED, "Try again later; `mint models` tells what the server has loaded."),
    (errors.NotFound, Code.NOT_FOUND, "`mint runs`, `models`, `checkpoints list` and `keys list` show what there is."),
    (errors.BadRequest, Code.USAGE, "`{verb} --help` shows what it takes."),
)


def explain(error: BaseException, verb: str) -> tuple[str, str, Code]:
    """What happened, what to do, and the status to end with."""
    if isinstance(error, Failure):
        return str(error), error.remedy, error.code
    if isinstance(error, USAGE_ERROR):
        message = " ".join(error.format_message().split())  # type: ignore[attr-defined]  # choices come one a line
        return message, f"`{verb} --help` shows what it takes.", Code.USAGE
    if isinstance(error, errors.ConnectionFailed):  # whose message goes on with what a script should do
        return str(error).partition(". ")[0] + ".", NO_SERVER, Code.UNREACHABLE
    for kind, code, remedy in REMEDIES:
        if isinstance(error, kind):
            return str(error), remedy.format(verb=verb), code
    where = "`--traceback` on the same command shows where it happened."
    if isinstance(error, errors.MintError | OSError):
        return str(error), where, Code.FAULT
    return f"{type(error).__name__}: {error}", f"This is a fault in mint. {where}", Code.FAULT


def tell(error: BaseException, verb: str) -> Code:
    """Says it on standard error."""
    message, remedy, code = explain(error, verb)
    first = next((line for line in message.splitlines() if line.strip()), type(error).__name__)
    print(f"{verb}: {first}\n{' ' * len(verb)}  {remedy}", file=sys.stderr)
    return code
