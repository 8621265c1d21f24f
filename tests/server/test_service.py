"""Health, keys, tokens, configuration, sessions, what bad input gets, and what outlives a restart."""

import base64
import json
import os
import socket
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from mint import wire
from mint.checks import LOSS_FNS
from mint.server.signer import Signer
from mint.server.store import Store
from tests.server.live import Live, datum_json, sample_body, train_body

Serve = Callable[..., Live]


def test_health_needs_no_key(serve: Serve) -> None:
    live = serve(keys=("tml-me",))
    assert httpx.get(f"{live.url}/health").json() == httpx.get(f"{live.url}/api/v1/healthz").json() == {"status": "ok"}


def test_capabilities_tell_models_and_losses_with_their_defaults(live: Live) -> None:
    live.model()
    told = live.get("/get_server_capabilities")
    assert told["supported_models"][0]["model_name"] == "mint/tiny"
    assert told["supported_models"][0]["max_context_length"] == 1024
    assert told["loss_fns"]["ppo"] == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "temperature": 1.0}
    assert set(told["loss_fns"]) == set(LOSS_FNS)


def test_models_named_at_the_start_are_loaded_before_the_server_is_ready(serve: Serve) -> None:
    assert serve(models=("mint/tiny",)).backend.names() == ["load_model"]


# Keys ---------------------------------------------------------------------------------------------------------------


def test_a_missing_and_a_wrong_key_are_told_which_variable_to_set(serve: Serve) -> None:
    live = serve(keys=("tml-me", "sk-you"))
    for headers in ({}, {"X-API-Key": "tml-other"}, {"X-API-Key": "eyJ.eyJ.x"}, {"Authorization": "Bearer nope"}):
        answer = httpx.get(f"{live.url}/api/v1/get_server_capabilities", headers=headers)
        assert answer.status_code == 401
        assert "MINT_API_KEY" in answer.json()["detail"]
    for headers in ({"X-API-Key": "tml-me"}, {"X-API-Key": "sk-you"}, {"Authorization": "Bearer sk-you"}):
        assert httpx.get(f"{live.url}/api/v1/get_server_capabilities", headers=headers).status_code == 200


def test_every_route_but_health_and_signed_links_asks_for_the_key(serve: Serve) -> None:
    live = serve(keys=("tml-me",))
    routes = httpx.get(f"{live.url}/openapi.json").json()["paths"]
    assert len(routes) > 40
    for path, methods in routes.items():
        for method in methods:
            if path.endswith(("/health", "/healthz", "/readyz")) or "/downloads/" in path:
                continue
            url = live.url + path.replace("{", "").replace("}", "")
            answer = httpx.request(method, url, json={} if method in ("post", "put") else None)
            assert answer.status_code == 401, f"{method} {path}: {answer.status_code}"


def test_sk_keys_are_exchanged_for_a_token_with_a_readable_end(serve: Serve) -> None:
    live = serve(keys=("sk-me",))
    assert live.post("/client/config", {"sdk_version": "0.22.0"})["pjwt_auth_enabled"] is True
    jwt = live.post("/auth/token")["jwt"]
    middle = jwt.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4)))
    assert claims["exp"] > time.time() + 3600
    session = httpx.post(f"{live.url}/api/v1/create_session", json={}, headers={"X-API-Key": jwt})
    assert session.status_code == 200
    live.post("/session_heartbeat", {"session_id": session.json()["session_id"]})
    altered = jwt[:-3] + ("AAA" if jwt[-3:] != "AAA" else "BBB")
    assert httpx.get(f"{live.url}/api/v1/sessions", headers={"X-API-Key": altered}).status_code == 401


def test_other_keys_are_not_asked_to_exchange(serve: Serve) -> None:
    live = serve(keys=("tml-me",))
    assert live.post("/client/config", {"sdk_version": "0.36.0", "new": 1})["pjwt_auth_enabled"] is False


def test_an_expired_token_and_a_download_link_do_not_open_the_api(serve: Serve) -> None:
    live = serve(keys=("sk-me",), token_seconds=-1)
    expired = live.post("/auth/token")["jwt"]
    assert httpx.get(f"{live.url}/api/v1/sessions", headers={"X-API-Key": expired}).status_code == 401
    path = live.save(live.model(), 1).removeprefix("tinker://").split("/")
    archive = f"/training_runs/{path[0]}/checkpoints/{path[1]}/{path[2]}/archive"
    link = live.http.get(archive, follow_redirects=False).headers["location"].split("/")[-2]
    assert httpx.get(f"{live.url}/api/v1/sessions", headers={"X-API-Key": link}).status_code == 401


def test_tenants_do_not_see_each_others_things(serve: Serve) -> None:
    live = serve(keys=("tml-me", "tml-you"))
    session = live.session()
    model, sampler = live.model(session), live.sampler(session)
    future = live.step(model, 1)
    you = {"X-API-Key": "tml-you"}
    asks = [
        ("/retrieve_future", {"request_id": future["request_id"]}),
        ("/get_info", {"model_id": model}),
        ("/optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}),
        ("/asample", sample_body(sampler, 0)),
        ("/session_heartbeat", {"session_id": session}),
        ("/create_model", {"session_id": session, "model_seq_id": 1, "base_model": "mint/tiny"}),
        ("/cancel_future", {"request_id": future["request_id"]}),
    ]
    for path, body in asks:
        assert live.http.post(path, json=body, headers=you).status_code == 404, path
    # A broken request of another tenant must not spend a number of this model.
    live.http.post("/optim_step", json={"model_id": model, "seq_id": 2, "nonsense": 1}, headers=you)
    late, early = live.step(model, 3), live.step(model, 2)
    assert live.fetch(early)["metrics"] == {"step": 2.0}
    assert live.fetch(late)["metrics"] == {"step": 3.0}


def test_the_secret_is_readable_by_the_owner_alone(live: Live) -> None:
    assert stat.S_IMODE(os.stat(live.config.data / "secret").st_mode) == 0o600


# Sessions and telemetry ---------------------------------------------------------------------------------------------


def test_sessions_remember_what_they_were_told_and_the_first_reason_for_their_end(live: Live) -> None:
    body = {"tags": ["a"], "user_metadata": {"n": 1}, "sdk_version": "0.36.0", "display_name": "d"}
    session = live.post("/create_session", body)["session_id"]
    told = live.get(f"/sessions/{session}")
    assert (told["user_metadata"], told["display_name"]) == ({"n": "1"}, "d")
    for reason in ("errored", "success"):
        answer = live.post(f"/sessions/{session}/finish", {"reason": {"type": reason}, "detail": None}, ok=False)
        assert answer.status_code == 204
    assert live.refused("/session_heartbeat", {"session_id": "unknown"}, 404)


def test_telemetry_is_accepted_whatever_it_holds(live: Live) -> None:
    assert live.post("/telemetry", {"events": [{"event": "NEW"}], "anything": 1}) == {"status": "accepted"}


def test_dynamic_configuration_lets_clients_cancel(live: Live) -> None:
    assert live.post("/client/dynamic_config", {"sdk_version": "0.36.0"})["sample_cancel_enabled"] is True


def test_what_only_the_hosted_service_has_is_404_and_says_so(live: Live) -> None:
    for method, path in [("GET", "/audit"), ("POST", "/sessions/search"), ("GET", "/billing/usage/events")]:
        answer = live.http.request(method, path, json={} if method == "POST" else None)
        assert answer.status_code == 404
        assert "hosted service" in answer.json()["detail"]


def kl_body(model: str, path: str, told: int = 3, **change: Any) -> dict[str, Any]:
    """Three tokens, of which the last two have a weight; the reference reads `told` tokens."""
    datum = {
        "student_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "reference_input": {"chunks": [{"type": "encoded_text", "tokens": [9] * (told - 2) + [2, 3]}]},
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
        "weights": {"data": [0.0, 1.0, 0.5], "dtype": "float32", "shape": [3]},
    }
    kind = "mint_forward_backward_reverse_kl"
    body = {"model_id": model, "reference_model_path": path, "data": [datum], "seq_id": None, "type": kind}
    return body | change


@pytest.mark.parametrize(("told", "weights"), [(2, [1.0, 0.5]), (3, [0.0, 1.0, 0.5]), (5, [0.0, 0.0, 0.0, 1.0, 0.5])])
def test_reverse_kl_reaches_the_backend_with_both_texts_aligned_at_their_end(
    live: Live, told: int, weights: list[float]
) -> None:
    model = live.model()
    path = live.save(model, 1, "one", "save_weights_for_sampler")
    done = live.fetch(live.post("/mint/forward_backward_reverse_kl", kl_body(model, path, told, temperature=0.5)))
    assert done["outputs"] == [{"loss": {"data": [0.5, 0.5, 0.5], "dtype": "float32", "shape": [3]}}]
    assert (done["metrics"], done["type"]) == ({"loss:sum": 1.0}, "mint_forward_backward_reverse_kl")
    ((_, adapter, folder, own, other, temperature),) = [c for c in live.backend.calls if c[0] == "reverse_kl"]
    assert (adapter, temperature) == (model, 0.5) and folder.endswith(".pin")
    assert own[0].loss_fn_inputs["weights"].tolist() == [0.0, 1.0, 0.5]
    assert other[0].model_input.to_ints() == [9] * (told - 2) + [2, 3]
    assert other[0].loss_fn_inputs["weights"].tolist() == weights
    assert other[0].loss_fn_inputs["target_tokens"].tolist()[-2:] == [3, 4]


def test_the_base_model_can_be_the_reference(live: Live) -> None:
    model = live.model()
    live.fetch(live.post("/mint/forward_backward_reverse_kl", kl_body(model, "mint/tiny", seq_id=1)))
    assert live.backend.calls[-1][:3] == ("reverse_kl", model, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reference_model_path": "tinker://no/weights/x"}, "no checkpoint"),
        ({"temperature": 0.0}, "temperature"),
        ({"data": [{}]}, "student_input"),
        ({"data": kl_body("", "", told=3)["data"] * 70_000}, "datums"),
        ({"data": [kl_body("", "")["data"][0] | {"weights": {"data": [1.0], "dtype": "float32"}}]}, "datum 0: student"),
        (
            {"data": [kl_body("", "")["data"][0] | {"reference_input": {"chunks": []}}]},
            "datum 0: reference_input has 0",
        ),
        (
            {"data": [kl_body("", "")["data"][0] | {"reference_input": {"chunks": [{"tokens": [999] * 3}]}}]},
            "reference_input: datum 0",
        ),
    ],
)
def test_what_has_no_reverse_kl_is_refused_and_its_number_spent(live: Live, change: dict[str, Any], said: str) -> None:
    model = live.model()
    answer = live.http.post("/mint/forward_backward_reverse_kl", json=kl_body(model, "mint/tiny", seq_id=1) | change)
    told = answer.text if answer.status_code != 200 else json.dumps(live.fetch(answer.json()))
    assert said in told and "reverse_kl" not in live.backend.names()
    if said != "temperature":
        assert live.fetch(live.step(model, 2))["metrics"]["step"] == 1.0


def test_checkpoints_are_interpolated_into_sampler_weights_of_their_own(live: Live) -> None:
    model = live.model()
    paths = [live.save(model, 1, "state"), live.save(model, 2, "one", "save_weights_for_sampler")]
    body = {
        "source_paths": paths,
        "coefficients": [0.25, 0.75],
        "output_path": None,
        "output_checkpoint_type": "sampler",
    }
    done = live.fetch(live.post("/mint/checkpoints/interpolate", body))
    assert (done["source_paths"], done["coefficients"], done["checkpoint_type"]) == (paths, [0.25, 0.75], "sampler")
    assert done["path"].endswith("/sampler_weights/interpolated")
    named = live.fetch(live.post("/mint/checkpoints/interpolate", body | {"output_path": "half way"}))
    assert named["path"].endswith("/sampler_weights/half way")
    ((folders, coefficients, _), _) = [call[1:] for call in live.backend.calls if call[0] == "combine"]
    assert len(folders) == 2 and coefficients == [0.25, 0.75]
    assert live.post("/weights_info", {"tinker_path": done["path"]})["lora_rank"] == 16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"coefficients": [1.0]}, "2 source_paths and 1 coefficients"),
        ({"source_paths": [], "coefficients": []}, "at least one"),
        ({"source_paths": ["tinker://no/weights/x", "tinker://no/weights/y"]}, "no checkpoint"),
        ({"output_checkpoint_type": "training"}, "output_checkpoint_type"),
        ({"coefficients": [1.0, True]}, "coefficients"),
        ({"output_path": "a/b"}, "cannot be used"),
    ],
)
def test_what_cannot_be_interpolated_is_refused(live: Live, change: dict[str, object], said: str) -> None:
    path = live.save(live.model(), 1, "state")
    body = {"source_paths": [path, path], "coefficients": [0.5, 0.5]} | change
    answer = live.http.post("/mint/checkpoints/interpolate", json=body)
    assert answer.status_code in (400, 404) and said in answer.text
    assert "combine" not in live.backend.names()


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [
        ([], {}, "empty"),
        ([datum_json([1, 2, 3], weights=[1.0])], {}, "datum 0: weights has length 1, model_input has 2"),
        ([datum_json([1, 2]), datum_json([1, 300])], {}, "datum 1: target_tokens holds token id 300"),
        ([datum_json([1, 2], weights=[float("nan")])], {}, "must be finite"),
        ([datum_json([1, 2], logprobs=[0.0], advantages=[float("inf")])], {"loss_fn": "ppo"}, "advantages holds inf"),
        ([datum_json([1, 2])], {"loss_fn": "ppo"}, "lacks 'logprobs'"),
        ([datum_json([1, 2])], {"loss_fn": "stable_reinforce"}, "unknown loss_fn"),
        ([datum_json([1, 2])], {"loss_fn_config": {"beta": 1}}, "unknown key 'beta'"),
        ([datum_json([1, 2])], {"loss_fn_config": [1]}, "loss_fn_config"),
        ([datum_json([1] * 1500)], {}, "context of 1024"),
        ([{"model_input": {"chunks": []}}], {}, "empty"),
        ([{"model_input": {"chunks": [{"type": "encoded_text", "tokens": ["a"]}]}}], {}, "integers"),
        (
            [datum_json([1, 2]) | {"loss_fn_inputs": {"target_tokens": {"data": [10**30], "dtype": "int64"}}}],
            {},
            "cannot be read",
        ),
        (
            [
                datum_json([1, 2])
                | {
                    "loss_fn_inputs": {
                        "target_tokens": {
                            "data": [1],
                            "dtype": "int64",
                            "shape": [1, 10**12],
                            "sparse_crow_indices": [0, 1],
                            "sparse_col_indices": [0],
                        }
                    }
                }
            ],
            {},
            "cells",
        ),
        ("data", {}, "list of datums"),
    ],
)
def test_bad_training_data_is_named_at_once_and_the_next_request_works(
    live: Live, data: object, more: dict, said: str
) -> None:
    model = live.model()
    body = train_body(model, 1)
    body["forward_backward_input"] |= {"data": data} | more
    answer = live.http.post("/forward_backward", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["detail"]
    assert "metrics" in live.fetch(live.train(model, 2))


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/create_session", b"{", "JSON"),
        ("/create_session", b"[1]", "dictionary"),
        ("/create_session", b'{"tags": "x"}', "tags"),
        ("/create_session", b'{"surprise": 1}', "unknown field 'surprise'"),
        ("/create_model", b'{"session_id": "a"}', "'model_seq_id' is missing"),
        ("/create_model", b'{"session_id": "a", "model_seq_id": -1, "base_model": "b"}', "model_seq_id"),
        ("/create_model", b'{"session_id": "a", "model_seq_id": true, "base_model": "b"}', "model_seq_id"),
        ("/forward_backward", b"{", "JSON"),
        ("/forward_backward", b"[" * 100_000, "JSON"),
        ("/forward_backward", b"3", "object"),
        ("/asample", b'{"prompt": 1}', "model input"),
        ("/asample", b"\xff\xfe", "JSON"),
        ("/retrieve_future", b'{"request_id": 5}', "request_id"),
        ("/checkpoints/upload", b"{}", "file"),
    ],
)
def test_a_body_that_cannot_be_read_is_a_400_with_a_sentence(live: Live, path: str, body: bytes, said: str) -> None:
    answer = live.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["detail"]


def test_garbage_in_protobuf_and_zstd_is_a_400(live: Live) -> None:
    proto = {"content-type": wire.PROTOBUF}
    assert live.http.post("/forward_backward", content=b"\xff" * 50, headers=proto).status_code == 400
    zstd = proto | {"content-encoding": "zstd"}
    assert live.http.post("/forward_backward", content=b"\xff" * 50, headers=zstd).status_code == 400
    odd = proto | {"content-encoding": "br"}
    assert "'br'" in live.http.post("/forward_backward", content=b"", headers=odd).json()["detail"]


def test_a_small_body_that_unpacks_to_too_much_is_refused(serve: Serve) -> None:
    live = serve(body_bytes=100_000)
    bomb = zstandard.compress(bytes(50_000_000))
    headers = {"content-type": wire.PROTOBUF, "content-encoding": "zstd"}
    assert len(bomb) < 100_000
    assert live.http.post("/forward_backward", content=bomb, headers=headers).status_code == 413


def test_a_body_that_declares_or_sends_too_much_is_413(serve: Serve) -> None:
    live = serve(body_bytes=100_000, small_body_bytes=1_000)
    assert live.http.post("/asample", content=bytes(200_000)).status_code == 413
    assert live.http.post("/create_session", content=b" " * 2_000).status_code == 413
    streamed = live.http.post("/asample", content=(bytes(10_000) for _ in range(20)))
    assert streamed.status_code == 413


def test_a_declared_size_is_refused_before_anything_is_sent(serve: Serve) -> None:
    live = serve(body_bytes=100_000)
    with socket.create_connection(("127.0.0.1", int(live.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n\r\n")
        assert b"413" in connection.recv(100)


# Restart ------------------------------------------------------------------------------------------------------------


def test_runs_sessions_and_checkpoints_outlive_a_restart(live: Live) -> None:
    session = live.session()
    model = live.model(session, user_metadata={"renderer": "qwen3"})
    live.step(model, 1)
    state, weights = live.save(model, 2), live.save(model, 3, kind="save_weights_for_sampler")
    named, base = live.sampler(session, 0, model_path=weights), live.sampler(session, 1)
    body = {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 2}
    snapshot = live.fetch(live.post("/save_weights_for_sampler", body))["sampling_session_id"]
    pending = live.step(model, 5)
    live.restart()
    assert live.get("/sessions")["sessions"] == [session]
    assert live.get(f"/training_runs/{model}")["user_metadata"] == {"renderer": "qwen3"}
    assert {c["tinker_path"] for c in live.get("/checkpoints")["checkpoints"]} == {state, weights}
    live.post("/session_heartbeat", {"session_id": session})
    # Sampling sessions of a path or base model go on; the logprob -1.5 is that of weights after one step.
    assert live.fetch(live.sample(named, 0))["sequences"][0]["logprobs"][0] == -1.5
    assert live.fetch(live.sample(base, 0))["sequences"]
    assert "snapshot" in live.refused("/asample", sample_body(snapshot, 0), 404)
    # A training model is gone, and the error says how to go on.
    said = live.refused("/optim_step", {"model_id": model, "seq_id": 6, "adam_params": {}}, 404)
    assert f"create_training_client_from_state_with_optimizer('{state}')" in said
    assert "restarted" in live.refused("/retrieve_future", {"request_id": pending["request_id"]}, 404)
    again = live.model(session, 1)
    live.fetch(live.post("/load_weights", {"model_id": again, "seq_id": 1, "path": state, "optimizer": True}))
    assert live.backend.steps[again] == 1


def test_with_another_key_the_house_still_owns_its_things(serve: Serve) -> None:
    first = serve(keys=("tml-old",))
    path = first.save(first.model(), 1)
    first.config = type(first.config)(port=0, data=first.config.data, api_keys=("tml-new",))
    first.restart()
    assert first.get("/checkpoints")["checkpoints"][0]["tinker_path"] == path


def test_servers_that_start_at_once_share_one_new_data_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: (Store(tmp_path / "mint.db"), Signer(tmp_path)), range(8)))
    signed = made[0][1].sign({"a": 1}, 60)
    assert all(signer.read(signed)["a"] == 1 for _, signer in made)
    for store, _ in made:
        store.close()
