"""Configuration of the programs: the only reader of the environment and of `.env` files.

Flat frozen dataclasses, a sentence under each field. Arguments win over the environment, the environment over `.env`,
`.env` over the defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def load_dotenv(path: str | Path = ".env") -> dict[str, str]:
    """Reads KEY=value lines into the environment, where not set already; returns what the file held."""
    values: dict[str, str] = {}
    file = Path(path)
    if not file.is_file():
        return values
    for line in file.read_text().splitlines():
        key, separator, value = line.strip().removeprefix("export ").partition("=")
        if separator and key and not key.startswith("#"):
            values[key.strip()] = value.strip().strip("'\"")
    for key, value in values.items():
        os.environ.setdefault(key, value)
    return values


def first_set(*names: str) -> str | None:
    """The first of these environment variables that is set and not empty."""
    return next((value for name in names if (value := os.environ.get(name))), None)


def data_home() -> Path:
    """Where servers keep runs and checkpoints unless told otherwise."""
    return Path(first_set("MINT_HOME") or Path.home() / ".mint")


def hub_cache() -> Path:
    """Where the Hugging Face Hub keeps what it has downloaded."""
    home = first_set("HF_HOME")
    return Path(first_set("HF_HUB_CACHE") or (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub")


@dataclass(frozen=True)
class ClientConfig:
    """Where the server is and who asks."""

    base_url: str | None = None
    """None: start a server on this machine for as long as the script runs."""
    api_key: str | None = None

    @classmethod
    def resolve(cls, base_url: str | None = None, api_key: str | None = None) -> ClientConfig:
        """Arguments, else MINT_BASE_URL / MINT_API_KEY, else TINKER_BASE_URL / TINKER_API_KEY."""
        return cls(
            base_url or first_set("MINT_BASE_URL", "TINKER_BASE_URL"),
            api_key or first_set("MINT_API_KEY", "TINKER_API_KEY"),
        )


@dataclass(frozen=True)
class ServerConfig:
    """One `mint serve`."""

    models: tuple[str, ...] = ()
    """Base models to serve, loaded at start; empty: whichever are asked for, loaded on first use."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    data: Path = Path(".mint")
    """Folder of the journals and, unless told otherwise, of the database and the checkpoints."""
    database: str | None = None
    """URL of a PostgreSQL database; None: a SQLite file in the data folder."""
    checkpoints: str | None = None
    """fsspec URL under which checkpoints are kept, such as s3://bucket/prefix; None: a folder in the data folder."""
    api_keys: tuple[str, ...] = ()
    """Keys that are let in, beside those made by `mint keys`; without any, everybody who reaches the port."""
    max_adapters: int | None = None
    """Adapters on the device at once, in training and in sampling; the others wait in host memory and on disk. None:
    as many as a quarter of the memory holds that the base models leave free."""
    tls_cert: Path | None = None
    """Certificate chain (PEM) to serve HTTPS with; None: plain HTTP."""
    tls_key: Path | None = None
    """Its private key."""
    lean: bool = False
    """Training computes activations again instead of keeping them: a fraction of the memory, a third more work."""
    deterministic: bool = False
    """On a GPU no sample depends on what else runs, at some cost; on a CPU none ever does."""
    bfloat16: bool = False
    """On a CPU weights are multiplied in bfloat16: up to twice as fast where the processor can. A GPU always does."""

    @classmethod
    def resolve(cls, environment: Mapping[str, str] | None = None, **given: object) -> ServerConfig:
        """Given fields that are not None, over MINT_API_KEY (several, separated by commas), MINT_HOME,
        MINT_DATABASE_URL and MINT_CHECKPOINTS_URL."""
        environment = os.environ if environment is None else environment
        keys = tuple(key.strip() for key in environment.get("MINT_API_KEY", "").split(",") if key.strip())
        defaults: dict[str, object] = {
            "api_keys": keys,
            "data": data_home(),
            "database": environment.get("MINT_DATABASE_URL") or None,
            "checkpoints": environment.get("MINT_CHECKPOINTS_URL") or None,
        }
        return cls(**(defaults | {name: value for name, value in given.items() if value is not None}))  # type: ignore[arg-type]

    @property
    def database_address(self) -> str | Path:
        return self.database or self.data / "mint.db"
