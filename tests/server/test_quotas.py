"""Limits per key: refused with 429, which one, how much and when; clients wait and go on, and order is kept."""

from __future__ import annotations

from typing import Any

import pytest

import mint
from mint import types
from mint.server.engine_clock import EngineClock
from mint.server.keyring import Quota
from mint.server.quotas import Bucket, Limited, Line
from tests.server.databases import BOTH_DATABASES
from tests.server.live import Live, sample_body, train_body
from tests.server.tenants import Keychain, audit_lines
from tests.waiting import eventually


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_its_rate_and_saves_up_for_a_minute() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    taken = 0
    for _ in range(10 * 240):  # ten minutes in quarters of a second, whenever there is one
        if bucket.wait(1) == 0:
            bucket.take(1)
            taken += 1
        clock.now += 0.25
    assert taken == 60 + 599, "what was saved up, and one a second"
    clock.now += 3600
    assert bucket.wait(60) == 0
    bucket.take(60)
    assert bucket.wait(1) == pytest.approx(1.0)


def test_an_overdrawn_bucket_pays_back_before_it_gives() -> None:
    clock = Clock()
    bucket = Bucket(600, clock)
    bucket.take(1600)
    assert bucket.wait(1) == pytest.approx(1001 / 10)
    clock.now += 100.1
    assert bucket.wait(1) == pytest.approx(0, abs=1e-6)
    assert bucket.wait(10**9) == pytest.approx(599 / 10), "nobody waits for more than a minute gives"


def test_nobody_passes_one_that_was_turned_away_until_it_comes_again() -> None:
    clock = Clock()
    line = Line(clock)
    let_in: list[int] = []
    closed = True

    def ask(number: int, waiting: int | None = None) -> bool:
        def admit() -> None:
            if closed:
                raise Limited("requests_per_minute", "no", 1)

        try:
            line.admit(number, waiting, admit)
        except Limited:
            return False
        let_in.append(number)
        return True

    assert not ask(3)
    closed = False
    assert not ask(4), "3 is on its way again"
    assert ask(2), "comes before it"
    assert ask(3)
    assert ask(4)
    closed = True
    assert ask(5, waiting=6), "6 has been let in and waits for it"
    assert not ask(7)
    closed = False
    clock.now += Line.PATIENCE + 1
    assert ask(8), "7 was given up"
    assert let_in == [2, 3, 4, 5, 8]


def test_engine_time_is_shared_out_equally_and_adds_up() -> None:
    clock = Clock()
    shares = EngineClock(clock)
    a, b = ("alice", "run"), ("bob", "run")
    shares.begin(a)
    clock.now += 4  # alice alone
    for _ in range(5):
        shares.begin(b)
    clock.now += 6  # both: three each, however many requests bob queued
    told_a = shares.end(a)
    clock.now += 2  # bob alone
    told_b = sum(shares.end(b) for _ in range(5))
    assert (told_a, told_b) == (4 + 3, 3 + 2)
    clock.now += 100  # nobody
    shares.begin(a)
    assert shares.end(a) == 0


def refusal(answer: Any) -> tuple[int, str, str]:
    return answer.status_code, answer.headers.get("x-mint-limit", ""), answer.json()["detail"]


def test_requests_a_minute_are_limited_and_said(live: Live) -> None:
    alice = Keychain(live).tenant("alice", requests_per_minute=3)
    session = alice.session()
    alice.get("/sessions")
    alice.get("/sessions")
    answer = alice.http.get("/sessions")
    status, limit, words = refusal(answer)
    assert (status, limit) == (429, "requests_per_minute")
    assert "3 requests a minute" in words
    assert 1 <= int(answer.headers["retry-after"]) <= 20
    for _ in range(10):  # what clients send by themselves does not count
        alice.post("/session_heartbeat", {"session_id": session})
    [line] = audit_lines(live, "refused")
    assert line["limit"] == "requests_per_minute"


def test_tokens_are_charged_when_they_have_been_used(live: Live) -> None:
    chain = Keychain(live)
    alice = chain.tenant("alice", tokens_per_minute=6)
    model, sampler = alice.model(), alice.sampler()
    alice.fetch(alice.train(model, 1))  # two tokens
    alice.fetch(alice.sample(sampler, 1))  # three of the prompt, three sampled: overdrawn
    status, limit, words = refusal(alice.post("/asample", sample_body(sampler, 2), ok=False))
    assert (status, limit) == (429, "tokens_per_minute")
    assert "6 tokens a minute" in words
    assert refusal(alice.post("/forward_backward", train_body(model, 2), ok=False))[0] == 429
    chat = {"model": "mint/tiny", "messages": [{"role": "user", "content": "hi"}]}
    openai = alice.http.post(f"{alice.url}/v1/chat/completions", json=chat)
    assert (openai.status_code, openai.headers["x-mint-limit"]) == (429, "tokens_per_minute")
    assert "6 tokens a minute" in openai.json()["error"]["message"]
    chain.ring.change("alice", tokens_per_minute=None)
    assert alice.fetch(alice.train(model, 2))["loss_fn_outputs"], "its number was not spent by the refusal"


def test_requests_at_once_are_limited(live: Live) -> None:
    alice = Keychain(live).tenant("alice", concurrent=2)
    sampler = alice.sampler()
    live.backend.hold()
    first = [alice.sample(sampler, n) for n in (1, 2)]
    assert refusal(alice.post("/asample", sample_body(sampler, 3), ok=False))[:2] == (429, "concurrent")
    live.backend.let_go()
    for envelope in first:
        alice.fetch(envelope)
    assert alice.fetch(alice.sample(sampler, 3))["sequences"]


def test_a_completion_of_several_prompts_is_one_request(live: Live) -> None:
    alice = Keychain(live).tenant("alice", concurrent=1, requests_per_minute=1)
    body = {"model": "mint/tiny", "prompt": ["a", "b"], "max_tokens": 1}
    first, second = (alice.http.post(f"{alice.url}/v1/completions", json=body) for _ in range(2))
    assert len(first.json()["choices"]) == 2
    assert (second.status_code, second.headers["x-mint-limit"]) == (429, "requests_per_minute")


def test_training_models_at_once_are_limited(live: Live) -> None:
    alice = Keychain(live).tenant("alice", adapters=2)
    session = alice.session()
    models = [alice.model(session, n) for n in (0, 1)]
    body = {"session_id": session, "model_seq_id": 2, "base_model": "mint/tiny"}
    status, limit, words = refusal(alice.post("/create_model", body, ok=False))
    assert (status, limit) == (429, "adapters")
    assert "may have 2" in words
    alice.fetch(alice.post("/create_model", body | {"model_seq_id": 1}))  # asked for again: no new one
    alice.fetch(alice.post("/unload_model", {"model_id": models[0]}))
    assert alice.model(session, 2)


@BOTH_DATABASES
def test_room_for_checkpoints_is_limited_until_some_are_deleted(live: Live) -> None:
    alice = Keychain(live).tenant("alice", disk_bytes=20)
    model = alice.model()
    paths = [alice.save(model, 1, "one"), alice.save(model, 2, "two")]  # 16 bytes each
    save = {"model_id": model, "seq_id": 3, "path": "three"}
    status, limit, words = refusal(alice.post("/save_weights", save, ok=False))
    assert (status, limit) == (429, "disk_bytes")
    assert "take 32 bytes and may take 20" in words
    copy = {"source_path": paths[0], "session_id": alice.session(), "model_seq_id": 0}
    assert alice.post("/copy_weights", copy, ok=False).status_code == 429
    upload = alice.http.post("/checkpoints/upload", files={"file": ("a.tar.gz", b"x", "application/gzip")})
    assert upload.status_code == 429
    for name in ("one", "two"):
        alice.http.delete(f"/training_runs/{model}/checkpoints/weights/{name}")
    assert alice.save(model, 3, "three"), "its number was not spent by the refusal"


def test_requests_refused_in_the_middle_are_carried_out_in_their_turn(live: Live) -> None:
    alice = Keychain(live).tenant("alice", concurrent=1)
    model = alice.model()
    live.backend.hold()
    first = alice.step(model, 1)
    assert alice.step(model, 2, ok=False).status_code == 429
    live.backend.let_go()
    alice.fetch(first)
    assert alice.step(model, 3, ok=False).status_code == 429, "2 is on its way again"
    assert alice.fetch(alice.step(model, 2))["metrics"] == {"step": 2.0}
    assert alice.fetch(alice.step(model, 3))["metrics"] == {"step": 3.0}


def test_our_client_waits_and_the_order_of_its_requests_is_kept(live: Live) -> None:
    """Steps sent in one go while only four requests may be under way: each is carried out once, in its turn."""
    _, key = Keychain(live).ring.create("alice", Quota(concurrent=4))
    with mint.ServiceClient(live.url, key) as service:
        trainer = service.create_lora_training_client("mint/tiny")
        live.backend.hold()
        futures = [trainer.optim_step(types.AdamParams(learning_rate=n + 1.0)) for n in range(12)]
        eventually(lambda: audit_lines(live, "refused"))
        live.backend.let_go()
        assert [future.result().metrics["step"] for future in futures] == list(range(1, 13))
    rates = [call[2].learning_rate for call in live.backend.calls if call[0] == "optim_step"]
    assert rates == [n + 1.0 for n in range(12)]
