"""Arguments on the wire that no other test shows to be honoured or refused by name."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mint
from mint import wire
from mint.errors import BadRequest
from mint.proto import MESSAGES
from mint.types import Datum, ModelInput, SamplingParams
from tests.server.live import Live, sample_body

CHAT = {"model": "mint/tiny", "messages": [{"role": "user", "content": "Say hi"}]}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Live]]:
    started: list[Live] = []

    def start(**options: Any) -> Live:
        started.append(Live(tmp_path / "data", **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def live(serve: Callable[..., Live]) -> Live:
    return serve()


# ------------------------------------------------------------------------------------------------ sessions, models


def test_what_a_session_was_told_can_be_read_back(live: Live) -> None:
    told = {"tags": ["a"], "sdk_version": "0.36.0", "project_id": "p", "display_name": "d", "user_metadata": {"k": "v"}}
    session = live.post("/create_session", told)["session_id"]
    found = live.get(f"/sessions/{session}")
    assert {key: found[key] for key in told} == told
    with mint.ServiceClient(live.url, project_id="q") as service:
        service.get_server_capabilities()
        client = service.create_lora_training_client("mint/tiny")
        session = client.model_id.partition(":")[0]
        assert live.get(f"/sessions/{session}")["project_id"] == "q"


def test_what_the_server_does_not_have_is_refused_by_name(live: Live) -> None:
    session = live.session()
    model = live.model(session)
    path = live.save(model, 1)
    load = {"session_id": session, "model_seq_id": 5, "path": path, "optimizer": False}
    save = {"model_id": model, "seq_id": 2, "path": "x"}
    copy = {"source_path": path, "session_id": session, "model_seq_id": 6}
    refusals = [
        ("/save_weights_external", save | {"age_encryption_recipients": ["age1"]}, "age_encryption_recipients"),
        ("/load_weights", load | {"optimizer_config": {"type": "muon"}}, "muon"),
        ("/load_weights", load | {"optimizer_config": {"type": "adamw", "amsgrad": True}}, "amsgrad"),
        ("/load_weights", load | {"weights_access_token": "t"}, "weights_access_token"),
        ("/copy_weights", copy | {"weights_access_token": "t"}, "weights_access_token"),
        ("/copy_weights", {"source_path": path, "destination_project_id": "p"}, "no projects"),
        ("/load_weights", {"model_id": model, "path": path, "optimizer": False, "base_model": "m"}, "base_model"),
        ("/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "quantize": 1}, "quantize"),
    ]
    for route, body, named in refusals:
        assert named in live.refused(route, body), route
    assert live.http.get("/training_runs", params={"project_id": "p"}).status_code == 400
    with mint.ServiceClient(live.url) as service, pytest.raises(BadRequest, match="project_id"):
        service.create_rest_client().list_training_runs(project_id="p").result()


def test_a_checkpoint_loaded_onto_another_base_model_is_refused(live: Live) -> None:
    session = live.session()
    path = live.save(live.model(session), 1)
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False, "base_model": "other/model"}
    assert "was trained on mint/tiny, not other/model" in live.refused("/load_weights", body)
    assert live.fetch(live.post("/load_weights", body | {"base_model": "mint/tiny"}))["model_id"]


def test_metadata_of_a_model_made_by_loading_is_kept(live: Live) -> None:
    session = live.session()
    path = live.save(live.model(session), 1)
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False, "user_metadata": {"k": "v"}}
    model = live.fetch(live.post("/load_weights", body))["model_id"]
    assert live.get(f"/training_runs/{model}")["user_metadata"] == {"k": "v"}


def test_a_copy_may_have_an_end_of_its_own(live: Live) -> None:
    session = live.session()
    body = {"source_path": live.save(live.model(session), 1), "session_id": session, "model_seq_id": 7}
    live.post("/copy_weights", body | {"ttl_seconds": 3600})
    (copy,) = live.get(f"/training_runs/{session}:train:7/checkpoints")["checkpoints"]
    assert copy["expires_at"] is not None


def test_the_scope_of_a_clients_listing_is_honoured(serve: Callable[..., Live]) -> None:
    live = serve(keys=("me", "you"))
    path = live.save(live.model(), 1, "one", "save_weights_for_sampler")
    rest = mint.RestClient(live.url, "you")
    run = path.removeprefix("tinker://").partition("/")[0]
    live.post(f"/training_runs/{run}/checkpoints/sampler_weights/one/publish")
    assert not rest.list_training_runs().result().training_runs
    assert len(rest.list_training_runs(access_scope="accessible").result().training_runs) == 1
    assert rest.get_training_run(run, access_scope="accessible").result().training_run_id == run
    assert rest.get_training_run_by_tinker_path(path, access_scope="accessible").result().training_run_id == run
    with pytest.raises(mint.NotFound):
        rest.get_training_run(run, access_scope="owned").result()


# ------------------------------------------------------------------------------------------------ samples and data


def test_a_sample_can_ask_a_checkpoint_without_a_session(live: Live) -> None:
    model = live.model()
    live.step(model, 1)
    path = live.save(model, 2, "one", "save_weights_for_sampler")
    answers = [
        live.fetch(live.post("/asample", sample_body(None, None) | target))["sequences"][0]["logprobs"][0]
        for target in ({"model_path": path}, {"base_model": "mint/tiny"})
    ]
    assert answers == [-1.5, -0.5]


def test_what_serves_other_losses_is_refused_by_name(live: Live) -> None:
    sampler = live.sampler()
    assert "record_stability_info" in live.refused("/asample", sample_body(sampler, 0, record_stability_info=True))
    assert live.fetch(live.sample(sampler, 1, record_stability_info=False))["sequences"]
    for spans in ("model_input_spans", "loss_fn_input_spans"):
        message = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="cross_entropy")
        getattr(message.data.add(), spans).add().prompt_tokens.sequence_id = "s"
        with pytest.raises(BadRequest, match="spans"):
            wire.forward_backward_from_proto(message.SerializeToString())


def test_chunks_that_are_not_text_are_refused_by_name() -> None:
    for kind in ("image", "dmel"):
        message = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="cross_entropy")
        getattr(message.data.add().model_input.add(), kind).SetInParent()
        with pytest.raises(BadRequest, match=kind):
            wire.forward_backward_from_proto(message.SerializeToString())
        with pytest.raises(BadRequest, match=kind):
            wire.model_input_from_json({"chunks": [{"type": kind, "data": ""}]})


def test_sparse_tensors_arrive_dense_in_either_dialect() -> None:
    dense = [[0.0, 2.0, 0.0], [3.0, 0.0, 0.0]]
    message = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=1, loss_fn="cross_entropy")
    tensor = message.data.add().loss_fn_inputs["weights"]
    tensor.dtype = 1
    tensor.shape.extend([2, 3])
    tensor.sparse_csr.values = np.array([2, 3], "<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 1, 2], "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array([1, 0], "<i8").tobytes()
    call = wire.forward_backward_from_proto(message.SerializeToString())
    assert call.data[0].loss_fn_inputs["weights"].tolist() == dense
    body = {"data": [2, 3], "dtype": "float32", "shape": [2, 3]}
    body |= {"sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [1, 0]}
    assert wire.tensor_from_json(body).tolist() == dense


UNKNOWN = bytes([0x78, 5])  # field 15, a varint


def test_unknown_protobuf_fields_are_refused_by_number_wherever_they_are() -> None:
    data = [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})] * 3
    body = wire.forward_backward_to_proto(wire.ForwardBackwardCall("m", 1, data, "ppo", {"temperature": 2.0}))
    assert wire.forward_backward_from_proto(body).data == data
    with pytest.raises(BadRequest, match="ForwardBackwardRequest has unknown field number 15; this server knows 1"):
        wire.forward_backward_from_proto(body + UNKNOWN)
    places: dict[str, Callable[[Any], Any]] = {
        "SparseCsr": lambda request: request.data[2].loss_fn_inputs["weights"].sparse_csr,
        "Datum": lambda request: request.data[1],
        "Chunk": lambda request: request.data[2].model_input[0],
        "EncodedTextChunk": lambda request: request.data[0].model_input[0].encoded_text,
        "Tensor": lambda request: request.data[1].loss_fn_inputs["weights"],
        "LossConfigValue": lambda request: request.loss_fn_config_v2["temperature"],
    }
    for name, place in places.items():
        broken = MESSAGES["ForwardBackwardRequest"].FromString(body)
        place(broken).MergeFromString(UNKNOWN)
        with pytest.raises(BadRequest, match=f"^{name} has unknown field number 15"):
            wire.forward_backward_from_proto(broken.SerializeToString())


# ------------------------------------------------------------------------------------------------ OpenAI's routes


def completion(live: Live, path: str, body: dict[str, Any]) -> Any:
    return live.http.post(f"{live.url}/v1/{path}", json=body, headers={"Authorization": "Bearer any"})


def test_sampling_fields_of_the_chat_route_reach_the_backend(live: Live) -> None:
    fields = {"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "stop_token_ids": [9]}
    fields |= {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.25}
    fields |= {"logit_bias": {"5": 1.5, "7": -100}, "regex": "[0-9]+"}
    assert completion(live, "chat/completions", CHAT | fields).is_success
    request = live.backend.calls[-1][2]
    params: SamplingParams = request.sampling_params
    assert (request.num_samples, params.temperature, params.top_p, params.top_k) == (2, 0.5, 0.9, 7)
    assert (params.min_p, params.seed) == (0.1, 3)
    assert 9 in params.stop_ids
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, -0.5, 0.25)
    assert (params.logit_bias, params.regex) == ({5: 1.5, 7: -100.0}, "[0-9]+")


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}, {"type": "integer"}),
    ],
)
def test_response_formats_reach_the_backend(live: Live, response_format: dict[str, Any], schema: object) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", {"model": "mint/tiny", "prompt": "hi"})):
        assert completion(live, path, body | {"response_format": response_format}).is_success
        assert live.backend.calls[-1][2].sampling_params.json_schema == schema


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream_options", {"include_obfuscation": True}),
        ("tool_choice", "required"),
        ("response_format", {"type": "grammar"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}, "strict": False}}),
        ("store", True),
        ("reasoning_effort", "high"),
    ],
)
def test_the_chat_route_refuses_what_it_cannot_honour(live: Live, field: str, value: object) -> None:
    answer = completion(live, "chat/completions", CHAT | {field: value})
    assert answer.status_code == 400
    assert field in answer.text


@pytest.mark.parametrize(("field", "value"), [("best_of", 3), ("suffix", "x"), ("unheard_of", 1)])
def test_the_completion_route_refuses_what_it_cannot_honour(live: Live, field: str, value: object) -> None:
    answer = completion(live, "completions", {"model": "mint/tiny", "prompt": "a", field: value})
    assert answer.status_code == 400
    assert field in answer.text


def test_template_arguments_reach_the_template(live: Live) -> None:
    lengths = []
    for arguments in ({}, {"add_generation_prompt": False}):
        answer = completion(live, "chat/completions", CHAT | {"chat_template_kwargs": arguments})
        lengths.append(answer.json()["usage"]["prompt_tokens"])
    assert lengths[0] > lengths[1]
