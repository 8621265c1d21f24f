"""Additions, scored by an exact verifier: the right number earns 1, everything else 0.

Run `python demos/rl/adapters/verifiable_math.py`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rl_core import RLAdapter, RLConfig, run_grpo

from mint.rl.answers import exact_match

Problem = tuple[int, int]

WORKED = "Q: What is 4 + 5?\nA: 9\n"
LARGEST = 99


class VerifiableMathAdapter(RLAdapter):
    def build_dataset(self) -> list[Problem]:
        return [(random.randint(0, LARGEST), random.randint(0, LARGEST)) for _ in range(64)]

    def make_prompt(self, sample: Problem, tokenizer: Any) -> list[int]:
        return tokenizer.encode(f"{WORKED}Q: What is {sample[0]} + {sample[1]}?\nA:")

    def compute_reward(self, response: str, sample: Problem) -> float:
        answer = response.partition("\n")[0]  # base models go on with questions of their own
        return exact_match(answer, sum(sample))


if __name__ == "__main__":
    run_grpo(VerifiableMathAdapter(), RLConfig.from_env(steps=25, batch=16, group=8, lr=1e-3, max_tokens=8))
