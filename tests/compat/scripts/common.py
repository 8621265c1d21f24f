"""What the scenario scripts share: the client under test, small data, and a report of one JSON line a scenario.

These scripts run in the client's own virtual environment, so they import that client and the standard library only;
what their facts should be is said by the tests that read the report.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

sdk = importlib.import_module(os.environ["COMPAT_CLIENT"])  # tinker, or mint of mindlab-toolkit
types = sdk.types
MINOR = int(importlib.metadata.version("tinker").split(".")[1])

MODEL = "mint/tiny"
EOS = 258
PATIENCE = 60
"""Seconds for one result: a call that hangs should say which one it was."""

_scenarios: dict[str, Callable[[], Any]] = {}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    _scenarios[function.__name__] = function
    return function


def scenario_of(since: int = 0, until: int = 99) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """For what only some minor versions of the tinker SDK can ask."""
    return scenario if since <= MINOR <= until else lambda function: function


def report() -> None:
    """Runs the scenarios named on the command line, or all, and prints what each of them found."""
    for name in sys.argv[1:] or list(_scenarios):
        try:
            outcome = {"facts": _scenarios[name]()}
        except Exception:
            outcome = {"error": traceback.format_exc()}
        print("RESULT", json.dumps({"scenario": name, **outcome}), flush=True)


def encode(text: str) -> list[int]:
    """mint/tiny has one token a byte."""
    return list(text.encode())


def text_datum(prompt: str, answer: str) -> Any:
    """Learn `answer` and the end of the text after `prompt`."""
    head, tail = encode(prompt), [*encode(answer), EOS]
    tokens = head + tail
    weights = [0.0] * (len(head) - 1) + [1.0] * len(tail)
    return datum(tokens, weights=weights)


def datum(tokens: list[int], **inputs: Any) -> Any:
    model_input = types.ModelInput.from_ints(tokens[:-1])
    return types.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": tokens[1:], **inputs})


SUMS = [text_datum(f"Q: What is {a} + {b}?\nA:", f" {a + b}") for a, b in [(1, 2), (12, 34), (40, 2), (57, 21)]]


def training_client(seed: int = 7, **options: Any) -> Any:
    return sdk.ServiceClient().create_lora_training_client(MODEL, **{"rank": 8, "seed": seed} | options)


def rest_client(service: Any) -> Any:
    return sdk.RestClient() if hasattr(sdk, "RestClient") else service.create_rest_client()


def train(client: Any, data: list[Any] = SUMS, learning_rate: float = 1e-3) -> float:
    """One step, both calls under way at once; gives the loss before it."""
    backward = client.forward_backward(data, "cross_entropy")
    step = client.optim_step(types.AdamParams(learning_rate=learning_rate))
    step.result(PATIENCE)
    return backward.result(PATIENCE).metrics["loss:sum"]


def logprobs_of(client: Any, data: list[Any] = SUMS) -> list[list[float]]:
    result = client.forward(data, "cross_entropy").result(PATIENCE)
    return [list(output["logprobs"].data) for output in result.loss_fn_outputs]


def furthest(one: list[list[float]], other: list[list[float]]) -> float:
    """The largest difference between two sets of log-probs."""
    return max(abs(p - q) for ps, qs in zip(one, other, strict=True) for p, q in zip(ps, qs, strict=True))


def refusal(call: Callable[[], Any]) -> dict[str, Any]:
    """The kind and words of the error that this call must end in."""
    try:
        call()
    except Exception as error:
        return {"error": type(error).__name__, "words": str(error), "status": getattr(error, "status_code", None)}
    return {"error": None, "words": "", "status": None}
