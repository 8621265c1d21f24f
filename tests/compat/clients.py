"""The clients under test, and the runs of scenario scripts in their environments."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.compat.environments import packages_of, python_of
from tests.compat.serving import SK_KEY, Served, bare_environment

SCRIPTS = Path(__file__).parent / "scripts"
WITH_TORCH = "tinker-0.36"
TIME_LIMIT = 240


@dataclass(frozen=True)
class Kind:
    """One published client."""

    name: str
    module: str
    """What its users import."""
    environment: str
    key: str | None = None
    """None: one that `mint keys create` made."""


KINDS = (
    Kind("tinker 0.36.0", "tinker", "tinker-0.36"),
    Kind("tinker 0.22.0", "tinker", "tinker-0.22"),
    Kind("mindlab-toolkit 0.2.0", "mint", "tinker-0.22", SK_KEY),
)
NEWEST, OLDEST, TOOLKIT = KINDS


class Client:
    """One client against one server; each script runs once, however many tests read its report."""

    def __init__(self, kind: Kind, served: Served, environment: Callable[[str], Path]) -> None:
        self.kind = kind
        self._served = served
        self._environment = environment
        self._report = functools.cache(self._run)

    def facts(self, script: str, scenario: str) -> Any:
        """What the scenario found; its own failure fails the test that asks."""
        report, told = self._report(script)
        assert scenario in report, f"{script}.{scenario} did not end:\n{told}\nserver: {self._served.log.read_text()}"
        outcome = report[scenario]
        assert "facts" in outcome, f"{script}.{scenario}: {outcome['error']}\nserver: {self._served.log.read_text()}"
        return outcome["facts"]

    def _run(self, script: str) -> tuple[dict[str, Any], str]:
        python, packages = python_of(self._environment(self.kind.environment)), {}
        if script == "custom_loss" and self.kind.environment != WITH_TORCH:
            # Torch is not installed twice: the client's packages go before those of the environment that has it.
            packages = {"PYTHONPATH": str(packages_of(self._environment(self.kind.environment)))}
            python = python_of(self._environment(WITH_TORCH))
        try:
            done = subprocess.run(
                [python, SCRIPTS / f"{script}.py"],
                cwd=self._served.folder,
                env=bare_environment(self._served.folder, self._address() | packages),
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT,
                check=False,
            )
            said, complained = done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            said, complained = (part.decode() if part else "" for part in (error.stdout, error.stderr))
        lines = [json.loads(line.removeprefix("RESULT ")) for line in said.splitlines() if line.startswith("RESULT ")]
        return {line["scenario"]: line for line in lines}, said + complained

    def _address(self) -> dict[str, str]:
        brand = "MINT" if self.kind.module == "mint" else "TINKER"
        return {
            "COMPAT_CLIENT": self.kind.module,
            f"{brand}_BASE_URL": self._served.url,
            f"{brand}_API_KEY": self.kind.key or self._served.key,
        }
