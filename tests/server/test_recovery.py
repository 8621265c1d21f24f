"""What clients see when the engine or the server dies: nothing but a delay. Over a backend that counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mint.errors import BadRequest, Internal
from tests.fakes import FakeBackend
from tests.server.live import Live
from tests.server.test_service import kl_body
from tests.waiting import eventually

PORT = 8123


@pytest.fixture
def live(serve: Callable[..., Live]) -> Live:
    return serve(port=PORT)


def journal_of(live: Live, model: str) -> Path:
    return next((live.config.data / "journal" / str(PORT) / "models").glob("*"))


# ------------------------------------------------------------------------------------------------------ the engine dies


def test_requests_under_way_when_the_engine_dies_are_carried_out_by_the_next_one(live: Live) -> None:
    model = live.model()
    live.fetch(live.step(model, 1))
    live.backend.hold()
    pending = [live.train(model, 2), live.step(model, 3), live.step(model, 4)]
    eventually(lambda: live.backend.names().count("optim_step") == 3)
    live.backend.lose_engine()
    answers = [live.fetch(envelope) for envelope in pending]
    assert [answers[1]["metrics"]["step"], answers[2]["metrics"]["step"]] == [2.0, 3.0]
    assert live.backend.steps[model] == 3, "the step that was done before was repeated, once"


def test_a_model_nobody_asked_for_comes_back_as_well(live: Live) -> None:
    model = live.model(lora_config={"rank": 8})
    live.fetch(live.step(model, 1))
    before = live.backend.adapters[model]
    live.backend.lose_engine()
    eventually(lambda: live.backend.steps.get(model) == 1)
    assert live.backend.adapters[model] == before, "from the same seed"


def test_samples_under_way_when_the_engine_dies_are_sampled_anew(live: Live) -> None:
    session = live.session()
    model = live.model(session)
    live.fetch(live.step(model, 1))
    snapshot = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 5}
    frozen = live.fetch(live.post("/save_weights_for_sampler", snapshot))["sampling_session_id"]
    live.fetch(live.step(model, 3))
    base = live.sampler(session, 6)
    live.backend.hold()
    pending = [live.sample(base, 0), live.sample(frozen, 0)]
    eventually(lambda: live.backend.names().count("sample") == 2)
    live.backend.lose_engine()
    assert [live.fetch(p)["sequences"][0]["logprobs"][0] for p in pending] == [-0.5, -1.5], "base and step 1"


def test_the_number_of_a_snapshot_is_used_once_also_after_a_restart(live: Live) -> None:
    session = live.session()
    model = live.model(session)

    def freeze(seq_id: int, number: int) -> Any:
        body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": number}
        return live.post("/save_weights_for_sampler", body, ok=False)

    frozen = live.fetch(freeze(1, 5).json())["sampling_session_id"]
    live.sampler(session, 6)
    for seq_id, number in ((2, 5), (3, 6)):
        refused = freeze(seq_id, number)
        assert refused.status_code == 400 and f"{number} was already used" in refused.json()["detail"]
    live.restart()
    refused = freeze(4, 5)
    assert refused.status_code == 400 and "5 was already used" in refused.json()["detail"]
    assert live.fetch(freeze(5, 7).json())["sampling_session_id"] != frozen
    assert "error" not in live.fetch(live.sample(frozen, 0))


def test_a_request_that_kills_every_engine_is_given_up_and_the_next_goes_on(live: Live) -> None:
    model, other = live.model(), live.model()
    live.backend.deadly = "forward_backward"
    live.backend.hold()
    poison, after, beside = live.train(model, 1), live.step(model, 2), live.step(other, 1)
    eventually(lambda: live.backend.names().count("optim_step") == 2)
    live.backend.let_go()
    assert "died 2 times while it worked on this request" in live.fetch(poison)["error"]
    assert live.fetch(after)["metrics"]["step"] == 1.0
    assert live.fetch(beside)["metrics"]["step"] == 1.0, "what ran beside it is not blamed"
    assert live.backend.generation == 3


def test_a_failure_that_was_told_is_not_undone_by_repeating_it(live: Live) -> None:
    model = live.model()
    live.backend.fail["forward_backward"] = Internal("out of memory")
    assert "out of memory" in live.fetch(live.train(model, 1))["error"]
    live.backend.fail.clear()
    live.fetch(live.step(model, 2))
    live.backend.calls.clear()
    live.backend.lose_engine()
    eventually(lambda: live.backend.steps.get(model) == 1)
    assert "forward_backward" not in live.backend.names()


def test_a_model_that_cannot_be_repeated_exactly_is_given_up_rather_than_wrong(live: Live) -> None:
    model = live.model()
    live.fetch(live.train(model, 1))
    live.backend.fail["forward_backward"] = BadRequest("something else")
    live.backend.lose_engine()
    assert "had succeeded, now fails" in live.fetch(live.step(model, 2))["error"]


# ------------------------------------------------------------------------------------------------------ the server dies


def test_pending_and_finished_requests_outlive_the_server(live: Live) -> None:
    model = live.model()
    done = live.step(model, 1)
    first = live.fetch(done)
    result = live.fetch_proto(live.train(model, 2)).content
    live.backend.hold()
    pending = live.step(model, 3)
    live.restart(finish=False)
    assert live.fetch(pending)["metrics"]["step"] == 2.0
    assert live.fetch(done) == first, "a result fetched before can be fetched again"
    assert live.fetch_proto(live.train(model, 2)).content == result, "the same request sent again is the same"
    assert live.fetch(live.step(model, 4))["metrics"]["step"] == 3.0


def test_creation_survives_with_its_id_and_its_seed(live: Live) -> None:
    live.backend.hold()
    session = live.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "mint/tiny"}
    created = live.post("/create_model", body)
    waiting = live.step(f"{session}:train:0", 1)
    live.restart(finish=False)
    assert live.fetch(created)["model_id"] == f"{session}:train:0"
    assert live.post("/create_model", body)["request_id"] == created["request_id"]
    assert live.fetch(waiting)["metrics"]["step"] == 1.0
    seed = live.backend.adapters[f"{session}:train:0"].seed
    live.restart()
    eventually(lambda: f"{session}:train:0" in live.backend.adapters)
    assert live.backend.adapters[f"{session}:train:0"].seed == seed


def test_order_gaps_and_late_numbers_are_repeated_as_they_were(live: Live) -> None:
    model = live.model()
    live.backend.calls.clear()
    for seq_id in (2, 3, 1):
        live.step(model, seq_id, learning_rate=seq_id * 1e-3)
    live.app.state.server.models._live[model].sequencer._gap_seconds = 0.05
    live.step(model, 6, learning_rate=6e-3)
    eventually(lambda: live.backend.names().count("optim_step") == 4)  # 6 after the wait for 4 and 5
    late = live.step(model, 4, learning_rate=4e-3)
    live.fetch(late)
    order = [call[2].learning_rate for call in live.backend.calls if call[0] == "optim_step"]
    assert order == [1e-3, 2e-3, 3e-3, 6e-3, 4e-3]
    live.restart()
    eventually(lambda: live.backend.names().count("optim_step") == 5)
    assert [call[2].learning_rate for call in live.backend.calls if call[0] == "optim_step"] == order
    assert "carried out" not in live.step(model, 5, ok=False).text, "5 never came before"


def test_a_save_is_not_repeated_once_it_was_acknowledged(live: Live) -> None:
    model = live.model()
    path = live.save(model, 1)
    run, kind, name = path.removeprefix("tinker://").split("/")
    live.http.delete(f"/training_runs/{run}/checkpoints/{kind}/{name}").raise_for_status()
    live.restart()
    live.fetch(live.step(model, 2))
    assert "save_adapter" not in live.backend.names(), "a deleted checkpoint does not come back"


def test_a_save_cut_short_is_finished_under_its_name(live: Live) -> None:
    model = live.model()
    live.backend.hold()
    pending = live.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "one"})
    live.restart(finish=False)
    assert live.fetch(pending)["path"].endswith("/weights/one")
    assert "exists already" in live.refused("/save_weights", {"model_id": model, "seq_id": 2, "path": "one"})


def test_a_loaded_checkpoint_may_be_deleted_before_the_crash(live: Live) -> None:
    model = live.model()
    live.fetch(live.step(model, 1))
    path = live.save(model, 2)
    live.fetch(live.step(model, 3))
    live.fetch(live.post("/load_weights", {"model_id": model, "seq_id": 4, "path": path, "optimizer": True}))
    run, kind, name = path.removeprefix("tinker://").split("/")
    live.http.delete(f"/training_runs/{run}/checkpoints/{kind}/{name}").raise_for_status()
    live.restart()
    assert live.fetch(live.step(model, 5))["metrics"]["step"] == 2.0


def test_reverse_kl_is_repeated_after_a_crash_though_its_reference_was_deleted(live: Live) -> None:
    model = live.model()
    path = live.save(model, 1, "one", "save_weights_for_sampler")
    live.fetch(live.post("/mint/forward_backward_reverse_kl", kl_body(model, path)))
    run, kind, name = path.removeprefix("tinker://").split("/")
    live.http.delete(f"/training_runs/{run}/checkpoints/{kind}/{name}").raise_for_status()
    live.restart()
    assert live.fetch(live.step(model, 2))["metrics"]["step"] == 1.0
    assert live.backend.names().count("reverse_kl") == 1, "by the new engine, before the step"


def test_snapshots_come_back_and_samples_in_flight_are_answered_410(live: Live) -> None:
    model = live.model()
    live.fetch(live.step(model, 1))
    snapshot = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 5}
    frozen = live.fetch(live.post("/save_weights_for_sampler", snapshot))["sampling_session_id"]
    live.fetch(live.step(model, 3))
    live.backend.hold()
    lost = live.sample(frozen, 0)
    live.restart(finish=False)
    assert live.post("/retrieve_future", {"request_id": lost["request_id"]}, ok=False).status_code == 410
    assert live.fetch(live.sample(frozen, 1))["sequences"][0]["logprobs"][0] == -1.5


def test_states_bound_what_is_repeated_and_results_outlive_them(serve: Callable[..., Live]) -> None:
    live = serve(port=PORT, state_seconds=0.0)
    model = live.model()
    envelopes = []
    for seq_id in range(1, 8):
        envelopes.append(live.step(model, seq_id))
        live.fetch(envelopes[-1])
    first = live.fetch(envelopes[0])
    eventually(lambda: journal_states(live, model))
    [state] = journal_states(live, model)  # older ones are deleted
    covered = int.from_bytes((state / "adapter_model.safetensors").read_bytes(), "little")
    assert covered > 0
    live.restart()
    assert live.fetch(live.step(model, 8))["metrics"]["step"] == 8.0
    assert "load_state" in live.backend.names()
    assert live.backend.names().count("optim_step") == 8 - covered
    assert live.fetch(envelopes[0]) == first


def journal_states(live: Live, model: str) -> list[Path]:
    return list(journal_of(live, model).glob("*.state"))


def test_a_damaged_journal_is_named_and_the_others_go_on(live: Live) -> None:
    hurt = live.model()
    pending = live.step(hurt, 1)
    live.fetch(pending)
    live.fetch(live.step(hurt, 2))
    file = journal_of(live, hurt) / "000000.log"
    well = live.model()
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 4
    live.stop()
    file.write_bytes(contents)
    live._start(type(live.backend)())
    told = live.refused("/optim_step", {"model_id": hurt, "seq_id": 3, "adam_params": {"learning_rate": 1e-3}}, 404)
    assert str(file) in told
    assert "record" in told
    assert live.get(f"/training_runs/{hurt}")["corrupted"] is True
    assert live.get(f"/training_runs/{well}")["corrupted"] is False
    assert live.fetch(live.step(well, 1))["metrics"]["step"] == 1.0


def test_an_unloaded_model_does_not_come_back(live: Live) -> None:
    model = live.model()
    live.fetch(live.step(model, 1))
    folder = journal_of(live, model)
    live.fetch(live.post("/unload_model", {"model_id": model}))
    assert not folder.exists()
    live.restart()
    assert "create_adapter" not in live.backend.names()


def test_a_save_the_server_died_over_once_it_was_entered_is_not_made_again(live: Live) -> None:
    """It might fail the second time, on a disk that has become full, and would be there all the same."""
    model = live.model()
    live.backend.hold()
    pending = live.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "one"})
    server = live.app.state.server
    eventually(lambda: "save_adapter" in live.backend.names())
    (entry,) = server.models._live[model].runner._flight
    folder = entry.place.record.head["fixed"]["folder"]
    draft = server.checkpoints.draft(folder)
    draft.mkdir(parents=True)
    (draft / "adapter_config.json").write_text('{"r": 8}')
    server.checkpoints._storage.keep(folder)
    path = server.checkpoints.record(server.models._live[model].run, "weights", "one", folder, 16).path
    live.backend.forget_held()
    live.stop()
    backend = FakeBackend()
    backend.fail["save_adapter"] = Internal("the disk is full")
    live._start(backend)
    assert live.fetch(pending)["path"] == path
    assert "save_adapter" not in live.backend.names()
    assert "exists already" in live.refused("/save_weights", {"model_id": model, "seq_id": 2, "path": "one"})


def test_a_name_that_a_crash_left_being_saved_is_waited_for(live: Live) -> None:
    model, checkpoints = live.model(), live.app.state.server.checkpoints
    body = {"model_id": model, "seq_id": 1, "path": "one"}
    checkpoints.reserve_again(model, "weights", "one", "folder")
    assert "ask again when that is over" in live.refused("/save_weights", body, 429)
    checkpoints.release_name(model, "weights", "one")
    assert live.fetch(live.post("/save_weights", body))["path"].endswith("/one")
