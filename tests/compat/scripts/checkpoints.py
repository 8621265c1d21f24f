"""Saving, loading, resuming, and the catalogue of runs, sessions and checkpoints."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from common import (
    MODEL,
    PATIENCE,
    furthest,
    logprobs_of,
    refusal,
    report,
    rest_client,
    scenario,
    scenario_of,
    sdk,
    train,
    training_client,
    types,
)


@scenario
def load_in_place() -> Any:
    client = training_client()
    train(client)
    saved, path = logprobs_of(client), client.save_state("here").result(PATIENCE).path
    train(client, learning_rate=1e-2)
    moved = furthest(saved, logprobs_of(client))
    client.load_state(path).result(PATIENCE)
    return {"path": path, "moved": moved, "left": furthest(saved, logprobs_of(client))}


@scenario
def resume() -> Any:
    """A run goes on, against the same run taken up from its checkpoint in each of the ways clients know."""
    service = sdk.ServiceClient()
    client = service.create_lora_training_client(MODEL, rank=8, seed=7)
    for _ in range(3):
        train(client)
    path = client.save_state("third").result(PATIENCE).path
    saved = logprobs_of(client)
    train(client)
    gone_on = logprobs_of(client)
    fresh = service.create_lora_training_client(MODEL, rank=8)
    fresh.load_state_with_optimizer(path).result(PATIENCE)
    taken_up = {
        "weights": service.create_training_client_from_state(path),
        "weights_and_optimizer": service.create_training_client_from_state_with_optimizer(path),
        "fresh_client": fresh,
    }
    found = {}
    for name, other in taken_up.items():
        at_load = furthest(saved, logprobs_of(other))
        train(other)
        found[name] = {"at_load": at_load, "after_a_step": furthest(gone_on, logprobs_of(other))}
    return found


@scenario
def catalogue() -> Any:
    service = sdk.ServiceClient(user_metadata={"purpose": "compat"})
    client = service.create_lora_training_client(MODEL, rank=4, user_metadata={"renderer": "plain"})
    state = client.save_state("one", ttl_seconds=7200).result(PATIENCE).path
    weights = client.save_weights_for_sampler("one").result(PATIENCE).path
    sampler = service.create_sampling_client(model_path=weights)
    sampler.compute_logprobs(types.ModelInput.from_ints([65, 66])).result(PATIENCE)
    rest = rest_client(service)
    run = rest.get_training_run_by_tinker_path(state).result(PATIENCE)
    listed = rest.list_training_runs(limit=100).result(PATIENCE)
    checkpoints = rest.list_checkpoints(run.training_run_id).result(PATIENCE).checkpoints
    info = rest.get_weights_info_by_tinker_path(state).result(PATIENCE)
    session_id = service.holder.get_session_id()
    session = rest.get_session(session_id).result(PATIENCE)
    return {
        "run": run.training_run_id,
        "base_model": run.base_model,
        "rank": run.lora_rank,
        "metadata": run.user_metadata,
        "listed": run.training_run_id in [one.training_run_id for one in listed.training_runs],
        "counted": listed.cursor.total_count >= len(listed.training_runs) > 0,
        "checkpoints": sorted([c.checkpoint_id, c.checkpoint_type, c.tinker_path] for c in checkpoints),
        "expiring": sorted(c.checkpoint_id for c in checkpoints if c.expires_at),
        "paths": [state, weights],
        "mine": {state, weights} <= {c.tinker_path for c in rest.list_user_checkpoints().result(PATIENCE).checkpoints},
        "info": [info.base_model, info.is_lora, info.lora_rank],
        "session_known": session_id in rest.list_sessions(limit=100).result(PATIENCE).sessions,
        "session_runs": session.training_run_ids,
        "session_samplers": len(session.sampler_ids),
        "sampler": rest.get_sampler(session.sampler_ids[0]).result(PATIENCE).model_path,
    }


@scenario
def care() -> Any:
    """Expiry, publication and deletion."""
    service = sdk.ServiceClient()
    client = service.create_lora_training_client(MODEL, rank=4)
    path = client.save_state("kept").result(PATIENCE).path
    doomed = client.save_state("doomed").result(PATIENCE).path
    rest = rest_client(service)

    def look() -> dict[str, Any]:
        found = rest.list_checkpoints(str(client.model_id)).result(PATIENCE).checkpoints
        return {c.checkpoint_id: [c.public, c.expires_at is not None] for c in found}

    seen = [look()]
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result(PATIENCE)
    rest.publish_checkpoint_from_tinker_path(path).result(PATIENCE)
    rest.delete_checkpoint_from_tinker_path(doomed).result(PATIENCE)
    seen.append(look())
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(PATIENCE)
    rest.unpublish_checkpoint_from_tinker_path(path).result(PATIENCE)
    seen.append(look())
    return {
        "seen": seen,
        "twice": refusal(lambda: client.save_state("kept").result(PATIENCE)),
        "gone": refusal(lambda: service.create_training_client_from_state(doomed)),
        "still_trains": train(client) > 0,
    }


@scenario_of(until=35)
def archive() -> Any:
    """The download link of clients up to 0.35, fetched without a key as they do."""
    service = sdk.ServiceClient()
    client = service.create_lora_training_client(MODEL, rank=4)
    path = client.save_weights_for_sampler("packed").result(PATIENCE).path
    link = rest_client(service).get_checkpoint_archive_url_from_tinker_path(path).result(PATIENCE)
    with urllib.request.urlopen(link.url, timeout=PATIENCE) as answer:
        downloaded = io.BytesIO(answer.read())
    with tarfile.open(fileobj=downloaded) as packed:
        files = {member.name: packed.extractfile(member).read() for member in packed.getmembers() if member.isfile()}
    return {"names": sorted(files), "adapter": json.loads(files["adapter_config.json"])}


@scenario_of(since=28)
def external_weights() -> Any:
    """The download of clients from 0.28 on: a link for each file."""
    service = sdk.ServiceClient()
    client = service.create_lora_training_client(MODEL, rank=4)
    path = client.save_weights_external("out").result(PATIENCE).path
    links = rest_client(service).get_external_weights_urls(path).result(PATIENCE)
    config = next(url for file, url in links.urls.items() if file.endswith("adapter_config.json"))
    with urllib.request.urlopen(config, timeout=PATIENCE) as answer:
        return {"path": path, "names": sorted(links.urls), "adapter": json.load(answer)}


@scenario_of(until=27)
def beside_newer_clients() -> Any:
    """A newer client has exported weights, a kind that this one refuses to read in a list."""
    service = sdk.ServiceClient()
    client = service.create_lora_training_client(MODEL, rank=4)
    client.save_state("mine").result(PATIENCE)
    exported = post("save_weights_external", {"model_id": str(client.model_id), "path": "theirs"})
    saved = post("retrieve_future", {"request_id": exported["request_id"]})
    rest = rest_client(service)
    listed = rest.list_checkpoints(str(client.model_id)).result(PATIENCE).checkpoints
    mine = rest.list_user_checkpoints().result(PATIENCE).checkpoints
    return {
        "saved": saved["path"],
        "listed": [c.checkpoint_id for c in listed],
        "types": [c.checkpoint_type for c in mine],
    }


def post(path: str, body: dict[str, Any]) -> Any:
    key = {"X-API-Key": os.environ["TINKER_API_KEY"], "Content-Type": "application/json"}
    address = f"{os.environ['TINKER_BASE_URL']}/api/v1/{path}"
    with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), key)) as answer:
        return json.load(answer)


@scenario
def command_line() -> Any:
    """The SDK's own command: what is there, and a checkpoint as files."""
    client = training_client()
    path = client.save_state("listed").result(PATIENCE).path

    def tinker(*words: str) -> Any:
        command = [sys.executable, "-m", "tinker.cli", "--format", "json", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with tempfile.TemporaryDirectory() as folder:
        tinker("checkpoint", "download", path, "--output", folder)
        files = sorted(file.name for file in Path(folder).rglob("*") if file.is_file())
    run, checkpoint = json.loads(tinker("run", "info", str(client.model_id))), tinker("checkpoint", "list")
    return {"run": run, "listed": path in checkpoint, "files": files}


report()
