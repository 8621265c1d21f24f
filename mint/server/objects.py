"""Checkpoints in an object store, through fsspec, where files cannot be renamed and an upload can end half-way.

    <name>/manifest.json      which upload counts, and the size and SHA-256 of each of its files
    <name>/<upload>/<file>    the files

An upload goes under a number of its own, and its manifest last: until then, readers, who go by the manifest, see the
checkpoint that was there before, or none. What was written or read last is kept on this machine as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec

from mint.errors import BadRequest, Busy, MintError
from mint.server.storage import IDENTITY

log = logging.getLogger("mint.server")

MANIFEST = "manifest.json"
FORMAT = 1
CACHE_BYTES = 20 << 30
"""What is kept on this machine besides; more is deleted, the longest unused first."""
_IN_USE_SECONDS = 3600.0
"""What was asked for this recently may still be being read."""


class ObjectStorage:
    def __init__(self, url: str, cache: Path, cache_bytes: int = CACHE_BYTES) -> None:
        self.url = url.rstrip("/")
        self._cache, self._cache_bytes = cache, cache_bytes
        cache.mkdir(parents=True, exist_ok=True)
        try:
            # Other servers write there too: a remembered listing would be a wrong one.
            self._files, root = fsspec.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise BadRequest(
                f"checkpoints cannot be kept at {url}: {error}. `pip install 'mint-rl[s3]'` brings what S3 needs; "
                "other stores have packages of their own."
            ) from error
        self._root = root.rstrip("/")
        self._deleting = ThreadPoolExecutor(max_workers=2, thread_name_prefix="mint-delete")

    def new_name(self, wanted: str) -> str:
        """Never used before, so that it needs no asking and what is kept on other machines cannot be out of date."""
        return f"{wanted}~{uuid.uuid4().hex[:8]}"

    def draft(self, name: str) -> Path:
        return self._cache / name

    def keep(self, name: str) -> None:
        folder, upload = self.draft(name), uuid.uuid4().hex[:12]
        files: dict[str, dict[str, Any]] = {}
        assert folder.is_dir(), f"nothing was written to {folder}"
        try:
            with self._reaching("written"):
                for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                    file = str(path.relative_to(folder))
                    files[file] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
                    self._files.put_file(str(path), self._at(name, upload, file))
                manifest = {"format": FORMAT, "upload": upload, "files": files}
                self._files.pipe_file(self._at(name, MANIFEST), json.dumps(manifest, indent=2).encode())
        except MintError:
            shutil.rmtree(folder, ignore_errors=True)
            self._delete_later(self._at(name, upload))
            raise
        self._delete_earlier_uploads(name, upload)
        self._make_room()

    def fetch(self, name: str) -> Path:
        folder = self._cache / name
        if not folder.is_dir():
            self._download(name, folder)
            self._make_room()
        os.utime(folder)
        return folder

    def delete(self, name: str) -> None:
        """Here at once; there on a thread, because callers do not wait."""
        shutil.rmtree(self._cache / name, ignore_errors=True)
        self._delete_later(self._at(name, MANIFEST), self._at(name))

    def identity(self) -> str:
        at = self._at(IDENTITY)
        with self._reaching("read"):
            if not self._files.exists(at):
                self._files.pipe_file(at, uuid.uuid4().hex.encode())
            return self._files.cat_file(at).decode().strip()

    def close(self) -> None:
        self._deleting.shutdown()

    # Reading --------------------------------------------------------------------------------------------------------

    def _download(self, name: str, folder: Path) -> None:
        manifest = self._manifest(name)
        part = self._cache / f".{uuid.uuid4().hex}.part"
        try:
            for file, expected in manifest["files"].items():
                target = part / file
                target.parent.mkdir(parents=True, exist_ok=True)
                self._download_file(name, manifest["upload"], file, target)
                _check(f"{self.url}/{name}/{manifest['upload']}/{file}", target, expected)
            folder.parent.mkdir(parents=True, exist_ok=True)
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another thread was first
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _manifest(self, name: str) -> dict[str, Any]:
        at = f"{self.url}/{name}/{MANIFEST}"
        try:
            with self._reaching("read"):
                manifest = json.loads(self._files.cat_file(self._at(name, MANIFEST)))
        except FileNotFoundError as error:
            raise BadRequest(
                f"checkpoint {self.url}/{name} was never written whole, or is damaged: {at} is missing."
            ) from error
        except ValueError as error:
            raise BadRequest(f"checkpoint {self.url}/{name} is damaged: {at} cannot be read ({error}).") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise BadRequest(f"{at} is not a manifest of format {FORMAT}, which this version of MinT reads.")
        return manifest

    def _download_file(self, name: str, upload: str, file: str, target: Path) -> None:
        try:
            with self._reaching("read"):
                self._files.get_file(self._at(name, upload, file), str(target))
        except FileNotFoundError as error:
            raise BadRequest(
                f"checkpoint {self.url}/{name} is damaged: {self.url}/{name}/{upload}/{file} is missing."
            ) from error

    # Room -----------------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        folders = [folder for folder in self._cache.glob("*/*/*") if folder.is_dir()]  # run, kind, name
        sizes = {folder: sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) for folder in folders}
        over = sum(sizes.values()) - self._cache_bytes
        for used, folder in sorted((folder.stat().st_mtime, folder) for folder in folders):
            if over <= 0 or used > time.time() - _IN_USE_SECONDS:
                return
            shutil.rmtree(folder, ignore_errors=True)
            over -= sizes[folder]

    def _delete_earlier_uploads(self, name: str, upload: str) -> None:
        """Of a save that was carried out again after a crash."""
        with self._reaching("listed"):
            found = self._files.ls(self._at(name), detail=False)
        earlier = [path for path in found if path.rstrip("/").rpartition("/")[2] not in (upload, MANIFEST)]
        if earlier:
            self._delete_later(*earlier)

    def _delete_later(self, *places: str) -> None:
        def work() -> None:
            for place in places:
                try:
                    self._files.rm(place, recursive=True)
                except FileNotFoundError:
                    pass
                except Exception as error:  # what it leaves is in no catalogue
                    log.warning("%s could not be deleted: %s", place, error)

        self._deleting.submit(work)

    def _at(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    @contextlib.contextmanager
    def _reaching(self, done: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, MintError, ValueError):
            raise
        except Exception as error:  # which library raises what is the file system's own business
            what = f"{type(error).__name__}: {error}"
            raise Busy(f"checkpoints at {self.url} cannot be {done} at present: {what}.") from error


def _check(at: str, file: Path, expected: dict[str, Any]) -> None:
    if (size := file.stat().st_size) != expected["bytes"]:
        raise BadRequest(f"checkpoint file {at} is damaged: it has {size} bytes, {MANIFEST} says {expected['bytes']}.")
    if _sha256(file) != expected["sha256"]:
        raise BadRequest(f"checkpoint file {at} is damaged: it does not match its SHA-256 in {MANIFEST}.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
