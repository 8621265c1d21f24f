"""Short chats before a judge that anyone can read: polite, to the point, on topic, and nothing said twice.

A language model judges instead with `mint.rl.judges`; `docs/prompting.md` shows one.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from mint.recipes.tasks import TaskBuilder
from mint.rl.config import Config
from mint.rl.envs import ProblemEnv, ProblemGroupBuilder
from mint.rl.renderers import ChatRenderer
from mint.rl.types import EnvGroupBuilder

REQUESTS = ["Tell me about {}.", "Say something nice about {}.", "Describe {} in one sentence.", "What is {}?"]
ADJECTIVES = ["brave", "golden", "happy", "lazy", "old", "quiet", "red", "shy", "small", "young"]
NOUNS = ["bear", "boat", "castle", "cookie", "fox", "garden", "lemon", "piano", "rose", "turtle", "village", "whale"]
POLITE = re.compile(r"glad|pleasure|happy to|of course|thank|please|welcome|certainly|sure")


def judge(prompt: str, answer: str) -> float:
    """A quarter for each line of the rubric; what is no sentence about the topic earns nothing."""
    words = re.findall(r"[a-z']+", answer.lower())
    topic = re.findall(r"[a-z]+", prompt.lower().removesuffix(" in one sentence."))[-1]
    if topic not in words or not answer.rstrip().endswith((".", "!")):
        return 0.0
    triples = list(zip(words, words[1:], words[2:], strict=False))
    polite = POLITE.search(answer.lower()) is not None
    return (1 + polite + (4 <= len(words) <= 25) + (len(triples) == len(set(triples)))) / 4


class ChatEnv(ProblemEnv):
    def __init__(self, request: str, tokenizer: Any) -> None:
        super().__init__(ChatRenderer(tokenizer), format_coef=0.0)
        self.request = request

    def get_question(self) -> str:
        return self.request

    def check_answer(self, sample_str: str) -> float:
        return judge(self.request, sample_str)

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "one or two polite sentences about it"


@dataclass(frozen=True)
class ChatDatasetBuilder(TaskBuilder[str]):
    groups_per_batch: int = 8
    num_batches: int = 15
    tests: int = 48

    def draw(self, rng: random.Random) -> str:
        adjective, noun = rng.choice(ADJECTIVES), rng.choice(NOUNS)
        topic = f"{'an' if adjective == 'old' else 'a'} {adjective} {noun}"
        return rng.choice(REQUESTS).format(topic)

    def name(self, problem: str) -> str:
        return problem

    def group(self, problem: str, tokenizer: Any, size: int) -> EnvGroupBuilder:
        return ProblemGroupBuilder(partial(ChatEnv, problem, tokenizer), size, "chat")


CONFIG = Config(
    model_name="mint/tiny",
    recipe_name="preference",
    dataset_builder=ChatDatasetBuilder(),
    learning_rate=1e-3,
    lora_rank=16,
    max_tokens=128,
    eval_every=5,
    save_every=5,
    log_path="runs/preference",
)
