"""`mint serve` as a child on a free port, for benchmarks that need the whole thing."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
START_WITHIN = 120.0


class Serving:
    """A context: the server runs inside it, and its log lies beside the data."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "serve.log"
        command = [sys.executable, "-m", "mint.cli", "serve", "--model", "mint/tiny", "--port", str(port)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("MINT_", "TINKER_"))}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--data", str(folder / "data"), *options],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def __enter__(self) -> Serving:
        deadline = time.monotonic() + START_WITHIN
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if self.get("/readyz").status_code == 200:
                    return self
            time.sleep(0.2)
        self.__exit__(None, None, None)
        raise RuntimeError(f"the server was not ready within {START_WITHIN:.0f} s:\n{self.log.read_text()[-2000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30)

    def status(self) -> dict[str, Any]:
        return self.get("/api/v1/mint/status").json()
