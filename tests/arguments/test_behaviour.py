"""Sampling, Adam, LoRA and loss arguments on the real engine, through client and server: each changes the outcome, and
in the way it is said to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import mint
from mint import types
from mint.types import AdamParams, Datum, ModelInput, SampleResponse, SamplingParams, TensorData

TEXT = "Q: What is 47 + 38?\nA:"
COUNT, LENGTH = 6, 8


@dataclass
class World:
    """A server, and what an unvaried call gives."""

    service: mint.ServiceClient

    def __post_init__(self) -> None:
        self.sampler = self.service.create_sampling_client(base_model="mint/tiny")
        self.tokenizer = self.sampler.get_tokenizer()
        self.prompt = self.tokenizer.encode(TEXT)
        self.plain = self.sample()

    def sample(self, prompt: list[int] | None = None, num_samples: int = COUNT, **given: Any) -> SampleResponse:
        options = {k: given.pop(k) for k in list(given) if k in OPTIONS}
        params = {"max_tokens": LENGTH, "seed": 1, "stop": [], "temperature": 1.5} | given
        tokens = ModelInput.from_ints(prompt or self.prompt)
        return self.sampler.sample(tokens, num_samples, SamplingParams(**params), **options).result()

    def trained(self, adam: dict[str, Any] | None = None, lora: dict[str, Any] | None = None) -> np.ndarray:
        """Log-probs after three steps on different data."""
        client = self.service.create_lora_training_client("mint/tiny", **{"rank": 4, "seed": 0} | (lora or {}))
        params = AdamParams(**{"learning_rate": 1e-2} | (adam or {}))
        for n in (1, 5, 3):
            client.forward_backward([self.datum(3 * n, n)], "cross_entropy")
            client.optim_step(params)
        output = client.forward([self.datum(0, 1)], "cross_entropy").result()
        return output.loss_fn_outputs[0]["logprobs"].to_numpy()

    def datum(self, shift: int, weight: float) -> Datum:
        tokens = self.prompt + [(t + shift) % 100 + 30 for t in self.prompt]
        inputs = {"target_tokens": tokens[1:], "weights": [weight] * (len(tokens) - 1)}
        return Datum(ModelInput.from_ints(tokens[:-1]), inputs)

    def loss(self, shift: int = 0, loss_fn: str = "ppo", config: dict[str, float] | None = None) -> float:
        datum = self.datum(shift, 1.0)
        if loss_fn == "ppo":
            n = datum.model_input.length
            inputs = {"logprobs": [-2.0 - 0.1 * i for i in range(n)], "advantages": [(-1.0) ** i for i in range(n)]}
            datum = replace(datum, loss_fn_inputs=datum.loss_fn_inputs | inputs)
        client = self.service.create_lora_training_client("mint/tiny", rank=1, seed=0)
        return client.forward_backward([datum], loss_fn, config).result().metrics["loss:sum"]


OPTIONS = {
    "include_prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs",
    "prompt_alt_tokens_k", "prompt_logprobs_last_n",
}  # fmt: skip


@pytest.fixture(scope="module")
def world(service: mint.ServiceClient) -> World:
    return World(service)


def tokens(response: SampleResponse) -> list[list[int]]:
    return [sequence.tokens for sequence in response.sequences]


def max_tokens(world: World) -> bool:
    return tokens(world.sample(max_tokens=3)) == [t[:3] for t in tokens(world.plain)]


def seed(world: World) -> bool:
    return tokens(world.sample(seed=2)) != tokens(world.plain) == tokens(world.sample(seed=1))


def stops(given: Callable[[World, int], dict[str, Any]]) -> Callable[[World], bool]:
    def check(world: World) -> bool:
        first = tokens(world.plain)[0]
        stop = first[2]
        (found,) = tokens(world.sample(num_samples=1, **given(world, stop)))
        return found == first[: first.index(stop) + 1]

    return check


def temperature(world: World) -> bool:
    greedy = tokens(world.sample(temperature=0.0))
    return greedy == greedy[:1] * COUNT != tokens(world.plain)


def keeps_only_the_best(**given: Any) -> Callable[[World], bool]:
    """A filter so narrow that only the likeliest token is left, at any temperature."""
    return lambda world: tokens(world.sample(**given)) == tokens(world.sample(temperature=0.0))


def repeats(world: World, **given: Any) -> int:
    """Tokens of a long answer that it had said before."""
    (answer,) = tokens(world.sample(num_samples=1, max_tokens=60, temperature=0.0, **given))
    return len(answer) - len(set(answer))


def repetition_penalty(world: World) -> bool:
    """A token of the prompt, which the bias makes the likeliest: only this penalty counts the prompt."""
    token = world.prompt[0]
    pulled = {"num_samples": 1, "max_tokens": 1, "temperature": 0.0, "logit_bias": {token: 60.0}}
    again, avoided = world.sample(**pulled), world.sample(**pulled, repetition_penalty=1e6)
    return tokens(again) == [[token]] != tokens(avoided) and repeats(world, repetition_penalty=1e6) < repeats(world)


def logit_bias(world: World) -> bool:
    forced = tokens(world.sample(logit_bias={65: 100}))
    banned = world.sample(logit_bias={token: -100 for token in tokens(world.plain)[0]})
    return forced == [[65] * LENGTH] * COUNT and not set(tokens(banned)[0]) & set(tokens(world.plain)[0])


def regex(world: World) -> bool:
    found = world.sample(regex="[abc]{3}", stop=None)
    return all(set(world.tokenizer.decode(s.tokens[:-1])) <= set("abc") and len(s.tokens) == 4 for s in found.sequences)


def json_schema(world: World) -> bool:
    found = world.sample(json_schema={"enum": ["yes", "no"]}, stop=None, max_tokens=9)
    said = {json.loads(world.tokenizer.decode(s.tokens, skip_special_tokens=True)) for s in found.sequences}
    return said <= {"yes", "no"}


def prompt(world: World) -> bool:
    return tokens(world.sample(prompt=world.prompt[:-4])) != tokens(world.plain)


def num_samples(world: World) -> bool:
    return tokens(world.sample(num_samples=2)) == tokens(world.plain)[:2]


def prompt_logprobs(world: World) -> bool:
    scored = world.sample(include_prompt_logprobs=True).prompt_logprobs
    return world.plain.prompt_logprobs is None and scored is not None and None not in scored[1:]


def topk_prompt_logprobs(world: World) -> bool:
    rows = world.sample(topk_prompt_logprobs=2).topk_prompt_logprobs
    return rows is not None and all(row is not None and len(row) == 2 for row in rows[1:])


def topk_sample_logprobs(world: World) -> bool:
    rows = world.sample(topk_sample_logprobs=3).sequences[0].topk_logprobs
    return world.plain.sequences[0].topk_logprobs is None and rows is not None and len(rows[0]) == 3


def target_prompt_logprobs(world: World) -> bool:
    targets = TensorData([[t] for t in world.prompt[1:]], "int64")
    both = world.sample(target_prompt_logprobs=targets, include_prompt_logprobs=True)
    assert both.target_prompt_logprobs is not None and both.prompt_logprobs is not None
    return np.array_equal(both.target_prompt_logprobs.to_numpy()[:, 0], np.float32(both.prompt_logprobs[1:]))


def prompt_alt_tokens_k(world: World) -> bool:
    drawn = world.sample(prompt_alt_tokens_k=2).prompt_alt_tokens
    return drawn is not None and drawn.tokens.shape == [len(world.prompt) - 1, 2]


def prompt_logprobs_last_n(world: World) -> bool:
    whole = world.sample(include_prompt_logprobs=True).prompt_logprobs
    last = world.sample(include_prompt_logprobs=True, prompt_logprobs_last_n=2).prompt_logprobs
    assert whole is not None
    return last == [None] * (len(whole) - 2) + whole[-2:]


def sampling_params(world: World) -> bool:
    return seed(world) and max_tokens(world)


def adam(**given: Any) -> Callable[[World], bool]:
    return lambda world: not np.array_equal(world.trained(adam=given), world.trained())


def lora(**given: Any) -> Callable[[World], bool]:
    return lambda world: not np.array_equal(world.trained(lora=given), world.trained())


def betas(world: World) -> bool:
    return np.array_equal(world.trained({"betas": (0.5, 0.6)}), world.trained({"beta1": 0.5, "beta2": 0.6}))


ARGUMENTS: dict[str, Callable[[World], bool]] = {
    "max_tokens": max_tokens,
    "seed": seed,
    "stop, a token": stops(lambda world, stop: {"stop": [stop]}),
    "stop, text": stops(lambda world, stop: {"stop": world.tokenizer.decode([stop])}),
    "stop_token_ids": stops(lambda world, stop: {"stop": None, "stop_token_ids": [stop]}),
    "temperature": temperature,
    "top_k": keeps_only_the_best(top_k=1),
    "top_p": keeps_only_the_best(top_p=1e-6),
    "min_p": keeps_only_the_best(min_p=0.999),
    "repetition_penalty": repetition_penalty,
    "presence_penalty": lambda world: repeats(world, presence_penalty=2.0) < repeats(world),
    "frequency_penalty": lambda world: repeats(world, frequency_penalty=2.0) < repeats(world),
    "logit_bias": logit_bias,
    "regex": regex,
    "json_schema": json_schema,
    "prompt": prompt,
    "num_samples": num_samples,
    "sampling_params": sampling_params,
    "prompt_logprobs": prompt_logprobs,
    "topk_prompt_logprobs": topk_prompt_logprobs,
    "topk_sample_logprobs": topk_sample_logprobs,
    "target_prompt_logprobs": target_prompt_logprobs,
    "prompt_alt_tokens_k": prompt_alt_tokens_k,
    "prompt_logprobs_last_n": prompt_logprobs_last_n,
    "learning_rate": adam(learning_rate=1e-3),
    "beta1": adam(beta1=0.5),
    "beta2": adam(beta2=0.5),
    "betas": betas,
    "eps": adam(eps=1e-2),
    "weight_decay": adam(weight_decay=0.5),
    "grad_clip_norm": adam(grad_clip_norm=1e-3),
    "rank": lora(rank=5),
    "LoRA seed": lora(seed=1),
    "train_mlp": lora(train_mlp=False),
    "train_attn": lora(train_attn=False),
    "train_unembed": lora(train_unembed=False),
    "data": lambda world: world.loss() != world.loss(shift=2),
    "loss_fn": lambda world: world.loss() != world.loss(loss_fn="cross_entropy"),
    "clip_low_threshold": lambda world: world.loss() != world.loss(config={"clip_low_threshold": 0.0}),
    "clip_high_threshold": lambda world: world.loss() != world.loss(config={"clip_high_threshold": 9.0}),
    "loss temperature": lambda world: world.loss() != world.loss(config={"temperature": 2.0}),
}


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_an_argument_changes_what_it_is_said_to_change(world: World, name: str) -> None:
    assert ARGUMENTS[name](world)


def test_the_same_arguments_give_the_same(world: World) -> None:
    assert world.sample().sequences[0].tokens == world.plain.sequences[0].tokens
    assert np.array_equal(world.trained(), world.trained())
    assert world.loss() == world.loss()
    assert types.SamplingParams() == types.SamplingParams()
