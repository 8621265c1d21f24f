"""One-line Python functions, scored by running them: code that passes every test earns 1, everything else 0.

The model's code runs in `mint.rl.sandbox`, never in this process: no network, no files, limits on time and memory.
"""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from mint.recipes.tasks import TaskBuilder
from mint.rl.config import Config
from mint.rl.envs import ProblemEnv, ProblemGroupBuilder
from mint.rl.renderers import PlainRenderer
from mint.rl.sandbox import Case, Limits, Sandbox, TestReport
from mint.rl.types import Action, ActionExtra, EnvGroupBuilder, StepResult

WORKED = "Q: Write a Python function f(x) that returns x plus 3.\nA: def f(x): return x + 3\n"
NUMBERS, WORDS, LISTS = ("-4", "0", "7", "30"), ("'mint'", "'a'", "'Tea'"), ("[3, 1, 2]", "[5]", "[-1, -7, 4, 4]")
NAMES = ("g", "solve", "compute", "helper")
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
    answer: str
    tests: tuple[Case, ...]


def draw_problem(rng: random.Random) -> Problem:
    name, k = rng.choice(NAMES), rng.randint(2, 20)
    argument, wanted, expression, inputs = rng.choice(FUNCTIONS)
    signature, expression = f"{name}({argument})", expression.format(k=k)
    values = [value.format(k=k) for value in inputs]
    right = eval(f"lambda {argument}: {expression}")  # ours, from the table above
    tests = tuple(Case(f"{name}({value})", right(eval(value))) for value in values)
    question = f"Q: Write a Python function {signature} that returns {wanted.format(k=k)}.\nA:"
    return Problem(question, f"def {signature}: return {expression}", tests)


def extract_code(response: str) -> str | None:
    """The last fenced block, else everything from the first `def` to the next question."""
    if fenced := re.findall(r"```(?:\w+)?\n(.*?)```", response, re.DOTALL):
        return str(fenced[-1])
    return response[response.find("def ") :].partition("\nQ:")[0] if "def " in response else None


Verdicts = dict[str, asyncio.Future[TestReport]]
"""By code, for one problem."""


class FunctionEnv(ProblemEnv):
    def __init__(self, problem: Problem, tokenizer: Any, sandbox: Sandbox, verdicts: Verdicts) -> None:
        super().__init__(PlainRenderer(tokenizer), format_coef=0.0)
        self.problem, self.sandbox, self.verdicts = problem, sandbox, verdicts

    def get_question(self) -> str:
        return WORKED + self.problem.question

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Runs the code beside the other rollouts; the same answer is run once, however often it is given."""
        code = extract_code(self.renderer.parse_response(action)[0]["content"])
        if code is not None:
            if code not in self.verdicts:
                tests = self.sandbox.run_tests_async(code, self.problem.tests)
                self.verdicts[code] = asyncio.ensure_future(tests)
            await self.verdicts[code]
        return await super().step(action, extra=extra)

    def check_answer(self, sample_str: str) -> bool:
        code = extract_code(sample_str)
        if code is None:
            return False
        report = self.verdicts[code].result()
        return report.passed == report.total

    def check_format(self, sample_str: str) -> bool:
        return extract_code(sample_str) is not None

    def get_reference_answer(self) -> str:
        return self.problem.answer


@dataclass(frozen=True)
class FunctionDatasetBuilder(TaskBuilder[Problem]):
    groups_per_batch: int = 8
    num_batches: int = 15
    tests: int = 40

    def draw(self, rng: random.Random) -> Problem:
        return draw_problem(rng)

    def name(self, problem: Problem) -> str:
        return problem.question

    def group(self, problem: Problem, tokenizer: Any, size: int) -> EnvGroupBuilder:
        verdicts: Verdicts = {}
        sandbox = Sandbox(Limits(seconds=5))
        return ProblemGroupBuilder(partial(FunctionEnv, problem, tokenizer, sandbox, verdicts), size, "functions")


CONFIG = Config(
    model_name="mint/tiny",
    recipe_name="code",
    dataset_builder=FunctionDatasetBuilder(),
    learning_rate=1e-3,
    lora_rank=16,
    max_tokens=48,
    eval_every=5,
    save_every=5,
    log_path="runs/code",
)
