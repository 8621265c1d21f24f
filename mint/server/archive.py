"""Checkpoints as archives: a folder out as one .tar.gz stream, an archive in without trusting it."""

from __future__ import annotations

import json
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from mint.errors import BadRequest
from mint.types import LoraConfig

COMPLETE = "checkpoint_complete"
"""An empty file at the root, which tools around the Tinker API look for."""
WEIGHTS = "adapter_model.safetensors"
_CHUNK = 1 << 20
_MAX_DEPTH = 16
_MAX_MEMBERS = 10_000
_MAX_HEADER = 64 << 20


def files_of(folder: Path) -> list[str]:
    """The files of a checkpoint, relative to its folder."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def tar_gz(folder: Path) -> Iterator[bytes]:
    """The folder's files as a gzipped tar, a piece at a time: adapters can be larger than memory."""
    pack = zlib.compressobj(1, wbits=31)  # weights hardly compress, so the fastest level
    names = files_of(folder)
    for name in names:
        size = (folder / name).stat().st_size
        yield pack.compress(_header(name, size))
        with (folder / name).open("rb") as file:
            while piece := file.read(_CHUNK):
                yield pack.compress(piece)
        yield pack.compress(bytes(-size % tarfile.BLOCKSIZE))
    if COMPLETE not in names:
        yield pack.compress(_header(COMPLETE, 0))
    yield pack.compress(bytes(2 * tarfile.BLOCKSIZE)) + pack.flush()


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def unpack(archive: IO[bytes], folder: Path, max_bytes: float) -> Path:
    """Extracts a .tar.gz of plain files into `folder`; the folder within that holds the adapter."""
    try:
        with tarfile.open(fileobj=archive, mode="r|gz") as tar:
            _extract(tar, folder, max_bytes)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error  # without the server's own path
        raise BadRequest(f"the upload cannot be read as a .tar.gz: {why}.") from error
    found = sorted(folder.rglob("adapter_config.json"), key=lambda path: len(path.parts))
    if not found or not (found[0].parent / WEIGHTS).is_file():
        raise BadRequest(f"the archive holds no PEFT adapter: it needs adapter_config.json and {WEIGHTS} side by side.")
    return found[0].parent


def _extract(tar: tarfile.TarFile, folder: Path, max_bytes: float) -> None:
    room, members = max_bytes, 0
    for member in tar:
        members += 1
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or "\\" in member.name:
            raise BadRequest(f"the archive holds {member.name!r:.200}; absolute paths and .. are refused.")
        if len(path.parts) > _MAX_DEPTH:
            raise BadRequest(f"the archive holds {member.name!r:.80}, deeper than {_MAX_DEPTH} folders.")
        if member.isdir():
            continue
        if not member.isreg():
            raise BadRequest(f"the archive holds {member.name!r}, a link or device; only plain files are taken.")
        room -= member.size
        if room < 0 or members > _MAX_MEMBERS:
            raise BadRequest(f"the archive unpacks to more than {max_bytes} bytes or {_MAX_MEMBERS} files.")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        source = tar.extractfile(member)
        assert source is not None
        with target.open("wb") as out:
            shutil.copyfileobj(source, out, _CHUNK)


def read_adapter(folder: Path) -> tuple[str, LoraConfig]:
    """Base model and shape of the adapter in a folder: from mint.json where we wrote it, else from PEFT's files."""
    try:
        if (folder / "mint.json").is_file():
            manifest = json.loads((folder / "mint.json").read_text())
            return str(manifest["base_model"]), LoraConfig(**manifest["lora"])
        config = json.loads((folder / "adapter_config.json").read_text())
        rank = max([int(config["r"]), *(config.get("rank_pattern") or {}).values()])
        return str(config["base_model_name_or_path"]), _lora(rank, _tensor_names(folder / WEIGHTS))
    except BadRequest:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRequest(f"the adapter's description cannot be read: {type(error).__name__}: {error}.") from error


def _lora(rank: int, names: list[str]) -> LoraConfig:
    unembed = [name for name in names if "lm_head" in name]
    attention = [name for name in names if "attn" in name or "attention" in name]
    return LoraConfig(
        rank,
        train_unembed=bool(unembed),
        train_attn=bool(attention),
        train_mlp=len(unembed) + len(attention) < len(names),
    )


def _tensor_names(file: Path) -> list[str]:
    """The names in a safetensors file, which opens with the length of its JSON header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _MAX_HEADER:
            raise ValueError(f"{file.name} is no safetensors file")
        header: dict[str, Any] = json.loads(opened.read(length))
    return [name for name in header if name != "__metadata__"]
