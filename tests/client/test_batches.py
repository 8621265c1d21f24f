"""Samples asked for together: few requests, each result its own, and nothing lost when a batch goes wrong."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mint
from mint import types, wire
from mint.client import batches
from mint.client.futures import start
from mint.client.transport import Transport
from tests.server.live import Live, sample_body
from tests.waiting import PATIENCE, eventually

COUNT = 40


@pytest.fixture
def sampler(live: Live) -> Iterator[mint.SamplingClient]:
    live.backend.words = list(range(20, 20 + COUNT))
    with mint.ServiceClient(live.url, "k") as service:
        yield service.create_sampling_client(base_model="mint/tiny")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of everything our client sends."""
    paths: list[str] = []
    send = Transport.send

    async def noted(self: Transport, method: str, path: str, **options: Any) -> Any:
        paths.append(path)
        return await send(self, method, path, **options)

    monkeypatch.setattr(Transport, "send", noted)
    return paths


def ask(sampler: mint.SamplingClient, count: int = COUNT) -> list[mint.APIFuture[types.SampleResponse]]:
    """Each for one token more than the one before, by which its answer is known; none is sent before all are asked."""
    prompt = types.ModelInput.from_ints([1, 2, 3])
    all_asked = threading.Event()

    async def wait() -> None:
        all_asked.wait(PATIENCE)

    start(wait())
    asked = [sampler.sample(prompt, 1, types.SamplingParams(max_tokens=n + 1)) for n in range(count)]
    all_asked.set()
    return asked


def lengths(futures: list[mint.APIFuture[types.SampleResponse]]) -> list[int]:
    return [len(future.result(PATIENCE).sequences[0].tokens) for future in futures]


def test_many_samples_are_few_requests_and_every_answer_its_own(sampler: mint.SamplingClient, sent: list[str]) -> None:
    futures = ask(sampler)
    assert lengths(futures) == list(range(1, COUNT + 1))
    assert "mint/samples" in sent and len(sent) < COUNT / 2
    names = [future.result().sequences[0].sequence_id for future in futures]
    assert len(set(names)) == COUNT and all(name is not None and name.endswith(":0") for name in names)


def test_what_was_asked_for_leaves_in_one_request_when_somebody_waits(
    sampler: mint.SamplingClient, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "GATHER", 10 * PATIENCE)
    prompt = types.ModelInput.from_ints([1, 2, 3])
    assert lengths([sampler.sample(prompt, 1, types.SamplingParams(max_tokens=n)) for n in range(1, 9)]) == [
        *range(1, 9)
    ]
    assert sent.count("mint/samples") == 1 and "asample" not in sent


def test_so_does_what_coroutines_that_run_together_ask_for(
    sampler: mint.SamplingClient, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "GATHER", 10 * PATIENCE)
    prompt = types.ModelInput.from_ints([1, 2, 3])

    async def together() -> list[types.SampleResponse]:
        asked = (sampler.sample_async(prompt, 1, types.SamplingParams(max_tokens=n)) for n in range(1, 9))
        return await asyncio.wait_for(asyncio.gather(*asked), PATIENCE)

    assert [len(found.sequences[0].tokens) for found in asyncio.run(together())] == [*range(1, 9)]
    assert sent.count("mint/samples") == 1 and "asample" not in sent


def test_one_that_comes_alone_leaves_when_somebody_waits_and_those_nobody_waits_for_leave_too(
    sampler: mint.SamplingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = types.ModelInput.from_ints([1, 2, 3])
    nobody_waits = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2))
    eventually(nobody_waits.done)
    monkeypatch.setattr(batches, "GATHER", 10 * PATIENCE)
    start(_never_sent(sampler)).result()
    assert lengths([sampler.sample(prompt, 1, types.SamplingParams(max_tokens=3))]) == [3]


async def _never_sent(sampler: mint.SamplingClient) -> None:
    assert sampler._connection.batches is not None
    sampler._connection.batches._sent = -math.inf


def test_results_come_as_they_are_done(live: Live, sampler: mint.SamplingClient) -> None:
    live.backend.hold()
    futures = ask(sampler)
    eventually(lambda: live.backend.names().count("sample") == COUNT)
    held = live.backend._held
    assert held is not None
    held.pop(COUNT // 2)()
    eventually(lambda: sum(future.done() for future in futures) == 1)
    live.backend.let_go()
    assert lengths(futures) == list(range(1, COUNT + 1))


def test_a_refused_sample_fails_alone_and_at_once_and_says_why(live: Live, sampler: mint.SamplingClient) -> None:
    live.backend.hold()
    good = ask(sampler, 5)
    bad = sampler.sample(types.ModelInput.from_ints([99_999]), 1, types.SamplingParams(max_tokens=1))
    more = ask(sampler, 5)
    with pytest.raises(mint.BadRequest, match="99999"):
        bad.result(PATIENCE)
    assert not any(future.done() for future in good + more)
    live.backend.let_go()
    assert lengths(good) == lengths(more) == [1, 2, 3, 4, 5]


def test_a_sample_given_up_in_a_batch_is_cancelled_and_the_others_come(
    live: Live, sampler: mint.SamplingClient
) -> None:
    live.backend.hold()
    futures = ask(sampler, 8)
    eventually(lambda: live.backend.names().count("sample") == 8)
    assert futures[3].cancel()
    eventually(lambda: live.backend.cancelled("sample") == 1)
    live.backend.let_go()
    assert lengths(futures[:3] + futures[4:]) == [1, 2, 3, 5, 6, 7, 8]


def test_what_takes_longer_than_the_answer_is_held_is_polled_for(tmp_path: Path, sent: list[str]) -> None:
    live = Live(tmp_path / "data", keys=("k",), poll_seconds=0.05)
    with mint.ServiceClient(live.url, "k") as service:
        sampler = service.create_sampling_client(base_model="mint/tiny")
        live.backend.words = list(range(20, 40))
        live.backend.hold()
        futures = ask(sampler, 8)
        eventually(lambda: sent.count("retrieve_future") >= 8)
        live.backend.let_go()
        assert lengths(futures) == list(range(1, 9))
        assert all(future.result().sequences[0].sequence_id for future in futures)
    live.stop()


@pytest.mark.parametrize("begun", [True, False])
def test_a_batch_that_is_lost_is_asked_for_one_by_one_and_sampled_once(
    live: Live, sampler: mint.SamplingClient, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    send = Transport.send

    async def lose(self: Transport, method: str, path: str, **options: Any) -> Any:
        if path == "mint/samples":
            if begun:
                await send(self, method, path, **(options | {"listener": None}))
            raise mint.ConnectionFailed("cut")
        return await send(self, method, path, **options)

    monkeypatch.setattr(Transport, "send", lose)
    assert lengths(ask(sampler)) == list(range(1, COUNT + 1))
    assert live.backend.names().count("sample") == COUNT


def test_other_clients_hear_nothing_of_batches_and_garbage_is_refused(live: Live) -> None:
    assert "sample_batches" not in live.post("/client/config", {"sdk_version": "0.36.0"})
    headers = {"content-type": wire.FRAMES}
    assert live.http.post("/mint/samples", content=b"", headers=headers).content == b""
    assert live.http.post("/mint/samples", content=b"\x00\x00\x00\x09{}", headers=headers).status_code == 400
    body = sample_body(live.sampler(live.session(), 0), 1)
    answer = live.http.post("/mint/samples", content=wire.framed([b"{", json.dumps(body).encode()]), headers=headers)
    refused, result = wire.read_frames(answer.content)
    assert refused == b"0 - -\n" and result.startswith(b"1 sample-") and b'"sequences"' in result
