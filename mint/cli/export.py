"""`mint export CHECKPOINT`: a folder for other programs, proved to compute what the trainer computes."""

from __future__ import annotations

import contextlib
import enum
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from mint.errors import MintError, NotFound

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
    base_url: Annotated[
        str | None, typer.Option(help="Server of a tinker:// path.", show_default="MINT_BASE_URL, or a local one")
    ] = None,
) -> None:
    """Write a checkpoint as a folder that transformers, PEFT or llama.cpp load, and prove it against the trainer."""
    try:
        with tempfile.TemporaryDirectory(prefix="mint-export-") as work, _progress() as tell:
            source = _find(checkpoint, base_url, Path(work), tell)
            _write(source, to, out, limit, base_model, tell)
    except MintError as error:
        typer.echo(f"mint export: {error}", err=True)
        raise typer.Exit(1) from error


def _write(
    source: Path, to: Form, out: Path, limit: float | None, base_model: str | None, tell: Callable[[str], None]
) -> None:
    tell("loading PyTorch")
    from transformers.utils.logging import disable_progress_bar

    from mint.engine.export import export as write

    disable_progress_bar()  # there is one already
    found = write(source, to.value, out, limit, base_model, tell)
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


# Finding ------------------------------------------------------------------------------------------------------------


def _find(checkpoint: str, base_url: str | None, work: Path, tell: Callable[[str], None]) -> Path:
    """The folder of the checkpoint, downloaded if need be."""
    if "://" in checkpoint or checkpoint.startswith("ckpt_"):
        return _download(checkpoint, base_url, work, tell)
    if (Path(checkpoint) / "adapter_config.json").is_file():
        return Path(checkpoint)
    from mint.rl.rundir import RunDir

    run, _, name = checkpoint.rstrip("/").rpartition("/")
    records = RunDir(run).checkpoints() if run else []
    matching = records[-1:] if name == "latest" else [record for record in records if record.name == name]
    if not matching:
        raise NotFound(
            f"{checkpoint} is no checkpoint: give a tinker:// path, a folder with adapter_config.json, or a run "
            "directory and /latest or the name of one of its checkpoints."
        )
    config = RunDir(run).config() or {}
    path = matching[-1].sampler_path or matching[-1].state_path
    return _download(path, base_url or config.get("base_url"), work, tell)


def _download(path: str, base_url: str | None, work: Path, tell: Callable[[str], None]) -> Path:
    import httpx

    import mint
    from mint.server.archive import unpack

    tell(f"downloading {path}")
    url = mint.RestClient(base_url).get_checkpoint_archive_url_from_tinker_path(path).result().url
    with tempfile.TemporaryFile() as archive:
        with httpx.stream("GET", url, timeout=60) as answer:
            if answer.status_code != 200:
                raise NotFound(f"{path} cannot be downloaded: the server answered {answer.status_code}.")
            for piece in answer.iter_bytes():
                archive.write(piece)
        archive.seek(0)
        return unpack(archive, work, max_bytes=1 << 42)
