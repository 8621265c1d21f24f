"""`mint export CHECKPOINT`: a folder for other programs, proved to compute what the trainer computes."""

from __future__ import annotations

import contextlib
import enum
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from mint.cli.failures import Code, Failure
from mint.cli.output import Address
from mint.cli.rundirs import open_run

SLOW_SECONDS = 2.0


class Form(enum.StrEnum):
    peft = "peft"
    merged = "merged"
    gguf_ready = "gguf-ready"


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="tinker://RUN/weights/NAME on a server, a checkpoint folder, or RUN/latest of a run directory."
        ),
    ],
    to: Annotated[Form, typer.Option(help="An adapter for PEFT, a whole model, or one for llama.cpp's converter.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist yet.")],
    limit: Annotated[
        float | None,
        typer.Option(
            help="Largest difference of a log-prob from the trainer's that is let through.",
            show_default="1e-3; for merged models in float16 0.05, in bfloat16 0.3",
        ),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Where the base model is.", show_default="as the checkpoint says")
    ] = None,
    base_url: Address = None,
) -> None:
    """Write a checkpoint as a folder that transformers, PEFT or llama.cpp load, and prove it against the trainer."""
    with tempfile.TemporaryDirectory(prefix="mint-export-") as work:
        source = _find(checkpoint, base_url, Path(work))
        with _progress() as tell:
            _write(source, to, out, limit, base_model, tell)


def _write(
    source: Path, to: Form, out: Path, limit: float | None, base_model: str | None, tell: Callable[[str], None]
) -> None:
    tell("loading PyTorch")
    from transformers.utils.logging import disable_progress_bar

    from mint.engine.export import export as write
    from mint.engine.export_proof import Different

    disable_progress_bar()  # there is one already
    try:
        found = write(source, to.value, out, limit, base_model, tell)
    except Different as error:
        raise Failure(
            str(error), "A PEFT folder (--to peft) rounds nothing; --limit allows more.", Code.ALARM
        ) from error
    rounding = "" if found.dtype == "float32" else f", {found.beyond_rounding:.1e} beyond rounding to {found.dtype}"
    typer.echo(
        f"{out}: log-probs of {found.tokens} tokens differ from the trainer's by {found.largest:.1e} at most, "
        f"{found.mean:.1e} on average{rounding} (limit {found.limit:g})."
    )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A bar that says what is being done, once it has taken long enough to wonder."""
    import threading

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("starting", total=None)
    start = threading.Timer(SLOW_SECONDS, bar.start)
    start.daemon = True
    start.start()
    try:
        yield lambda doing: bar.update(task, description=doing)
    finally:
        start.cancel()
        bar.stop()


def _find(checkpoint: str, base_url: str | None, work: Path) -> Path:
    """The folder of the checkpoint, downloaded if need be."""
    from mint.cli.checkpoints import fetch

    if (Path(checkpoint) / "adapter_config.json").is_file():
        return Path(checkpoint)
    if "://" not in checkpoint:
        checkpoint, of_run = _in_run(checkpoint)
        base_url = base_url or of_run
    fetch(checkpoint, work, base_url)
    return work


def _in_run(named: str) -> tuple[str, str | None]:
    """The path of RUN/latest or RUN/NAME, and the address of the run's server."""
    run, _, name = named.rstrip("/").rpartition("/")
    run_dir = open_run(Path(run))
    records = run_dir.checkpoints()
    matching = records[-1:] if name == "latest" else [record for record in records if record.name == name]
    if not matching:
        there = ", ".join(record.name for record in records) or "none"
        raise Failure(
            f"{run} has no checkpoint {name!r}; there are: {there}.",
            "Name one of them, or give a tinker:// path or a folder with adapter_config.json.",
            Code.NOT_FOUND,
        )
    config = run_dir.config() or {}
    return matching[-1].sampler_path or matching[-1].state_path, config.get("base_url")
