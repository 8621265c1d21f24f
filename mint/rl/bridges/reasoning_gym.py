"""The procedural tasks of reasoning-gym by name, scored by their own scorers. Needs `mint-rl[envs]`."""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mint.errors import BadRequest
from mint.rl.bridges import require
from mint.rl.bridges.formats import find_format
from mint.rl.datasets import ListRLDataset, holdout_split
from mint.rl.envs import ProblemEnv, ProblemGroupBuilder
from mint.rl.renderers import Renderer
from mint.rl.types import RLDataset, RLDatasetBuilder

logger = logging.getLogger(__name__)

# These scorers of reasoning-gym 0.1.25 execute the answer, in this process: with eval(), or with SymPy's parse_expr(),
# which is eval() after some rewriting. "open('x', 'w')" would do as it says, and "Integral(f(x), x)", which gives the
# question back, would be right.
EVALUATED = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
PARSED_BY_SYMPY = {
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
}
INTEGRATION_FUNCTIONS = {
    "acos",
    "asin",
    "atan",
    "cos",
    "cosh",
    "exp",
    "ln",
    "log",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
}
LITERALS = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load)
ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Name, ast.Load)
LARGEST_EXPONENT = 100


def is_harmless(answer: str, task: str) -> bool:
    """Whether this task's scorer may be given this answer: literals where it evaluates, arithmetic for SymPy."""
    if task not in EVALUATED | PARSED_BY_SYMPY:
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return task in EVALUATED  # what is not Python cannot be evaluated; SymPy would rewrite it until it can
    if task in EVALUATED:
        return all(isinstance(node, LITERALS) for node in ast.walk(tree))
    functions = INTEGRATION_FUNCTIONS if task.endswith("integration") else set()
    return all(_is_arithmetic(node, functions) for node in ast.walk(tree))


def _is_arithmetic(node: ast.AST, functions: set[str]) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in functions and not node.keywords
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):  # 9**9**9 would take this process with it
        numbers = [n.value for n in ast.walk(node.right) if isinstance(n, ast.Constant)]
        towers = [n for side in (node.left, node.right) for n in ast.walk(side) if isinstance(n, ast.Pow)]
        return not towers and all(isinstance(n, int | float) and abs(n) <= LARGEST_EXPONENT for n in numbers)
    return isinstance(node, ARITHMETIC) and not isinstance(node, ast.LShift)


class ReasoningGymEnv(ProblemEnv):
    def __init__(
        self,
        renderer: Renderer,
        dataset: Any,
        entry: Mapping[str, Any],
        prompt_format: str,
        threshold: float,
        format_coef: float,
    ) -> None:
        super().__init__(renderer, format_coef=format_coef)
        self.dataset = dataset
        self.entry = entry
        self.format = find_format(prompt_format)
        self.threshold = threshold

    def get_question(self) -> str:
        return self.format.prompt(self.entry["question"])

    def check_answer(self, sample_str: str) -> float:
        answer = self.format.extract(sample_str)
        if answer is None or not is_harmless(answer, self.entry["metadata"]["source_dataset"]):
            return 0.0
        try:
            score = float(self.dataset.score_answer(answer, self.entry))
        except Exception as error:  # some scorers raise on answers they did not expect; that is a wrong answer
            logger.warning("the scorer of %s raised %r on %r", self.entry["metadata"]["source_dataset"], error, answer)
            return 0.0
        return score if score >= self.threshold else 0.0

    def check_format(self, sample_str: str) -> bool:
        return self.format.extract(sample_str) is not None

    def get_reference_answer(self) -> str:
        return str(self.entry["answer"])


@dataclass(frozen=True)
class ReasoningGymDatasetBuilder(RLDatasetBuilder):
    """`size` problems of one task, some of them held out by question."""

    task: str
    renderer: Renderer
    size: int = 1000
    config: Mapping[str, Any] = field(default_factory=dict)
    """The task's own settings, such as its difficulty."""
    threshold: float = 1.0
    """Scores below it count as 0. Many scorers give crumbs (0.01 to 0.2) for wrong answers, so lower it only for a task
    whose partial credit means something."""
    group_size: int = 4
    groups_per_batch: int = 8
    prompt_format: str = "tags"
    """One of `mint.rl.bridges.formats.FORMATS`."""
    format_coef: float = 0.1
    holdout: float = 0.1
    num_batches: int | None = None
    """None: once through the problems."""
    seed: int = 0

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        gym = require("reasoning_gym", "envs")
        known = sorted(gym.factory.DATASETS)
        if self.task not in known:
            raise BadRequest(f"reasoning-gym has no task {self.task!r}; it has {', '.join(known)}")
        try:
            dataset = gym.create_dataset(self.task, size=self.size, seed=self.seed, **self.config)
        except (TypeError, AssertionError, ValueError) as error:
            raise BadRequest(
                f"reasoning-gym's {self.task} refused the settings {dict(self.config)}: {error}"
            ) from error
        entries = [dataset[i] for i in range(self.size)]
        make = partial(partial, ReasoningGymEnv, self.renderer, dataset)
        builders = [
            ProblemGroupBuilder(
                make(e, self.prompt_format, self.threshold, self.format_coef), self.group_size, self.task
            )
            for e in entries
        ]
        train, test = holdout_split(builders, self.holdout, key=ProblemGroupBuilder.problem_id, seed=self.seed)
        training = ListRLDataset(train, self.groups_per_batch, seed=self.seed, num_batches=self.num_batches)
        return training, ListRLDataset(test, self.groups_per_batch, seed=None) if test else None
