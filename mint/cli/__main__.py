"""Lists the verbs."""

from __future__ import annotations

from typing import Annotated

import typer

from mint.cli.advise import advise
from mint.cli.bisect import bisect
from mint.cli.doctor import doctor
from mint.cli.evaluate import evaluate
from mint.cli.keys import keys
from mint.cli.plot import plot
from mint.cli.serve import serve
from mint.cli.usage import usage
from mint.version import __version__

app = typer.Typer(
    help="Reinforcement-learning fine-tuning of language models with LoRA.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(doctor)
app.command()(advise)
app.command("eval")(evaluate)
app.command()(bisect)
app.command()(plot)
app.add_typer(keys, name="keys")
app.command()(usage)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mint {__version__}")
        raise typer.Exit


@app.callback()
def verbs(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Verbs are needed even while there is one."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
