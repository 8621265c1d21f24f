"""The task of the recipes: additions of two numbers below 100, in the form the bundled model knows."""

from __future__ import annotations

import random
import re
import zlib

Problem = tuple[int, int]


def prompt_of(problem: Problem) -> str:
    return f"Q: What is {problem[0]} + {problem[1]}?\nA:"


def answer_of(problem: Problem) -> str:
    return f" {sum(problem)}"


def wrong_answer_of(problem: Problem, rng: random.Random) -> str:
    """A mistake somebody might make: off by a little, or by a ten."""
    return f" {max(0, sum(problem) + rng.choice([-10, -9, -2, -1, 1, 2, 9, 10]))}"


def reward_of(text: str, problem: Problem) -> float:
    found = re.search(r"-?\d+", text)
    return 1.0 if found and int(found.group()) == sum(problem) else 0.0


def is_held_out(problem: Problem) -> bool:
    """A tenth of all additions, by their name: the same in every process, and never trained on."""
    low, high = sorted(problem)
    return zlib.crc32(f"{low} + {high}".encode()) % 10 == 0


def draw_problems(rng: random.Random, count: int, held_out: bool = False) -> list[Problem]:
    drawn: list[Problem] = []
    while len(drawn) < count:
        problem = (rng.randint(0, 99), rng.randint(0, 99))
        if is_held_out(problem) == held_out:
            drawn.append(problem)
    return drawn
