"""One-line Python functions, scored by running them: code that passes every test earns 1, everything else 0.

The model's code runs in `mint.rl.sandbox`, never in this process: no network, no files, limits on time and memory.

Run `python demos/rl/adapters/environment_tooluse.py`.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rl_core import RLAdapter, RLConfig, run_grpo

from mint.rl.sandbox import Case, IsolationUnavailable, Limits, Sandbox, TestReport

WORKED = "Q: Write a Python function f(x) that returns x plus 3.\nA: def f(x): return x + 3\n"
NUMBERS, WORDS, LISTS = ("-4", "0", "7", "30"), ("'mint'", "'a'", "'Tea'"), ("[3, 1, 2]", "[5]", "[-1, -7, 4, 4]")
# argument, what to return, an expression for it, inputs to test on; {k} is a small number
FUNCTIONS = [
    ("x", "x plus {k}", "x + {k}", NUMBERS),
    ("x", "x times {k}", "x * {k}", NUMBERS),
    ("x", "the remainder of x divided by {k}", "x % {k}", NUMBERS),
    ("x", "the absolute value of x", "abs(x)", NUMBERS),
    ("x", "True if x is even", "x % 2 == 0", NUMBERS),
    ("x", "True if x is greater than {k}", "x > {k}", (*NUMBERS, "{k}")),
    ("s", "s reversed", "s[::-1]", WORDS),
    ("s", "the last letter of s", "s[-1]", WORDS),
    ("s", "s in upper case", "s.upper()", WORDS),
    ("xs", "the sum of xs", "sum(xs)", LISTS),
    ("xs", "the largest item of xs", "max(xs)", LISTS),
    ("xs", "xs sorted", "sorted(xs)", LISTS),
]


@dataclass(frozen=True)
class Problem:
    question: str
    gold: str
    tests: tuple[Case, ...]


def draw_problem() -> Problem:
    name, k = random.choice(["g", "solve", "compute", "helper"]), random.randint(2, 20)
    argument, wanted, expression, inputs = random.choice(FUNCTIONS)
    signature, expression = f"{name}({argument})", expression.format(k=k)
    values = [value.format(k=k) for value in inputs]
    gold = eval(f"lambda {argument}: {expression}")  # ours, from the table above
    tests = tuple(Case(f"{name}({value})", gold(eval(value))) for value in values)
    question = f"Q: Write a Python function {signature} that returns {wanted.format(k=k)}.\nA:"
    return Problem(question, f" def {signature}: return {expression}", tests)


def extract_code(response: str) -> str | None:
    """The last fenced block, else everything from the first `def` to the next question."""
    if fenced := re.findall(r"```(?:\w+)?\n(.*?)```", response, re.DOTALL):
        return fenced[-1]
    return response[response.find("def ") :].partition("\nQ:")[0] if "def " in response else None


class EnvironmentToolUseAdapter(RLAdapter):
    def __init__(self) -> None:
        self.sandbox = Sandbox(Limits(seconds=5))
        self.reports: dict[tuple[str, str], asyncio.Future[TestReport]] = {}

    def build_dataset(self) -> list[Problem]:
        return [draw_problem() for _ in range(64)]

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
