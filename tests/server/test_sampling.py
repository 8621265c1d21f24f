"""Sampling over the wire: sessions that pin weights, retries, completions, cancellation."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mint import wire
from mint.errors import BadRequest
from tests.fakes import TINY
from tests.server.live import Live, sample_body
from tests.waiting import eventually


def steps_seen(live: Live, result: dict) -> float:
    """How many optimizer steps the sampled weights had, which the fake tells by its log-probs."""
    return -0.5 - result["sequences"][0]["logprobs"][0]


def test_a_sample_in_json_and_in_protobuf(live: Live) -> None:
    sampler = live.sampler()
    envelope = live.sample(sampler, 0, num_samples=2, prompt_logprobs=True, topk_prompt_logprobs=1)
    assert len(envelope["sample_sequence_ids"]) == 2
    result = live.fetch(envelope)
    assert result["sequences"] == [{"tokens": [72, 105, 258], "logprobs": [-0.5] * 3, "stop_reason": "stop"}] * 2
    assert result["prompt_logprobs"] == [None, *(pytest.approx(-t / 100) for t in (2, 3))]
    assert result["topk_prompt_logprobs"][0] is None
    decoded = wire.sample_response_from_proto(live.fetch_proto(envelope).content)
    assert decoded.sequences[1].tokens == [72, 105, 258]


def test_every_field_of_newer_clients_reaches_the_backend(live: Live) -> None:
    more = {
        "topk_sample_logprobs": 2,
        "target_prompt_logprobs": {"data": [5, -1], "dtype": "int64", "shape": [2, 1]},
        "prompt_alt_tokens_k": 1,
        "prompt_logprobs_last_n": 1,
        "record_stability_info": False,
        "sampling_params": {"max_tokens": 2, "seed": 7, "stop": ["x", 3], "temperature": 0, "top_k": 4, "top_p": 0.5},
    }
    live.fetch_proto(live.sample(live.sampler(), 0, **more))
    request = live.backend.calls[-1][2]
    params = request.sampling_params
    assert (params.seed, params.stop, params.temperature, params.top_k, params.top_p) == (7, ["x", 3], 0, 4, 0.5)
    assert (request.topk_sample_logprobs, request.prompt_alt_tokens_k, request.prompt_logprobs_last_n) == (2, 1, 1)
    assert request.target_prompt_logprobs.tolist() == [[5], [-1]]


def test_a_sample_sent_again_is_the_same_sample_and_numbers_impose_no_order(live: Live) -> None:
    sampler = live.sampler()
    third, first = live.sample(sampler, 3), live.sample(sampler, 0)
    assert live.sample(sampler, 3) == third != first
    assert live.backend.names().count("sample") == 2
    assert "seq_id 3" in live.refused("/asample", sample_body(sampler, 3, num_samples=2))


def test_a_sampling_session_keeps_its_weights_while_training_goes_on(live: Live) -> None:
    session = live.session()
    model = live.model(session)
    live.step(model, 1)
    body = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0}
    pinned = live.fetch(live.post("/save_weights_for_sampler", body))["sampling_session_id"]
    assert pinned == f"{session}:sample:0"
    live.step(model, 3)
    body = {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 1}
    newer = live.fetch(live.post("/save_weights_for_sampler", body))["sampling_session_id"]
    assert steps_seen(live, live.fetch(live.sample(pinned, 0))) == 1
    assert steps_seen(live, live.fetch(live.sample(newer, 0))) == 2


def test_a_snapshot_sent_again_under_a_fresh_session_number_is_the_same(live: Live) -> None:
    model = live.model()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    first = live.post("/save_weights_for_sampler", body)
    assert live.post("/save_weights_for_sampler", body | {"sampling_session_seq_id": 5}) == first
    assert live.backend.names().count("snapshot") == 1


def test_a_named_checkpoint_is_sampled_by_its_path_under_either_scheme(live: Live) -> None:
    session = live.session()
    model = live.model(session)
    live.step(model, 1)
    path = live.save(model, 2, "one", "save_weights_for_sampler")
    for number, spelled in enumerate([path, path.replace("tinker://", "mint://")]):
        sampler = live.sampler(session, number, model_path=spelled)
        assert steps_seen(live, live.fetch(live.sample(sampler, 0))) == 1
        assert live.get(f"/samplers/{sampler}")["model_path"] == path
    assert live.backend.names().count("load_policy") == 1, "sessions of one path share it"


def test_the_same_session_number_is_the_same_sampling_session(live: Live) -> None:
    session = live.session()
    assert live.sampler(session, 0) == live.sampler(session, 0) != live.sampler(session, 1)
    path = live.save(live.model(session), 1, "one", "save_weights_for_sampler")
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    assert "already used" in live.refused("/create_sampling_session", body)


def test_a_sampling_session_asked_for_twice_at_once_is_made_once(live: Live) -> None:
    session = live.session()
    live.backend.hold()
    with ThreadPoolExecutor(2) as pool:
        twice = [pool.submit(live.sampler, session, 0) for _ in range(2)]
        eventually(lambda: live.open_requests() == 2)
        live.backend.let_go()
        assert twice[0].result() == twice[1].result()
    assert live.backend.names().count("load_policy") == 1


def test_sampling_what_does_not_exist_is_refused_when_the_session_is_made(live: Live) -> None:
    body = {"session_id": live.session(), "sampling_session_seq_id": 0}
    assert "mint/tiny" in live.refused("/create_sampling_session", body | {"base_model": "no/such"}, 404)
    missing = body | {"model_path": "tinker://x:train:0/sampler_weights/one"}
    assert "never saved" in live.refused("/create_sampling_session", missing, 404)
    assert "not a checkpoint path" in live.refused("/create_sampling_session", body | {"model_path": "/etc/passwd"})
    assert "either" in live.refused("/create_sampling_session", body)


def test_an_idle_policy_leaves_memory_and_comes_back_on_use(serve) -> None:
    live = serve(policy_idle_seconds=0.1)
    session = live.session()
    model = live.model(session)
    live.step(model, 1)
    sampler = live.sampler(session, model_path=live.save(model, 2, "one", "save_weights_for_sampler"))
    live.fetch(live.sample(sampler, 0))
    eventually(lambda: not any(name.startswith("checkpoint:") for name in live.backend.policies.copy()))
    assert steps_seen(live, live.fetch(live.sample(sampler, 1))) == 1


def test_the_official_sdk_is_told_a_name_it_can_load_a_tokenizer_from(live: Live) -> None:
    sampler = live.sampler()
    official = live.http.get(f"/samplers/{sampler}", headers={"User-Agent": "AsyncTinker/Python 0.36.0"}).json()
    assert Path(official["base_model"]) == TINY
    assert live.get(f"/samplers/{sampler}")["base_model"] == "mint/tiny"
    assert live.get(f"/samplers/{sampler}")["tokenizer_id"] == str(TINY)


def test_a_sample_can_ask_a_base_model_without_a_session(live: Live) -> None:
    live.session()
    body = sample_body(None, None, base_model="mint/tiny")
    assert live.fetch(live.post("/asample", body))["sequences"]
    both = sample_body(live.sampler(), 0, base_model="mint/tiny")
    assert "give one of them" in live.refused("/asample", both)


def test_a_cancelled_sample_is_cancelled_in_the_backend(live: Live) -> None:
    sampler = live.sampler()
    live.backend.hold()
    envelope = live.sample(sampler, 0)
    live.post("/cancel_future", {"request_id": envelope["request_id"]})
    assert live.fetch(envelope) == {"error": "the request was cancelled.", "category": "user"}
    live.backend.let_go()
    assert live.fetch(live.sample(sampler, 1))["sequences"]


def test_a_held_sample_is_answered_by_its_result_the_same_as_a_fetched_one(live: Live) -> None:
    sampler = live.sampler()
    held = live.post("/asample", sample_body(sampler, 0, num_samples=2), ok=False, **{wire.HOLD: "1"})
    envelope = live.sample(sampler, 0, num_samples=2)
    assert held.headers[wire.HELD] == envelope["request_id"]
    assert [f"{held.headers[wire.HELD]}:{n}" for n in range(2)] == envelope["sample_sequence_ids"]
    assert held.json() == live.fetch(envelope)
    live.backend.fail["sample"] = BadRequest("no")
    failed = live.post("/asample", sample_body(sampler, 1), ok=False, **{wire.HOLD: "1"})
    assert failed.json() == {"error": "no", "category": "user"}


def test_a_held_sample_that_takes_long_is_answered_by_its_id(serve) -> None:
    live = serve(poll_seconds=0.05)
    sampler = live.sampler()
    live.backend.hold()
    answer = live.post("/asample", sample_body(sampler, 0), ok=False, **{wire.HOLD: "1"})
    assert wire.HELD not in answer.headers
    live.backend.let_go()
    assert live.fetch(answer.json())["sequences"]


def test_too_many_waiting_samples_are_answered_429_until_there_is_room(serve) -> None:
    live = serve(pending_samples=3)
    sampler = live.sampler()
    live.backend.hold()
    waiting = live.sample(sampler, 0, num_samples=2)
    assert "under way already" in live.refused("/asample", sample_body(sampler, 1, num_samples=2), 429)
    live.backend.let_go()
    live.fetch(waiting)
    assert live.fetch(live.sample(sampler, 1, num_samples=2))["sequences"]


def test_finished_samples_of_a_clone_can_be_asked_for_together(live: Live) -> None:
    sampler = live.sampler()
    first, cloned = live.sample(sampler, 0), live.sample(sampler, 10**9)
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    news = live.post("/retrieve_futures", {"target": target, "prev_cursor": 0, "retrieved_request_ids": []})
    assert [c["request_id"] for c in news["completions"]] == [first["request_id"]]
    assert news["completions"][0]["state"] == "finished"
    second = live.sample(sampler, 1)
    news = live.post("/retrieve_futures", {"target": target, "prev_cursor": news["cursor"], "timeout": 1})
    assert [c["request_id"] for c in news["completions"]] == [second["request_id"]]
    again = {"target": target, "prev_cursor": news["cursor"], "timeout": 0.05}
    assert live.post("/retrieve_futures", again) == {"completions": [], "cursor": news["cursor"]}
    other = live.post("/retrieve_futures", {"target": target | {"cloned_sampler_id": 1}, "prev_cursor": 0})
    assert [c["request_id"] for c in other["completions"]] == [cloned["request_id"]]


def test_joining_a_sampling_session_gives_every_client_its_own_number(live: Live) -> None:
    body = {"sampling_session_id": live.sampler(), "type": "join_sampling_session"}
    assert [live.post("/join_sampling_session", body)["client_counter"] for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": {"chunks": []}}, "empty"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 264]}]}}, "264 at position 1"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**30]}]}}, "token id"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "image"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 1.5}, "num_samples"),
        ({"sampling_params": {"max_tokens": 2000}}, "context of 1024"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"sampling_params": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"sampling_params": {"no_repeat_ngram_size": 2}}, "no_repeat_ngram_size"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}}, "[2, K]"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_a_bad_sample_request_is_refused_at_once_and_the_next_one_works(live: Live, change: dict, said: str) -> None:
    sampler = live.sampler()
    assert said in live.refused("/asample", sample_body(sampler, 0, **change))
    assert live.fetch(live.sample(sampler, 1))["sequences"]


def test_a_silent_session_gives_its_memory_back_and_an_active_one_does_not(serve) -> None:
    live = serve(session_idle_seconds=3600.0)
    silent, active = live.session(), live.session()
    gone, kept = live.model(silent), live.model(active)
    body = {"model_id": gone, "seq_id": 1, "sampling_session_seq_id": 0}
    snapshot = live.fetch(live.post("/save_weights_for_sampler", body))["sampling_session_id"]
    path = live.save(gone, 2)
    live.fall_silent(active, 3000)
    live.post("/session_heartbeat", {"session_id": active, "type": "session_heartbeat"})
    live.fall_silent(active, 3000)
    live.fall_silent(silent, 4000)
    eventually(lambda: gone not in live.backend.adapters and snapshot not in live.backend.policies)
    assert set(live.backend.adapters) == {kept}
    assert path in live.refused("/get_info", {"model_id": gone}, 404)
    assert "snapshot" in live.refused("/asample", sample_body(snapshot, 0), 404)
    assert live.post("/weights_info", {"tinker_path": path})["base_model"] == "mint/tiny"


def test_a_finished_session_is_given_up_sooner(serve) -> None:
    live = serve(finished_idle_seconds=0.1)
    session = live.session()
    live.model(session)
    live.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    eventually(lambda: not live.backend.adapters)


def test_nothing_is_remembered_of_a_checkpoint_that_nobody_samples_any_more(serve) -> None:
    live = serve(policy_idle_seconds=0.1)
    model = live.model()
    for n in (1, 2, 3):
        path = live.save(model, n, f"c{n}", "save_weights_for_sampler")
        assert live.fetch(live.sample(live.sampler(model_path=path), 1))["sequences"]
        assert live.http.get(f"{live.url}/v1/models/{path}").is_success
    policies = live.app.state.server.policies._shared
    eventually(lambda: not policies)
    assert live.fetch(live.sample(live.sampler(model_path=path), 1))["sequences"], "it comes back when it is asked for"
