"""Budgets: a run or key that has used its means is stopped, saved, and told how to go on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import mint
from mint import types
from mint.server.keyring import Quota
from tests.server.databases import BOTH_DATABASES
from tests.server.live import Live, sample_body, train_body
from tests.server.tenants import Keychain, audit_lines

Serve = Callable[..., Live]


@BOTH_DATABASES
def test_a_run_is_stopped_at_its_budget_with_its_state_saved(live: Live) -> None:
    model = live.model(user_metadata={"budget_tokens": 5})
    for seq_id in (1, 3):
        live.fetch(live.train(model, seq_id))  # two tokens each
        live.fetch(live.step(model, seq_id + 1))
    live.fetch(live.train(model, 5))
    words = live.refused("/forward_backward", train_body(model, 7), 403)
    assert "has used 6 tokens, and its budget_tokens is 5" in words
    [path] = re.findall(r"saved as (tinker://\S+/weights/budget-stop)\.", words)
    assert f"create_training_client_from_state_with_optimizer('{path}'" in words
    # The gradients that were paid for may still be applied, and the model saved by hand.
    assert live.fetch(live.step(model, 6))["metrics"] == {"step": 3.0}
    live.save(model, 8)
    [line] = audit_lines(live, "budget_reached")
    assert line["target"] == model
    # What was saved is the state before the refused request, and training goes on from it.
    loaded = {"session_id": live.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    again = live.fetch(live.post("/load_weights", loaded))["model_id"]
    assert live.backend.steps[again] == 2
    assert live.fetch(live.train(again, 1))["loss_fn_outputs"]


def test_sampling_stops_with_its_run_but_what_was_saved_by_name_can_be_sampled(live: Live) -> None:
    session = live.session()
    model = live.model(session, user_metadata={"budget_tokens": 6})
    snapshot = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 1}
    sampler = live.fetch(live.post("/save_weights_for_sampler", snapshot))["sampling_session_id"]
    live.fetch(live.sample(sampler, 1))  # three of the prompt, three sampled
    assert "budget_tokens is 6" in live.refused("/asample", sample_body(sampler, 2), 403)
    path = live.save(model, 2, "named", "save_weights_for_sampler")
    assert live.fetch(live.sample(live.sampler(session, 2, model_path=path), 1))["sequences"]


def test_engine_seconds_are_a_budget_too(live: Live) -> None:
    model = live.model(user_metadata={"budget_seconds": "1e-9"})
    live.fetch(live.train(model, 1))
    assert "its budget_seconds is 1e-09" in live.refused("/forward_backward", train_body(model, 2), 403)


def test_a_budget_that_is_no_number_is_refused_before_the_run_begins(live: Live) -> None:
    body = {"session_id": live.session(), "model_seq_id": 0, "base_model": "mint/tiny"}
    for given in ("plenty", "0", "-5"):
        words = live.refused("/create_model", body | {"user_metadata": {"budget_tokens": given}})
        assert f"budget_tokens '{given}'" in words
    assert live.backend.calls == []


def test_a_keys_budget_holds_for_all_it_does_and_can_be_raised(live: Live) -> None:
    chain = Keychain(live)
    _, key = chain.ring.create("alice", Quota(budget_tokens=6))
    with mint.ServiceClient(live.url, key) as service:
        trainer = service.create_lora_training_client("mint/tiny")
        datum = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
        trainer.forward_backward([datum] * 2, "cross_entropy").result()
        with pytest.raises(mint.Forbidden, match="'alice' has used 6 tokens") as refused:
            trainer.forward_backward([datum], "cross_entropy").result()
        assert "mint keys set alice --budget-tokens N" in str(refused.value)
        assert f"tinker://{trainer.model_id}/weights/budget-stop" in str(refused.value)
        with pytest.raises(mint.Forbidden):
            service.create_lora_training_client("mint/tiny")
        with pytest.raises(mint.Forbidden):
            service.create_sampling_client(base_model="mint/tiny").sample(
                types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)
            ).result()
        assert Keychain(live).tenant("bob").model(), "nobody else is stopped"
        chain.ring.change("alice", budget_tokens=100)
        trainer.forward_backward([datum], "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()


def test_a_budget_is_kept_over_a_restart(serve: Serve) -> None:
    live = serve(port=8000)
    model = live.model(user_metadata={"budget_tokens": 4})
    live.fetch(live.train(model, 1))
    live.restart()
    live.fetch(live.train(model, 2))
    assert "has used 4 tokens" in live.refused("/forward_backward", train_body(model, 3), 403)


def test_the_state_is_saved_even_where_the_key_has_no_room_left(live: Live, tmp_path: Path) -> None:
    alice = Keychain(live).tenant("alice", disk_bytes=10)
    model = alice.model(user_metadata={"budget_tokens": 2})
    alice.save(model, 1)
    alice.fetch(alice.train(model, 2))
    assert "budget-stop" in alice.refused("/forward_backward", train_body(model, 3), 403)
    names = [checkpoint["checkpoint_id"] for checkpoint in alice.get("/checkpoints")["checkpoints"]]
    assert sorted(names) == ["weights/budget-stop", "weights/one"]
