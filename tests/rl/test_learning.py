"""The parts together, on the in-memory service: sample, grade, advantages, datums, train, and the reward rises."""

import asyncio
from functools import partial

import numpy as np
import pytest

from mint.rl.aggregation import aggregation_scales, scale_advantages
from mint.rl.completers import SamplingTokenCompleter
from mint.rl.data_processing import assemble_training_data, compute_advantages, drop_zero_advantages, wire_datums
from mint.rl.envs import EnvFromMessageEnv, ProblemEnv, ProblemGroupBuilder
from mint.rl.kl import incorporate_kl_penalty, kl_loss_datums, sampled_logprobs, score_datums
from mint.rl.metrics import compute_kl_sample_train, compute_trajectory_metrics
from mint.rl.renderers import PlainRenderer
from mint.rl.rollouts import do_group_rollout
from mint.rl.tools import ToolMessageEnv
from mint.types import AdamParams
from tests.rl.fakes import ALPHABET, CharTokenizer, FakeSamplingClient, FakeTrainingClient


class SayLetter(ProblemEnv):
    """Right when the answer is the letter asked for."""

    def __init__(self, letter: str) -> None:
        super().__init__(PlainRenderer(CharTokenizer()))
        self.letter = letter

    def get_question(self) -> str:
        return f"say {self.letter.upper()}"  # not the same character: a bigram policy must tell asking from answering

    def check_answer(self, sample_str: str) -> bool:
        return sample_str == self.letter

    def check_format(self, sample_str: str) -> bool:
        return len(sample_str) == 1

    def get_reference_answer(self) -> str:
        return self.letter


def fresh_table() -> np.ndarray:
    """A policy that mostly says one of six letters, then stops or rambles."""
    table = np.full((len(ALPHABET), len(ALPHABET)), -6.0)
    table[:, 1:7] = 0.0
    table[:, 0] = 1.0
    return table


async def train(
    steps: int, kl_coef: float = 0.0, kl_mode: str = "advantage", aggregation: str = "token_sum"
) -> tuple[list[float], float]:
    """Rewards by step, and how far the policy ended from where it began (mean log-prob difference on its samples)."""
    client, reference = FakeTrainingClient(fresh_table()), FakeSamplingClient(fresh_table())
    builders = [ProblemGroupBuilder(partial(SayLetter, letter), 16) for letter in "abcd"]
    rewards, kl = [], 0.0
    for step in range(steps):
        sampler = await client.save_weights_and_get_sampling_client_async()
        policy = SamplingTokenCompleter(sampler, max_tokens=4, seed=step)
        groups = [await do_group_rollout(builder, policy.for_member(i)) for i, builder in enumerate(builders)]
        rewards.append(compute_trajectory_metrics(groups, [b.logging_tags() for b in builders])["env/all/reward/total"])
        data, metadata = assemble_training_data(groups, compute_advantages(groups))
        coef_in_advantage = kl_coef if kl_mode == "advantage" else 0.0
        kl = (await incorporate_kl_penalty(data, reference, coef_in_advantage))["kl_policy_base"]
        scales = aggregation_scales(data, metadata, aggregation, divisor=4.0)
        if kl_mode == "loss":
            extra = kl_loss_datums(
                data, sampled_logprobs(data), await score_datums(reference, data), kl_coef, "k2", scales
            )
            await client.forward_backward_async(extra, "cross_entropy")
        trained, _ = drop_zero_advantages(scale_advantages(data, scales), metadata)
        if not trained:
            continue  # everything is solved
        output = (await client.forward_backward_async(wire_datums(trained), "importance_sampling")).result()
        drift = compute_kl_sample_train(trained, [o["logprobs"].to_numpy() for o in output.loss_fn_outputs])
        assert abs(drift["optim/kl_sample_train_v1"]) < 1e-6  # sampled by the weights being trained
        await client.optim_step_async(AdamParams(learning_rate=0.2))
    return rewards, kl


@pytest.mark.parametrize("aggregation", ["token_sum", "token_mean", "sequence_mean", "constant"])
def test_the_reward_rises(aggregation: str) -> None:
    rewards, _ = asyncio.run(train(25, aggregation=aggregation))
    assert np.mean(rewards[:2]) < 0.3
    assert np.mean(rewards[-2:]) > 0.8


@pytest.mark.parametrize("mode", ["advantage", "loss"])
def test_more_kl_keeps_the_policy_closer(mode: str) -> None:
    distances = [asyncio.run(train(12, coef, mode))[1] for coef in (0.0, 0.1, 0.5, 2.0)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < distances[0] / 2


def test_a_conversation_trains_as_one_datum() -> None:
    async def talk() -> int:
        sampler = FakeSamplingClient(fresh_table())
        ask = [{"role": "user", "content": "say a"}]
        env = EnvFromMessageEnv(PlainRenderer(CharTokenizer()), ToolMessageEnv(ask, lambda response: 1.0))
        builder = ProblemGroupBuilder(lambda: env, 1)  # type: ignore[arg-type,return-value]
        group = await do_group_rollout(builder, SamplingTokenCompleter(sampler, max_tokens=30, seed=1))
        assert group.get_total_rewards() == [1.0]
        return len(assemble_training_data([group], [np.array([1.0])])[0])

    assert asyncio.run(talk()) == 1
