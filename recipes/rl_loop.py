"""GRPO on the raw client, from top to bottom: sample groups, score, centre, train, refresh.

    python recipes/rl_loop.py                       # additions, on the bundled model
    python recipes/rl_loop.py steps=40 group_size=16 loss_fn=ppo

To make it yours, change the three functions under "the task". What was left out on purpose: standard-deviation scaling,
KL, several optimizer steps a batch, sampling ahead of training, resume. `mint.rl.train` has them all, with the same
five steps inside.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arguments import configured

import mint
from mint import types
from mint.recipes.addition import Problem, draw_problems, prompt_of, reward_of


@dataclass(frozen=True)
class Config:
    base_model: str = "mint/tiny"
    log_path: str = "runs/rl_loop"
    steps: int = 20
    groups_per_batch: int = 16
    """Problems a step."""
    group_size: int = 8
    """Answers a problem."""
    learning_rate: float = 1e-3
    lora_rank: int = 16
    max_tokens: int = 8
    temperature: float = 0.8
    loss_fn: str = "importance_sampling"
    eval_every: int = 5
    save_every: int = 10
    holdout: int = 100
    """Problems to measure on."""
    seed: int = 0


# ---------------------------------------------------------------------------------------------------- the task


def training_problems(config: Config, step: int) -> list[Problem]:
    """A function of the step, so that any step can be repeated by itself."""
    return draw_problems(random.Random(f"{config.seed} {step}"), config.groups_per_batch)


def encode_prompt(problem: Problem, tokenizer: Any) -> list[int]:
    return tokenizer.encode(prompt_of(problem))


def score(problem: Problem, text: str) -> float:
    return reward_of(text, problem)


# ---------------------------------------------------------------------------------------------------- the loop


@dataclass(frozen=True)
class Group:
    """One problem with its answers and what they earned."""

    prompt: list[int]
    answers: list[types.SampledSequence]
    rewards: list[float]

    @property
    def advantages(self) -> list[float]:
        """Reward minus the group's mean: the group is its own baseline."""
        mean = sum(self.rewards) / len(self.rewards)
        return [reward - mean for reward in self.rewards]


def sample_groups(
    sampler: mint.SamplingClient, tokenizer: Any, problems: Sequence[Problem], size: int, config: Config, seed: int
) -> list[Group]:
    """All requests are under way before the first answer is waited for."""
    prompts = [encode_prompt(problem, tokenizer) for problem in problems]
    futures = [
        sampler.sample(
            prompt=types.ModelInput.from_ints(prompt),
            num_samples=size,
            sampling_params=types.SamplingParams(
                max_tokens=config.max_tokens, temperature=config.temperature, seed=1000 * seed + number
            ),
        )
        for number, prompt in enumerate(prompts)
    ]
    groups = []
    for problem, prompt, future in zip(problems, prompts, futures, strict=True):
        answers = future.result().sequences
        texts = [tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
        groups.append(Group(prompt, answers, [score(problem, text) for text in texts]))
    return groups


def to_datums(group: Group) -> list[types.Datum]:
    """One datum an answer: input t[:-1], target t[1:], everything 0 on the prompt. None where all earned the same."""
    if not any(group.advantages):
        return []
    before = len(group.prompt) - 1
    datums = []
    for answer, advantage in zip(group.answers, group.advantages, strict=True):
        tokens = group.prompt + answer.tokens
        inputs = {
            "target_tokens": tokens[1:],
            "weights": [0.0] * before + [1.0] * len(answer.tokens),
            "logprobs": [0.0] * before + list(answer.logprobs or []),
            "advantages": [0.0] * before + [advantage] * len(answer.tokens),
        }
        datums.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
    return datums


def mean_reward(groups: Sequence[Group]) -> float:
    rewards = [reward for group in groups for reward in group.rewards]
    return sum(rewards) / len(rewards)


def main(config: Config) -> float:
    """The held-out accuracy of the final weights."""
    log_path = Path(config.log_path)
    log_path.mkdir(parents=True, exist_ok=True)
    (log_path / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    trainer = mint.ServiceClient().create_lora_training_client(
        base_model=config.base_model, rank=config.lora_rank, seed=config.seed
    )
    tokenizer = trainer.get_tokenizer()
    holdout = draw_problems(random.Random(1), config.holdout, held_out=True)
    adam = types.AdamParams(learning_rate=config.learning_rate, beta2=0.95)

    with (log_path / "metrics.jsonl").open("w", buffering=1) as metrics_file:
        sampler = trainer.save_weights_and_get_sampling_client()
        for step in range(config.steps + 1):
            began, line = time.monotonic(), {"step": float(step)}
            if step % config.eval_every == 0 or step == config.steps:
                tested = sample_groups(sampler, tokenizer, holdout, 1, config, seed=0)
                line["test/reward"] = mean_reward(tested)
            if step < config.steps:
                problems = training_problems(config, step)
                groups = sample_groups(sampler, tokenizer, problems, config.group_size, config, seed=1 + step)
                datums = [datum for group in groups for datum in to_datums(group)]
                line |= {"reward": mean_reward(groups), "datums": len(datums)}
                if datums:  # a step without signal would still move the weights, by Adam's momentum
                    gradient = trainer.forward_backward(datums, config.loss_fn)
                    update = trainer.optim_step(adam)
                    sampler = trainer.save_weights_and_get_sampling_client()  # of the weights after both
                    gradient.result(), update.result()
                if (step + 1) % config.save_every == 0:
                    trainer.save_state(f"{step + 1:06d}").result()
            line["time/total"] = time.monotonic() - began
            metrics_file.write(json.dumps(line) + "\n")
            print(", ".join(f"{name}={value:.4g}" for name, value in line.items()))

    print(f"Checkpoint: {trainer.save_state('final').result().path}")
    return line["test/reward"]


if __name__ == "__main__":
    main(configured(Config()))
