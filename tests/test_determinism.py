"""The contract of docs/determinism.md: the same seeds give the same rollouts and the same weights, bit for bit,
whatever else the server is doing."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

import mint
from mint import types

STEPS, GROUP = 2, 4


@dataclass
class Run:
    """What a run drew, and what became of its weights."""

    samples: list[tuple[list[int], list[float]]] = field(default_factory=list)
    weights: str = ""


def grpo(service: mint.ServiceClient, name: str) -> Run:
    """A small run of GRPO with every seed given."""
    trainer = service.create_lora_training_client("mint/tiny", rank=8, seed=3)
    tokenizer = trainer.get_tokenizer()
    prompts = [tokenizer.encode(f"Q: What is {a} + {b}?\nA:") for a, b in [(1, 2), (13, 45)]]
    run = Run()
    for step in range(STEPS):
        sampler = trainer.save_weights_and_get_sampling_client()
        params = [types.SamplingParams(max_tokens=10, temperature=0.9, seed=10 * step + n) for n in range(len(prompts))]
        asked = [sampler.sample(types.ModelInput.from_ints(p), GROUP, s) for p, s in zip(prompts, params, strict=True)]
        data = []
        for prompt, answer in zip(prompts, asked, strict=True):
            sequences = answer.result().sequences
            rewards = np.array([sum(sequence.tokens) % 7 for sequence in sequences], dtype=float)
            for sequence, advantage in zip(sequences, rewards - rewards.mean(), strict=True):
                assert sequence.logprobs is not None
                run.samples.append((sequence.tokens, sequence.logprobs))
                full, before, n = prompt + sequence.tokens, len(prompt) - 1, len(sequence.tokens)
                inputs = {
                    "target_tokens": full[1:],
                    "logprobs": [0.0] * before + sequence.logprobs,
                    "advantages": [0.0] * before + [float(advantage)] * n,
                }
                data.append(types.Datum(types.ModelInput.from_ints(full[:-1]), inputs))
        trainer.forward_backward(data, "importance_sampling")
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    run.weights = weights_of(service, trainer.save_weights_for_sampler(name).result().path)
    return run


def weights_of(service: mint.ServiceClient, path: str | None) -> str:
    """A digest of the saved adapter."""
    assert path is not None
    link = service.create_rest_client().get_checkpoint_archive_url_from_tinker_path(path).result()
    with urllib.request.urlopen(link.url) as response, tarfile.open(fileobj=io.BytesIO(response.read())) as tar:
        member = next(m for m in tar.getmembers() if m.name.endswith("adapter_model.safetensors"))
        file = tar.extractfile(member)
        assert file is not None
        return hashlib.sha256(file.read()).hexdigest()


@pytest.fixture
def crowd(service: mint.ServiceClient) -> Iterator[threading.Event]:
    """Two other tenants who train and sample without a pause until the event is set."""
    over, begun = threading.Event(), threading.Semaphore(0)

    def hammer(number: int) -> None:
        rng = np.random.default_rng(number)
        trainer = service.create_lora_training_client("mint/tiny", rank=5 + number, seed=number, train_mlp=bool(number))
        while not over.is_set():
            sampler = trainer.save_weights_and_get_sampling_client()
            lengths = rng.integers(1, 70, 4)
            asked = [
                sampler.sample(
                    types.ModelInput.from_ints(rng.integers(0, 250, n).tolist()),
                    int(rng.integers(1, 9)),
                    types.SamplingParams(max_tokens=int(rng.integers(1, 20)), stop=[]),
                )
                for n in lengths
            ]
            tokens = rng.integers(0, 250, 80).tolist()
            datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
            trainer.forward_backward([datum] * int(rng.integers(1, 6)), "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            for answer in asked:
                answer.result()
            begun.release()

    tenants = [threading.Thread(target=hammer, args=(n,)) for n in (0, 1)]
    for tenant in tenants:
        tenant.start()
    for _ in tenants:
        begun.acquire()
    yield over
    over.set()
    for tenant in tenants:
        tenant.join()


def test_a_run_is_the_same_to_the_last_bit_while_others_hammer_the_server(
    service: mint.ServiceClient, request: pytest.FixtureRequest
) -> None:
    alone = grpo(service, "alone")
    request.getfixturevalue("crowd")
    together = grpo(service, "together")
    assert together.samples == alone.samples
    assert together.weights == alone.weights
    assert len({tuple(tokens) for tokens, _ in alone.samples[:GROUP]}) > 1, "samples of one seed differ"


def test_weights_that_differ_are_told_apart(service: mint.ServiceClient) -> None:
    """The digest above would see a single changed bit of training."""
    digests = []
    for rate in (1e-3, 1.0001e-3):
        trainer = service.create_lora_training_client("mint/tiny", rank=2, seed=3)
        datum = types.Datum(types.ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8]})
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=rate)).result()
        digests.append(weights_of(service, trainer.save_weights_for_sampler("w").result().path))
    assert digests[0] != digests[1]
