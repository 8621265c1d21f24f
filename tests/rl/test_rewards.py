import asyncio
import math
from typing import Any

import pytest

from mint.errors import BadRequest
from mint.rl.rewards import (
    Reward,
    RewardError,
    Term,
    as_reward,
    call_reward,
    tool_spam_penalty,
    unsafe_words_penalty,
    verbosity_penalty,
)


def test_terms_are_weighted_and_each_is_logged_alone() -> None:
    reward = Reward((Term("right", lambda r: 1.0), Term("style", lambda r: 0.5, 0.2), verbosity_penalty(2, 6, 0.5)))
    total, metrics = asyncio.run(reward("prompt", "four"))
    assert total == pytest.approx(1.0 + 0.2 * 0.5 + 0.5 * -0.5)
    assert metrics == {
        "reward/right": 1.0, "reward/style": 0.5, "reward/verbosity": -0.5, "penalized/verbosity": 1.0,
        "reward/penalties": pytest.approx(-0.25),
    }  # fmt: skip
    assert reward.range == pytest.approx((-0.5, 1.2))


async def judged(prompt: str, answer: str, trace: Any) -> float:
    return 0.25


def graded(prompt: str, answer: str, trace: Any = None) -> float:
    return 0.0 if trace is None else 0.75


@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (lambda response: float(response == "a"), 1.0),
        (lambda prompt, answer: float((prompt, answer) == ("p", "a")), 1.0),
        (lambda prompt, answer, trace: float(trace["tool_calls"] == [1]), 1.0),
        (lambda *everything: float(len(everything) == 3), 1.0),
        (lambda response, limit=5: float(limit == 5), 1.0),
        (graded, 0.75),
        (judged, 0.25),
    ],
)
def test_a_function_is_called_with_as_much_as_it_takes(function: Any, seen: float) -> None:
    assert asyncio.run(call_reward(function, "p", "a", {"tool_calls": [1]})) == seen


@pytest.mark.parametrize("function", [lambda: 1.0, lambda a, b, c, d: 1.0, lambda a, *, key: 1.0])
def test_other_signatures_are_refused_before_the_run(function: Any) -> None:
    with pytest.raises(BadRequest, match=r"\(response\), \(prompt, answer\) or \(prompt, answer, trace\)"):
        Term("odd", function)


@pytest.mark.parametrize("value", [1.5, -0.1, math.nan, math.inf])
def test_a_value_out_of_range_is_refused_with_its_sample(value: float) -> None:
    with pytest.raises(RewardError, match=r"'score' returned .* outside its range .*'the prompt'.*'the answer'"):
        asyncio.run(as_reward(lambda response: value)("the prompt", "the answer"))


@pytest.mark.parametrize(("value", "kept"), [(1.5, 1.0), (-0.1, 0.0), (math.nan, 0.0), (0.5, 0.5)])
def test_or_clipped_and_counted(value: float, kept: float) -> None:
    total, metrics = asyncio.run(Reward((Term("t", lambda r: value),), "clip")("p", "a"))
    assert total == kept
    assert metrics == {"reward/t": kept, "reward_clipped": float(value != kept)}


def test_penalties_stay_in_their_range() -> None:
    spam = tool_spam_penalty(free=1, limit=3)
    values = [spam.function("p", "a", {"tool_calls": [0] * n}) for n in range(6)]
    assert values == [0.0, 0.0, -0.5, -1.0, -1.0, -1.0]


def test_unsafe_words_are_whole_words_in_any_case() -> None:
    unsafe = unsafe_words_penalty(["kill", "rm -rf"]).function
    assert [unsafe(text) for text in ("Kill it", "skill", "run rm -rf /", "fine")] == [-1.0, 0.0, -1.0, 0.0]
    assert unsafe_words_penalty([]).function("anything") == 0.0


def test_terms_need_names_of_their_own_and_a_range() -> None:
    with pytest.raises(BadRequest, match="name of its own"):
        Reward((Term("a", lambda r: 1.0), Term("a", lambda r: 1.0)))
    with pytest.raises(BadRequest, match="low must be below high"):
        Term("a", lambda r: 1.0, low=1.0, high=0.0)
