"""What MinT's own toolkit adds to the tinker SDK, and the raw HTTP its examples use."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

from common import MODEL, PATIENCE, SUMS, furthest, logprobs_of, report, scenario, sdk, train, types

ADDRESS, KEY = os.environ["MINT_BASE_URL"], os.environ["MINT_API_KEY"]


@scenario
def uploaded_checkpoint() -> Any:
    """An archive comes down, goes up again as a form, and is trained on from there."""
    service = sdk.ServiceClient()
    client = service.create_lora_training_client(MODEL, rank=4, seed=7)
    train(client)
    path = client.save_state("down").result(PATIENCE).path
    link = service.create_rest_client().get_checkpoint_archive_url_from_tinker_path(path).result(PATIENCE)
    with urllib.request.urlopen(link.url, timeout=PATIENCE) as answer:
        packed = answer.read()
    uploaded = upload(packed)
    fresh = service.create_lora_training_client(MODEL, rank=4)
    fresh.load_state_with_optimizer(uploaded.get("path") or uploaded["checkpoint_id"]).result(PATIENCE)
    here = logprobs_of(client)
    left = furthest(here, logprobs_of(fresh))
    train(client)
    train(fresh)
    return {"left": left, "after_a_step": furthest(logprobs_of(client), logprobs_of(fresh)), "answer": uploaded}


def upload(packed: bytes) -> dict[str, str]:
    border = "----compat"
    head = f'--{border}\r\nContent-Disposition: form-data; name="file"; filename="c.tar.gz"\r\n'
    body = f"{head}Content-Type: application/gzip\r\n\r\n".encode() + packed + f"\r\n--{border}--\r\n".encode()
    headers = {"X-API-Key": KEY, "Content-Type": f"multipart/form-data; boundary={border}"}
    request = urllib.request.Request(f"{ADDRESS}/api/v1/checkpoints/upload", body, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


@scenario
def interpolation() -> Any:
    """Half of two adapters of different ranks, one of them new and so nothing: half way from the base model."""
    service = sdk.ServiceClient()
    trained, new = (service.create_lora_training_client(MODEL, rank=rank, seed=rank) for rank in (4, 2))
    train(trained, SUMS, 1e-2)
    paths = [client.save_weights_for_sampler("one").result(PATIENCE).path for client in (trained, new)]
    done = sdk.mint.interpolate_checkpoints(service, source_paths=paths, coefficients=[0.5, 0.5], output_path="half")
    whole = sdk.mint.interpolate_checkpoints(service, source_paths=paths, coefficients=[1.0, 7.0])
    text = types.ModelInput.from_ints([65, 66, 67, 68])

    def scored(**target: str) -> list[float]:
        return service.create_sampling_client(**target).compute_logprobs(text).result(PATIENCE)[1:]

    return {
        "answer": done.model_dump(),
        "paths": paths,
        "base": scored(base_model=MODEL),
        "half": scored(model_path=done.path),
        "whole": scored(model_path=whole.path),
        "trained": scored(model_path=paths[0]),
    }


@scenario
def reverse_kl() -> Any:
    """A student comes to answer like a trained model."""
    service = sdk.ServiceClient()
    teacher, student = (service.create_lora_training_client(MODEL, rank=4, seed=seed) for seed in range(2))
    for _ in range(5):
        train(teacher, SUMS)
    path = teacher.save_weights_for_sampler("one").result(PATIENCE).path
    tokens = [65, 66, 67, 68]
    one = sdk.mint.ReverseKLDatum(
        student_input=types.ModelInput.from_ints(tokens[:-1]),
        reference_input=types.ModelInput.from_ints(tokens[:-1]),
        target_tokens=types.TensorData(data=tokens[1:], dtype="int64", shape=[3]),
        weights=types.TensorData(data=[0.0, 1.0, 1.0], dtype="float32", shape=[3]),
    )
    found = []
    for _ in range(20):
        answer = sdk.mint.forward_backward_reverse_kl(student, reference_model_path=path, data=[one])
        student.optim_step(types.AdamParams(learning_rate=1e-3)).result(PATIENCE)
        found.append(answer.model_dump())
    return {"answers": [found[0], found[-1]]}


report()
