"""Arithmetic too large to guess, with a calculator to ask: the right answer at the end of the conversation earns 1.

The model's first turn may call the tool, `<tool_call>312*47</tool_call>`; the tool's answer comes back as a turn of the
conversation, and the model goes on. Nobody shows it how: that asking pays is learned from the reward alone.

Run `python demos/rl/adapters/agentic.py`.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rl_core import RLAdapter, RLConfig, run_grpo

from mint.rl.answers import exact_match
from mint.rl.calculator import calculator, evaluate
from mint.rl.envs import ParseError
from mint.rl.tools import parse_tool_calls

TOOLS = {calculator.name: calculator}
TOOL_CALL = re.compile(r"<tool_call>.*?(</tool_call>|$)", re.DOTALL)


class CalculatorAdapter(RLAdapter):
    def build_dataset(self) -> list[str]:
        numbers = [(random.randint(11, 999), random.choice("+-*"), random.randint(11, 999)) for _ in range(64)]
        return [f"{a} {operator} {b}" for a, operator, b in numbers]

    def make_prompt(self, sample: str, tokenizer: Any) -> list[int]:
        self.tokenizer = tokenizer
        return tokenizer.apply_chat_template(
            self.opening(sample), tools=[calculator.spec()], tokenize=True, add_generation_prompt=True
        )

    def opening(self, sample: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"What is {sample}?"}]

    def next_turn(self, response: str, sample: str) -> str | None:
        try:
            calls = parse_tool_calls({"content": response}, TOOLS)
            results = [calculator.function(**call.arguments) for call in calls]
        except (ParseError, TypeError, ValueError, ArithmeticError):
            return None  # not a call, or not one that can be answered
        return self.tool_turn(sample, results) if results else None

    def tool_turn(self, sample: str, results: list[str]) -> str:
        """What the chat template puts between an assistant's turn and its next one when tools have answered."""
        said = {"role": "assistant", "content": "@@said@@"}
        answers = [{"role": "tool", "name": calculator.name, "content": result} for result in results]
        text = self.tokenizer.apply_chat_template(
            [*self.opening(sample), said, *answers],
            tools=[calculator.spec()],
            tokenize=False,
            add_generation_prompt=True,
        )
        return text.partition(said["content"])[2].removeprefix(self.tokenizer.eos_token)

    def compute_reward(self, response: str, sample: str) -> float:
        return exact_match(TOOL_CALL.sub("", response), evaluate(sample))


if __name__ == "__main__":
    run_grpo(CalculatorAdapter(), RLConfig.from_env(steps=12, batch=8, group=8, lr=1e-3, max_tokens=32, max_turns=3))
