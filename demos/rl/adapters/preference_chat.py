"""Short chats, scored by a judge: how far an answer is polite, to the point, on topic and free of repetition.

The judge below is a few lines anyone can read. A language model judges instead if one is named: MINT_JUDGE_MODEL, at
the OpenAI-compatible MINT_JUDGE_URL (such as http://localhost:8000/v1), with MINT_JUDGE_KEY where it asks for a key.

Run `python demos/rl/adapters/preference_chat.py`.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rl_core import RLAdapter, RLConfig, run_grpo

from mint.rl.completers import EndpointMessageCompleter
from mint.rl.judges import RubricJudge

Judge = Callable[[str, str], float | Awaitable[float]]

REQUESTS = ["Tell me about {}.", "Say something nice about {}.", "Describe {} in one sentence.", "What is {}?"]
ADJECTIVES = ["brave", "golden", "happy", "lazy", "old", "quiet", "red", "shy", "small", "young"]
NOUNS = ["bear", "boat", "castle", "cookie", "fox", "garden", "lemon", "piano", "rose", "turtle", "village", "whale"]
RUBRIC = "Polite; to the point, one or two short sentences; about what was asked; says nothing twice."


def local_judge(prompt: str, answer: str) -> float:
    """A quarter for each line of the rubric; what is no sentence about the topic earns nothing."""
    words = re.findall(r"[a-z']+", answer.lower())
    topic = re.findall(r"[a-z]+", prompt.lower().removesuffix(" in one sentence."))[-1]
    if topic not in words or not answer.rstrip().endswith((".", "!")):
        return 0.0
    polite = re.search(r"glad|pleasure|happy to|of course|thank|please|welcome|certainly|sure", answer.lower())
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return (1 + bool(polite) + (4 <= len(words) <= 25) + (len(triples) == len(set(triples)))) / 4


def choose_judge() -> Judge:
    model, url = os.environ.get("MINT_JUDGE_MODEL"), os.environ.get("MINT_JUDGE_URL")
    if not model:
        return local_judge
    if not url:
        raise SystemExit(f"MINT_JUDGE_MODEL is {model!r}; set MINT_JUDGE_URL to the server that has it, up to /v1.")
    return RubricJudge(EndpointMessageCompleter(url, model, os.environ.get("MINT_JUDGE_KEY")), RUBRIC)


class PreferenceChatAdapter(RLAdapter):
    def __init__(self, judge: Judge = local_judge) -> None:
        self.judge = judge

    def build_dataset(self) -> list[str]:
        topics = [f"a {random.choice(ADJECTIVES)} {random.choice(NOUNS)}" for _ in range(64)]
        return [random.choice(REQUESTS).format(topic.replace("a old", "an old")) for topic in topics]

    def make_prompt(self, sample: str, tokenizer: Any) -> list[int]:
        messages = [{"role": "user", "content": sample}]
        return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)

    def compute_reward(self, response: str, sample: str) -> float | Awaitable[float]:
        return self.judge(sample, response)

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        print(f"Step {step}: avg_reward={sum(rewards) / len(rewards):.3f}, datums={num_datums}", flush=True)


if __name__ == "__main__":
    run_grpo(
        PreferenceChatAdapter(choose_judge()), RLConfig.from_env(steps=15, batch=8, group=8, lr=1e-3, max_tokens=128)
    )
