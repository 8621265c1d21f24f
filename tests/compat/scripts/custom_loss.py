"""Losses that run in the client, on log-probs the server gives and gradients it takes; this needs torch."""

from __future__ import annotations

from typing import Any

import torch
from common import (
    MODEL,
    PATIENCE,
    SUMS,
    furthest,
    logprobs_of,
    report,
    scenario,
    scenario_of,
    sdk,
    text_datum,
    train,
    training_client,
    types,
)


def cross_entropy(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
    loss = -sum((p * w).sum() for p, w in zip(logprobs, weights, strict=True))
    return loss, {"mine": loss.item()}


@scenario
def like_the_built_in() -> Any:
    custom, built_in = training_client(), training_client()
    result = custom.forward_backward_custom(SUMS, cross_entropy).result(PATIENCE)
    custom.optim_step(types.AdamParams(learning_rate=1e-3)).result(PATIENCE)
    loss = train(built_in)
    return {
        "loss": loss,
        "metrics": result.metrics,
        "difference_after_a_step": furthest(logprobs_of(custom), logprobs_of(built_in)),
    }


@scenario_of(since=36)
def traced() -> Any:
    """A loss traced by the SDK, which it runs itself unless the server says it can."""
    service = sdk.ServiceClient()
    client = service.create_lora_training_client(MODEL, rank=8, seed=7)

    def likelihood(logprobs: Any, weights: Any) -> tuple[Any, dict[str, Any]]:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/likelihood:sum": loss}

    handle = service.create_custom_loss(likelihood, {"logprobs": 1, "weights": 1}).result(PATIENCE)
    result = client.forward_backward_custom(SUMS, handle).result(PATIENCE)
    return {"metrics": result.metrics, "loss": train(client, learning_rate=0.0)}


@scenario
def preferences() -> Any:
    """Direct preference optimisation over pairs: weights of both signs reach the server."""
    client = training_client()
    pairs = [text_datum("Q: What is 1 + 2?\nA:", answer) for answer in (" 3", " 4")]
    reference = [torch.tensor(row) for row in logprobs_of(client, pairs)]

    def dpo(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
        chosen, rejected = [((p - q) * w).sum() for p, q, w in zip(logprobs, reference, weights, strict=True)]
        loss = -torch.nn.functional.logsigmoid(0.5 * (chosen - rejected))
        return loss, {"dpo": loss.item()}

    losses = []
    for _ in range(6):
        losses.append(client.forward_backward_custom(pairs, dpo).result(PATIENCE).metrics["dpo"])
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result(PATIENCE)
    return {"losses": losses}


report()
