"""Checkpoints in object stores: fsspec's memory, and S3 as moto serves it. Whole or not at all, and damage is named."""

import io
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest

from mint.config import ServerConfig
from mint.errors import BadRequest, Busy
from mint.server.objects import ObjectStorage
from mint.server.state import open_store
from mint.server.storage import FolderStorage, open_storage
from tests.server.live import Live
from tests.server.test_checkpoints import address
from tests.waiting import eventually


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The URL of a bucket, on a server of this process."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "any")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place of this test's own."""
    root = "memory:/" if request.param == "memory" else request.getfixturevalue("s3")
    return f"{root}/{tmp_path.name}"


def names(url: str) -> list[str]:
    files, root = fsspec.url_to_fs(url, use_listings_cache=False)
    return [path.removeprefix(root).strip("/") for path in files.find(root)]


def objects(url: str) -> dict[str, bytes]:
    files, root = fsspec.url_to_fs(url, use_listings_cache=False)
    return {name: files.cat_file(f"{root}/{name}") for name in names(url)}


def put(url: str, name: str, content: bytes) -> None:
    files, root = fsspec.url_to_fs(url, use_listings_cache=False)
    files.pipe_file(f"{root}/{name}", content)


def written(storage: ObjectStorage, name: str, **files: str) -> str:
    folder = storage.draft(name)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_text(content)
    storage.keep(name)
    return name


def read(storage: ObjectStorage, name: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in storage.fetch(name).iterdir()}


# The storage itself -------------------------------------------------------------------------------------------------


def test_another_machine_reads_what_was_kept(url: str, tmp_path: Path) -> None:
    here, there = (ObjectStorage(url, tmp_path / machine) for machine in ("a", "b"))
    name = written(here, here.new_name("run%3A0/weights/step 10"), weights="1", config="2")
    assert read(there, name) == {"weights": "1", "config": "2"}
    assert here.identity() == there.identity()


def test_an_upload_that_ends_half_way_is_nobodys_checkpoint(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, there = ObjectStorage(url, tmp_path / "a"), ObjectStorage(url, tmp_path / "b")
    whole = storage._files.put_file

    def cut(local: str, remote: str) -> None:
        if remote.endswith("b"):
            raise ConnectionError("the line went dead")
        whole(local, remote)

    monkeypatch.setattr(storage._files, "put_file", cut)
    with pytest.raises(Busy, match="the line went dead"):
        written(storage, "run/weights/one", a="1", b="2")
    monkeypatch.undo()
    for machine in (storage, there):
        with pytest.raises(BadRequest, match=r"never written whole.*one/manifest\.json is missing"):
            machine.fetch("run/weights/one")
    storage.close()
    assert objects(url) == {}, "what had arrived is removed"


def test_a_save_carried_out_again_replaces_its_first_try_at_once(url: str, tmp_path: Path) -> None:
    storage = ObjectStorage(url, tmp_path / "a")
    written(storage, "run/weights/one", weights="1", more="1")
    put(url, "run/weights/one/deadbeef/weights", b"half of a try that a crash ended")
    (storage.draft("run/weights/one") / "more").unlink()
    written(storage, "run/weights/one", weights="2")
    storage.close()
    assert read(ObjectStorage(url, tmp_path / "b"), "run/weights/one") == {"weights": "2"}
    assert len(objects(url)) == 2, "the manifest and one file"


@pytest.mark.parametrize("change", ["altered", "cut", "missing", "manifest"])
def test_damage_is_named_and_nothing_of_it_is_read(url: str, tmp_path: Path, change: str) -> None:
    written(ObjectStorage(url, tmp_path / "a"), "run/weights/one", weights="0123456789")
    [at] = [name for name in objects(url) if name.endswith("/weights")]
    files, root = fsspec.url_to_fs(url, use_listings_cache=False)
    if change == "altered":
        put(url, at, b"0123456788")
    elif change == "cut":
        put(url, at, b"01234")
    elif change == "missing":
        files.rm(f"{root}/{at}")
    else:
        put(url, "run/weights/one/manifest.json", b'{"format": 1, "upl')
    named = "run/weights/one/manifest.json" if change == "manifest" else at
    reader = ObjectStorage(url, tmp_path / "b")
    with pytest.raises(BadRequest, match="damaged") as refused:
        reader.fetch("run/weights/one")
    assert f"{url}/{named}" in str(refused.value)
    assert not list((tmp_path / "b").rglob("weights")), "neither the checkpoint nor a part of it"


def test_deleting_leaves_nothing_there_or_here(url: str, tmp_path: Path) -> None:
    storage = ObjectStorage(url, tmp_path / "a")
    written(storage, "run/weights/one", weights="1")
    storage.delete("run/weights/one")
    storage.close()
    assert objects(url) == {}
    assert not (tmp_path / "a" / "run/weights/one").exists()


def test_the_copies_on_this_machine_are_bounded_and_come_back(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    storage = ObjectStorage(url, tmp_path / "a", cache_bytes=2500)
    for n in range(3):
        written(storage, f"run/weights/{n}", weights=f"{n}" * 1000)
        long_ago = time.time() - 10_000 + n
        os.utime(storage.draft(f"run/weights/{n}"), (long_ago, long_ago))
    storage.fetch("run/weights/0")
    written(storage, "run/weights/3", weights="3" * 1000)
    kept = sorted(path.name for path in (tmp_path / "a" / "run" / "weights").iterdir())
    assert kept == ["0", "3"], "the two longest unused are gone"
    assert read(storage, "run/weights/1") == {"weights": "1" * 1000}


def test_where_checkpoints_lie_is_chosen_by_the_url(tmp_path: Path) -> None:
    assert open_storage(None, tmp_path).url == str(tmp_path / "checkpoints")
    assert isinstance(open_storage(f"file://{tmp_path}/x", tmp_path), FolderStorage)
    with pytest.raises(BadRequest, match="AWS_ACCESS_KEY_ID") as refused:
        open_storage("s3://key:geheim@bucket/x", tmp_path)
    assert "geheim" not in str(refused.value)
    with pytest.raises(BadRequest, match="nosuch"):
        open_storage("nosuch://x", tmp_path)


# A server over it ---------------------------------------------------------------------------------------------------


def test_everything_about_checkpoints_works_over_the_wire(url: str, serve: Callable[..., Live]) -> None:
    live = serve(checkpoints=url)
    session = live.session()
    model = live.model(session)
    live.fetch(live.step(model, 1))
    path = live.save(model, 2, "one", ttl_seconds=7200)
    live.fetch(live.step(model, 3))
    live.fetch(live.post("/load_weights", {"model_id": model, "seq_id": 4, "path": path, "optimizer": True}))
    assert live.backend.steps[model] == 1
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    assert live.backend.steps[live.fetch(live.post("/load_weights", body))["model_id"]] == 1
    sampler = live.sampler(session, model_path=path)
    assert live.fetch(live.sample(sampler, 0))["sequences"][0]["logprobs"][0] == -1.5
    live.post(f"{address(path)}/publish")
    [listed] = live.get("/checkpoints")["checkpoints"]
    assert (listed["tinker_path"], listed["public"], listed["size_bytes"]) == (path, True, 16)
    link = live.http.get(f"{address(path)}/archive").headers["location"]
    with tarfile.open(fileobj=io.BytesIO(httpx.get(link).content)) as archive:
        assert archive.extractfile("adapter_model.safetensors").read()[0] == 1
    copied = live.post("/copy_weights", {"source_path": path, "session_id": session, "model_seq_id": 2})["tinker_path"]
    live.http.delete(address(path)).raise_for_status()
    assert [c["tinker_path"] for c in live.get("/checkpoints")["checkpoints"]] == [copied]
    live.fetch(live.post("/load_weights", {"model_id": model, "seq_id": 5, "path": copied, "optimizer": True}))
    live.http.put(f"{address(copied)}/ttl", json={"ttl_seconds": 1}).raise_for_status()
    eventually(lambda: names(url) == ["storage-id"])  # deleted and expired ones are gone from the store


def test_a_save_that_cannot_be_uploaded_fails_and_frees_its_name(
    serve: Callable[..., Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = serve(checkpoints=f"memory://{tmp_path.name}")
    model = live.model()

    def dead(*_: Any, **__: Any) -> None:
        raise ConnectionError("the line went dead")

    monkeypatch.setattr(fsspec.filesystem("memory", use_listings_cache=False).__class__, "put_file", dead)
    failed = live.fetch(live.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "one"}))
    assert "the line went dead" in failed["error"]
    monkeypatch.undo()
    assert live.save(model, 2, "one")


def test_a_save_that_a_crash_interrupted_is_carried_out_again(serve: Callable[..., Live], tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    live = serve(checkpoints=url, port=8124)
    model = live.model()
    live.fetch(live.step(model, 1))
    live.backend.hold()
    pending = live.post("/save_weights", {"model_id": model, "seq_id": 2, "path": "one"})
    live.restart(finish=False)
    path = live.fetch(pending)["path"]
    assert len([name for name in names(url) if name.endswith("manifest.json")]) == 1
    live.fetch(live.post("/load_weights", {"model_id": model, "seq_id": 3, "path": path, "optimizer": True}))
    assert live.backend.steps[model] == 1


def test_a_damaged_checkpoint_is_refused_by_name_over_the_wire(serve: Callable[..., Live], tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    one = serve(checkpoints=url)
    path = one.save(one.model(), 1)
    [at] = [name for name in objects(url) if name.endswith("adapter_model.safetensors")]
    put(url, at, b"\xff" * 8)
    two = Live(tmp_path / "other", database=one.config.database, checkpoints=url)
    try:
        body = {"session_id": two.session(), "model_seq_id": 0, "path": path, "optimizer": True}
        assert at in two.refused("/load_weights", body)
        model = two.model(two.session())
        assert at in two.refused("/load_weights", {"model_id": model, "seq_id": 1, "path": path, "optimizer": True})
        assert two.fetch(two.step(model, 2))["metrics"], "the number was spent, the next one goes on"
    finally:
        two.stop()


def test_a_server_that_would_keep_checkpoints_elsewhere_is_refused(serve: Callable[..., Live], tmp_path: Path) -> None:
    a, b = f"memory://{tmp_path.name}/a", f"memory://{tmp_path.name}/b"
    one = serve(checkpoints=a)
    elsewhere = ServerConfig(data=tmp_path / "other", database=one.config.database, checkpoints=b)
    with pytest.raises(BadRequest, match=r"/a, and this server was told to keep them at .*/b"):
        open_store(elsewhere)  # there are none yet, but another server runs
    one.stop()
    for opened in open_store(elsewhere):  # nobody is there, and nothing would be lost
        opened.close()
    one.config = replace(one.config, checkpoints=b)
    one.restart()
    one.save(one.model(), 1)
    one.stop()
    with pytest.raises(BadRequest, match="copy everything there, the file storage-id included"):
        open_store(replace(elsewhere, checkpoints=a))
    put(a, "storage-id", objects(b)["storage-id"])
    for opened in open_store(replace(elsewhere, checkpoints=a)):
        opened.close()
