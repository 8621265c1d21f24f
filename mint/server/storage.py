"""Where the files of checkpoints lie: a folder on this machine, or anything fsspec has a URL for.

A checkpoint goes by its name, a relative path such as `run/weights/one`, which the catalogue gives and the database
keeps. The backend reads and writes folders on this machine only. What is in the files is not known here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from mint.errors import BadRequest

IDENTITY = "storage-id"
"""A file beside the checkpoints by which two servers know whether they mean the same ones."""


class Storage(Protocol):
    url: str

    def new_name(self, wanted: str) -> str:
        """The name to save under: the one wanted, or one like it where that is, or may be, taken."""
        ...

    def draft(self, name: str) -> Path:
        """Where the backend is to write it."""
        ...

    def keep(self, name: str) -> None:
        """Takes in what was written, whole or not at all; afterwards it is there for whoever can read this storage."""
        ...

    def fetch(self, name: str) -> Path:
        """A folder on this machine that holds it, not to be changed; what is damaged is refused and named."""
        ...

    def delete(self, name: str) -> None: ...

    def identity(self) -> str:
        """The same for all servers with these checkpoints, and for nobody else."""
        ...

    def close(self) -> None: ...


class FolderStorage:
    """The backend writes to the place itself, and checks what it reads."""

    def __init__(self, root: Path) -> None:
        self.url = str(root)
        self._root = root

    def new_name(self, wanted: str) -> str:
        return f"{wanted}~{uuid.uuid4().hex[:8]}" if (self._root / wanted).exists() else wanted

    def draft(self, name: str) -> Path:
        return self._root / name

    def keep(self, name: str) -> None:
        pass

    def fetch(self, name: str) -> Path:
        return self._root / name

    def delete(self, name: str) -> None:
        shutil.rmtree(self._root / name, ignore_errors=True)

    def identity(self) -> str:
        file, number = self._root / IDENTITY, uuid.uuid4().hex
        self._root.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            new = file.with_name(f".{number}")
            new.write_text(number)
            with contextlib.suppress(FileExistsError):  # of two servers that start at once, one wins
                os.link(new, file)
            new.unlink()
        return file.read_text().strip()

    def close(self) -> None:
        pass


def open_storage(url: str | None, data: Path) -> Storage:
    """The storage of this URL; without one, a folder of the data folder."""
    if url is None:
        return FolderStorage(data / "checkpoints")
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise BadRequest(
            f"the checkpoints URL {parts.scheme}://...@{parts.hostname} holds credentials; leave them out and set them "
            "in the environment (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)."
        )
    if parts.scheme in ("", "file"):
        return FolderStorage(Path(parts.path).expanduser().absolute())
    from mint.server.objects import ObjectStorage

    return ObjectStorage(url, data / "cache" / "checkpoints")
