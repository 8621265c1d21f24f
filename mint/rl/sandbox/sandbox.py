"""Untrusted Python, a model's output say, run in a child with nothing to break and nothing to forge.

`Sandbox.run` runs a program. `Sandbox.run_tests` scores code: the code and the tests run in two separate sandboxes, the
tests call the code over a pipe, and only plain data crosses. The code never sees a test, shares no interpreter with
one, and can claim values but no verdict. Starting and ending the children is in `process.py`, how they are shut in in
`isolation.py`, what they do in `child.py`, what all this contains and does not contain in docs/sandbox.md.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from mint.errors import BadRequest
from mint.rl.sandbox.child import encode
from mint.rl.sandbox.isolation import Isolation, find_jail
from mint.rl.sandbox.process import Child, Limits, Result, supervise


@dataclass(frozen=True)
class Case:
    """A test as data: `expression`, in terms of what the code defines, must equal `expected` (plain data)."""

    expression: str
    expected: Any


@dataclass(frozen=True)
class Outcome:
    passed: bool
    message: str = ""
    """Why not."""


@dataclass(frozen=True)
class TestReport:
    """One outcome per test, in their order; `code` is how the code's own process ended."""

    __test__ = False  # pytest: this is no test class

    outcomes: tuple[Outcome, ...]
    code: Result

    @property
    def passed(self) -> int:
        return sum(outcome.passed for outcome in self.outcomes)

    @property
    def total(self) -> int:
        return len(self.outcomes)

    @property
    def score(self) -> float:
        """The fraction of tests passed."""
        return self.passed / self.total


@dataclass(frozen=True)
class Sandbox:
    """Where untrusted code runs. Holds no live state, so it may be shared between threads and pickled."""

    limits: Limits = field(default_factory=Limits)
    require_isolation: bool = True
    """False accepts the weaker fallback, with a warning, where bubblewrap does not work."""
    python: str | None = None
    """An interpreter whose installed packages the code may use; by default the standard library alone."""
    parallel: int = os.cpu_count() or 1
    """How many asynchronous runs go on at once; the others wait, so that their clocks do not run."""

    def __post_init__(self) -> None:
        if self.isolation != "bubblewrap":
            warnings.warn(
                f"untrusted code will run with the weak isolation {self.isolation!r}: it can read and write files"
                " outside its folder as far as this user's rights go (docs/sandbox.md)",
                RuntimeWarning,
                stacklevel=3,
            )

    @property
    def isolation(self) -> Isolation:
        return find_jail(self.require_isolation, self.python).isolation

    def run(self, code: str, stdin: str = "") -> Result:
        """Run `code` as a program."""
        jail = find_jail(self.require_isolation, self.python)
        child = Child(jail, self.limits, "script", code.encode("utf-8", "replace"), stdin.encode())
        supervise([child], self.limits.seconds)
        return child.result()

    def run_tests(
        self, code: str, tests: Sequence[str | Case], *, setup: str = "", entry_point: str | None = None
    ) -> TestReport:
        """Score `code` by `tests`: a string is Python that must run without an exception, a `Case` is an equation.

        In tests and `setup` (run first: imports, helper functions), names that neither they nor Python define are the
        code's. A built-in or a standard module keeps its own meaning, so name the `entry_point` if it is called `sum`.
        Tests are this caller's, not the code's: they are isolated too, but what they decide is believed.
        """
        if not tests:
            raise BadRequest("run_tests got no tests: a score needs at least one")
        parse(setup)
        job = {"setup": setup, "entry_point": entry_point, "tests": [as_job(test) for test in tests]}
        # The tester prints verdicts, as many as there are tests, each cut to a length.
        tester_limits = replace(self.limits, output_bytes=self.limits.output_bytes + 4096 * len(tests))
        with pipe_pair() as (for_tester, for_candidate):
            start = functools.partial(Child, find_jail(self.require_isolation, self.python))
            tester = start(tester_limits, "tester", json.dumps(job).encode(), pipes=for_tester)
            try:
                candidate = start(self.limits, "candidate", code.encode("utf-8", "replace"), pipes=for_candidate)
            except BaseException:
                tester.close(None)
                raise
        ended = supervise([tester, candidate], self.limits.seconds)
        verdicts = [json.loads(line) for line in bytes(tester.stdout).split(b"\n")[:-1]]
        outcomes = [Outcome(not verdict, verdict) for verdict in verdicts]
        missing = f"no verdict: {ended or 'the tests ended early'}"
        outcomes += [Outcome(False, missing)] * (len(tests) - len(outcomes))
        return TestReport(tuple(outcomes), candidate.result())

    async def run_async(self, code: str, stdin: str = "") -> Result:
        return await asyncio.get_running_loop().run_in_executor(workers(self.parallel), self.run, code, stdin)

    async def run_tests_async(
        self, code: str, tests: Sequence[str | Case], *, setup: str = "", entry_point: str | None = None
    ) -> TestReport:
        call = functools.partial(self.run_tests, code, tests, setup=setup, entry_point=entry_point)
        return await asyncio.get_running_loop().run_in_executor(workers(self.parallel), call)


@functools.cache
def workers(parallel: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(parallel, thread_name_prefix="sandbox")


@contextlib.contextmanager
def pipe_pair() -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """(write, read) for one child and (read, write) for the other; closed here once both have started."""
    calls_in, calls_out = os.pipe()
    replies_in, replies_out = os.pipe()
    try:
        yield (calls_out, replies_in), (calls_in, replies_out)
    finally:
        for fd in (calls_in, calls_out, replies_in, replies_out):
            os.close(fd)


def parse(test: str, mode: str = "exec") -> None:
    try:
        ast.parse(test, mode=mode)
    except SyntaxError as error:
        raise BadRequest(f"the test {test!r} is not Python: {error}") from error


def as_job(test: str | Case) -> Any:
    """A test as JSON; one that is not Python, or expects more than plain data, is the caller's mistake."""

    def refuse(value: Any) -> NoReturn:
        raise BadRequest(f"{test!r} expects a {type(value).__name__}; a Case takes plain data, else write an assert")

    if isinstance(test, Case):
        parse(test.expression, "eval")
        return [test.expression, encode(test.expected, refuse)]
    parse(test)
    return test
