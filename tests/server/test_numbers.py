"""Numbers that are none, or mean nothing: every numeric field of every request refuses them by name, before anything is
done. What the fuzzer checks (no 5xx) is not enough here: nonsense must not be accepted either."""

import json
import math
from typing import Any

import pytest

from tests.server.live import Live, sample_body

HUGE = 10**400
NO_INTEGERS = [True, "3", 1.5, math.nan, math.inf, [], {}]
NO_NUMBERS = [True, "0.5", math.nan, math.inf, -math.inf, HUGE, []]


def refused(live: Live, path: str, body: Any) -> str:
    answer = live.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400, f"{body}: {answer.status_code} {answer.text}"
    told = answer.json()
    return told["error"]["message"] if "error" in told else told["detail"]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [-1, HUGE, *NO_INTEGERS]),
        ("n", [0, -1, 129, HUGE, *NO_INTEGERS]),
        ("temperature", [-0.1, *NO_NUMBERS]),
        ("top_p", [0, -1, 1.1, *NO_NUMBERS]),
        ("min_p", [-0.1, 1, *NO_NUMBERS]),
        ("top_k", [0, -2, 2**31, HUGE, *NO_INTEGERS]),
        ("seed", NO_INTEGERS),
        ("stop_token_ids", [[True], ["1"], [1.5], 3]),
        ("repetition_penalty", [0, -1, *NO_NUMBERS]),
        ("presence_penalty", [2.1, -2.1, *NO_NUMBERS]),
        ("frequency_penalty", [2.1, -2.1, *NO_NUMBERS]),
        ("logit_bias", [{"5": 101}, {"-1": 1}, {"1.5": 1}, {"5": "1"}, {"5": True}, [5], 5]),
        ("regex", [5, True, ["a"]]),
        ("response_format", ["json_object", {"type": 5}, {"type": "json_schema", "json_schema": {"schema": 5}}]),
    ],
)
def test_the_openai_routes_refuse_what_is_no_number(live: Live, field: str, values: list[Any]) -> None:
    for value in values:
        completion = {"model": "mint/tiny", "prompt": "hi", field: value}
        chat = {"model": "mint/tiny", "messages": [{"role": "user", "content": "hi"}], field: value}
        assert field in refused(live, f"{live.url}/v1/completions", completion)
        assert field in refused(live, f"{live.url}/v1/chat/completions", chat)
    assert "sample" not in live.backend.names()


def test_lengths_and_counts_of_the_openai_routes_begin_where_they_should(live: Live) -> None:
    chat = {"model": "mint/tiny", "messages": [{"role": "user", "content": "hi"}]}
    for field in ("max_tokens", "max_completion_tokens"):
        for value in (0, -1, True):
            assert field in refused(live, f"{live.url}/v1/chat/completions", chat | {field: value})
    for value in (-1, 21, True, "1"):
        assert "logprobs" in refused(
            live, f"{live.url}/v1/completions", {"model": "mint/tiny", "prompt": "hi", "logprobs": value}
        )
        assert "top_logprobs" in refused(live, f"{live.url}/v1/chat/completions", chat | {"top_logprobs": value})
    for prompt in ([True], [1.5], [[]], [], "", [-1], [10**30]):
        assert refused(live, f"{live.url}/v1/completions", {"model": "mint/tiny", "prompt": prompt})
    nothing = {"model": "mint/tiny", "prompt": "hi", "max_tokens": 0}
    assert live.post(f"{live.url}/v1/completions", nothing)["choices"][0]["text"] == ""


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [0, -1, *NO_INTEGERS]),
        ("temperature", [-0.1, *NO_NUMBERS]),
        ("top_p", [0, 1.1, *NO_NUMBERS]),
        ("min_p", [1, *NO_NUMBERS]),
        ("repetition_penalty", [0, *NO_NUMBERS]),
        ("frequency_penalty", [2.1, *NO_NUMBERS]),
        ("logit_bias", [{"5": 101}, {"x": 1}, [5], 5]),
        ("regex", [5, True, ["a"]]),
        ("json_schema", [5, True, ["a"], "{}"]),
        ("top_k", [0, -2, 2**31, HUGE, *NO_INTEGERS]),
        ("seed", NO_INTEGERS),
    ],
)
def test_a_sample_refuses_what_is_no_number(live: Live, field: str, values: list[Any]) -> None:
    sampler = live.sampler()
    for value in values:
        body = sample_body(sampler, 1, sampling_params={field: value})
        answer = live.http.post("/asample", content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code == 400, f"{field}={value!r:.40}: {answer.text}"
    assert "sample" not in live.backend.names()


@pytest.mark.parametrize("field", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"])
def test_an_optimizer_step_refuses_what_is_no_number(live: Live, field: str) -> None:
    model = live.model()
    for number, value in enumerate([-1, *NO_NUMBERS], 1):
        body = {"model_id": model, "seq_id": number, "adam_params": {field: value}}
        assert field in refused(live, "/optim_step", body)
    assert live.fetch(live.step(model, 20))["metrics"]


@pytest.mark.parametrize(
    "lora", [{"rank": rank} for rank in (0, -1, 1025, HUGE, *NO_INTEGERS)] + [{"seed": 2**64}, {"seed": True}]
)
def test_an_adapter_of_no_sensible_size_is_refused_before_it_takes_memory(live: Live, lora: dict[str, Any]) -> None:
    body = {"session_id": live.session(), "model_seq_id": 0, "base_model": "mint/tiny", "lora_config": lora}
    assert next(iter(lora)) in refused(live, "/create_model", body)
    assert "create_adapter" not in live.backend.names()


@pytest.mark.parametrize("value", ["nan", "inf", "1e999", "-1", "0", "many", ""])
def test_a_budget_that_is_no_number_is_refused(live: Live, value: str) -> None:
    for name in ("budget_tokens", "budget_seconds"):
        body = {
            "session_id": live.session(),
            "model_seq_id": 0,
            "base_model": "mint/tiny",
            "user_metadata": {name: value},
        }
        assert name in refused(live, "/create_model", body)


@pytest.mark.parametrize("since", ["nan", "inf", "-inf", "1e400", "1e300", "-1", "x"])
def test_usage_since_no_moment_is_refused(live: Live, since: str) -> None:
    answer = live.http.get("/mint/usage", params={"since": since})
    assert answer.status_code == 400 and "since" in answer.json()["detail"], answer.text
