"""Checkpoints over the wire: names, listings, sharing, expiry, downloads, uploads, copies."""

import io
import json
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.server.databases import BOTH_DATABASES
from tests.server.live import Live
from tests.waiting import eventually

pytestmark = BOTH_DATABASES


def checkpoint_files(live: Live) -> list[str]:
    root = live.config.data / "checkpoints"
    return sorted(str(p.relative_to(root)) for p in root.rglob("adapter_model.safetensors"))


def address(path: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"/training_runs/{run}/checkpoints/{kind}/{name}"


def test_state_is_saved_with_the_optimizer_and_sampler_weights_without(live: Live) -> None:
    model = live.model()
    assert live.save(model, 1) == f"tinker://{model}/weights/one"
    assert live.save(model, 2, kind="save_weights_for_sampler") == f"tinker://{model}/sampler_weights/one"
    assert [call[3] for call in live.backend.calls if call[0] == "save_adapter"] == [True, False]


def test_a_taken_name_is_refused_unless_it_may_be_overwritten(live: Live) -> None:
    model = live.model()
    live.save(model, 1)
    body = {"model_id": model, "seq_id": 2, "path": "one", "overwrite": False, "type": "save_weights"}
    assert "exists already" in live.refused("/save_weights", body)
    live.step(model, 3)
    path = live.save(model, 4, overwrite=True)
    assert len(checkpoint_files(live)) == 1
    live.step(model, 5)
    live.fetch(live.post("/load_weights", {"model_id": model, "seq_id": 6, "path": path, "optimizer": True}))
    assert live.backend.steps[model] == 1, "the newer of the two saves"


def test_two_saves_of_one_name_at_once_cannot_both_win(live: Live) -> None:
    model = live.model()
    live.backend.hold()
    pending = live.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "one"})
    assert "being saved" in live.refused("/save_weights", {"model_id": model, "seq_id": 2, "path": "one"})
    live.backend.let_go()
    assert live.fetch(pending)["path"]


def test_a_failed_save_frees_its_name_and_lists_nothing(live: Live) -> None:
    model = live.model()
    live.backend.fail["save_adapter"] = OSError("disk full")
    failed = live.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "one"})
    assert "disk full" in live.fetch(failed)["error"]
    assert live.get("/checkpoints")["checkpoints"] == []
    live.backend.fail.clear()
    assert live.save(model, 2)


@pytest.mark.parametrize("name", ["../../etc", "a/b", "..", ".", "", "a\\b", "a\nb", "x" * 200])
def test_names_that_could_leave_the_folder_are_refused(live: Live, name: str) -> None:
    model = live.model()
    if name:
        assert "cannot be used" in live.refused("/save_weights", {"model_id": model, "seq_id": 1, "path": name})
    else:
        assert live.save(model, 1, name).endswith("/000001"), "without a name, the request's number"


def test_odd_but_harmless_names_stay_inside_the_folder(live: Live) -> None:
    model = live.model()
    for seq_id, name in enumerate(["step 10", "loss=0.5%", "über:1", "~", "a..b"], start=1):
        path = live.save(model, seq_id, name)
        assert path.endswith(f"/weights/{name}")
        live.fetch(live.post("/load_weights", {"model_id": model, "seq_id": None, "path": path, "optimizer": False}))
    run = live.config.data / "checkpoints" / model.replace(":", "%3A") / "weights"
    assert len(list(run.iterdir())) == 5


def test_listings_tell_size_time_and_metadata(live: Live) -> None:
    session = live.session()
    first, second = live.model(session, 0), live.model(session, 1)
    live.save(first, 1, "one", ttl_seconds=7200, user_metadata={"step": "1"})
    live.save(first, 2, "one", "save_weights_for_sampler")
    live.save(second, 1, "two")
    [training, sampler] = live.get(f"/training_runs/{first}/checkpoints")["checkpoints"]
    assert (training["checkpoint_id"], training["checkpoint_type"]) == ("weights/one", "training")
    assert (sampler["checkpoint_id"], sampler["checkpoint_type"]) == ("sampler_weights/one", "sampler")
    assert (training["size_bytes"], training["public"], training["user_metadata"]) == (16, False, {"step": "1"})
    lifetime = datetime.fromisoformat(training["expires_at"]) - datetime.fromisoformat(training["time"])
    assert lifetime.total_seconds() == pytest.approx(7200, abs=5)
    page = live.get("/checkpoints", limit=2, offset=1)
    assert page["cursor"] == {"limit": 2, "offset": 1, "total_count": 3}
    assert [c["checkpoint_id"] for c in page["checkpoints"]] == ["sampler_weights/one", "weights/one"]
    runs = live.get("/training_runs", limit=1)
    assert runs["cursor"]["total_count"] == 2
    assert runs["training_runs"][0]["last_checkpoint"]["checkpoint_id"] == "weights/two"
    assert live.get(f"/sessions/{session}")["training_run_ids"] == [first, second]
    assert live.get("/sessions")["sessions"] == [session]


def test_an_expired_checkpoint_is_gone_from_listing_loading_and_disk(serve: Callable[..., Live]) -> None:
    live = serve(sweep_seconds=0.05)
    model = live.model()
    path = live.save(model, 1, ttl_seconds=1)
    live.http.put(f"{address(live.save(model, 2, 'two', ttl_seconds=7200))}/ttl", json={"ttl_seconds": None})
    eventually(lambda: len(checkpoint_files(live)) == 1)
    [kept] = live.get("/checkpoints")["checkpoints"]
    assert (kept["checkpoint_id"], kept.get("expires_at")) == ("weights/two", None)
    load = {"model_id": model, "seq_id": 3, "path": path, "optimizer": True}
    assert "has expired" in live.refused("/load_weights", load, 404)
    assert live.save(model, 4), "the name is free again"


def test_deleting_removes_the_files(live: Live) -> None:
    model = live.model()
    path = live.save(model, 1)
    assert live.http.delete(address(path)).is_success
    assert checkpoint_files(live) == []
    assert live.http.delete(address(path)).status_code == 404


def test_others_see_only_what_is_published_and_change_nothing(serve: Callable[..., Live]) -> None:
    live = serve(keys=("tml-me", "tml-you"))
    model = live.model()
    path = live.save(model, 1, "one", "save_weights_for_sampler")
    you = {"X-API-Key": "tml-you"}
    assert live.http.post("/weights_info", json={"tinker_path": path}, headers=you).status_code == 404
    assert live.http.get(f"/training_runs/{model}", headers=you).status_code == 404
    live.post(f"{address(path)}/publish")
    assert live.http.post("/weights_info", json={"tinker_path": path}, headers=you).json()["base_model"] == "mint/tiny"
    assert live.http.delete(address(path), headers=you).status_code == 403
    accessible = {"access_scope": "accessible"}
    assert live.http.get("/training_runs", headers=you).json()["training_runs"] == []
    assert len(live.http.get("/training_runs", headers=you, params=accessible).json()["training_runs"]) == 1
    assert live.http.get("/checkpoints", headers=you).json()["checkpoints"] == []
    live.http.delete(f"{address(path)}/publish")
    assert live.http.post("/weights_info", json={"tinker_path": path}, headers=you).status_code == 404


def test_a_new_model_starts_from_a_checkpoint_in_one_request(live: Live) -> None:
    session = live.session()
    model = live.model(session, lora_config={"rank": 4, "train_mlp": False})
    live.step(model, 1)
    path = live.save(model, 2)
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True, "type": "load_weights"}
    loaded = live.fetch(live.post("/load_weights", body))
    assert (loaded["model_id"], loaded["path"]) == (f"{session}:train:1", path)
    drawn = live.backend.adapters[loaded["model_id"]]  # each from a seed of its own
    assert replace(drawn, seed=None) == replace(live.backend.adapters[model], seed=None)
    assert live.backend.steps[loaded["model_id"]] == 1
    assert live.fetch(live.step(loaded["model_id"], 1))["metrics"] == {"step": 2.0}


def test_weights_info_tells_how_to_make_a_model_like_it(live: Live) -> None:
    path = live.save(live.model(lora_config={"rank": 4, "train_mlp": False}), 1)
    assert live.post("/weights_info", {"tinker_path": path}) == {
        "base_model": "mint/tiny",
        "is_lora": True,
        "lora_rank": 4,
        "train_unembed": True,
        "train_mlp": False,
        "train_attn": True,
    }


def test_a_checkpoint_that_does_not_fit_is_refused_at_once(live: Live) -> None:
    session = live.session()
    path = live.save(live.model(session, 0, lora_config={"rank": 4}), 1)
    other = live.model(session, 1, lora_config={"rank": 8})
    load = {"model_id": other, "seq_id": 1, "path": path, "optimizer": False}
    assert "rank 4, this model has 8" in live.refused("/load_weights", load)
    sampler = live.save(other, 2, "s", "save_weights_for_sampler")
    load = {"model_id": other, "seq_id": 3, "path": sampler, "optimizer": True}
    assert "no optimizer state" in live.refused("/load_weights", load)
    assert "either model_id" in live.refused("/load_weights", {"path": path, "optimizer": True})


def test_an_archive_link_works_without_a_key_until_it_is_altered(serve: Callable[..., Live]) -> None:
    live = serve(keys=("tml-me",))
    path = live.save(live.model(), 1, "one", "save_weights_for_sampler")
    redirect = live.http.get(f"{address(path)}/archive", headers={"accept": "application/gzip"}, follow_redirects=False)
    assert redirect.status_code == 302
    datetime.strptime(redirect.headers["expires"], "%a, %d %b %Y %H:%M:%S GMT")
    link = redirect.headers["location"]
    with urlopen(link) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as tar:
        assert tar.getnames() == ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]
        assert tar.extractfile("adapter_config.json").read() == b'{"r": 8}'
    token = link.split("/")[-2]
    forged = link.replace(token, token[:-4] + ("AAAA" if token[-4:] != "AAAA" else "BBBB"))
    assert live.http.get(forged).status_code == 403


def test_an_expired_link_is_refused(serve: Callable[..., Live]) -> None:
    live = serve(link_seconds=-1)
    path = live.save(live.model(), 1)
    link = live.http.get(f"{address(path)}/archive", follow_redirects=False).headers["location"]
    assert live.http.get(link).status_code == 403


def test_external_weights_are_fetched_file_by_file(live: Live) -> None:
    model = live.model()
    body = {"model_id": model, "seq_id": 1, "path": "out", "type": "save_weights_external"}
    saved = live.fetch(live.post("/save_weights_external", body))
    assert saved["path"] == f"tinker://{model}/external_weights/out"
    answer = live.get(f"{address(saved['path'])}/external_weights_urls")
    assert set(answer["urls"]) == {"adapter_config.json", "adapter_model.safetensors"}
    with urlopen(answer["urls"]["adapter_config.json"]) as file:
        assert file.read() == b'{"r": 8}'
    encrypted = body | {"seq_id": 2, "path": "secret", "age_encryption_recipients": ["age1xyz"]}
    assert "age_encryption_recipients" in live.refused("/save_weights_external", encrypted)


def test_a_copy_outlives_its_source(live: Live) -> None:
    session = live.session()
    model = live.model(session)
    live.step(model, 1)
    path = live.save(model, 2)
    body = {"source_path": path, "session_id": session, "model_seq_id": 7}
    copied = live.post("/copy_weights", body)["tinker_path"]
    assert copied == f"tinker://{session}:train:7/weights/one"
    assert live.post("/copy_weights", body)["tinker_path"] == copied
    live.http.delete(address(path))
    live.fetch(live.post("/load_weights", {"model_id": model, "seq_id": 3, "path": copied, "optimizer": True}))
    project = {"source_path": copied, "destination_project_id": "p"}
    assert "no projects" in live.refused("/copy_weights", project)


# Uploads ------------------------------------------------------------------------------------------------------------


def archive(files: dict[str, bytes], member: Callable[[tarfile.TarInfo], tarfile.TarInfo] = lambda info: info) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(member(info), io.BytesIO(content))
    return out.getvalue()


def safetensors(*names: str) -> bytes:
    header = json.dumps({n: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in names}).encode()
    return struct.pack("<Q", len(header)) + header


ADAPTER = {
    "adapter_config.json": json.dumps({"base_model_name_or_path": "mint/tiny", "r": 4, "lora_alpha": 8}).encode(),
    "adapter_model.safetensors": safetensors("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
}


def send(live: Live, content: bytes) -> tuple[int, dict]:
    answer = live.http.post("/checkpoints/upload", files={"file": ("a.tar.gz", content, "application/gzip")})
    return answer.status_code, answer.json()


@pytest.mark.parametrize("folder", ["", "my-adapter/"])
def test_an_uploaded_adapter_can_be_loaded_by_path_and_by_id(live: Live, folder: str) -> None:
    status, answer = send(live, archive({folder + name: content for name, content in ADAPTER.items()}))
    assert status == 200
    assert answer["checkpoint_id"].startswith("ckpt_")
    info = live.post("/weights_info", {"tinker_path": answer["checkpoint_id"]})
    assert (info["base_model"], info["lora_rank"]) == ("mint/tiny", 4)
    assert (info["train_attn"], info["train_mlp"], info["train_unembed"]) == (True, False, False)
    model = live.model(lora_config={"rank": 4})
    for path in (answer["path"], answer["checkpoint_id"]):
        loaded = live.fetch(live.post("/load_weights", {"model_id": model, "path": path, "optimizer": False}))
        assert loaded["path"] == answer["path"]


def as_link(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.type, info.linkname, info.size = tarfile.SYMTYPE, "/etc/passwd", 0
    return info


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (archive({"../escape": b"x"}), ".. are refused"),
        (archive({"/etc/escape": b"x"}), "absolute paths"),
        (archive({"adapter_config.json": b""}, as_link), "link or device"),
        (archive({"readme": b"x"}), "no PEFT adapter"),
        (archive(ADAPTER | {"adapter_config.json": b"{}"}), "cannot be read"),
        (archive(ADAPTER | {"adapter_model.safetensors": b"\xff" * 20}), "no safetensors file"),
        (b"not a tar", "cannot be read as a .tar.gz"),
        (archive(ADAPTER)[:-30], "cannot be read as a .tar.gz"),
    ],
    ids=lambda value: value if isinstance(value, str) else "archive",  # its bytes hold the time, which differs
)
def test_a_bad_upload_is_refused_and_leaves_nothing_behind(live: Live, content: bytes, said: str) -> None:
    status, answer = send(live, content)
    assert status == 400, answer
    assert said in answer["detail"]
    assert not list(live.config.data.glob("upload-*"))
    assert not list((live.config.data / "checkpoints").glob("*/"))
    assert not Path("/etc/escape").exists()


def test_an_archive_that_unpacks_to_too_much_is_refused(serve: Callable[..., Live]) -> None:
    live = serve(upload_bytes=10_000)
    status, answer = send(live, archive(ADAPTER | {"bomb": bytes(1_000_000)}))
    assert status == 400
    assert "more than 10000 bytes" in answer["detail"]
