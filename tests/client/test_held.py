"""Results as the rest of the first answer: one request a training call, in order, and by polls where that fails."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mint
from mint import types, wire
from mint.client import polling
from mint.client.transport import Transport
from tests.client.stub import Answer, Stub
from tests.server.live import Live, train_body
from tests.waiting import PATIENCE, eventually

DATA = [types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]})]
ADAM = types.AdamParams(learning_rate=1e-3)
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=2)


@pytest.fixture
def training(live: Live) -> Iterator[mint.TrainingClient]:
    with mint.ServiceClient(live.url, "k") as service:
        yield service.create_lora_training_client("mint/tiny", rank=8, seed=1)


def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def retrieve(*_: object) -> object:
        raise AssertionError("polled")

    monkeypatch.setattr(polling, "retrieve", retrieve)


def test_every_training_call_ends_without_a_poll(
    live: Live, training: mint.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_polls(monkeypatch)
    output = training.forward_backward(DATA, "cross_entropy").result()
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx([-0.02, -0.03, -0.04])
    assert training.optim_step(ADAM).result().metrics == {"step": 1.0}
    path = training.save_state("one").result().path
    assert training.load_state(path).result().path == path
    assert training.save_weights_and_get_sampling_client()
    with pytest.raises(mint.RequestRejected, match="kept out"):
        live.backend.fail["optim_step"] = mint.BadRequest("kept out")
        training.optim_step(ADAM).result()


def test_a_call_is_sent_on_while_the_one_before_it_is_held(live: Live, training: mint.TrainingClient) -> None:
    live.backend.hold()
    calls = [training.forward_backward(DATA, "cross_entropy"), training.optim_step(ADAM)]
    eventually(lambda: live.backend.names()[-2:] == ["forward_backward", "optim_step"])
    assert not any(call.done() for call in calls)
    live.backend.let_go()
    assert [type(call.result(PATIENCE)).__name__ for call in calls] == ["ForwardBackwardOutput", "OptimStepResponse"]


def test_a_sampling_client_is_there_before_its_snapshot(live: Live, training: mint.TrainingClient) -> None:
    live.backend.hold()
    training.optim_step(ADAM)
    samplers = [
        training.save_weights_and_get_sampling_client(),
        asyncio.run(training.save_weights_and_get_sampling_client_async()),
    ]
    training.optim_step(ADAM)
    answers = [sampler.sample(PROMPT, 1, PARAMS) for sampler in samplers]
    eventually(lambda: live.backend.names().count("sample") == 2)
    assert not any(answer.done() for answer in answers)
    live.backend.let_go()
    assert [answer.result(PATIENCE).sequences[0].logprobs[0] for answer in answers] == [-1.5, -1.5]


def test_whoever_samples_a_snapshot_that_failed_hears_why(
    live: Live, training: mint.TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    live.backend.fail["snapshot"] = mint.Internal("out of memory")
    failed = training.save_weights_and_get_sampling_client()
    for _ in range(2):
        with pytest.raises(mint.RequestRejected, match=r"cannot be sampled: the snapshot failed\. out of memory"):
            failed.sample(PROMPT, 1, PARAMS).result(PATIENCE)
    live.backend.fail.clear()
    good = training.save_weights_and_get_sampling_client()
    assert good.sample(PROMPT, 1, PARAMS).result(PATIENCE).sequences[0].logprobs[0] == -0.5
    assert "snapshot" not in caplog.text, "what it failed with is told to who samples it, and once is enough"


def test_a_snapshot_that_is_refused_is_told_at_once(live: Live, training: mint.TrainingClient) -> None:
    live.fetch(live.post("/unload_model", {"model_id": training.model_id}))
    with pytest.raises(mint.NotFound, match="unloaded"):
        training.save_weights_and_get_sampling_client()


def test_a_result_that_takes_longer_than_a_held_answer_is_polled_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(tmp_path / "data", keys=("k",), poll_seconds=0.02)
    polls: list[object] = []
    poll = Transport.poll

    async def noted(self: Transport, *asked: Any) -> Any:
        polls.append(asked)
        return await poll(self, *asked)

    monkeypatch.setattr(Transport, "poll", noted)
    with mint.ServiceClient(live.url, "k") as service:
        training = service.create_lora_training_client("mint/tiny")
        live.backend.hold()
        before = len(polls)
        step = training.optim_step(ADAM)
        eventually(lambda: len(polls) >= before + 2)
        live.backend.let_go()
        assert step.result(PATIENCE).metrics == {"step": 1.0}
    live.stop()


def test_an_answer_that_ends_empty_or_is_of_the_protocol_alone_is_polled_for(
    stub: Stub, training_of_stub: mint.TrainingClient
) -> None:
    later = {"content-type": wire.LATER, wire.HELD: "r-held"}
    stub.faults["optim_step"].append(Answer(b"", headers=later))
    stub.results["r-held"] = Answer({"metrics": {"by": 1.0}})
    assert training_of_stub.optim_step(ADAM).result().metrics == {"by": 1.0}
    assert [r.headers[wire.HOLD] for r in stub.received if r.path == "optim_step"] == ["1"]
    assert training_of_stub.optim_step(ADAM).result() is not None
    assert len(stub.said("retrieve_future")) == 3  # the model's, and one for each step


@pytest.fixture
def training_of_stub(service: mint.ServiceClient) -> mint.TrainingClient:
    return service.create_lora_training_client("base")


def test_a_held_answer_says_who_it_is_at_once_and_takes_the_form_asked_for(live: Live) -> None:
    model = live.model()
    body = train_body(model, 1)
    live.backend.hold()
    headers = {wire.HOLD: "1", "accept": f"{wire.PROTOBUF}, {wire.JSON}"}
    with live.http.stream("POST", "/forward_backward", json=body, headers=headers) as answer:
        request_id = answer.headers[wire.HELD]
        assert answer.headers["content-type"] == wire.LATER
        live.backend.let_go()
        media, _, content = answer.read().partition(b"\n")
    assert media.decode() == wire.PROTOBUF
    told = live.fetch({"request_id": request_id})  # the same result, in JSON
    assert wire.forward_backward_output_from_proto(content) == wire.forward_backward_output_from_json(told)
    again = live.http.post("/forward_backward", json=body, headers={wire.HOLD: "1"})
    assert again.headers[wire.HELD] == request_id and again.content.startswith(b"application/json\n")
