"""At fixed weights the importance ratio is 1, however the samples were drawn: client, server and engine together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mint
from mint import types

TEMPERATURES = (0.5, 0.8, 1.0, 1.2)
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-p": {"top_p": 0.7},
    "top-k": {"top_k": 3},
    "min-p": {"min_p": 0.2},
    "all": {"top_p": 0.9, "top_k": 5, "min_p": 0.05},
}


@pytest.fixture(scope="module")
def trainer(service: mint.ServiceClient) -> mint.TrainingClient:
    """Trained a little, so that it is not the base model."""
    trainer = service.create_lora_training_client("mint/tiny", rank=8, seed=0)
    tokens = trainer.get_tokenizer().encode("Q: What is 47 + 38?\nA: 85")
    datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    for _ in range(2):
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    return trainer


def rollouts(
    sampler: mint.SamplingClient, prompt: list[int], params: types.SamplingParams, count: int = 16
) -> list[types.Datum]:
    data = []
    for n, sequence in enumerate(sampler.sample(types.ModelInput.from_ints(prompt), count, params).result().sequences):
        full, before = prompt + sequence.tokens, len(prompt) - 1
        assert sequence.logprobs is not None
        inputs = {
            "target_tokens": full[1:],
            "logprobs": [0.0] * before + sequence.logprobs,
            "advantages": [0.0] * before + [n - 7.5] * len(sequence.tokens),
        }
        data.append(types.Datum(types.ModelInput.from_ints(full[:-1]), inputs))
    return data


@pytest.mark.parametrize("filters", list(FILTERS))
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_ratio_is_one_at_fixed_weights(trainer: mint.TrainingClient, temperature: float, filters: str) -> None:
    prompt = trainer.get_tokenizer().encode("Q: What is 12 + 34?\nA:")
    params = types.SamplingParams(max_tokens=12, temperature=temperature, seed=1, stop=[], **FILTERS[filters])
    data = rollouts(trainer.save_weights_and_get_sampling_client(), prompt, params)
    metrics = trainer.forward(data, "importance_sampling").result().metrics
    assert metrics["ratio:mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio:min"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio:max"] == pytest.approx(1, abs=1e-4)
    assert metrics["tokens:sum"] == 16 * 12


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.2])
def test_the_tempered_policy_can_be_trained_consistently(trainer: mint.TrainingClient, temperature: float) -> None:
    """By its own log-probs, which `forward` with the loss's temperature gives: the ratio is 1 there too."""
    prompt = trainer.get_tokenizer().encode("Q: What is 12 + 34?\nA:")
    params = types.SamplingParams(max_tokens=12, temperature=temperature, seed=1, stop=[])
    data = rollouts(trainer.save_weights_and_get_sampling_client(), prompt, params)
    option = {"temperature": temperature}
    scored = trainer.forward(data, "importance_sampling", option).result()
    assert scored.metrics["ratio:max"] > 1.05, "the recorded log-probs are the raw policy's"
    tempered = []
    for datum, output in zip(data, scored.loss_fn_outputs, strict=True):
        used = datum.loss_fn_inputs["advantages"].to_numpy() != 0
        logprobs = np.where(used, output["logprobs"].to_numpy(), 0.0)
        tempered.append(types.Datum(datum.model_input, datum.loss_fn_inputs | {"logprobs": logprobs}))
    metrics = trainer.forward(tempered, "importance_sampling", option).result().metrics
    assert metrics["ratio:mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio:max"] == pytest.approx(1, abs=1e-4)
