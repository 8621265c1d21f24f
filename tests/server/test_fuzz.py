"""Every field of every request, replaced by everything it should not be: never a 5xx, never a wedged model."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import Live, datum_json, sample_body, train_body

NASTY = [None, True, -1, 1.5, 10**30, math.nan, "", "a\x00/../\ud800", [], [None], {"a": {"b": []}}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something can be replaced, at any depth."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    copy = json.loads(json.dumps(value))
    spot = copy
    for key in path[:-1]:
        spot = spot[key]
    spot[path[-1]] = new
    return copy


def bodies(live: Live) -> dict[str, Any]:
    session = live.session()
    model, sampler = live.model(session), live.sampler(session)
    path = live.save(model, 1)
    return {
        "/client/config": {"sdk_version": "0.36.0"},
        "/create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.36.0"},
        "/session_heartbeat": {"session_id": session},
        f"/sessions/{session}/finish": {"reason": {"type": "success"}, "detail": "d"},
        "/create_model": {
            "session_id": session,
            "model_seq_id": 9,
            "base_model": "mint/tiny",
            "user_metadata": {"a": 1},
            "lora_config": {"rank": 4, "seed": 1, "train_mlp": True},
            "optimizer_config": {"type": "adamw"},
        },
        "/forward_backward": train_body(model, 2, [datum_json([1, 2, 3], weights=[1.0, 1.0])], loss_fn_config={}),
        "/optim_step": {"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 1e-3, "beta1": 0.9}},
        "/save_weights": {"model_id": model, "seq_id": 4, "path": "p", "ttl_seconds": 9, "overwrite": True},
        "/save_weights_for_sampler": {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 7},
        "/save_weights_external": {"model_id": model, "seq_id": 6, "path": "p", "age_encryption_recipients": []},
        "/load_weights": {"model_id": model, "seq_id": 7, "path": path, "optimizer": True},
        "/get_info": {"model_id": model},
        "/create_sampling_session": {"session_id": session, "sampling_session_seq_id": 8, "base_model": "mint/tiny"},
        "/asample": sample_body(sampler, 0, topk_prompt_logprobs=1, prompt_logprobs=True),
        "/retrieve_futures": {"target": {"sampling_session_id": sampler}, "prev_cursor": 0, "timeout": 0},
        "/retrieve_future": {"request_id": "x", "allow_metadata_only": True},
        "/cancel_future": {"request_id": "x"},
        "/weights_info": {"tinker_path": path},
        "/copy_weights": {"source_path": path, "session_id": session, "model_seq_id": 10, "ttl_seconds": 5},
        "/mint/checkpoints/interpolate": {"source_paths": [path], "coefficients": [1.0]},
        f"{live.url}/v1/chat/completions": {
            "model": "mint/tiny",
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 2,
            "stop": ["a"],
        },
        f"{live.url}/v1/completions": {"model": "mint/tiny", "prompt": [1, 2], "logprobs": 1, "echo": True},
    }


def test_no_field_of_any_request_can_cause_a_5xx_or_wedge_the_model(serve) -> None:
    live = serve(gap_seconds=0.05)
    asked = bodies(live)
    model = asked["/get_info"]["model_id"]
    for address, body in asked.items():
        for path in places(body):
            for nasty in NASTY:
                content = json.dumps(replaced(body, path, nasty))
                answer = live.http.post(address, content=content, headers={"content-type": "application/json"})
                what = f"{address} {path} = {nasty!r:.40}"
                assert answer.status_code < 500, f"{what}: {answer.text}"
                if answer.text.startswith('{"request_id"'):
                    assert "the server failed" not in str(live.fetch(answer.json())), what
    assert live.fetch(live.step(model, 10**6))["metrics"]


@pytest.mark.parametrize("query", ["limit=-1", "limit=x", "offset=-5", "offset=1e99", "access_scope=all"])
def test_bad_queries_are_400(live: Live, query: str) -> None:
    for path in ("/training_runs", "/sessions"):
        answer = live.http.get(f"{path}?{query}")
        assert answer.status_code == 400, answer.text
