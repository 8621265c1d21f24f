"""Usage by key and run: what was counted equals what was sent and got, survives restarts, and is told to its owner."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mint.server.store import Store
from mint.server.usage import HOUR, Counter, Used, report
from tests.server.databases import BOTH_DATABASES
from tests.server.live import Live, datum_json
from tests.server.tenants import Keychain
from tests.waiting import eventually

Serve = Callable[..., Live]


def by_run(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {line["run"]: line for line in lines}


@BOTH_DATABASES
def test_tokens_requests_and_disk_are_counted_by_run(live: Live) -> None:
    alice = Keychain(live).tenant("alice")
    session = alice.session()
    model = alice.model(session)
    data = [datum_json([1, 2, 3, 4]), datum_json([1, 2])]
    alice.fetch(alice.train(model, 1, data))  # 3 + 1 tokens
    forward = {"model_id": model, "seq_id": 2, "forward_input": {"data": data, "loss_fn": "cross_entropy"}}
    alice.fetch(alice.post("/forward", forward))
    alice.fetch(alice.step(model, 3))
    snapshot = {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 1}
    sampler = alice.fetch(alice.post("/save_weights_for_sampler", snapshot))["sampling_session_id"]
    alice.fetch(alice.sample(sampler, 1, num_samples=2))  # 3 of the prompt once, 2 x 3 sampled
    path = alice.save(model, 5, "one", "save_weights_for_sampler")
    alice.fetch(alice.sample(alice.sampler(session, 2, model_path=path), 1))
    alice.fetch(alice.sample(alice.sampler(session, 3), 1))  # of the base model: of no run
    used = by_run(alice.get("/mint/usage")["usage"])
    assert used.keys() == {"", model}
    assert used[model]["trained_tokens"] == 4
    assert used[model]["prompt_tokens"] == 4 + 3 + 3
    assert used[model]["sampled_tokens"] == 6 + 3
    assert used[model]["requests"] == 7, "two passes, a step, a snapshot, a save, two samples"
    assert used[model]["disk_bytes"] == 16
    assert used[model]["engine_seconds"] > 0
    assert (used[""]["prompt_tokens"], used[""]["sampled_tokens"]) == (3, 3)
    assert used[model]["key"] == "alice"


def test_completions_and_refusals_are_counted_as_what_they_are(live: Live) -> None:
    alice = Keychain(live).tenant("alice")
    body = {"model": "mint/tiny", "prompt": [1, 2, 3, 4], "max_tokens": 2}
    told = alice.http.post(f"{alice.url}/v1/completions", json=body).json()["usage"]
    assert alice.http.post(f"{alice.url}/v1/completions", json=body | {"prompt": [99999]}).status_code == 400
    [line] = alice.get("/mint/usage")["usage"]
    assert (line["prompt_tokens"], line["sampled_tokens"]) == (4, 2)
    assert (line["prompt_tokens"], line["sampled_tokens"]) == (told["prompt_tokens"], told["completion_tokens"])


def test_a_request_sent_again_and_one_carried_out_again_count_once(live: Live) -> None:
    alice = Keychain(live).tenant("alice")
    model = alice.model()
    alice.fetch(alice.train(model, 1))
    alice.fetch(alice.train(model, 1))
    live.backend.lose_engine()
    alice.fetch(alice.step(model, 2))  # the pass before it is carried out again
    used = by_run(alice.get("/mint/usage")["usage"])[model]
    assert live.backend.names().count("forward_backward") == 2
    assert (used["trained_tokens"], used["requests"]) == (2, 2)


def test_usage_outlives_the_server(serve: Serve) -> None:
    live = serve(keys=("tml-house",))
    sampler = live.sampler()
    live.fetch(live.sample(sampler, 1))
    live.restart()
    live.fetch(live.sample(sampler, 2))
    [line] = [line for line in live.get("/mint/usage")["usage"] if not line["run"]]
    assert (line["sampled_tokens"], line["owner"]) == (6, "local")


def test_a_snapshot_is_known_by_its_run_after_a_restart(serve: Serve) -> None:
    live = serve(port=8000)
    model = live.model()
    snapshot = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 1}
    sampler = live.fetch(live.post("/save_weights_for_sampler", snapshot))["sampling_session_id"]
    live.restart()
    live.fetch(live.sample(sampler, 1))
    assert by_run(live.get("/mint/usage")["usage"])[model]["sampled_tokens"] == 3


def test_what_is_counted_is_in_the_database_after_the_next_sweep_without_a_clean_end(live: Live) -> None:
    live.fetch(live.sample(live.sampler(), 1))
    with sqlite3.connect(live.config.data / "mint.db") as database:
        eventually(lambda: database.execute("select sampled_tokens from usage").fetchone() == (3,))


# The counter ----------------------------------------------------------------------------------------------------------


@BOTH_DATABASES
def test_two_servers_add_to_the_same_sums(database: str) -> None:
    stores = [Store(database) for _ in range(2)]
    counters = [Counter(store) for store in stores]
    for counter in counters:
        for _ in range(3):
            counter.add("alice", "run", Used(sampled_tokens=5))
            counter.flush()
    assert counters[0].total("alice", "run").sampled_tokens == 30
    counters[1].add("alice", "other", Used(sampled_tokens=1))
    assert counters[1].total("alice").sampled_tokens == 31
    counters[1].add("alice", "other", Used(sampled_tokens=1))
    assert counters[1].total("alice").sampled_tokens == 32, "what is not written yet counts too"
    for store in stores:
        store.close()


def test_what_cannot_be_written_is_kept_for_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(Store(tmp_path / "mint.db"))
    counter.add("alice", "", Used(requests=2))

    def full(_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(counter, "_write", full)
        with pytest.raises(OSError, match="full"):
            counter.flush()
    counter.add("alice", "", Used(requests=1))
    assert counter.total("alice").requests == 3


def test_usage_is_told_from_the_hour_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "mint.db")
    counter = Counter(store)
    now = 1_800_000_000 // HOUR * HOUR
    for hours_ago in (0, 1, 30):
        monkeypatch.setattr(time, "time", lambda ago=hours_ago: now - ago * HOUR + 60)
        counter.add("alice", "run", Used(requests=1))
        counter.flush()

    def requests(since: float | None) -> int:
        return sum(line.requests for line in report(store, str, since=since))

    assert (requests(None), requests(now - HOUR), requests(now + 120)) == (3, 2, 1)
