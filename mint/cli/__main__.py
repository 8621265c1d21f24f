"""The `mint` command. Its verbs are in `mint.cli.verbs`, how it fails in `mint.cli.failures`."""

from __future__ import annotations

from typing import Annotated

import typer

from mint.cli.app import LazyGroup
from mint.version import __version__

app = typer.Typer(
    help="Reinforcement-learning fine-tuning of language models with LoRA.",
    epilog="Begin with: mint quickstart",
    cls=LazyGroup,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mint {__version__}")
        raise typer.Exit


@app.callback()
def verbs(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="After an error, show where it happened. Works after any verb.")
    ] = False,
) -> None:
    """Reinforcement-learning fine-tuning of language models with LoRA."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
