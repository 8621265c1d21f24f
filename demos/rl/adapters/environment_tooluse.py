"""One-line Python functions, scored by running them: code that passes every test earns 1, everything else 0.

The model's code runs in `mint.rl.sandbox`, never in this process: no network, no files, limits on time and memory.
The problems are those of `mint train code` (`mint/recipes/functions.py`): a question, the right answer, test cases.

Run `python demos/rl/adapters/environment_tooluse.py`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rl_core import RLAdapter, RLConfig, run_grpo

from mint.recipes.functions import WORKED, Problem, draw_problem, extract_code
from mint.rl.sandbox import IsolationUnavailable, Limits, Sandbox, TestReport


class EnvironmentToolUseAdapter(RLAdapter):
    def __init__(self) -> None:
        self.sandbox = Sandbox(Limits(seconds=5))
        self.reports: dict[tuple[str, str], asyncio.Future[TestReport]] = {}

    def build_dataset(self) -> list[Problem]:
        return [draw_problem(random) for _ in range(64)]  # the module, which `RLConfig.seed` has seeded

    def make_prompt(self, sample: Problem, tokenizer: Any) -> list[int]:
        return tokenizer.encode(WORKED + sample.question)

    async def compute_reward(self, response: str, sample: Problem) -> float:
        code = extract_code(response)
        if code is None:
            return 0.0
        key = (sample.question, code)
        if key not in self.reports:  # the same answer is run once, however often it is given
            self.reports[key] = asyncio.ensure_future(self.sandbox.run_tests_async(code, sample.tests))
        report = await self.reports[key]
        return float(report.passed == report.total)


if __name__ == "__main__":
    try:
        adapter = EnvironmentToolUseAdapter()
    except IsolationUnavailable as error:
        raise SystemExit(f"This demo runs code that a model wrote, and only where that is safe. {error}") from error
    run_grpo(adapter, RLConfig.from_env(steps=15, batch=8, group=8, lr=1e-3, max_tokens=48))
