"""Training calls: steps in a pipeline, chunks, losses, facts about the model."""

from __future__ import annotations

import asyncio
from typing import Any

from common import (
    EOS,
    MODEL,
    PATIENCE,
    SUMS,
    datum,
    encode,
    furthest,
    logprobs_of,
    report,
    scenario,
    scenario_of,
    sdk,
    train,
    types,
)
from common import training_client as new_client


@scenario
def a_pipelined_step() -> Any:
    client = new_client()
    before = client.forward_backward(SUMS, "cross_entropy")
    step = client.optim_step(types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, grad_clip_norm=1.0))
    after = client.forward(SUMS, "cross_entropy")
    first, last = before.result(PATIENCE), after.result(PATIENCE)
    return {
        "logprobs": [list(output["logprobs"].data) for output in first.loss_fn_outputs],
        "weights": [list(one.loss_fn_inputs["weights"].data) for one in SUMS],
        "loss": first.metrics["loss:sum"],
        "loss_after": last.metrics["loss:sum"],
        "step_metrics": step.result(PATIENCE).metrics,
    }


@scenario
def forward_only() -> Any:
    client = new_client()
    before = logprobs_of(client)
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result(PATIENCE)
    return {"moved": furthest(before, logprobs_of(client))}


@scenario
def three_chunks() -> Any:
    """A client cuts a batch after 1024 datums and posts the first piece last."""
    data = [datum([65 + n % 26] * (2 + n % 3), weights=[1.0] * (1 + n % 3)) for n in range(2100)]
    whole, parts = new_client(), new_client()
    result = whole.forward_backward(data, "cross_entropy")
    pieces = [parts.forward_backward(data[start : start + 700], "cross_entropy") for start in (0, 700, 1400)]
    for client in (whole, parts):
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result(PATIENCE)
    outputs = [list(output["logprobs"].data) for output in result.result(PATIENCE).loss_fn_outputs]
    return {
        "lengths": [len(logprobs) for logprobs in outputs],
        "total": sum(map(sum, outputs)),
        "loss": result.result(PATIENCE).metrics["loss:sum"],
        "loss_in_parts": sum(piece.result(PATIENCE).metrics["loss:sum"] for piece in pieces),
        "difference_after_a_step": furthest(logprobs_of(whole), logprobs_of(parts)),
    }


@scenario
def reinforcement_losses() -> Any:
    """Each loss on log-probs of an older policy, with weights that hide the prompt, as MinT's clients send them."""
    client = new_client()
    tokens = [*encode("A: 42"), EOS]
    now = logprobs_of(client, [datum(tokens, weights=[1.0] * 5)])[0]
    old = [p + shift for p, shift in zip(now, [0.1, -0.4, 0.5, -0.1, 2.0], strict=True)]
    inputs = {"logprobs": old, "advantages": [1.0, -1.0, 2.0, 0.5, 1.5], "weights": [0.0, 1.0, 1.0, 1.0, 1.0]}
    config = {"dro": {"beta": 0.05}, "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}}
    losses = {}
    for name in ("importance_sampling", "ppo", "cispo", "dro"):
        result = client.forward_backward([datum(tokens, **inputs)], name, config.get(name)).result(PATIENCE)
        losses[name] = result.metrics["loss:sum"]
    return {"now": now, "losses": losses, **inputs}


@scenario_of(since=34)
def sequence_loss() -> Any:
    """gspo, which clients know from 0.34 on; on the policy's own log-probs every ratio is one."""
    client = new_client()
    tokens = [*encode("A: 42"), EOS]
    now = logprobs_of(client, [datum(tokens, weights=[1.0] * 5)])[0]
    one = datum(tokens, logprobs=now, advantages=[1.0, -1.0, 2.0, 0.5, 1.5])
    return {"loss": client.forward_backward([one], "gspo").result(PATIENCE).metrics["loss:sum"]}


@scenario
def facts_of_the_model() -> Any:
    client = new_client(user_metadata={"purpose": "compat"})
    info, tokenizer = client.get_info(), client.get_tokenizer()
    return {
        "served": [model.model_name for model in sdk.ServiceClient().get_server_capabilities().supported_models],
        "name": info.model_data.model_name,
        "rank": info.lora_rank,
        "tokens": tokenizer.encode("A: 42"),
        "eos": tokenizer.eos_token_id,
    }


@scenario
def asynchronous_twins() -> Any:
    return asyncio.run(_asynchronous_twins())


async def _asynchronous_twins() -> Any:
    service = sdk.ServiceClient()
    capabilities = await service.get_server_capabilities_async()
    client = await service.create_lora_training_client_async(MODEL, rank=8)
    info = await client.get_info_async()
    forward = await client.forward_async(SUMS, "cross_entropy")
    backward = await client.forward_backward_async(SUMS, "cross_entropy")
    step = await client.optim_step_async(types.AdamParams(learning_rate=1e-3))
    before, same, _ = await asyncio.gather(forward, backward, step)
    saved = await (await client.save_weights_for_sampler_async("async"))
    sampler = await service.create_sampling_client_async(model_path=saved.path)
    prompt = types.ModelInput.from_ints(encode("Q: What is 1 + 2?\nA:"))
    params = types.SamplingParams(max_tokens=4)
    samples = await asyncio.gather(*[sampler.sample_async(prompt, 1, params) for _ in range(3)])
    return {
        "served": len(capabilities.supported_models),
        "rank": info.lora_rank,
        "losses": [before.metrics["loss:sum"], same.metrics["loss:sum"]],
        "samples": [len(sample.sequences) for sample in samples],
        "logprobs": len(await sampler.compute_logprobs_async(prompt)),
    }


@scenario
def two_adapters_interleaved() -> Any:
    """Two training clients on one base model, step by step in turn, each on a task of its own."""
    tasks = {"up": [datum([*encode("abcdef"), EOS])], "down": [datum([*encode("fedcba"), EOS])]}
    clients = {name: new_client() for name in tasks}
    losses: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(8):
        for name, client in clients.items():
            losses[name].append(train(client, tasks[name], 2e-3))
    crossed = -sum(map(sum, logprobs_of(clients["up"], tasks["down"])))
    return {"losses": losses, "up_on_down": crossed, "down_on_down": losses["down"][-1]}


report()
