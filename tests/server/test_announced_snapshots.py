"""A snapshot's sampling session is told, and may be sampled, before the snapshot has been taken."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mint import wire
from mint.errors import Internal
from tests.server.live import Live, sample_body
from tests.waiting import eventually

PORT = 8124


@contextmanager
def asked(live: Live, model: str, seq_id: int, number: int = 7) -> Iterator[httpx.Response]:
    """The answer to a snapshot, from its head on."""
    body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": number}
    with live.http.stream("POST", "/save_weights_for_sampler", json=body, headers={wire.HOLD: "1"}) as answer:
        yield answer


def result_of(answer: httpx.Response) -> dict[str, Any]:
    return json.loads(answer.read().partition(b"\n")[2])


def steps_of(result: dict[str, Any]) -> float:
    """Of the weights that were sampled."""
    return -0.5 - result["sequences"][0]["logprobs"][0]


def test_it_is_told_before_it_is_taken_and_what_is_sampled_waits_for_it(serve: Callable[..., Live]) -> None:
    live = serve(port=PORT)
    session = live.session()
    model = live.model(session)
    live.fetch(live.step(model, 1))
    live.backend.hold()
    later = live.tenant("tml-any")
    with asked(live, model, 2) as answer:
        sampler = answer.headers[wire.SAMPLER]
        assert sampler == f"{session}:sample:7"
        sample = later.sample(sampler, 0)
        eventually(lambda: later.backend.names()[-1] == "sample")
        later.step(model, 3)
        later.backend.let_go()
        assert result_of(answer)["sampling_session_id"] == sampler
    assert steps_of(live.fetch(sample)) == 1, "the weights of its own moment"
    assert live.backend.names().count("load_policy") == 0
    live.restart()
    assert steps_of(live.fetch(live.sample(sampler, 1))) == 1, "from the files it left"


def test_it_is_told_to_nobody_who_does_not_wait_for_it_there(live: Live) -> None:
    body = {"model_id": live.model(), "seq_id": 1, "sampling_session_seq_id": 7}
    answer = live.post("/save_weights_for_sampler", body, ok=False)
    assert wire.SAMPLER not in answer.headers
    assert live.fetch(answer.json())["sampling_session_id"]


def test_the_same_request_sent_again_is_told_the_same(live: Live) -> None:
    model = live.model()
    live.backend.hold()
    with asked(live, model, 1) as first:
        other = live.tenant("tml-any")
        with asked(other, model, 1, number=9) as again:
            assert again.headers[wire.SAMPLER] == first.headers[wire.SAMPLER]
            live.backend.let_go()
            assert result_of(again) == result_of(first)
    assert live.backend.names().count("snapshot") == 1


@pytest.mark.parametrize("before", [True, False], ids=["while it is taken", "afterwards"])
def test_whoever_samples_one_that_fails_hears_why(live: Live, before: bool) -> None:
    model = live.model()
    live.backend.hold()
    live.backend.fail["snapshot"] = Internal("the weights of layer 3 are not finite.")
    later = live.tenant("tml-any")
    with asked(live, model, 1) as answer:
        sampler = answer.headers[wire.SAMPLER]
        sample = later.sample(sampler, 0) if before else None
        later.backend.let_go()
        assert "not finite" in result_of(answer)["error"]
    told = live.fetch(sample or live.sample(sampler, 0))
    assert told["category"] == "user"
    assert told["error"] == (
        f"{sampler} cannot be sampled: the snapshot failed. the weights of layer 3 are not finite."
    )
    live.backend.fail.clear()
    with asked(live, model, 2, number=8) as answer:
        assert live.tenant("tml-any").fetch(live.tenant("tml-any").sample(answer.headers[wire.SAMPLER], 0))["sequences"]


def test_one_that_was_cancelled_before_its_turn_is_not_sampled(live: Live) -> None:
    model = live.model()
    later = live.tenant("tml-any")
    with asked(live, model, 2) as answer:  # the first request is still to come
        sampler = answer.headers[wire.SAMPLER]
        sample = later.sample(sampler, 0)
        later.post("/cancel_future", {"request_id": answer.headers[wire.HELD]})
        assert "cancelled" in result_of(answer)["error"]
    assert "the snapshot failed. the request was cancelled" in live.fetch(sample)["error"]


def test_a_sample_may_come_before_the_turn_of_its_snapshot(live: Live) -> None:
    """Its run has still to be sent an earlier request."""
    model = live.model()
    later = live.tenant("tml-any")
    with asked(live, model, 2) as answer:
        sample = later.sample(answer.headers[wire.SAMPLER], 0)
        assert "snapshot" not in live.backend.names()
        later.step(model, 1)
        assert result_of(answer)["sampling_session_id"]
    assert steps_of(live.fetch(sample)) == 1


def test_a_batch_of_samples_waits_for_it_as_well(live: Live) -> None:
    model = live.model()
    live.backend.hold()
    later = live.tenant("tml-any")
    with asked(live, model, 1) as answer:
        batch = wire.framed([json.dumps(sample_body(answer.headers[wire.SAMPLER], n)).encode() for n in range(3)])
        with later.http.stream(
            "POST", "/mint/samples", content=batch, headers={"content-type": wire.FRAMES, wire.HOLD: "1"}
        ) as samples:
            later.backend.let_go()
            frames = wire.FrameReader().feed(samples.read())
    assert sorted(int(frame.partition(b" ")[0]) for frame in frames) == [0, 1, 2]
    assert all(b"sequences" in frame for frame in frames)


def test_it_is_taken_again_by_the_next_engine(live: Live) -> None:
    model = live.model()
    live.fetch(live.step(model, 1))
    live.backend.hold()
    later = live.tenant("tml-any")
    with asked(live, model, 2) as answer:
        sample = later.sample(answer.headers[wire.SAMPLER], 0)
        eventually(lambda: live.backend.names()[-1] == "sample")
        live.backend.lose_engine()
        assert result_of(answer)["sampling_session_id"]
    assert steps_of(live.fetch(sample)) == 1


@pytest.mark.parametrize("sample_first", [True, False])
def test_it_is_taken_by_the_next_server(serve: Callable[..., Live], sample_first: bool) -> None:
    """`kill -9` between the announcement and the snapshot."""
    live = serve(port=PORT)
    model = live.model()
    live.fetch(live.step(model, 1))
    live.backend.hold()
    with asked(live, model, 2) as answer:
        sampler, request_id = answer.headers[wire.SAMPLER], answer.headers[wire.HELD]
    live.restart(finish=False)
    if sample_first:
        live.backend.hold()
        sample = live.sample(sampler, 0)
        live.backend.let_go()
    else:
        assert live.fetch({"request_id": request_id})["sampling_session_id"] == sampler
        sample = live.sample(sampler, 0)
    assert steps_of(live.fetch(sample)) == 1
    assert live.backend.names().count("snapshot") == 1
    body = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 7}
    assert "already used" in live.refused("/save_weights_for_sampler", body)


def test_one_whose_session_ends_meanwhile_leaves_nothing_behind(live: Live) -> None:
    session = live.session()
    model = live.model(session)
    live.backend.hold()
    with asked(live, model, 1) as answer:
        sampler = answer.headers[wire.SAMPLER]
    live.fall_silent(session, 10_000)
    eventually(lambda: sampler not in live.app.state.server.samplers._live)
    live.backend.let_go()
    eventually(lambda: sampler not in live.backend.policies and model not in live.backend.adapters)
    folders = live.app.state.server.home.snapshots
    eventually(lambda: not list(folders.iterdir()))
    assert live.refused("/asample", sample_body(sampler, 0), 404)


def test_another_owner_cannot_sample_it(serve: Callable[..., Live]) -> None:
    live = serve(keys=("tml-one", "tml-two"))
    model = live.model()
    live.backend.hold()
    with asked(live, model, 1) as answer:
        sampler = answer.headers[wire.SAMPLER]
        other = live.tenant("tml-two")
        assert "no sampling session" in other.refused("/asample", sample_body(sampler, 0), 404)
        live.backend.let_go()
        assert result_of(answer)["sampling_session_id"] == sampler
