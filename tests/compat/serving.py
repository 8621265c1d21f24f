"""The real `mint serve`, as a process on loopback for as long as some tests need it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mint.server.keyring import Keyring
from mint.server.store import Store

SK_KEY = "sk-compat"


@dataclass(frozen=True)
class Served:
    url: str
    log: Path
    folder: Path
    """Where the server was started: relative names of models are found here."""
    key: str
    """One of those `mint keys create` makes."""


@contextlib.contextmanager
def mint_serve(folder: Path, models: Sequence[str]) -> Iterator[Served]:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    store = Store(folder / "data" / "mint.db")
    _, key = Keyring(store).create("compat")
    store.close()
    named = [word for model in models for word in ("--model", model)]
    command = [sys.executable, "-m", "mint.cli", "serve", *named, "--port", "0", "--data", str(folder / "data")]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=bare_environment(folder, {"MINT_API_KEY": SK_KEY}),
        )
    try:
        assert process.stdout is not None
        address = next((found for line in process.stdout if (found := re.search(r"http://\S+", line))), None)
        assert address, f"the server did not start:\n{log.read_text()}"
        yield Served(address.group(), log, folder, key)
    finally:
        process.terminate()
        process.wait(20)


def bare_environment(home: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Nothing of the developer's own: no keys, no addresses, no caches, no proxies, and nothing is downloaded."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    quiet = {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false", "NO_PROXY": "127.0.0.1"}
    offline = {"HOME": str(home), "HF_HOME": str(home / "hub"), "HF_HUB_OFFLINE": "1"}
    # The machine is shared by a server and a client: one thread each.
    return kept | quiet | offline | {"OMP_NUM_THREADS": "1"} | dict(more)
