"""`mint checkpoints list | download | delete`."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mint.cli.failures import Failure
from mint.cli.output import Address, AsJson, counted, print_json, print_table
from mint.cli.rundirs import Run, open_run

if TYPE_CHECKING:
    from mint.client.rest import RestClient

PAGE = 100
CHUNK = 1 << 20

app = typer.Typer(help="List, download and delete checkpoints.", no_args_is_help=True, add_completion=False)

CheckpointPath = Annotated[str, typer.Argument(metavar="TINKER_PATH", help="As listed: tinker://RUN/weights/NAME.")]


@app.command("list")
def list_checkpoints(
    run: Run = None,
    server: Annotated[bool, typer.Option(help="All that the server has, not those of one run.")] = False,
    base_url: Address = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a run, or all that a server has."""
    if server or base_url:
        rows = _on_server(base_url)
        columns: tuple[str, ...] = ("path", "type", "bytes", "time", "expires")
    else:
        run_dir = open_run(run)
        rows = [vars(record) for record in run_dir.checkpoints()]
        columns = ("name", "batch", "state_path", "sampler_path", "final")
        if not rows and not as_json:
            typer.echo(f"{run_dir.path} has saved no checkpoint yet.")
            return
    if as_json:
        return print_json(rows)
    print_table(columns, [[row[column] for column in columns] for row in rows], ("bytes", "batch"))


@app.command()
def download(
    path: CheckpointPath,
    out: Annotated[Path, typer.Option(help="Folder to put it in.")] = Path("checkpoint"),
    base_url: Address = None,
) -> None:
    """Fetch a checkpoint as a folder that PEFT reads."""
    if out.exists() and any(out.iterdir()):
        raise Failure(f"{out} is there already and not empty.", "Choose another folder with --out.")
    fetch(path, out, base_url)
    typer.echo(out)


def fetch(path: str, out: Path, base_url: str | None) -> None:
    """The files of a checkpoint on a server, in this folder."""
    import tempfile

    import httpx

    import mint
    from mint.errors import ConnectionFailed

    link = mint.RestClient(base_url).get_checkpoint_archive_url_from_tinker_path(path).result().url
    with tempfile.TemporaryFile() as archive:
        try:
            with httpx.stream("GET", link, timeout=60, follow_redirects=True) as response:
                response.raise_for_status()
                size = int(response.headers.get("content-length", 0))
                for chunk in counted(response.iter_bytes(CHUNK), "MiB", -(-size // CHUNK) or None):
                    archive.write(chunk)
        except httpx.HTTPError as error:
            raise ConnectionFailed(f"the archive of {path} could not be fetched: {error}") from error
        archive.seek(0)
        out.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=archive) as tar:
            tar.extractall(out, filter="data")


@app.command()
def delete(
    paths: Annotated[list[str], typer.Argument(metavar="TINKER_PATH...")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    base_url: Address = None,
) -> None:
    """Delete checkpoints from the server, for good."""
    import mint

    if not yes:
        typer.confirm(f"Delete {len(paths)} checkpoint{'s' if len(paths) > 1 else ''} for good?", abort=True)
    with mint.ServiceClient(base_url) as service:
        rest = service.create_rest_client()
        for path in paths:
            rest.delete_checkpoint_from_tinker_path(path).result()
            typer.echo(f"deleted {path}")


def _on_server(base_url: str | None) -> list[dict[str, Any]]:
    import mint

    with mint.ServiceClient(base_url) as service:
        return [
            {
                "path": one.tinker_path,
                "type": one.checkpoint_type,
                "bytes": one.size_bytes,
                "time": one.time.isoformat(timespec="seconds"),
                "expires": one.expires_at.isoformat(timespec="seconds") if one.expires_at else None,
            }
            for one in _every(service.create_rest_client())
        ]


def _every(rest: RestClient) -> list[Any]:
    found: list[Any] = []
    while page := rest.list_user_checkpoints(PAGE, len(found)).result().checkpoints:
        found += page
    return found
