"""The whole of GRPO on the raw client, in one file: sample, score, centre the scores within the group, train.

An adapter brings the task (`RLAdapter`), `RLConfig` the settings, `run_grpo` the loop. A step does this:

    1. freeze the current weights as a sampling client
    2. sample `group` answers to each of `batch` prompts, all at once
    3. reward every answer; its advantage is its reward less the mean of its group
    4. train on the sampled tokens with their log-probs and advantages (loss_fn="importance_sampling")

Groups whose rewards are all equal teach nothing and are left out (`datums` counts what is left); a step without datums
moves no weights. What is not here, on purpose: KL, schedules, evaluation, resume. `mint.rl` has them.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import random
from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import mint
from mint import types
from mint.config import load_dotenv


@dataclass
class RLConfig:
    model: str = "mint/tiny"
    """Base model: bundled, a local folder, or a Hub id such as Qwen/Qwen3-0.6B."""
    rank: int = 16
    steps: int = 5
    batch: int = 8
    """Prompts per step."""
    group: int = 4
    """Answers per prompt; with one answer every advantage is zero."""
    lr: float = 1e-4
    max_tokens: int = 16
    """Of one turn."""
    temperature: float = 1.0
    max_turns: int = 4
    """Turns of the model in an episode, where the adapter has a `next_turn`."""
    loss_fn: str = "importance_sampling"
    seed: int = 0
    """Of the adapter's weights, of `random` (which tasks draw from) and of sampling: the same seed repeats the run."""

    def __post_init__(self) -> None:
        if self.group < 2:
            raise ValueError(f"group is {self.group}: an answer is compared with the others of its group; use 4 to 16.")

    @classmethod
    def from_env(cls, **defaults: Any) -> RLConfig:
        """`defaults` over the class's, and the environment (also from `.env`) over both."""
        load_dotenv()
        names = {"model": "MINT_BASE_MODEL", "rank": "MINT_LORA_RANK"}
        for key in cls.__dataclass_fields__:
            name, kind = names.get(key, f"MINT_RL_{key.upper()}"), type(getattr(cls, key))
            if value := os.environ.get(name):
                try:
                    defaults[key] = kind(value)
                except ValueError:
                    raise ValueError(f"{name} is {value!r}; it must be of type {kind.__name__}.") from None
        return cls(**defaults)


class RLAdapter(Protocol):
    """One task. Subclass it, or write any class with the first three methods."""

    @abstractmethod
    def build_dataset(self) -> list[Any]:
        """The task items of one step; the first `batch` are used."""

    @abstractmethod
    def make_prompt(self, sample: Any, tokenizer: Any) -> list[int]:
        """The prompt of an item, as token ids."""

    @abstractmethod
    def compute_reward(self, response: str, sample: Any) -> float | Awaitable[float]:
        """Scores one response; for an episode of several turns, all that the model wrote in it. May be `async`."""

    def next_turn(self, response: str, sample: Any) -> str | None:
        """What the environment answers to the model's turn, as the text to append; None ends the episode."""
        return None

    def evaluate(self, step: int, rewards: list[float], num_datums: int) -> None:
        """Reports a step."""
        accuracy = sum(reward > 0 for reward in rewards) / len(rewards) if rewards else 0.0
        print(f"Step {step}: accuracy={accuracy:.1%}, datums={num_datums}", flush=True)


@dataclass
class Episode:
    """One rollout: the tokens so far and, from the second on, which the model wrote and with what log-prob."""

    sample: Any
    tokens: list[int]
    weights: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    response: str = ""
    done: bool = False

    def __post_init__(self) -> None:
        self.weights, self.logprobs = [0.0] * (len(self.tokens) - 1), [0.0] * (len(self.tokens) - 1)

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Appends what the model wrote, or, without log-probs, what the environment said."""
        self.tokens += tokens
        self.weights += [0.0 if logprobs is None else 1.0] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs

    def datum(self, advantage: float) -> types.Datum:
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens=self.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": self.tokens[1:],
                "weights": self.weights,
                "logprobs": self.logprobs,
                "advantages": [advantage * weight for weight in self.weights],
            },
        )


def play_turn(adapter: RLAdapter, episode: Episode, sequence: types.SampledSequence, tokenizer: Any) -> None:
    """Adds the model's turn and the environment's answer to it; a turn cut off by `max_tokens` gets none."""
    ended = sequence.tokens[-1:] == [tokenizer.eos_token_id]  # a token to learn, but no part of the text
    text = tokenizer.decode(sequence.tokens[:-1] if ended else sequence.tokens)
    episode.extend(sequence.tokens, sequence.logprobs)
    episode.response += text
    reply = adapter.next_turn(text, episode.sample) if ended and hasattr(adapter, "next_turn") else None
    episode.done = reply is None
    if reply is not None:
        episode.extend(tokenizer.encode(reply, add_special_tokens=False), None)


def rollout(
    adapter: RLAdapter, samples: Sequence[Any], sampler: mint.SamplingClient, tokenizer: Any, cfg: RLConfig
) -> list[list[Episode]]:
    """A group of episodes for every sample; the prompt of a group is sent once, and all groups run at the same time."""

    def ask(tokens: list[int], count: int) -> Future[types.SampleResponse]:
        params = types.SamplingParams(
            max_tokens=cfg.max_tokens,
            temperature=cfg.temperature,
            stop_token_ids=[tokenizer.eos_token_id],
            seed=random.getrandbits(31),
        )
        return sampler.sample(types.ModelInput.from_ints(tokens=tokens), count, params)

    prompts = [list(adapter.make_prompt(sample, tokenizer)) for sample in samples]
    groups = [[Episode(sample, list(p)) for _ in range(cfg.group)] for sample, p in zip(samples, prompts, strict=True)]
    batches = groups  # episodes with the same tokens so far: whole groups at first, then every open one by itself
    for _ in range(cfg.max_turns):
        answers = [ask(batch[0].tokens, len(batch)) for batch in batches]
        for batch, answer in zip(batches, answers, strict=True):
            for episode, sequence in zip(batch, answer.result().sequences, strict=True):
                play_turn(adapter, episode, sequence, tokenizer)
        batches = [[episode] for group in groups for episode in group if not episode.done]
    return groups


def score(adapter: RLAdapter, groups: list[list[Episode]]) -> list[list[float]]:
    """The reward of every episode; `async` ones (a judge, a sandbox) are worked out at the same time within a group."""
    rewards = [[adapter.compute_reward(episode.response, episode.sample) for episode in group] for group in groups]

    async def settle(reward: float | Awaitable[float]) -> float:
        value = await reward if inspect.isawaitable(reward) else reward
        if value is None or not math.isfinite(value):
            raise ValueError(f"{type(adapter).__name__}.compute_reward gave {value!r}; a reward is a finite number.")
        return float(value)

    async def settle_all() -> list[list[float]]:
        return [await asyncio.gather(*map(settle, group)) for group in rewards]

    with ThreadPoolExecutor(1) as thread:  # an event loop of our own: in a notebook this thread has one running
        return thread.submit(asyncio.run, settle_all()).result()


def group_datums(group: list[Episode], rewards: list[float]) -> list[types.Datum]:
    """The training data of one group; none if every reward is the same. An empty answer counts in the mean only."""
    if min(rewards) == max(rewards):
        return []
    mean = sum(rewards) / len(rewards)
    return [e.datum(reward - mean) for e, reward in zip(group, rewards, strict=True) if any(e.weights)]


def run_grpo(adapter: RLAdapter, cfg: RLConfig | None = None) -> str:
    """Trains a fresh LoRA adapter on the task; the path of the final sampler checkpoint."""
    cfg = cfg or RLConfig.from_env()
    missing = [n for n in ("build_dataset", "make_prompt", "compute_reward") if not callable(getattr(adapter, n, None))]
    if missing:
        raise TypeError(f"{type(adapter).__name__} lacks {', '.join(missing)}; see RLAdapter.")
    random.seed(cfg.seed)
    service = mint.ServiceClient()
    trainer = service.create_lora_training_client(base_model=cfg.model, rank=cfg.rank, seed=cfg.seed)
    tokenizer = trainer.get_tokenizer()
    print(f"Model: {cfg.model}, Vocab: {tokenizer.vocab_size:,}, {cfg}", flush=True)

    for step in range(1, cfg.steps + 1):
        sampler = trainer.save_weights_and_get_sampling_client()
        samples = adapter.build_dataset()[: cfg.batch]
        if not len(samples):
            raise ValueError(f"{type(adapter).__name__}.build_dataset gave nothing to train on in step {step}.")
        groups = rollout(adapter, samples, sampler, tokenizer, cfg)
        rewards = score(adapter, groups)
        datums = [d for group, r in zip(groups, rewards, strict=True) for d in group_datums(group, r)]
        if datums:
            trainer.forward_backward(datums, loss_fn=cfg.loss_fn)
            trainer.optim_step(types.AdamParams(learning_rate=cfg.lr)).result()
        report = getattr(adapter, "evaluate", None) or RLAdapter.evaluate.__get__(adapter)
        report(step, [reward for group in rewards for reward in group], len(datums))

    path = trainer.save_weights_for_sampler(name="rl-final").result().path
    print(f"Saved: {path}")
    return path
