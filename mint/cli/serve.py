"""`mint serve`: what it may be asked, and the engine in a process of its own, started again when it dies. The HTTP
server over it is in `mint.cli.serving`."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mint.cli.failures import Failure
from mint.config import ServerConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Base model to serve: mint/tiny, a Hub id or a folder. Repeat for several; none: any."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    data: Annotated[
        Path | None, typer.Option(help="Folder of runs and checkpoints.", show_default="MINT_HOME or ~/.mint")
    ] = None,
    max_adapters: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Adapters on the device at once; idle ones go to host memory and disk and come back on use.",
            show_default="what a quarter of the free memory holds",
        ),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            help="PostgreSQL to share between servers: postgresql://user@host/mint. A password belongs in "
            "MINT_DATABASE_URL or ~/.pgpass, not on the command line.",
            show_default="MINT_DATABASE_URL or a SQLite file in the data folder",
        ),
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            help="Where checkpoints are kept: s3://bucket/prefix, gs://..., any fsspec URL; credentials come from the "
            "environment.",
            show_default="MINT_CHECKPOINTS_URL or a folder in the data folder",
        ),
    ] = None,
    lean: Annotated[
        bool, typer.Option("--lean", help="Train in a fraction of the memory, for a third more work.")
    ] = False,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Samples drawn on a GPU do not depend on what else runs, at some cost (docs/determinism.md). On a CPU "
            "they never do.",
        ),
    ] = False,
    bfloat16: Annotated[
        bool,
        typer.Option(
            "--bfloat16",
            help="On a CPU multiply weights in bfloat16, up to twice as fast on a processor with avx512_bf16 "
            "(docs/performance.md). A GPU always does.",
        ),
    ] = False,
    runs: Annotated[Path, typer.Option(help="Folder of run directories, shown under /dashboard.")] = Path("runs"),
    tls_cert: Annotated[Path | None, typer.Option(help="Serve HTTPS with this certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate (PEM).")] = None,
    local: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve models over HTTP, and the dashboard under /dashboard. Keys come from `mint keys` and from MINT_API_KEY
    (several: separated by commas)."""
    config = ServerConfig.resolve(
        models=tuple(model or ()),
        host=host,
        port=port,
        data=data,
        database=database,
        checkpoints=checkpoints,
        max_adapters=max_adapters,
        tls_cert=tls_cert,
        tls_key=tls_key,
        lean=lean,
        deterministic=deterministic,
        bfloat16=bfloat16,
    )
    _check_keys(config)
    _check_tls(config)
    _check_port(config)
    run(config, None if local else runs)


def has_keys(config: ServerConfig) -> bool:
    """Whether keys were made for the server of this database."""
    if config.database is None and not (config.data / "mint.db").exists():
        return False
    from mint.server.keyring import Keyring
    from mint.server.store import Store

    store = Store(config.database_address)
    try:
        return bool(Keyring(store).all())
    finally:
        store.close()


def _check_keys(config: ServerConfig) -> None:
    if config.host not in LOOPBACK and not config.api_keys and not has_keys(config):
        raise Failure(
            f"refusing to listen on {config.host} without keys: everybody on the network could use this machine.",
            "Make a key with `mint keys create NAME`, or set MINT_API_KEY to a secret of your choice, or leave --host "
            "at 127.0.0.1.",
        )


def _check_tls(config: ServerConfig) -> None:
    import ssl

    pair = "Give the certificate chain and its private key, both as PEM files."
    if (config.tls_cert is None) != (config.tls_key is None):
        raise Failure("--tls-cert and --tls-key belong together.", pair)
    if config.tls_cert is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:  # errors of ssl among them
        told = f"{config.tls_cert} and {config.tls_key} cannot be used as certificate and key: {error}."
        raise Failure(told, pair) from error


def _check_port(config: ServerConfig) -> None:
    """Before anything is loaded, which may take minutes."""
    import socket

    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((config.host, config.port))
        except OSError as error:
            raise Failure(
                f"cannot listen on {config.host}:{config.port}: {error.strerror or error}.",
                f"Is another server there already? Try --port {config.port + 1}, or --port 0 for any free one.",
            ) from error


def run(config: ServerConfig, runs: Path | None) -> None:
    """Serves until SIGINT or SIGTERM. Without a folder of runs it is the child of a script: it has no dashboard, and
    ends when its parent, however that ends, lets go of our standard input."""
    # Before anything else is imported: importing torch, which the engine's process does meanwhile, takes longest.
    from mint.engine.spawn import start_child

    child = start_child(["mint.engine.engine"])

    from mint.cli.serving import serve_until_told
    from mint.engine.process import make_engine
    from mint.engine.supervised import SupervisedEngine

    failed = threading.Event()

    def fail(code: int) -> None:
        typer.echo(f"mint serve: the engine process ended with status {code} before it was ready.", err=True)
        failed.set()

    spill = config.data.absolute() / "spill"
    make = partial(
        make_engine,
        max_adapters=config.max_adapters,
        spill=spill,
        lean=config.lean,
        deterministic=config.deterministic,
        bfloat16=config.bfloat16,
    )
    engine = SupervisedEngine(config.models or None, on_failure=fail, make=make, child=child)
    try:
        served = serve_until_told(config, runs, engine, failed)
        healthy = served and engine.usable
    finally:
        engine.close()
    if not healthy:
        raise typer.Exit(1)
