"""Short runs that must learn: by example, and by reward."""

from __future__ import annotations

import random
import re
from typing import Any

from common import PATIENCE, datum, encode, report, scenario, text_datum, train, training_client, types


def problems(count: int) -> list[tuple[int, int]]:
    draw = random.Random(0)
    return [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(count)]


def prompt_of(problem: tuple[int, int]) -> list[int]:
    return encode(f"Q: What is {problem[0]} + {problem[1]}?\nA:")


@scenario
def by_example() -> Any:
    client = training_client(rank=16)
    data = [text_datum(f"Q: What is {a} + {b}?\nA:", f" {a + b}") for a, b in problems(16)]
    return {"losses": [train(client, data) for _ in range(10)]}


def group_datums(prompt: list[int], sequences: list[Any], rewards: list[float]) -> list[Any]:
    mean, head = sum(rewards) / len(rewards), len(prompt) - 1
    made = []
    for sequence, reward in zip(sequences, rewards, strict=True):
        tokens, length = list(sequence.tokens), len(sequence.tokens)
        inputs = {
            "logprobs": [0.0] * head + list(sequence.logprobs),
            "advantages": [0.0] * head + [reward - mean] * length,
        }
        made.append(datum(prompt + tokens, **inputs))
    return made if len(set(rewards)) > 1 else []


def reward_of(sequence: Any, problem: tuple[int, int]) -> float:
    text = bytes(token for token in sequence.tokens if token < 256).decode(errors="replace")
    found = re.search(r"\d+", text)
    return float(found is not None and int(found.group()) == sum(problem))


@scenario
def by_reward() -> Any:
    """Group-centred advantages on additions: a fresh snapshot, samples, one step, eight times."""
    client = training_client(rank=16)
    tasks, rewards = problems(16), []
    params = {"max_tokens": 6, "temperature": 1.0}
    for step in range(8):
        sampler = client.save_weights_and_get_sampling_client()
        futures = [
            sampler.sample(types.ModelInput.from_ints(prompt_of(task)), 8, types.SamplingParams(seed=n, **params))
            for n, task in enumerate(tasks, start=100 * step)
        ]
        data = []
        rewards.append(0.0)
        for task, future in zip(tasks, futures, strict=True):
            sequences = future.result(PATIENCE).sequences
            scores = [reward_of(sequence, task) for sequence in sequences]
            rewards[-1] += sum(scores) / len(scores) / len(tasks)
            data += group_datums(prompt_of(task), sequences, scores)
        backward = client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result(PATIENCE)
        backward.result(PATIENCE)
    return {"rewards": rewards}


report()
