"""Word problems with a number as the answer, from a local file: GSM8K and its like (SVAMP, MAWPS, GSM-hard).

Numbers are compared exactly, in any spelling. An answer that is not a plain number (`\\frac{3}{2}`, `18 \\text{ eggs}`)
goes to math-verify, where that is installed (`mint-rl[envs]`).
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from mint.errors import BadRequest
from mint.rl.answers import canonical_number
from mint.rl.bridges import require
from mint.rl.bridges.formats import find_format
from mint.rl.datasets import ListRLDataset, holdout_split
from mint.rl.envs import ProblemEnv, ProblemGroupBuilder
from mint.rl.renderers import Renderer
from mint.rl.types import RLDataset, RLDatasetBuilder

logger = logging.getLogger(__name__)

# What math-verify is spared: towers of powers and factorials, which a sampled answer can make too large to compute.
_RISKY = re.compile(r"\^|\*\*|!")
_LONGEST = 100
_UNIT = re.compile(r"(?<=\d)\s+[A-Za-z ]+\.?$")


@dataclass(frozen=True)
class WordProblem:
    question: str
    answer: str
    """A number, without separators."""


def load_problems(path: str | Path) -> list[WordProblem]:
    """From `.jsonl` or `.json` (one list), plain or gzipped."""
    path = Path(path)
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        text = file.read()
    rows = (
        json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines() if line]
    )
    if not rows:
        raise BadRequest(f"{path} holds no problems")
    return [_problem(row, f"{path}, row {number}") for number, row in enumerate(rows)]


def _problem(row: Mapping[str, Any], where: str) -> WordProblem:
    match row:
        case {"question": str(question), "answer": str(answer)}:
            gold: Any = answer.rpartition("####")[2]
        case {"input": str(question), "target": gold}:
            pass
        case {"Body": str(body), "Question": str(asked), "Answer": gold}:
            question = f"{body.rstrip(' .')}. {asked}"
        case _:
            raise BadRequest(
                f"{where} has the fields {sorted(row)}; expected question and answer (GSM8K: '... #### 42'), input and "
                "target, or Body, Question and Answer"
            )
    number = canonical_number(str(gold))
    try:
        Fraction(number)
    except ValueError:
        raise BadRequest(f"{where} has the answer {gold!r}, which is not a number") from None
    return WordProblem(question.strip(), number)


def is_equal(answer: str, gold: str) -> bool:
    """Whether `answer`, as extracted from a response, is the number `gold`."""
    try:
        return Fraction(canonical_number(_UNIT.sub("", answer))) == Fraction(gold)
    except (ValueError, ZeroDivisionError):
        pass
    if len(answer) > _LONGEST or _RISKY.search(answer) or not _has_math_verify():
        return False
    math_verify = require("math_verify", "envs")
    # Its timeouts are alarm signals, which only a main thread may have; without powers there is nothing to wait for,
    # and no need to warn at every call.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    given, wanted = (math_verify.parse(text, parsing_timeout=None) for text in (f"${answer}$", gold))
    return bool(math_verify.verify(wanted, given, timeout_seconds=None))


def _has_math_verify() -> bool:
    return importlib.util.find_spec("math_verify") is not None


class WordProblemEnv(ProblemEnv):
    def __init__(self, renderer: Renderer, problem: WordProblem, prompt_format: str, format_coef: float) -> None:
        super().__init__(renderer, format_coef=format_coef)
        self.problem = problem
        self.format = find_format(prompt_format)

    def get_question(self) -> str:
        return self.format.prompt(self.problem.question)

    def check_answer(self, sample_str: str) -> bool:
        answer = self.format.extract(sample_str)
        return answer is not None and is_equal(answer, self.problem.answer)

    def check_format(self, sample_str: str) -> bool:
        return self.format.extract(sample_str) is not None

    def get_reference_answer(self) -> str:
        return self.problem.answer


@dataclass(frozen=True)
class Gsm8kDatasetBuilder(RLDatasetBuilder):
    """A training set from `path`, and a test set from `test_path` or, without one, held out of `path`."""

    path: str
    renderer: Renderer
    test_path: str | None = None
    group_size: int = 4
    groups_per_batch: int = 8
    prompt_format: str = "boxed"
    """One of `mint.rl.bridges.formats.FORMATS`."""
    format_coef: float = 0.1
    holdout: float = 0.1
    """The fraction held out where there is no `test_path`."""
    limit: int | None = None
    """Train on the first so many problems."""
    num_batches: int | None = None
    """None: once through the data."""
    seed: int = 0
    name: str = "gsm8k"

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        if not _has_math_verify():
            logger.warning("math-verify is not installed (pip install 'mint-rl[envs]'): only plain numbers are graded")
        problems = load_problems(self.path)
        if self.test_path is not None:
            train, test = problems, load_problems(self.test_path)
        else:
            train, test = holdout_split(problems, self.holdout, key=lambda problem: problem.question, seed=self.seed)
        training = ListRLDataset(
            self._builders(train), self.groups_per_batch, seed=self.seed, limit=self.limit, num_batches=self.num_batches
        )
        return training, ListRLDataset(self._builders(test), self.groups_per_batch, seed=None) if test else None

    def _builders(self, problems: list[WordProblem]) -> list[ProblemGroupBuilder]:
        make = partial(partial, WordProblemEnv, self.renderer)
        return [
            ProblemGroupBuilder(make(problem, self.prompt_format, self.format_coef), self.group_size, self.name)
            for problem in problems
        ]
