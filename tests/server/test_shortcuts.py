"""The short way to the busiest endpoints gives what the router gives."""

import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from mint.server.routes import known_user
from mint.server.shortcuts import SHORTCUTS, Shortcut
from tests.server.live import Live

ROUTED = "application/vnd.mint+json"
"""JSON to the router, and not plain enough for the short way."""


@pytest.mark.parametrize("found", SHORTCUTS.values(), ids=SHORTCUTS.keys())
def test_a_shortcut_leaves_out_nothing_the_router_would_inject(found: Shortcut) -> None:
    hints = get_type_hints(found.endpoint, include_extras=True)
    expected = {"request", "server", "user"} | ({"body"} if found.body else set())
    assert set(inspect.signature(found.endpoint).parameters) == expected
    assert hints.get("body") is found.body
    user = hints["user"]
    assert get_origin(user) is Annotated and get_args(user)[1].dependency is known_user


@pytest.mark.parametrize(
    "body",
    [
        {"model_id": "nobody", "seq_id": 1, "adam_params": {"learning_rate": 1.0}},
        {"model_id": "nobody", "seq_id": "1"},
        {"model_id": "nobody", "seq_id": 1, "more": 2},
        {"seq_id": -1},
        [],
        "text",
        None,
    ],
)
def test_refusals_are_those_of_the_router(live: Live, body: Any) -> None:
    def told(kind: str) -> tuple[int, str]:
        answer = live.http.post("/optim_step", content=json.dumps(body).encode(), headers={"content-type": kind})
        return answer.status_code, answer.json()["detail"]

    short, routed = told("application/json"), told(ROUTED)
    assert short == routed
    assert 400 <= short[0] < 500


def test_a_refused_body_spends_its_number_and_the_next_goes_on(live: Live) -> None:
    model = live.model()
    bad = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 1e-3}, "unknown": 1}
    assert live.post("/optim_step", bad, ok=False).status_code == 400
    assert live.fetch(live.step(model, 2))["metrics"] == {"step": 1.0}


def test_the_figures_name_the_routes(live: Live) -> None:
    live.fetch(live.step(live.model(), 1))
    figures = live.http.get(f"{live.url}/metrics").text
    for path in ("/api/v1/optim_step", "/api/v1/retrieve_future"):
        assert f'route="{path}"' in figures


def test_other_methods_are_left_to_the_router(live: Live) -> None:
    assert live.http.get("/optim_step").status_code == 405


def test_a_wrong_key_is_refused_on_the_short_way_too(serve: Callable[..., Live]) -> None:
    live = serve(keys=("right",)).tenant("wrong")
    for path in SHORTCUTS:
        answer = live.http.post(live.url + path, json={"request_id": "r", "model_id": "m", "seq_id": 1})
        assert answer.status_code == 401, path
