"""A key that is revoked, or expires, stops at once: nothing goes on, and what it had trained is there to be seen."""

import threading
import time
from collections.abc import Callable

import httpx
import pytest

from tests.server.live import Live, train_body
from tests.server.tenants import Keychain, audit_lines
from tests.waiting import eventually

Serve = Callable[..., Live]


@pytest.fixture
def chain(serve: Serve) -> Keychain:
    return Keychain(serve(keys=("tml-house",), poll_seconds=30.0))


def test_a_revoked_keys_models_are_saved_for_an_administrator_and_leave_memory(chain: Keychain) -> None:
    alice, admin = chain.tenant("alice"), chain.tenant("root", admin=True)
    model = alice.model()
    for n in (1, 2, 3):
        alice.fetch(alice.step(model, n))
    chain.ring.revoke("alice")
    eventually(lambda: model not in alice.backend.adapters)
    assert alice.post("/get_info", {"model_id": model}, ok=False).status_code == 401
    saved = admin.get(f"/training_runs/{model}/checkpoints")["checkpoints"]
    assert [one["checkpoint_id"] for one in saved] == ["weights/key-stop"]
    [line] = eventually(lambda: audit_lines(alice, "key_shut_out"))
    assert line["key"] == chain.id("alice") and line["saved"] == [f"tinker://{model}/weights/key-stop"]
    # An administrator can go on from it.
    body = {"session_id": admin.session(), "model_seq_id": 0, "path": line["saved"][0], "optimizer": True}
    taken_up = admin.fetch(admin.post("/load_weights", body))["model_id"]
    assert admin.fetch(admin.step(taken_up, 1))["metrics"] == {"step": 4.0}


def test_what_was_queued_is_cancelled_from_the_end_and_what_ran_is_in_the_checkpoint(chain: Keychain) -> None:
    alice = chain.tenant("alice")
    model = alice.model()
    backend = alice.backend
    backend.hold()
    for n in range(1, 9, 2):
        alice.post("/forward_backward", train_body(model, n))
        alice.step(model, n + 1)
    alice.post("/save_weights", {"model_id": model, "seq_id": 9, "path": "mine"})
    eventually(lambda: backend.names().count("save_adapter") == 1)
    chain.ring.revoke("alice")
    eventually(lambda: backend.cancelled("save_adapter") == 1)
    eventually(lambda: backend.cancelled("optim_step") == 4 and backend.cancelled("forward_backward") == 3)
    backend.let_go()
    eventually(lambda: model not in backend.adapters)
    assert backend.names().count("save_adapter") == 2, "the one that was asked for, and ours"
    assert audit_lines(alice, "checkpoint_saved")[-1]["target"] == f"tinker://{model}/weights/key-stop"
    assert len(audit_lines(alice, "checkpoint_saved")) == 1


def test_samples_under_way_end_with_the_key_and_others_go_on(chain: Keychain) -> None:
    alice, bob = chain.tenant("alice"), chain.tenant("bob")
    hers, his = alice.sampler(), bob.sampler()
    alice.backend.hold()
    alice.sample(hers, 1)
    waiting = bob.sample(his, 1)
    told: list[httpx.Response] = []
    ask = {"model": "mint/tiny", "prompt": "hi", "max_tokens": 3}
    asking = [
        threading.Thread(
            target=lambda more=more: told.append(alice.http.post(f"{alice.url}/v1/completions", json=ask | more))
        )
        for more in ({}, {"stream": True})
    ]
    for thread in asking:
        thread.start()
    eventually(lambda: alice.backend.names().count("sample") == 4)
    chain.ring.revoke("alice")
    for thread in asking:
        thread.join()
    whole, stream = sorted(told, key=lambda answer: answer.status_code, reverse=True)
    assert whole.status_code == 401 and "revoked" in whole.text
    assert "revoked" in stream.text and "[DONE]" not in stream.text
    eventually(lambda: alice.backend.cancelled("sample") == 3)
    alice.backend.let_go()
    assert bob.fetch(waiting)["sequences"]


def test_an_expired_key_is_stopped_like_a_revoked_one(chain: Keychain) -> None:
    row, key = chain.ring.create("guest", expires=time.time() + 3600)
    guest = chain.tenant("unused").tenant(key)
    model = guest.model()
    chain.ring.change("guest", expires=time.time() + 0.2)
    eventually(lambda: model not in guest.backend.adapters)
    assert eventually(lambda: audit_lines(guest, "key_shut_out"))[0]["key"] == row.id


def test_a_rotated_key_keeps_what_it_has(chain: Keychain) -> None:
    alice = chain.tenant("alice")
    model = alice.model()
    _, key = chain.ring.rotate("alice")
    again = alice.tenant(key)
    assert again.fetch(again.step(model, 1))["metrics"]
    assert alice.step(model, 2, ok=False).status_code == 401


def test_a_model_that_cannot_be_saved_stays_until_it_can(chain: Keychain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mint.server.shutout.AGAIN_SECONDS", 0.05)
    alice = chain.tenant("alice")
    model = alice.model()
    alice.backend.fail["save_adapter"] = OSError(28, "No space left on device")
    chain.ring.revoke("alice")
    eventually(lambda: alice.backend.names().count("save_adapter") >= 2)
    assert model in alice.backend.adapters
    del alice.backend.fail["save_adapter"]
    eventually(lambda: model not in alice.backend.adapters)
    assert eventually(lambda: audit_lines(alice, "key_shut_out"))[0]["saved"]
