"""With another tenant's ids one gets nothing: every address of the app, one by one, answers as for an id nobody has."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts

from mint.server.app import create_app
from mint.server.limits import Limits
from mint.wire import FRAMES, framed, read_frames
from tests.fakes import FakeBackend
from tests.server.live import Live, sample_body, train_body
from tests.server.tenants import Keychain

Serve = Callable[..., Live]
CHECKPOINT = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"

OPEN = {
    "GET /health",
    "GET /healthz",
    "GET /readyz",
    "GET /api/v1/healthz",
    "GET /openapi.json",
    "GET /docs",
    "GET /docs/oauth2-redirect",
    "GET /redoc",
}
"""Say nothing about anybody."""
BY_LINK = {"GET /api/v1/downloads/{token}/checkpoint.tar.gz", "GET /api/v1/downloads/{token}/file"}
"""Need a signed link, which only who sees the checkpoint is given; see the tests of links below."""
OF_THE_CALLER = {
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "POST /api/v1/auth/token",
    "GET /api/v1/get_server_capabilities",
    "POST /api/v1/create_session",
    "POST /api/v1/telemetry",
    "POST /api/v1/checkpoints/upload",
}
"""Take no id of anything that somebody owns."""
LISTS = {
    "GET /api/v1/training_runs",
    "GET /api/v1/checkpoints",
    "GET /api/v1/sessions",
    "GET /api/v1/mint/usage",
    "GET /v1/models",
}
"""Show what the caller may see."""
FOR_ADMINISTRATORS = {"GET /metrics", "GET /api/v1/mint/status"}
"""Tell of everybody: 403 for a tenant."""
HOSTED_ONLY = {
    "PUT /api/v1/sessions/{session_id}/project",
    "GET /api/v1/sessions/{session_id}/trace_export",
    "POST /api/v1/sessions/search",
    "GET /api/v1/audit",
    "GET /api/v1/billing/{rest:path}",
    "GET /api/v1/auth/apikey/me",
    "DELETE /api/v1/auth/apikey/me",
    "POST /api/v1/create_custom_loss",
}
"""Always 404."""
IN_FRAMES = {"POST /api/v1/mint/samples"}
"""Take ids inside bodies of several requests."""

Ids = dict[str, str]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ADAM = {"adam_params": {"learning_rate": 1e-3}}


def _model(ids: Ids, **more: Any) -> dict[str, Any]:
    return {"model_id": ids["model"], "seq_id": 90} | more


BY_ID: dict[str, Callable[[Ids], Any]] = {
    "POST /api/v1/retrieve_future": lambda ids: {"request_id": ids["future"]},
    "POST /api/v1/retrieve_futures": lambda ids: {"target": {"sampling_session_id": ids["sampler"]}, "timeout": 0},
    "POST /api/v1/cancel_future": lambda ids: {"request_id": ids["future"]},
    "POST /api/v1/create_model": lambda ids: {
        "session_id": ids["session"],
        "model_seq_id": 7,
        "base_model": "mint/tiny",
    },
    "POST /api/v1/forward_backward": lambda ids: train_body(ids["model"], 90),
    "POST /api/v1/forward": lambda ids: {
        "model_id": ids["model"],
        "seq_id": 90,
        "forward_input": train_body("", 1)["forward_backward_input"],
    },
    "POST /api/v1/optim_step": lambda ids: _model(ids, **ADAM),
    "POST /api/v1/save_weights": lambda ids: _model(ids, path="x"),
    "POST /api/v1/save_weights_for_sampler": lambda ids: _model(ids, path="x"),
    "POST /api/v1/save_weights_external": lambda ids: _model(ids, path="x"),
    "POST /api/v1/load_weights": lambda ids: _model(ids, path=ids["path"], optimizer=False),
    "POST /api/v1/get_info": lambda ids: {"model_id": ids["model"]},
    "POST /api/v1/unload_model": lambda ids: {"model_id": ids["model"]},
    "POST /api/v1/mint/checkpoints/interpolate": lambda ids: {"source_paths": [ids["path"]], "coefficients": [1.0]},
    "POST /api/v1/mint/forward_backward_reverse_kl": lambda ids: _model(ids, reference_model_path="x", data=[]),
    "POST /api/v1/session_heartbeat": lambda ids: {"session_id": ids["session"]},
    "POST /api/v1/sessions/{session_id}/finish": lambda ids: {"reason": {"type": "success"}},
    "GET /api/v1/sessions/{session_id}": lambda ids: None,
    "POST /api/v1/create_sampling_session": lambda ids: {
        "session_id": ids["session"],
        "sampling_session_seq_id": 9,
        "base_model": "mint/tiny",
    },
    "GET /api/v1/samplers/{sampler_id}": lambda ids: None,
    "POST /api/v1/join_sampling_session": lambda ids: {"sampling_session_id": ids["sampler"]},
    "POST /api/v1/asample": lambda ids: sample_body(ids["sampler"], 90),
    "POST /api/v1/weights_info": lambda ids: {"tinker_path": ids["path"]},
    "POST /api/v1/copy_weights": lambda ids: {
        "source_path": ids["path"],
        "session_id": ids["own session"],
        "model_seq_id": 8,
    },
    "GET /api/v1/training_runs/{run}": lambda ids: None,
    "GET /api/v1/training_runs/{run}/checkpoints": lambda ids: None,
    f"DELETE {CHECKPOINT}": lambda ids: None,
    f"POST {CHECKPOINT}/publish": lambda ids: {},
    f"DELETE {CHECKPOINT}/publish": lambda ids: None,
    f"PUT {CHECKPOINT}/ttl": lambda ids: {"ttl_seconds": 5},
    f"GET {CHECKPOINT}/archive": lambda ids: None,
    f"GET {CHECKPOINT}/external_weights_urls": lambda ids: None,
    "GET /v1/models/{name:path}": lambda ids: None,
    "POST /v1/completions": lambda ids: {"model": ids["path"], "prompt": "hi"},
    "POST /v1/chat/completions": lambda ids: {"model": ids["path"], **CHAT},
}


def app_routes(live: Live) -> set[str]:
    app = create_app(live.config, FakeBackend(), Limits())
    found = {f"{method} {route.path}" for route in iter_route_contexts(app.routes) for method in route.methods or ()}
    return {route for route in found if not route.startswith("HEAD ")}


def test_every_address_has_been_decided_upon(live: Live) -> None:
    decided = OPEN | BY_LINK | OF_THE_CALLER | LISTS | FOR_ADMINISTRATORS | HOSTED_ONLY | IN_FRAMES | set(BY_ID)
    assert app_routes(live) == decided, "a new address needs a place in one of the sets above"


@pytest.fixture
def two(serve: Serve) -> tuple[Live, Live, Keychain]:
    """A tenant with a run, a sampler, a checkpoint and a future; and another with nothing but a session."""
    live = serve(keys=("tml-house",))
    chain = Keychain(live)
    return chain.tenant("alice"), chain.tenant("bob"), chain


def ids_of(alice: Live, bob: Live) -> Ids:
    session = alice.session()
    model = alice.model(session)
    path = alice.save(model, 1, "one", "save_weights_for_sampler")
    sampler = alice.sampler(session, model_path=path)
    return {
        "session": session,
        "model": model,
        "run": model,
        "path": path,
        "kind": "sampler_weights",
        "name": "one",
        "sampler": sampler,
        "future": alice.step(model, 2)["request_id"],
        "sample": alice.sample(sampler, 1)["request_id"],
        "own session": bob.session(),
    }


def nobodys(ids: Ids) -> Ids:
    """The same with ids that nothing on the server has."""
    session = str(uuid.uuid4())
    run = f"{session}:train:0"
    return ids | {
        "session": session,
        "model": run,
        "run": run,
        "path": f"tinker://{run}/sampler_weights/one",
        "sampler": f"{session}:sample:0",
        "future": uuid.uuid4().hex,
        "sample": f"sample-{uuid.uuid4().hex}",
    }


def words_of(answer: httpx.Response) -> str:
    """Without the number that every request gets for the log."""
    return re.sub(r'"request_id":\s*"[0-9a-f-]+"', "", answer.text)


def ask(who: Live, route: str, ids: Ids) -> tuple[int, str]:
    """Status and words, with whatever the id was taken out."""
    method, _, path = route.partition(" ")
    names = {"{session_id}": "session", "{sampler_id}": "sampler", "{run}": "run", "{kind}": "kind", "{name}": "name"}
    path = path.replace("{name:path}", ids["path"])
    for placeholder, name in names.items():
        path = path.replace(placeholder, ids[name])
    body = BY_ID[route](ids)
    answer = who.http.request(
        method, who.url + path, json=body, headers={"accept": "*/*"}, params={"access_scope": "accessible"}
    )
    words = words_of(answer)
    for value in sorted(ids.values(), key=len, reverse=True):
        words = words.replace(value, "ID")
    return answer.status_code, words


def test_another_tenants_ids_are_answered_like_ids_nobody_has(two: tuple[Live, Live, Keychain]) -> None:
    alice, bob, _ = two
    ids = ids_of(alice, bob)
    before = alice.backend.calls.copy()
    for route in BY_ID:
        theirs, unknown = ask(bob, route, ids), ask(bob, route, nobodys(ids))
        assert theirs[0] == 404, f"{route}: {theirs}"
        assert theirs == unknown, route
    sample = {"request_id": ids["sample"]}, {"request_id": nobodys(ids)["sample"]}
    theirs, unknown = (bob.http.post("/retrieve_future", json=body) for body in sample)
    assert (theirs.status_code, words_of(theirs)) == (unknown.status_code, words_of(unknown))
    assert alice.backend.calls == before, "nothing of it reached the backend"
    # Alice's model is as it was, and none of its numbers was spent.
    assert alice.fetch(alice.step(ids["model"], 3))["metrics"] == {"step": 2.0}


def test_another_tenants_sampler_in_a_batch_is_answered_like_one_nobody_has(two: tuple[Live, Live, Keychain]) -> None:
    alice, bob, _ = two
    ids = ids_of(alice, bob)
    before = alice.backend.calls.copy()
    for sampler in (ids["sampler"], nobodys(ids)["sampler"]):
        body = framed([json.dumps(sample_body(sampler, 90)).encode()])
        answer = bob.http.post("/mint/samples", content=body, headers={"content-type": FRAMES})
        assert (answer.status_code, read_frames(answer.content)) == (200, [b"0 - -\n"])
    assert alice.backend.calls == before, "nothing of it reached the backend"


def test_another_tenants_checkpoint_cannot_be_used_under_ones_own_ids(two: tuple[Live, Live, Keychain]) -> None:
    alice, bob, _ = two
    ids = ids_of(alice, bob)
    own = {"session_id": ids["own session"]}
    model = bob.model(ids["own session"])
    bodies = {
        "/load_weights": {**own, "model_seq_id": 3, "path": ids["path"], "optimizer": False},
        "/create_sampling_session": {**own, "sampling_session_seq_id": 3, "model_path": ids["path"]},
        "/asample": sample_body(None, None) | {"model_path": ids["path"]},
    }
    for path, body in bodies.items():
        assert "another user's" in bob.refused(path, body, 404)
    load = {"model_id": model, "seq_id": 1, "path": ids["path"], "optimizer": False}
    assert "another user's" in bob.refused("/load_weights", load, 404)


def test_lists_show_nothing_of_another_tenant(two: tuple[Live, Live, Keychain]) -> None:
    alice, bob, chain = two
    ids = ids_of(alice, bob)
    for route in sorted(LISTS):
        answer = bob.http.get(bob.url + route.removeprefix("GET "), params={"access_scope": "accessible"})
        assert answer.status_code == 200
        for name in ("session", "model", "path"):
            assert ids[name] not in answer.text or name == "own session", route
        assert chain.id("alice") not in answer.text, route
    assert bob.http.get("/mint/usage", params={"key": "alice"}).status_code == 404
    assert bob.http.get("/mint/usage", params={"run": ids["run"]}).json() == {"usage": []}


def test_an_administrator_sees_and_looks_after_what_others_saved(two: tuple[Live, Live, Keychain]) -> None:
    alice, bob, chain = two
    ids = ids_of(alice, bob)
    for admin in (chain.tenant("root", admin=True), alice.tenant("tml-house")):
        assert admin.get("/training_runs")["training_runs"] == []
        everything = admin.get("/training_runs", access_scope="accessible")["training_runs"]
        assert [run["training_run_id"] for run in everything] == [ids["run"]]
        assert ids["session"] in admin.get("/sessions", access_scope="accessible")["sessions"]
        assert admin.post("/weights_info", {"tinker_path": ids["path"]})["base_model"] == "mint/tiny"
        assert {line["key"] for line in admin.get("/mint/usage", key="all")["usage"]} >= {"alice"}
        # Requests, models and samplers stay their owner's.
        assert admin.post("/get_info", {"model_id": ids["model"]}, ok=False).status_code == 404
        assert admin.post("/retrieve_future", {"request_id": ids["future"]}, ok=False).status_code == 404
    checkpoint = f"/training_runs/{ids['run']}/checkpoints/sampler_weights/one"
    assert chain.tenant("root2", admin=True).http.delete(checkpoint).is_success
    assert alice.get("/checkpoints")["checkpoints"] == []


def test_what_tells_of_everybody_is_for_administrators(two: tuple[Live, Live, Keychain]) -> None:
    _, bob, chain = two
    for route in FOR_ADMINISTRATORS:
        address = bob.url + route.removeprefix("GET ")
        assert bob.http.get(address).status_code == 403
        assert chain.ring.find("alice").id not in bob.http.get(address).text
    root = chain.tenant("root", admin=True)
    assert root.http.get(f"{root.url}/metrics").status_code == 200


def test_a_published_checkpoint_tells_nothing_of_the_rest_of_its_run(two: tuple[Live, Live, Keychain]) -> None:
    alice, bob, _ = two
    model = alice.model(user_metadata={"note": "secret plan"})
    shown = alice.save(model, 1, "shown", "save_weights_for_sampler")
    alice.save(model, 2, "hidden", "save_weights_for_sampler")
    alice.save(model, 3, "hidden", "save_weights")
    alice.post(f"/training_runs/{model}/checkpoints/sampler_weights/shown/publish")
    run = bob.get(f"/training_runs/{model}", access_scope="accessible")
    assert (run.get("last_checkpoint"), run["user_metadata"]) == (None, {})
    assert run["last_sampler_checkpoint"]["tinker_path"] == shown
    listed = bob.get(f"/training_runs/{model}/checkpoints")["checkpoints"]
    assert [checkpoint["tinker_path"] for checkpoint in listed] == [shown]
    assert [m["id"] for m in bob.http.get(f"{bob.url}/v1/models").json()["data"]] == ["mint/tiny", shown]


def archive_link(who: Live, model: str) -> str:
    archive = f"/training_runs/{model}/checkpoints/sampler_weights/one/archive"
    return who.http.get(archive, follow_redirects=False).headers["location"]


def test_a_link_ends_with_the_right_to_what_it_leads_to(two: tuple[Live, Live, Keychain]) -> None:
    alice, bob, chain = two
    model = ids_of(alice, bob)["model"]
    publish = f"/training_runs/{model}/checkpoints/sampler_weights/one/publish"
    alice.post(publish)
    lent, own = archive_link(bob, model), archive_link(alice, model)
    assert httpx.get(lent).status_code == httpx.get(own).status_code == 200
    alice.http.delete(publish)
    assert httpx.get(lent).status_code == 404
    assert httpx.get(own).status_code == 200
    chain.ring.revoke("alice")
    assert httpx.get(own).status_code == 404
