"""Requests drawn from a server's own OpenAPI page by schemathesis, each judged by one rule: never a 5xx."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode


def fuzz(url: str, examples: int, derandomize: bool) -> dict[str, Counter[int]]:
    """Asks every operation this often, with values of its schema and with others; how often which status came back.
    Raises at the first 5xx, with the smallest request that causes it."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    told: dict[str, Counter[int]] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        seen = told[f"{operation.method.upper()} {operation.path}"] = Counter()
        for mode in GenerationMode:
            _ask(operation, mode, examples, derandomize, seen)
    return told


def _ask(operation: Any, mode: GenerationMode, examples: int, derandomize: bool, seen: Counter[int]) -> None:
    try:
        strategy = operation.as_strategy(generation_mode=mode)
    except TypeError:
        return

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(case=strategy)
    def ask(case: Any) -> None:
        answer = case.call()
        seen[answer.status_code] += 1
        assert answer.status_code < 500, f"{case.as_curl_command()}\n{answer.status_code}: {answer.text}"

    try:
        ask()
    except Exception as error:
        if type(error).__name__ not in ("Unsatisfiable", "SkipTest"):  # an operation that cannot be asked wrongly
            raise
