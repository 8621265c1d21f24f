"""Checkpoint archives made to do harm: refused with a reason that says nothing of the server's own folders."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.live import Live

Build = Callable[[tarfile.TarFile], None]
CONFIG = b'{"r": 8, "base_model_name_or_path": "mint/tiny"}'
EMPTY = (2).to_bytes(8, "little") + b"{}"


def file(name: str, content: bytes = b"x") -> Build:
    def add(tar: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))

    return add


def special(kind: bytes, link: str = "") -> Build:
    def add(tar: tarfile.TarFile) -> None:
        member = tarfile.TarInfo("adapter_config.json")
        member.type, member.linkname = kind, link
        tar.addfile(member)

    return add


def adapter(config: bytes = CONFIG, weights: bytes = EMPTY) -> list[Build]:
    return [file("adapter_config.json", config), file("adapter_model.safetensors", weights)]


def archive(*members: Build) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for add in members:
            add(tar)
    return packed.getvalue()


NASTY: dict[str, list[Build]] = {
    "a symbolic link": [special(tarfile.SYMTYPE, "/etc/passwd")],
    "a hard link": [special(tarfile.LNKTYPE, "../../mint.db")],
    "a device": [special(tarfile.CHRTYPE)],
    "a pipe": [special(tarfile.FIFOTYPE)],
    "an absolute name": [file("/etc/evil")],
    "a name that leads out": [file("a/../../evil")],
    "a file that is a folder too": [file("a"), file("a/b")],
    "a name nothing can have": [file("n" * 5000)],
    "a name with a nul": [file("a\0b")],
    "a thousand folders deep": [file("/".join(["d"] * 1000) + "/x")],
    "deep JSON": adapter(b"[" * 100_000),
    "a list": adapter(b"[]"),
    "no JSON": adapter(b"\0"),
    "a rank beyond all bounds": adapter(b'{"r": 1000000000, "base_model_name_or_path": "mint/tiny"}'),
    "a rank that is none": adapter(b'{"r": NaN, "base_model_name_or_path": "mint/tiny"}'),
    "a pattern of text": adapter(b'{"r": 8, "rank_pattern": {"a": "x"}, "base_model_name_or_path": "mint/tiny"}'),
    "no tensors": adapter(),
    "a header longer than the file": adapter(weights=(2**63).to_bytes(8, "little")),
    "a deep header": adapter(weights=(100_000).to_bytes(8, "little") + b"[" * 100_000),
}


@pytest.mark.parametrize("members", NASTY.values(), ids=NASTY.keys())
def test_an_archive_made_to_do_harm_is_refused_with_a_reason(live: Live, members: list[Build], tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*"))
    answer = live.http.post("/checkpoints/upload", files={"file": ("a.tar.gz", archive(*members))})
    assert answer.status_code == 400, answer.text
    assert str(tmp_path) not in answer.text and "BadRequest" not in answer.text
    assert set(tmp_path.rglob("*")) - before <= {tmp_path / "data" / name for name in ("mint.db-wal", "mint.db-shm")}


def test_an_archive_that_says_more_than_it_holds_is_refused_by_what_it_says(live: Live) -> None:
    member = tarfile.TarInfo("big")
    member.size = 8 << 40
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.fileobj.write(member.tobuf())  # type: ignore[union-attr]
    answer = live.http.post("/checkpoints/upload", files={"file": ("a.tar.gz", packed.getvalue())})
    assert answer.status_code == 400 and "unpacks to more than" in answer.text
