"""Kills `mint serve` and its engine at random points while clients train, and checks that nobody can tell.

    python benchmarks/faults.py --kills 200 [--sdk PYTHON_WITH_TINKER] [--disk-mib 32] [--out results.json]

Each client runs a fixed program (`faults_client.py`). For every one that finishes, its checkpoints, told losses and
samples must equal, bit for bit, those of the same program on a server nobody disturbed: so no save is lost or torn, no
update lost or doubled, no snapshot another one. A client that makes no progress for `--patience` seconds is wedged.
With --disk-mib the data lies on a tmpfs of that size (root only), which is filled up and freed again and again.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0"}


class Server:
    """`mint serve` on a fixed port and data folder; started again whenever it is killed."""

    def __init__(self, data: Path) -> None:
        self.data = data
        # Bound and never listening: between two servers nobody else is given the port.
        self._port_keeper = socket.socket()
        self._port_keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_keeper.bind(("127.0.0.1", 0))
        self.port = self._port_keeper.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._log = (data.parent / "serve.log").open("ab")
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "mint.cli", "serve", "--model", "mint/tiny", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--data", str(self.data)], env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=self._log
        )

    def engine(self) -> int | None:
        for file in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                return int(file.read_text().split()[0])
        return None

    def kill(self, what: str) -> bool:
        """False if there was nothing to kill."""
        if what == "engine":
            if (pid := self.engine()) is None:
                return False
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return True
        self.process.kill()  # the engine dies with its parent
        self.process.wait()
        time.sleep(random.uniform(0.0, 0.5))
        self.start()
        return True

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class Client:
    def __init__(self, python: str, package: str, address: str, steps: int, patient: bool) -> None:
        self.package, self.steps = package, steps
        self.told: list[dict[str, Any]] = []
        self.last_word = time.monotonic()
        arguments = [package, address, str(steps), *(["patient"] if patient else [])]
        self.process = subprocess.Popen(
            [python, str(HERE / "faults_client.py"), *arguments],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.complaints: list[str] = []
        self._threads = [threading.Thread(target=self._listen), threading.Thread(target=self._hear)]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.last_word = time.monotonic()
            self.told.append(json.loads(line))

    def _hear(self) -> None:
        assert self.process.stderr is not None
        self.complaints = self.process.stderr.read().splitlines()[-15:]

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def finished(self) -> bool:
        return any("finished" in facts for facts in self.told)

    def join(self) -> None:
        self.process.wait()
        for thread in self._threads:
            thread.join()

    def facts(self, name: str) -> list[Any]:
        return [facts[name] for facts in self.told if name in facts]

    def result(self, data: Path) -> dict[str, Any]:
        """All that the program's outcome consists of, without the ids that differ from run to run."""
        [model] = self.facts("model")
        saves = {path.rpartition("/")[2]: _digests(data, model, path) for path in self.facts("saved")}
        return {"losses": self.facts("losses"), "samples": self.facts("sampled"), "saves": saves}

    def discard(self, data: Path) -> None:
        for model in self.facts("model"):
            shutil.rmtree(_checkpoints(data, model), ignore_errors=True)


def _checkpoints(data: Path, model: str) -> Path:
    return data / "checkpoints" / quote(model, safe="")


def _digests(data: Path, model: str, path: str) -> dict[str, str] | str:
    """The files of a checkpoint by their SHA-256, verified."""
    folder = _checkpoints(data, model) / "weights" / path.rpartition("/")[2]
    from mint.engine.folders import sha256

    try:
        digests = json.loads((folder / "mint.json").read_text())["sha256"]
    except OSError:
        return "lost"
    return digests if all(sha256(folder / name) == digest for name, digest in digests.items()) else "torn"


class FullDisk(threading.Thread):
    """Fills the data folder's disk for a few seconds, now and then."""

    def __init__(self, data: Path) -> None:
        super().__init__(daemon=True)
        self._file = data / "ballast"
        self._over = threading.Event()
        self.times = 0

    def run(self) -> None:
        while not self._over.wait(random.uniform(2.0, 6.0)):
            self.times += 1
            with contextlib.suppress(OSError), self._file.open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            self._over.wait(random.uniform(0.5, 3.0))
            self._file.unlink(missing_ok=True)

    def stop(self) -> None:
        self._over.set()
        self.join()
        self._file.unlink(missing_ok=True)


def campaign(
    options: argparse.Namespace, data: Path, quiet: dict[str, Any], pythons: list[tuple[str, str]]
) -> dict[str, Any]:
    """Kills until there have been enough; `pythons` are the clients, each a Python and the package it imports."""
    random.seed(options.seed)
    server = Server(data)
    begin = time.monotonic()
    filler = FullDisk(data) if options.disk_mib else None
    if filler:
        filler.start()

    def new(kind: tuple[str, str]) -> Client:
        return Client(*kind, server.address, options.steps, bool(filler))

    clients = [new(kind) for kind in pythons]
    tally: Counter[str] = Counter()
    kills: Counter[str] = Counter()
    amiss: list[dict[str, Any]] = []

    def collect(again: bool) -> None:
        for place, client in enumerate(clients):
            silent = time.monotonic() - client.last_word
            if client.running and silent > options.patience:
                tally["wedged"] += 1
                amiss.append({"client": client.package, "wedged_after": client.told[-1:]})
                client.process.kill()
                client.process.wait()
            if client.running or getattr(client, "seen", False):
                continue
            client.join()
            client.seen = True  # type: ignore[attr-defined]
            _judge(client, data, quiet, tally, amiss)
            if filler:  # what finished clients have saved would fill it for good
                client.discard(data)
            if again:
                clients[place] = new(pythons[place])

    def over() -> bool:
        return sum(kills.values()) >= options.kills or time.monotonic() - begin > options.minutes * 60

    while not over():
        words = sum(len(client.told) for client in clients)
        early = random.random() < 0.15
        until = time.monotonic() + (random.uniform(0.0, 3.0) if early else options.wait)
        # Most kills wait for progress, so that they hit work; some come while the server is starting.
        while time.monotonic() < until and not over():
            time.sleep(0.01)
            collect(again=True)
            if not early and sum(len(client.told) for client in clients) > words:
                time.sleep(random.uniform(0.0, 0.5))
                break
        what = random.choice(["engine", "engine", "server"])
        if server.kill(what):
            kills[what] += 1
    if filler:
        filler.stop()
    while any(client.running for client in clients):
        time.sleep(0.1)
        collect(again=False)
    collect(again=False)
    server.stop()
    return {
        "kills": dict(kills),
        "disk_filled": filler.times if filler else 0,
        "seconds": round(time.monotonic() - begin, 1),
        **{name: tally[name] for name in ("finished", "different", "lost_saves", "errors", "wedged", "saves", "steps")},
        "clients": {name: tally[f"finished_{name}"] for name in {package for _, package in pythons}},
        "amiss": amiss[:10],
    }


def _judge(client: Client, data: Path, quiet: dict[str, Any], tally: Counter[str], amiss: list[dict[str, Any]]) -> None:
    """Compares what a client was told and what lies on disk with the quiet run."""
    if not client.finished:
        if client.process.returncode != -signal.SIGKILL:
            tally["errors"] += 1
            amiss.append({"client": client.package, "error": client.complaints})
        return
    result = client.result(data)
    tally["finished"] += 1
    tally[f"finished_{client.package}"] += 1
    tally["steps"] += len(result["losses"])
    tally["saves"] += len(result["saves"])
    tally["lost_saves"] += sum(isinstance(digests, str) for digests in result["saves"].values())
    expected = quiet | {"saves": {name: quiet["saves"][name] for name in result["saves"]}}
    if result != expected:
        tally["different"] += 1
        amiss.append({"client": client.package, "differs_in": [key for key in result if result[key] != expected[key]]})


def quiet_run(options: argparse.Namespace, data: Path, patient: bool) -> dict[str, Any]:
    data.mkdir()
    server = Server(data)
    client = Client(sys.executable, "mint", server.address, options.steps, patient)
    try:
        client.join()
        assert client.finished, client.complaints
    finally:
        server.stop()
    return client.result(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop killing after this long")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a client's program")
    parser.add_argument("--sdk", help="a Python that has the official SDK: one client of three uses it")
    parser.add_argument("--disk-mib", type=int, help="size of a tmpfs for the data, which is filled up at times")
    parser.add_argument("--wait", type=float, default=120.0, help="longest wait for progress before a kill")
    parser.add_argument("--patience", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="where to keep the servers' log")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="mint-faults-"))
    data = home / "data"
    data.mkdir()
    try:
        quiet = quiet_run(options, home / "quiet", patient=bool(options.disk_mib))
        if options.disk_mib:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={options.disk_mib}m", "tmpfs", str(data)]
            subprocess.run(mount, check=True)
        pythons = [(sys.executable, "mint"), (sys.executable, "mint")]
        if options.sdk:
            pythons.append((options.sdk, "tinker"))
        found = campaign(options, data, quiet, pythons)
    finally:
        if options.disk_mib:
            subprocess.run(["umount", "-l", str(data)], check=False)
        if options.log:
            shutil.copy(home / "serve.log", options.log)
        shutil.rmtree(home, ignore_errors=True)
    facts = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "seed": options.seed}
    found |= facts | {"steps_a_client": options.steps}
    for name, value in found.items():
        print(f"{name:>16}  {value}")
    line = json.dumps(found)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)
    sys.exit(bool(found["different"] or found["lost_saves"] or found["errors"] or found["wedged"]))


if __name__ == "__main__":
    main()
