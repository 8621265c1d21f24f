"""Bounded queues that keep the order, what those who wait are told, and what a dead session leaves behind: nothing."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mint.client.http import Response
from mint.client.transport import Transport
from mint.errors import Busy, Lost
from mint.server.limits import Limits
from mint.server.queues import Load, Queues
from tests.server.live import Live, sample_body, train_body
from tests.waiting import eventually

Serve = Callable[..., Live]
PLENTY = 1 << 40


def queues(**limits: Any) -> Queues:
    return Queues(Limits(**limits), free_memory=lambda: PLENTY)


def test_each_bound_refuses_what_is_beyond_it_and_lets_in_when_there_is_room_again() -> None:
    bounds = {"model_requests": 2, "session_requests": 3, "pending_requests": 4}
    books = queues(**bounds)
    leave = [books.enter(Load("s", requests=1, model="m")) for _ in range(2)]
    with pytest.raises(Busy, match="2 requests of this model are under way"):
        books.enter(Load("s", requests=1, model="m"))
    leave.append(books.enter(Load("s", requests=1, model="n")))
    with pytest.raises(Busy, match="3 requests of this session"):
        books.enter(Load("s", requests=1, model="n"))
    leave.append(books.enter(Load("t", requests=1, model="o")))
    with pytest.raises(Busy, match="4 requests are under way"):
        books.enter(Load("u", requests=1, model="p"))
    for gone in leave:
        gone()
        gone()  # once is enough
    assert books.depths() == {"requests": 0, "samples": 0, "bytes": 0, "models": 0}
    books.enter(Load("u", requests=1, model="p"))


def test_bytes_are_bounded_and_one_large_request_is_let_in_alone() -> None:
    books = queues(model_bytes=100)
    leave = books.enter(Load("s", requests=1, bytes=500, model="m"))
    with pytest.raises(Busy, match="500 bytes of this model"):
        books.enter(Load("s", requests=1, bytes=1, model="m"))
    leave()
    books.enter(Load("s", requests=1, bytes=60, model="m"))


def test_after_a_refusal_no_later_request_of_the_model_overtakes_it() -> None:
    books = queues(model_requests=1)
    leave = books.enter_in_order(Load("s", requests=1, model="m"), 1, following=1)
    with pytest.raises(Busy):
        books.enter_in_order(Load("s", requests=1, model="m"), 3, following=2)
    leave()
    with pytest.raises(Busy, match="request 3 of this model found no room and comes first"):
        books.enter_in_order(Load("s", requests=1, model="m"), 4, following=2)
    assert books.expects("m")
    books.enter_in_order(Load("s", requests=1, model="m"), 2, following=2)  # whose turn it is: let in, full or not
    books.enter_in_order(Load("s", requests=1, model="m"), 3, following=3)
    assert not books.expects("m")


def test_short_of_memory_nothing_new_is_taken_in_and_those_who_wait_are_told() -> None:
    books = Queues(Limits(least_free_memory=100 << 20), free_memory=lambda: 50 << 20)
    with pytest.raises(Busy, match="50 MiB of memory left"):
        books.enter(Load("s", samples=1))
    assert books.waiting().queue_state == "paused_capacity"


def test_a_full_queue_is_a_429_with_state_and_retry_after_and_training_stays_in_order(serve: Serve) -> None:
    live = serve(model_requests=2)
    model = live.model()
    live.backend.hold()
    first, second = live.train(model, 1), live.step(model, 2)
    answer = live.post("/forward_backward", train_body(model, 4), ok=False)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert answer.json()["queue_state"] == "paused_capacity" and "2 requests" in answer.json()["queue_state_reason"]
    live.backend.let_go()
    live.fetch(first), live.fetch(second)
    assert live.step(model, 5, ok=False).status_code == 429  # 4 comes first
    third = live.step(model, 3)
    fourth = live.train(model, 4)
    fifth = live.step(model, 5)
    for envelope in (third, fourth, fifth):
        live.fetch(envelope)
    done = [name for name in live.backend.names() if name in ("forward_backward", "optim_step")]
    assert done == ["forward_backward", "optim_step", "optim_step", "forward_backward", "optim_step"]


def test_a_poll_says_that_adapters_wait_for_a_place(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    live = serve(poll_seconds=0.05, sweep_seconds=3600)
    model = live.model()
    live.backend.hold()
    envelope = live.train(model, 1)
    live._server.config.app.state.server.queues.engine = {"adapters_waiting": 3, "adapters_limit": 4}
    answer = live.post("/retrieve_future", {"request_id": envelope["request_id"]}, ok=False)
    assert answer.status_code == 408 and answer.json()["queue_state"] == "paused_capacity"
    assert answer.json()["queue_state_reason"] == "3 adapters wait for a place on the device (4 fit)"


def test_our_client_says_once_that_the_server_is_full_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    asked = 0

    async def answer(*_: object) -> Response:
        nonlocal asked
        asked += 1
        if asked < 4:
            return Response(429, {"retry-after": "0"}, b'{"detail": "9 requests are under way already"}')
        return Response(200, {}, b'{"ok": true}')

    async def ask() -> object:
        transport = Transport("http://127.0.0.1:1", None)
        transport._posts.request = answer  # type: ignore[method-assign]
        transport._met = True
        return await transport.post("optim_step", {})

    with caplog.at_level(logging.WARNING, "mint"):
        assert asyncio.run(ask()) == {"ok": True}
    (said,) = [record.getMessage() for record in caplog.records if record.name == "mint"]
    assert said.startswith("9 requests are under way") and "Trying again" in said


def test_a_dead_session_leaves_nothing_in_memory_and_no_file(serve: Serve) -> None:
    live = serve(sweep_seconds=3600)
    session = live.session()
    model = live.model(session)
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    snapshot = live.fetch(live.post("/save_weights_for_sampler", body))["sampling_session_id"]
    sampler = live.sampler(session, 1)
    live.backend.hold()
    waiting = live.sample(sampler, 0)
    live.post("/retrieve_futures", {"target": {"sampling_session_id": sampler}, "timeout": 0})
    server = live._server.config.app.state.server
    home = server.home.folder
    assert len(server.futures) >= 3 and list(home.glob("snapshots/*")) and list(home.glob("models/*"))

    def end() -> None:
        for one in server.sessions._live.values():
            one.last_seen = -1e9
        server.sweep()

    live.backend.forget_held()
    live.backend._held = None
    live._server.servers[0].get_loop().call_soon_threadsafe(end)
    eventually(lambda: not list(home.glob("models/*")) and not list(home.glob("snapshots/*")))
    eventually(lambda: not live.backend.adapters and snapshot not in live.backend.policies)
    eventually(lambda: server.queues.depths() == {"requests": 0, "samples": 0, "bytes": 0, "models": 0})
    eventually(lambda: not server.futures._logs and not server.samplers._live)
    assert live.post("/retrieve_future", {"request_id": waiting["request_id"]}, ok=False).status_code == 410


def test_snapshots_an_earlier_server_left_go_when_their_session_does_not_come_back(tmp_path: Path) -> None:
    live = Live(tmp_path / "data", port=1)
    session = live.session()
    model = live.model(session)
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    live.fetch(live.post("/save_weights_for_sampler", body))
    live.fetch(live.post("/unload_model", {"model_id": model}))
    folder = live._server.config.app.state.server.home.snapshots
    assert list(folder.iterdir())
    live.change_limits(session_idle_seconds=0.05)
    live.restart()
    eventually(lambda: not list(folder.iterdir()))
    live.stop()


def test_an_adapter_the_engine_lost_on_its_disk_is_made_again_and_nobody_notices(live: Live) -> None:
    model = live.model()
    live.fetch(live.train(model, 1))
    live.fetch(live.step(model, 2))
    calls = {"left": 1}
    genuine = live.backend.optim_step

    def lost_once(adapter: str, params: Any) -> Any:
        if calls["left"]:
            calls["left"] -= 1
            live.backend.fail["optim_step"] = Lost("damaged")
            try:
                return genuine(adapter, params)
            finally:
                del live.backend.fail["optim_step"]
        return genuine(adapter, params)

    live.backend.optim_step = lost_once  # type: ignore[method-assign]
    live.backend.steps[model] = 0  # as if its state were gone
    assert live.fetch(live.step(model, 3))["metrics"]["step"] == 2.0  # made anew, the first step repeated, then this
    assert live.backend.names().count("create_adapter") == 2


def test_a_policy_the_engine_lost_is_loaded_again(live: Live) -> None:
    sampler = live.sampler()
    live.fetch(live.sample(sampler, 0))
    genuine, left = live.backend.sample, [1]

    def lost_once(*args: Any, **more: Any) -> Any:
        if left:
            left.clear()
            live.backend.fail["sample"] = Lost("damaged")
            try:
                return genuine(*args, **more)
            finally:
                del live.backend.fail["sample"]
        return genuine(*args, **more)

    live.backend.sample = lost_once  # type: ignore[method-assign]
    assert live.fetch(live.post("/asample", sample_body(sampler, 1)))["sequences"]
    assert live.backend.names().count("load_policy") == 2


def test_a_snapshot_nobody_samples_leaves_memory_and_comes_back_on_use(serve: Serve) -> None:
    live = serve(snapshot_idle_seconds=0.05)
    model = live.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    snapshot = live.fetch(live.post("/save_weights_for_sampler", body))["sampling_session_id"]
    server = live._server.config.app.state.server
    eventually(lambda: snapshot not in live.backend.policies and snapshot not in server.samplers._live)
    assert live.fetch(live.sample(snapshot, 0))["sequences"]
