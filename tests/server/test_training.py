"""Training over the wire: order, retries, gaps, both dialects."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import zstandard

from mint import wire
from mint.errors import BadRequest, Internal
from mint.server.bodies import LARGE
from mint.types import AdamParams, TensorData
from tests.server.live import Live, datum, datum_json, train_body
from tests.waiting import eventually


def trained(live: Live) -> list[int]:
    """The first token of each batch the backend was given, in order."""
    return [call[2][0].model_input.to_ints()[0] for call in live.backend.calls if call[0] == "forward_backward"]


def batch(first: int) -> list[dict]:
    return [datum_json([first, 2, 3])]


def test_a_whole_step_in_json(live: Live) -> None:
    model = live.model(lora_config={"rank": 8, "seed": 1, "train_unembed": False}, user_metadata={"lr": 3})
    lora = live.backend.adapters[model]
    assert (lora.rank, lora.seed, lora.train_unembed, lora.train_mlp) == (8, 1, False, True)
    passed, stepped = live.train(model, 1), live.step(model, 2, grad_clip_norm=1.0)
    result = live.fetch(passed)
    assert result["metrics"] == {"loss:sum": 0.05}
    assert result["loss_fn_outputs"][0]["logprobs"]["data"] == pytest.approx([-0.02, -0.03])
    assert live.fetch(stepped)["metrics"] == {"step": 1.0}
    # What the client leaves out has the defaults of the SDK that left it out.
    assert live.backend.calls[-1][2] == AdamParams(1e-3, 0.9, 0.95, 1e-12, 0.0, 1.0)
    assert live.get(f"/training_runs/{model}")["user_metadata"] == {"lr": "3"}


def test_a_large_body_is_read_while_others_are_served(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    model, threads = live.model(), []
    read = wire.read_json

    def noted(body: bytes) -> object:
        threads.append((len(body) >= LARGE, asyncio._get_running_loop() is None))
        return read(body)

    monkeypatch.setattr(wire, "read_json", noted)
    few, many = batch(1), 5000 * batch(1)
    results = [live.fetch(live.train(model, number, data)) for number, data in ((1, few), (2, many))]
    assert [len(result["loss_fn_outputs"]) for result in results] == [1, 5000]
    assert set(threads) == {(False, False), (True, True)}


@pytest.mark.parametrize("compress", [False, True])
def test_a_protobuf_batch_arrives_as_sent_and_its_result_comes_back_as_protobuf(live: Live, compress: bool) -> None:
    model = live.model()
    rows = [
        datum([1, 2, 3], logprobs=[-0.5, -0.25], advantages=[1.0, -1.0]),
        datum([9, 8], logprobs=[0], advantages=[2]),
    ]
    call = wire.ForwardBackwardCall(model, 1, rows, "ppo", {"clip_low_threshold": 0.5}, forward_only=False)
    body, headers = wire.forward_backward_to_proto(call), {"content-type": wire.PROTOBUF}
    if compress:
        body, headers["content-encoding"] = zstandard.compress(body), "zstd"
    envelope = live.http.post("/forward_backward", content=body, headers=headers).json()
    answer = live.fetch_proto(envelope)
    assert answer.headers["content-type"] == wire.PROTOBUF
    output = wire.forward_backward_output_from_proto(answer.content)
    assert [o["logprobs"] for o in output.loss_fn_outputs] == [
        TensorData([-0.02, -0.03], "float32"),
        TensorData([-0.08], "float32"),
    ]
    assert live.backend.calls[-1] == ("forward_backward", model, rows, "ppo", {"clip_low_threshold": 0.5})


def test_forward_in_either_dialect_leaves_gradients_alone(live: Live) -> None:
    model = live.model()
    body = {"model_id": model, "seq_id": 1, "forward_input": {"data": batch(1), "loss_fn": "cross_entropy"}}
    live.fetch(live.post("/forward", body))
    call = wire.ForwardBackwardCall(model, 2, [datum([1, 2])], "cross_entropy", forward_only=True)
    proto = {"content-type": wire.PROTOBUF}
    body = wire.forward_backward_to_proto(call)
    live.fetch_proto(live.http.post("/forward_backward", content=body, headers=proto).json())
    assert live.backend.names()[-2:] == ["forward", "forward"]


def test_the_first_chunk_may_come_last(live: Live) -> None:
    model = live.model()
    for seq_id in (2, 3, 1):
        live.train(model, seq_id, batch(seq_id))
    live.fetch(live.step(model, 4))
    assert trained(live) == [1, 2, 3]
    assert live.backend.names()[-1] == "optim_step"


def test_a_gap_is_waited_out_and_the_next_request_still_runs(serve) -> None:
    patient = serve()
    patient.train(patient.model(), 2, batch(2))
    assert trained(patient) == []
    live = serve(gap_seconds=0.05)
    live.fetch(live.train(live.model(), 2, batch(2)))
    assert trained(live) == [2]


def test_a_refused_post_uses_up_its_number(serve) -> None:
    live = serve()
    model = live.model()
    live.refused("/forward_backward", train_body(model, 1, [datum_json([1, 2, 3], weights=[1.0])]))
    live.refused("/forward_backward", train_body(model, 2, [{"model_input": {"chunks": []}, "nonsense": 1}]))
    live.refused("/optim_step", {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": -1}})
    live.refused("/optim_step", {"model_id": model, "seq_id": 4, "adam_params": {}, "unheard_of": 1})
    assert live.fetch(live.step(model, 5))["metrics"] == {"step": 1.0}


def test_a_request_sent_again_is_the_same_request(live: Live) -> None:
    model = live.model()
    first, again = live.train(model, 1), live.train(model, 1)
    assert first == again
    live.fetch(first)
    assert live.train(model, 1) == first
    assert live.backend.names().count("forward_backward") == 1


def test_another_payload_under_a_used_number_is_refused_without_409(live: Live) -> None:
    model = live.model()
    live.train(model, 1, batch(1))
    assert "seq_id 1 of model" in live.refused("/forward_backward", train_body(model, 1, batch(2)))


def test_a_number_whose_result_was_forgotten_does_not_run_twice(serve) -> None:
    live = serve(delivered_seconds=0.0)
    model = live.model()
    live.fetch(live.train(model, 1))
    answer = eventually(
        lambda: (told := live.post("/forward_backward", train_body(model, 1), ok=False)).is_error and told
    )
    assert answer.status_code == 400 and "no longer kept" in answer.json()["detail"]
    assert live.backend.names().count("forward_backward") == 1


def test_creating_a_model_twice_under_one_number_gives_one_model(live: Live) -> None:
    session = live.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "mint/tiny"}
    assert live.post("/create_model", body) == live.post("/create_model", body)
    assert live.model(session) == f"{session}:train:0"
    assert live.backend.names().count("create_adapter") == 1
    assert "model_seq_id 0" in live.refused("/create_model", body | {"lora_config": {"rank": 2}})


def test_requests_are_handed_on_without_waiting_for_results(live: Live) -> None:
    model = live.model()
    live.backend.hold()
    pending = [live.train(model, n) for n in range(1, 6)]
    assert live.backend.names().count("forward_backward") == 5
    live.backend.let_go()
    assert all("metrics" in live.fetch(envelope) for envelope in pending)


def test_requests_without_a_number_run_in_order_of_arrival(live: Live) -> None:
    model = live.model()
    for first in (5, 4, 6):
        live.train(model, None, batch(first))
    assert trained(live) == [5, 4, 6]


def test_a_failure_is_told_once_fetched_and_the_model_goes_on(live: Live) -> None:
    model = live.model()
    live.backend.fail["forward_backward"] = BadRequest("datum 0 is strange")
    assert live.fetch(live.train(model, 1)) == {"error": "datum 0 is strange", "category": "user"}
    live.backend.fail["forward_backward"] = Internal("out of memory")
    assert live.fetch(live.train(model, 2)) == {"error": "out of memory", "category": "server"}
    answer = live.fetch_proto(live.train(model, 3))
    assert answer.json()["category"] == "server", "errors are JSON, whatever the client accepts"
    live.backend.fail.clear()
    assert "metrics" in live.fetch(live.train(model, 4))


def test_metrics_that_are_no_finite_numbers_are_told_as_text_clients_read_as_numbers(live: Live) -> None:
    model = live.model()
    live.backend.optim_step = lambda adapter, params: live.backend._do(
        "step", lambda: {"norm": float("nan"), "lr": 1.0}
    )
    metrics = live.fetch(live.step(model, 1))["metrics"]
    assert metrics == {"norm": "nan", "lr": 1.0}
    assert math.isnan(float(metrics["norm"]))


def test_an_unknown_base_model_names_those_there_are(live: Live, serve) -> None:
    body = {"session_id": live.session(), "model_seq_id": 0, "base_model": "no/such"}
    failed = live.fetch(live.post("/create_model", body))
    assert failed["category"] == "user"
    assert "mint/tiny" in failed["error"]
    closed = serve(models=("mint/tiny",))
    body["session_id"] = closed.session()
    assert "served: mint/tiny" in closed.refused("/create_model", body)


def test_requests_for_a_model_that_failed_to_be_made_say_why(live: Live) -> None:
    session = live.session()
    live.backend.hold()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "no/such"}
    live.post("/create_model", body)
    early = live.train(f"{session}:train:0", 1)
    live.backend.let_go()
    assert "no/such" in live.fetch(early)["error"]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "dimuon"),
        ({"lora_config": {"rank": 0}}, "rank is 0"),
        ({"lora_config": {"rank": 4, "alpha": 16}}, "alpha"),
        ({"lora_config": {"train_mlp": False, "train_attn": False, "train_unembed": False}}, "nothing to train"),
        ({"quantize": True}, "quantize"),
    ],
)
def test_what_create_model_cannot_honour_is_refused_by_name(live: Live, field: dict, said: str) -> None:
    body = {"session_id": live.session(), "model_seq_id": 0, "base_model": "mint/tiny"} | field
    assert said in live.refused("/create_model", body)


def test_other_optimizers_are_refused_at_the_step_too(live: Live) -> None:
    model = live.model()
    body = {"model_id": model, "seq_id": 1, "optimizer_params": {"type": "dimuon", "learning_rate": 1.0}}
    assert "dimuon" in live.refused("/optim_step", body)


def test_get_info_points_to_the_tokenizer_on_this_machine(live: Live) -> None:
    model = live.model(lora_config={"rank": 4})
    info = live.post("/get_info", {"model_id": model, "type": "get_info"})
    assert (info["model_id"], info["is_lora"], info["lora_rank"]) == (model, True, 4)
    assert info["model_data"]["model_name"] == "mint/tiny"
    assert info["model_data"]["tokenizer_id"].endswith("mint/models/tiny")


def test_an_unloaded_model_is_gone_and_says_so(live: Live) -> None:
    model = live.model()
    assert live.fetch(live.post("/unload_model", {"model_id": model}))["model_id"] == model
    assert model not in live.backend.adapters
    assert "no longer in memory" in live.refused("/get_info", {"model_id": model}, 404)


def test_a_poll_is_held_until_the_result_comes(live: Live) -> None:
    model = live.model()
    live.backend.hold()
    pending = live.train(model, 1)
    with ThreadPoolExecutor(1) as pool:
        polled = pool.submit(live.fetch, pending)
        eventually(lambda: live.open_requests() == 1)
        live.backend.let_go()
        assert polled.result()["metrics"] == {"loss:sum": 0.05}


def test_a_poll_that_lasts_too_long_is_answered_408_and_the_next_one_succeeds(serve) -> None:
    live = serve(poll_seconds=0.1)
    model = live.model()
    live.backend.hold()
    pending = live.train(model, 1)
    answer = live.post("/retrieve_future", {"request_id": pending["request_id"]}, ok=False)
    assert (answer.status_code, answer.json()["queue_state"]) == (408, "active")
    live.backend.let_go()
    assert "metrics" in live.fetch(pending)
    assert "metrics" in live.fetch(pending), "a result can be fetched again after a lost answer"


def test_an_unknown_request_is_404(live: Live) -> None:
    assert "no request" in live.refused("/retrieve_future", {"request_id": "nope"}, 404)


def test_the_older_accept_header_gets_protobuf_and_a_plain_one_json(live: Live) -> None:
    envelope = live.train(live.model(), 1)
    body = {"request_id": envelope["request_id"], "allow_metadata_only": True}
    both = live.post("/retrieve_future", body, ok=False, accept="application/x-protobuf, application/json")
    assert both.headers["content-type"] == wire.PROTOBUF
    assert live.post("/retrieve_future", body, ok=False, accept="application/json").json()["metrics"]
