"""Sampling: where from, how many, when to stop, and what is known of each token."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from typing import Any

from common import (
    EOS,
    MODEL,
    PATIENCE,
    datum,
    encode,
    furthest,
    logprobs_of,
    report,
    scenario,
    scenario_of,
    sdk,
    train,
    training_client,
    types,
)

PROMPT = types.ModelInput.from_ints(encode("Q: What is 12 + 34?\nA:"))


def base() -> Any:
    return sdk.ServiceClient().create_sampling_client(base_model=MODEL)


def sample(sampler: Any, count: int = 1, prompt: Any = PROMPT, **params: Any) -> Any:
    params = {"max_tokens": 8} | params
    return sampler.sample(prompt, count, types.SamplingParams(**params)).result(PATIENCE)


def tokens_of(answer: Any) -> list[list[int]]:
    return [list(sequence.tokens) for sequence in answer.sequences]


@scenario
def three_sources() -> Any:
    """The base model, a checkpoint by its path, and a snapshot that later training leaves alone."""
    service = sdk.ServiceClient()
    client = service.create_lora_training_client(MODEL, rank=8, seed=7)
    for _ in range(5):
        train(client, learning_rate=3e-3)
    path = client.save_weights_for_sampler("by-path").result(PATIENCE).path
    by_path = service.create_sampling_client(model_path=path)
    snapshot = client.save_weights_and_get_sampling_client()
    kept = snapshot.compute_logprobs(PROMPT).result(PATIENCE)
    train(client, learning_rate=3e-3)
    text = types.ModelInput.from_ints(encode("Q: What is 12 + 34?\nA: 46"))
    scores = {"base": base(), "path": by_path, "snapshot": snapshot}
    return {
        "path": path,
        "answers": {name: tokens_of(sample(sampler, temperature=0.0)) for name, sampler in scores.items()},
        "scores": {name: sum(s.compute_logprobs(text).result(PATIENCE)[1:]) for name, s in scores.items()},
        "snapshot_moved": furthest([kept[1:]], [snapshot.compute_logprobs(PROMPT).result(PATIENCE)[1:]]),
    }


@scenario
def groups_and_seeds() -> Any:
    sampler = base()
    drawn = [tokens_of(sample(sampler, 4, seed=seed, temperature=1.0)) for seed in (3, 3, 4)]
    answer = sample(sampler, 2)
    return {
        "drawn": drawn,
        "logprobs": [[len(s.tokens), len(s.logprobs), max(s.logprobs)] for s in answer.sequences],
        "reasons": [str(s.stop_reason) for s in answer.sequences],
    }


@scenario
def stops() -> Any:
    """What the model writes greedily, and where a token, a string, the end of the text and a limit cut it."""
    sampler = base()
    whole = sample(sampler, temperature=0.0, max_tokens=12)
    tokens = tokens_of(whole)[0]

    def cut(**params: Any) -> list[Any]:
        sequence = sample(sampler, temperature=0.0, **{"max_tokens": 12} | params).sequences[0]
        return [list(sequence.tokens), str(sequence.stop_reason)]

    return {
        "whole": [tokens, str(whole.sequences[0].stop_reason)],
        "by_token": cut(stop=[tokens[1]]),
        "by_string": cut(stop=[chr(tokens[1])]),
        "by_length": cut(max_tokens=1),
        # Examples pass this name, which the client drops without a word; the end of the text must stop anyway.
        "by_dropped_name": cut(stop_token_ids=[EOS]),
        "top_k_1": tokens_of(sample(sampler, temperature=1.0, top_k=1, seed=5, max_tokens=12))[0],
    }


@scenario
def prompt_logprobs() -> Any:
    client = training_client()
    train(client)
    sampler = client.save_weights_and_get_sampling_client()
    tokens = PROMPT.to_ints()
    trained = logprobs_of(client, [datum(tokens, weights=[0.0] * (len(tokens) - 1))])[0]
    params = types.SamplingParams(max_tokens=1, temperature=0.0)
    answer = sampler.sample(PROMPT, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result(PATIENCE)
    plain = sampler.sample(PROMPT, 1, params).result(PATIENCE)
    best = [dict(row) if row else None for row in answer.topk_prompt_logprobs]
    return {
        "tokens": tokens,
        "first": answer.prompt_logprobs[0],
        "difference_to_trainer": furthest([answer.prompt_logprobs[1:]], [trained]),
        "difference_to_compute": furthest(
            [answer.prompt_logprobs[1:]], [sampler.compute_logprobs(PROMPT).result(PATIENCE)[1:]]
        ),
        "topk": [None if row is None else [[token, row[token]] for token in row] for row in best],
        "prompt_logprobs": answer.prompt_logprobs,
        "unasked": plain.prompt_logprobs,
    }


@scenario
def twenty_at_once() -> Any:
    """All with the same prompt, which a hosted server is known to have stumbled over."""
    sampler = base()
    params = types.SamplingParams(max_tokens=8, seed=11)
    futures = [sampler.sample(PROMPT, 2, params) for _ in range(20)]
    return {"answers": [tokens_of(future.result(PATIENCE)) for future in futures]}


@scenario
def names() -> Any:
    sampler = base()
    tokenizer = sampler.get_tokenizer()
    return {"base_model": sampler.get_base_model(), "tokens": tokenizer.encode("A: 42")}


@scenario
def in_another_process() -> Any:
    sampler = training_client().save_weights_and_get_sampling_client()
    # The copy draws its own numbers for its requests, so both may ask at once.
    here = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=8, temperature=0.0))
    script = os.path.join(os.path.dirname(__file__), "unpickle.py")
    text = base64.b64encode(pickle.dumps(sampler)).decode()
    done = subprocess.run([sys.executable, script], input=text, capture_output=True, text=True, timeout=PATIENCE)
    there = [line.removeprefix("TOKENS ") for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert there, f"{done.stdout}{done.stderr}"
    return {"here": tokens_of(here.result(PATIENCE)), "there": json.loads(there[0])}


@scenario_of(since=33)
def newest_options() -> Any:
    """What 0.36 can ask of a sample beyond 0.22."""
    sampler, tokens = base(), PROMPT.to_ints()
    params = types.SamplingParams(max_tokens=4, temperature=0.0)
    rows = len(tokens) - 1
    targets = types.TensorData(data=[-1] * (2 * rows - 2) + [tokens[-1], 65], dtype="int64", shape=[rows, 2])
    answer = sampler.sample(
        PROMPT,
        1,
        params,
        include_prompt_logprobs=True,
        topk_sample_logprobs=2,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=3,
        prompt_logprobs_last_n=2,
    ).result(PATIENCE)
    copy = sdk.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
    sequence = answer.sequences[0]
    return {
        "prompt_logprobs": answer.prompt_logprobs,
        "whole": sampler.compute_logprobs(PROMPT).result(PATIENCE),
        "target": list(answer.target_prompt_logprobs.data),
        "target_shape": list(answer.target_prompt_logprobs.shape),
        "alternatives": list(answer.prompt_alt_tokens.tokens.shape),
        "sampled": [list(sequence.tokens), list(sequence.logprobs)],
        "topk_sampled": [dict(row) for row in sequence.topk_logprobs],
        "endless": tokens_of(sample(sampler, temperature=0.0, max_tokens=40, stop=[]))[0],
        "copy": tokens_of(sample(copy, temperature=0.0)),
        "original": tokens_of(sample(sampler, temperature=0.0)),
    }


report()
