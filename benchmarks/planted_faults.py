"""Faults planted in real runs of the bundled model, each with the finding that names it; and clean runs of many kinds.

Every one is a mistake people make: in the environment, the grader, the data, the settings, or the loop itself.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

from math_rl import AdditionEnv

import mint
from mint.client.tokenizers import load_tokenizer
from mint.recipes.addition import Problem, draw_problems, is_held_out
from mint.rl.completers import SamplingTokenCompleter
from mint.rl.data_processing import assemble_training_data, compute_advantages, wire_datums
from mint.rl.datasets import ListRLDataset
from mint.rl.envs import ProblemGroupBuilder
from mint.rl.renderers import ChatRenderer
from mint.rl.rundir import RunDir
from mint.rl.strategies import MinViableGroup
from mint.rl.train import Config, train
from mint.rl.types import Env, RLDataset, RLDatasetBuilder, StepResult, TokensWithLogprobs
from mint.types import Datum, TensorData

# --------------------------------------------------------------------------------------------------------------------
# The task, with places to go wrong


@dataclass(frozen=True)
class Additions(RLDatasetBuilder):
    env: Callable[[Problem, Any], AdditionEnv] = AdditionEnv
    groups: int = 8
    group_size: int = 4
    batches: int = 10
    tests: int = 32
    digits: int = 2
    leak: bool = False
    """Train on the test problems too."""
    test_env: Callable[[Problem, Any], AdditionEnv] | None = None
    builder: Callable[..., ProblemGroupBuilder] = ProblemGroupBuilder
    seed: int = 0

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        tokenizer, rng = load_tokenizer("mint/tiny"), random.Random(self.seed)
        train = draw_problems(rng, self.groups * self.batches)
        test = draw_problems(rng, self.tests, held_out=True)
        if self.digits > 2:
            train, test = ([(a * 97 + 100, b * 89 + 100) for a, b in some] for some in (train, test))
        if self.leak:
            train = (test + train)[: len(train)]

        def dataset(problems: Sequence[Problem], env: Callable[[Problem, Any], AdditionEnv], size: int) -> RLDataset:
            groups = [self.builder(partial(env, problem, tokenizer), size, "addition") for problem in problems]
            return ListRLDataset(groups, self.groups, seed=None)

        return dataset(train, self.env, self.group_size), dataset(test, self.test_env or self.env, 1)


BASE = Config(
    model_name="mint/tiny",
    recipe_name="doctor",
    dataset_builder=Additions(),
    learning_rate=1e-3,
    lora_rank=16,
    max_tokens=8,
    eval_every=5,
    save_every=0,
    loggers=(),
    log_path="",
)


class Paying(AdditionEnv):
    """Rewards something else than it checks; the check is still reported as `correct`."""

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        result = await super().step(action, extra=extra)
        result.reward = self.pay(str(result.logs["response"]), result.reward)
        return result

    def pay(self, text: str, right: float) -> float:
        raise NotImplementedError


class AlwaysRight(AdditionEnv):
    def check_answer(self, sample_str: str) -> float:
        return 1.0


class Raising(AdditionEnv):
    def check_answer(self, sample_str: str) -> float:
        if len(sample_str.strip()) > 2:
            raise ValueError(f"cannot parse {sample_str!r}")
        return super().check_answer(sample_str)


class Swallowing(AdditionEnv):
    """Its grader fails on every second problem, and says 0."""

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        result = await super().step(action, extra=extra)
        failed = sum(self.problem) % 2
        result.metrics["grader_error"] = failed
        result.reward *= 1 - failed
        return result


class Stopping(AdditionEnv):
    stops: tuple[int | str, ...] = ()

    async def initial_observation(self) -> Any:
        return (await super().initial_observation())[0], list(self.stops)


class StoppingAtOnce(Stopping):
    stops = (" ",)


class OtherTokenizer(AdditionEnv):
    """Prompts as another tokenizer would have them."""

    async def initial_observation(self) -> Any:
        prompt, stop = await super().initial_observation()
        return mint.types.ModelInput.from_ints([(token + 7) % 256 for token in prompt.to_ints()]), stop


class OtherDecoder(AdditionEnv):
    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        return await super().step([(token + 7) % 256 for token in action], extra=extra)


class Flipped(Paying):
    def pay(self, text: str, right: float) -> float:
        return -right


class FlippedInside(AdditionEnv):
    """The check itself is flipped, so no term disagrees; only the reference does."""

    def check_answer(self, sample_str: str) -> float:
        return 1.0 - super().check_answer(sample_str)


class PayingForEven(Paying):
    """Pays for any even number, whatever was asked."""

    def pay(self, text: str, right: float) -> float:
        return float(text.strip()[-1:] in ("0", "2", "4", "6", "8"))


class Chat(AdditionEnv):
    """Talk about animals instead, paid by the letter."""

    def __init__(self, problem: Problem, tokenizer: Any) -> None:
        super().__init__(problem, tokenizer)
        self.renderer = ChatRenderer(tokenizer)  # type: ignore[assignment]

    def get_question(self) -> str:
        held_out = is_held_out(self.problem)
        kinds = (
            ("shy", "big", "small", "old") if held_out else ("young", "quick", "calm", "clean", "fat", "happy", "wise")
        )
        animals = ("fox", "dog", "cat", "horse", "owl", "bear", "lion", "pig", "duck", "crow", "goat", "whale")
        return f"Tell me about a {kinds[self.problem[0] % len(kinds)]} {animals[self.problem[1] % len(animals)]}."

    def get_reference_answer(self) -> str:
        return ""

    def check_answer(self, sample_str: str) -> float:
        return min(len(sample_str), 64) / 64


class ChatOfEs(Chat):
    def check_answer(self, sample_str: str) -> float:
        return sample_str.count("e") / 24


class Random(Paying):
    def pay(self, text: str, right: float) -> float:
        return float(random.random() < 0.5)


class Pedantic(AdditionEnv):
    def check_answer(self, sample_str: str) -> float:
        return float(sample_str == f"{sum(self.problem)}.0")


class Scaled(Paying):
    """One problem in a hundred pays two hundred times."""

    def pay(self, text: str, right: float) -> float:
        return 200 * right if self.problem in self.expensive else right

    expensive: frozenset[Problem] = frozenset(draw_problems(random.Random(0), 80)[56:64])


@dataclass(frozen=True)
class NextMembersReward(ProblemGroupBuilder):
    """Rewards a list away from their rollouts."""

    async def compute_group_rewards(self, trajectory_group: Any, env_group: Sequence[Env]) -> Any:
        own = [sum(t.reward for t in trajectory.transitions) for trajectory in trajectory_group]
        return [(own[i - 1] - own[i], {}) for i in range(len(own))]


def last_problem_only(problem: Problem, tokenizer: Any) -> AdditionEnv:
    """What a lambda made in a loop does: every environment sees the last value."""
    env = AdditionEnv(problem, tokenizer)
    env.get_question = lambda: "Q: What is 47 + 38?\nA:"  # type: ignore[method-assign]
    return env


# --------------------------------------------------------------------------------------------------------------------
# Faults in the loop


def stale_sampler() -> AbstractContextManager[Any]:
    fresh = mint.TrainingClient.save_weights_and_get_sampling_client_async
    kept: dict[int, Any] = {}

    async def first_one(self: Any, name: str | None = None) -> Any:
        if id(self) not in kept:
            kept[id(self)] = await fresh(self, name)
        return kept[id(self)]

    return patch.object(mint.TrainingClient, "save_weights_and_get_sampling_client_async", first_one)


def other_temperature(from_group: int, temperature: float) -> AbstractContextManager[Any]:
    made = iter(range(10**9))

    def completer(client: Any, max_tokens: int, given: float, seed: int) -> SamplingTokenCompleter:
        used = temperature if next(made) >= from_group else given
        return SamplingTokenCompleter(client, max_tokens, used, seed=seed)

    return patch("mint.rl.sampler.SamplingTokenCompleter", completer)


def one_seed() -> AbstractContextManager[Any]:
    draw = SamplingTokenCompleter.complete_many

    async def same(self: Any, model_input: Any, stop: Any, count: int, *, max_tokens: int | None = None) -> Any:
        return await draw(self, model_input, stop, 1, max_tokens=max_tokens) * count

    return patch.object(SamplingTokenCompleter, "complete_many", same)


def recorded_logprobs(change: Callable[[list[float]], list[float]]) -> AbstractContextManager[Any]:
    def action(sequence: Any) -> TokensWithLogprobs:
        return TokensWithLogprobs(list(sequence.tokens), change(list(sequence.logprobs)), sequence.stop_reason)

    return patch("mint.rl.completers._action", action)


def advantages(change: Callable[[np.ndarray], np.ndarray], where: str) -> AbstractContextManager[Any]:
    if where == "computed":
        return patch("mint.rl.prepare.compute_advantages", lambda g, e: [change(a) for a in compute_advantages(g, e)])
    return patch(
        "mint.rl.prepare.assemble_training_data",
        lambda groups, adv, mask: assemble_training_data(groups, [change(a) for a in adv], mask),
    )


def without_last_token() -> AbstractContextManager[Any]:
    """The end token gets no advantage, as when a mask is one too short."""

    def assembled(groups: Any, adv: Any, mask: bool) -> Any:
        data, metadata = assemble_training_data(groups, adv, mask)
        for datum in data:
            values = datum.loss_fn_inputs["advantages"].to_numpy().copy()
            values[-1] = 0.0
            datum.loss_fn_inputs["advantages"] = TensorData(values, "float32")
        return data, metadata

    return patch("mint.rl.prepare.assemble_training_data", assembled)


def no_optimizer_step() -> AbstractContextManager[Any]:
    async def nothing(self: Any) -> None:
        pass

    return patch("mint.rl.update.Update.step", nothing)


def one_version_behind() -> AbstractContextManager[Any]:
    fresh = mint.TrainingClient.save_weights_and_get_sampling_client_async
    last: dict[int, Any] = {}

    async def previous(self: Any, name: str | None = None) -> Any:
        new = await fresh(self, name)
        given, last[id(self)] = last.get(id(self), new), new
        return given

    return patch.object(mint.TrainingClient, "save_weights_and_get_sampling_client_async", previous)


def sent_negated() -> AbstractContextManager[Any]:
    """After everything that is recorded: only what becomes of the policy shows it."""

    def negated(data: Sequence[Datum], weights: bool = True) -> list[Datum]:
        sent = wire_datums(data, weights)
        for datum in sent:
            datum.loss_fn_inputs["advantages"] = TensorData(-datum.loss_fn_inputs["advantages"].to_numpy(), "float32")
        return sent

    return patch("mint.rl.update.wire_datums", negated)


# --------------------------------------------------------------------------------------------------------------------
# The lists


@dataclass(frozen=True)
class Fault:
    name: str
    finding: str
    """The kind that must stand first in the report."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Of the configuration."""
    data: dict[str, Any] = field(default_factory=dict)
    """Of the dataset."""
    planted: Callable[[], AbstractContextManager[Any]] = nullcontext
    missed: bool = False
    """Known not to be found."""

    def make(self, folder: Path, service: mint.ServiceClient) -> RunDir:
        with self.run_with(folder) as config:
            return train(config, service)

    def config(self, log_path: str | Path, base_url: str | None = None) -> Config:
        builder = replace(Additions(), **self.data)
        return replace(BASE, dataset_builder=builder, log_path=str(log_path), base_url=base_url, **self.fields)

    @contextlib.contextmanager
    def run_with(self, log_path: str | Path, base_url: str | None = None) -> Iterator[Config]:
        with self.planted():
            yield self.config(log_path, base_url)


def roll(values: np.ndarray) -> np.ndarray:
    return np.roll(values, 1)


FAULTS: list[Fault] = [
    Fault("problems far too hard", "all_wrong", data={"digits": 3}),
    Fault("grader accepts anything", "all_right", data={"env": AlwaysRight}),
    Fault("group of one", "group_of_one", data={"group_size": 1, "groups": 16}),
    Fault("grader raises", "grader_errors", {"rollout_error_tolerance": MinViableGroup(1, 0)}, {"env": Raising}),
    Fault("grader fails and says 0", "grader_errors", data={"env": Swallowing}),
    Fault("grader rejects right answers", "rejects_reference", data={"env": Pedantic}),
    Fault("grader is random", "contradictory_grades", data={"env": Random}),
    Fault("reward of the wrong sample", "contradictory_grades", data={"builder": NextMembersReward}),
    Fault("reward sign flipped", "reward_sign", data={"env": Flipped}),
    Fault("check of the answer flipped", "reward_sign", data={"env": FlippedInside}),
    Fault("max_tokens too small", "truncated", {"max_tokens": 2}),
    Fault("stop token missing", "stop_token_missing", {"max_tokens": 16}, {"env": Stopping}),
    Fault("stop at the first token", "stops_at_once", data={"env": StoppingAtOnce}),
    Fault("wrong tokenizer for prompts", "wrong_tokenizer", data={"env": OtherTokenizer}),
    Fault("wrong tokenizer for answers", "wrong_tokenizer", data={"env": OtherDecoder}),
    Fault("every problem the same", "same_prompt", data={"env": last_problem_only}),
    Fault("holdout leaked into training", "leaked_holdout", data={"leak": True}),
    Fault("temperature too low", "identical_samples", {"temperature": 0.01}),
    Fault("one seed for all members", "identical_samples", planted=one_seed),
    Fault(
        "temperature raised in mid-run", "temperature_changed",
        data={"batches": 14}, planted=partial(other_temperature, 56, 1.8),
    ),
    Fault(
        "temperature lowered in mid-run", "temperature_changed",
        data={"batches": 14}, planted=partial(other_temperature, 56, 0.3),
    ),
    Fault("stale sampler", "stale_sampler", planted=stale_sampler),
    Fault("sampler one version behind", "stale_sampler", planted=one_version_behind),
    Fault("log-probs shifted by one", "shifted_logprobs", planted=partial(recorded_logprobs, lambda p: [0.0, *p[:-1]])),
    Fault("log-probs after temperature", "mismatch", planted=partial(recorded_logprobs, lambda p: [2 * x for x in p])),
    Fault("advantage of the wrong sample", "wrong_advantage", planted=partial(advantages, roll, "sent")),
    Fault("advantage sign flipped", "wrong_advantage", planted=partial(advantages, np.negative, "computed")),
    Fault("gradient sign flipped", "reward_fell", {"learning_rate": 2e-3}, {"batches": 20, "groups": 12}, sent_negated),
    Fault("end token outside the mask", "mask", planted=without_last_token),
    Fault("no optimizer step", "frozen", planted=no_optimizer_step),
    Fault("KL penalty too strong", "kl_outweighs_reward", {"kl_penalty_coef": 20.0}, {"batches": 12}),
    Fault("learning rate too small", "learning_rate_small", {"learning_rate": 1e-7}),
    Fault("learning rate zero", "frozen", {"learning_rate": 0.0}),
    Fault("learning rate too large", "learning_rate_large", {"learning_rate": 0.05}),
    Fault("reward for length", "length_drift", {"max_tokens": 64, "learning_rate": 2e-3}, {"env": Chat, "batches": 10}),
    Fault(
        "reward for a letter", "repetition",
        {"max_tokens": 40, "learning_rate": 3e-3}, {"env": ChatOfEs, "batches": 20},
    ),
    Fault("reward for even numbers", "reward_hacking", {"learning_rate": 2e-3}, {"env": PayingForEven, "batches": 18}),
    Fault(
        "training reward unlike the holdout's", "reward_hacking", {"learning_rate": 2e-3},
        {"env": PayingForEven, "test_env": AdditionEnv, "batches": 18, "tests": 64},
    ),
    Fault("rollouts too old", "staleness", {"max_lag": 6, "learning_rate": 4e-3}, {"batches": 12}),
    Fault("one batch pays 200 times", "spike", data={"env": Scaled}),
]  # fmt: skip


class PartialCredit(Paying):
    """A tenth off for every unit of distance."""

    def pay(self, text: str, right: float) -> float:
        digits = text.strip()
        return max(0.0, 1 - abs(int(digits) - sum(self.problem)) / 10) if digits.isdigit() else 0.0


CLEAN: list[Fault] = [
    Fault(f"{name}, seed {seed}", "", {**fields, "seed": seed}, {**data, "seed": seed})
    for name, fields, data in (
        ("default", {}, {}),
        ("groups of eight, twenty steps", {}, {"group_size": 8, "batches": 20}),
        ("ppo, one step behind", {"loss_fn": "ppo", "max_lag": 1}, {"batches": 12}),
        ("KL penalty, normalised advantages", {"kl_penalty_coef": 0.05, "advantage": "group_std"}, {}),
        ("cispo in two substeps", {"loss_fn": "cispo", "num_substeps": 2}, {}),
        ("cooling from 1.0 to 0.7", {"temperature": "linear 1.0 -> 0.7", "learning_rate": 5e-4}, {"batches": 15}),
        ("partial credit", {"remove_constant_reward_groups": True}, {"env": PartialCredit, "batches": 15}),
        ("difficulty band", {"difficulty_band": (0.2, 0.8), "max_steps": 20}, {"batches": 8}),
        ("dynamic sampling, small learning rate", {"dynamic_sampling": 1, "learning_rate": 3e-4}, {"batches": 20}),
        ("until solved", {"learning_rate": 2e-3, "grad_clip_norm": 30.0}, {"groups": 16, "batches": 25}),
    )
    for seed in range(3)
]
