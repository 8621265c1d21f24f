"""The catalogue of checkpoints: what they are called, who may see them and until when.

What is in a checkpoint is the backend's business; where its files lie is that of `mint.server.storage`, packing and
unpacking archives that of `mint.server.archive`.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Select, func, or_, select, true
from sqlalchemy.exc import IntegrityError, OperationalError

from mint.errors import BadRequest, Busy, Forbidden, NotFound
from mint.server.auth import User
from mint.server.room import is_full
from mint.server.storage import IDENTITY, Storage
from mint.server.store import CheckpointRow, RunRow, SettingRow, Store
from mint.types import CHECKPOINT_KINDS, Checkpoint, Cursor, LoraConfig, ParsedCheckpointTinkerPath, TrainingRun

_NAME = re.compile(r"[^/\\\x00-\x1f\x7f]{1,120}")
_LONGEST_TTL = 10 * 366 * 24 * 3600
_STORAGE = "checkpoints"
UPLOADS, UPLOAD_NAME = "ckpt_", "uploaded"


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def expiry(ttl_seconds: int | None) -> float | None:
    if ttl_seconds is None:
        return None
    if not 1 <= ttl_seconds <= _LONGEST_TTL:
        raise BadRequest(f"ttl_seconds is {ttl_seconds}; it must be between 1 and {_LONGEST_TTL} (ten years), or null.")
    return time.time() + ttl_seconds


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise BadRequest(
            f"checkpoint name {name!r} cannot be used; give 1 to 120 characters without slashes or control "
            "characters, for example 'step_0010'."
        )


class Checkpoints:
    def __init__(self, store: Store, storage: Storage) -> None:
        self._store = store
        self._storage = storage
        self._keeping = ThreadPoolExecutor(max_workers=4, thread_name_prefix="mint-keep")
        self._being_saved: set[tuple[str, str, str]] = set()
        self._being_repeated: set[tuple[str, str, str]] = set()

    # Saving ---------------------------------------------------------------------------------------------------------

    def reserve(self, run_id: str, kind: str, name: str, overwrite: bool = False) -> str:
        """The name of its files, once its own is known to be good and free; `release_name` ends the claim."""
        check_name(name)
        if (run_id, kind, name) in self._being_saved:
            raise BadRequest(f"tinker://{run_id}/{kind}/{name} is being saved already.")
        if (run_id, kind, name) in self._being_repeated:
            raise Busy(
                f"tinker://{run_id}/{kind}/{name} is being saved, as it was when the server ended; ask again when that "
                "is over."
            )
        if not overwrite and self._find(run_id, kind, name) is not None:
            raise BadRequest(
                f"tinker://{run_id}/{kind}/{name} exists already; choose another name, delete it first, or pass "
                "overwrite=True to save_state."
            )
        self._being_saved.add((run_id, kind, name))
        return self._storage.new_name(f"{quote(run_id, safe='')}/{kind}/{quote(name, safe=' ')}")

    def reserve_again(self, run_id: str, kind: str, name: str, folder: str) -> CheckpointRow | None:
        """For a save that was accepted before and is carried out again; its entry if it had come as far as that."""
        row = self._find(run_id, kind, name)
        self._being_repeated.add((run_id, kind, name))
        return row if row is not None and row.folder == folder else None

    def draft(self, folder: str) -> Path:
        return self._storage.draft(folder)

    def kept(self, folder: str, written: Future[int]) -> Future[int]:
        """Done when what the backend writes is where checkpoints are kept; with the same result."""
        kept: Future[int] = Future()

        def keep() -> None:
            try:
                self._storage.keep(folder)
                kept.set_result(written.result())
            except Exception as error:
                kept.set_exception(error)

        def go_on(_: Future[int]) -> None:
            if written.cancelled():
                kept.cancel()
            elif (error := written.exception()) is not None:
                kept.set_exception(error)
            else:
                self._keeping.submit(keep)

        def give_up(_: Future[int]) -> None:
            if kept.cancelled():
                written.cancel()

        written.add_done_callback(go_on)
        kept.add_done_callback(give_up)
        return kept

    def discard(self, folder: str) -> None:
        """Files in no catalogue are nobody's."""
        self._storage.delete(folder)

    def release_name(self, run_id: str, kind: str, name: str) -> None:
        self._being_saved.discard((run_id, kind, name))
        self._being_repeated.discard((run_id, kind, name))

    def record(
        self,
        run: RunRow,
        kind: str,
        name: str,
        folder: str,
        size_bytes: int,
        expires: float | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> CheckpointRow:
        """Enters what was kept into the catalogue; one of the same name is replaced."""
        same_name = select(CheckpointRow).where(
            CheckpointRow.run_id == run.id, CheckpointRow.kind == kind, CheckpointRow.name == name
        )
        replaced = self._store.all(same_name)  # expired ones too
        row = CheckpointRow(
            run_id=run.id,
            kind=kind,
            name=name,
            owner=run.owner,
            folder=folder,
            size_bytes=size_bytes,
            expires=expires,
            user_metadata=user_metadata,
        )
        self._store.replace(replaced, row)
        for old in replaced:
            if old.folder != row.folder:  # a save that is carried out again replaces itself
                self._storage.delete(old.folder)
        return row

    def copy(self, source: CheckpointRow, run: RunRow, expires: float | None) -> CheckpointRow:
        folder = self.reserve(run.id, source.kind, source.name)
        try:
            shutil.copytree(self.fetch(source), self.draft(folder))
            self._storage.keep(folder)
            return self.record(run, source.kind, source.name, folder, source.size_bytes, expires, source.user_metadata)
        finally:
            self.release_name(run.id, source.kind, source.name)

    def adopt(
        self, unpacked: Path, base_model: str, lora: LoraConfig, user: User, kind: str = "weights",
        name: str = UPLOAD_NAME, source: str = "upload",
    ) -> CheckpointRow:  # fmt: skip
        """A checkpoint that no run of the user's saved, with a run of its own to live in."""
        run_id = f"{UPLOADS}{uuid.uuid4().hex[:16]}"
        size_bytes = sum(file.stat().st_size for file in unpacked.rglob("*") if file.is_file())
        run = RunRow(
            id=run_id,
            owner=user.name,
            base_model=base_model,
            rank=lora.rank,
            train_unembed=lora.train_unembed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
            user_metadata={"source": source},
        )
        folder = f"{run_id}/{kind}/{quote(name, safe=' ')}"
        self.draft(folder).parent.mkdir(parents=True)
        shutil.move(unpacked, self.draft(folder))  # which may be another file system
        self._storage.keep(folder)
        self._store.add(run)
        return self.record(run, kind, name, folder, size_bytes)

    # Finding --------------------------------------------------------------------------------------------------------

    def fetch(self, row: CheckpointRow) -> Path:
        """A folder on this machine with its files, which may have to be downloaded first: not on the event loop."""
        return self._storage.fetch(row.folder)

    def run_of(self, row: CheckpointRow) -> RunRow:
        run = self._store.get(RunRow, row.run_id)
        assert run is not None, f"checkpoint {row.path} without a run"
        return run

    def resolve(self, path: str, user: User) -> CheckpointRow:
        """The checkpoint of a tinker:// or mint:// path, or of an upload's ckpt_ id; others' only if published."""
        if path.startswith(UPLOADS):
            path = f"tinker://{path}/weights/{UPLOAD_NAME}"
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
        kind, _, name = parsed.checkpoint_id.partition("/")
        row = self._find(parsed.training_run_id, kind, name)
        if row is None or not (user.sees(row.owner) or row.public):
            raise NotFound(
                f"no checkpoint {path!r}; it was never saved here, has expired or was deleted, or is another user's. "
                "list_user_checkpoints() shows what there is."
            )
        return row

    def own(self, run_id: str, kind: str, name: str, user: User) -> CheckpointRow:
        row = self.resolve(f"tinker://{run_id}/{kind}/{name}", user)
        if not user.sees(row.owner):
            raise Forbidden(f"{row.path} belongs to another user; it can be read, not changed.")
        return row

    def newest(self, run_id: str, kind: str = "weights", published: bool = False) -> CheckpointRow | None:
        query = _alive().where(CheckpointRow.run_id == run_id, CheckpointRow.kind == kind)
        if published:
            query = query.where(CheckpointRow.public)
        return next(iter(self._store.all(query.order_by(CheckpointRow.created.desc()).limit(1))), None)

    def has_published(self, run_id: str) -> bool:
        return bool(self._store.all(_alive().where(CheckpointRow.run_id == run_id, CheckpointRow.public).limit(1)))

    def of_run(self, run_id: str) -> Sequence[CheckpointRow]:
        return self._store.all(_alive().where(CheckpointRow.run_id == run_id).order_by(CheckpointRow.created))

    def of_user(
        self, user: User, limit: int, offset: int, kinds: Collection[str] = CHECKPOINT_KINDS
    ) -> tuple[Sequence[CheckpointRow], int]:
        theirs = _alive().where(CheckpointRow.owner == user.name, CheckpointRow.kind.in_(kinds))
        return self._store.page(theirs.order_by(CheckpointRow.created.desc()), limit, offset)

    def samplable(self, user: User) -> Sequence[CheckpointRow]:
        theirs = true() if user.admin else or_(CheckpointRow.owner == user.name, CheckpointRow.public)
        return self._store.all(_alive().where(CheckpointRow.kind == "sampler_weights", theirs))

    def bytes_of(self, owner: str) -> int:
        """What the owner's checkpoints take on disk."""
        with self._store.transaction() as session:
            query = select(func.sum(CheckpointRow.size_bytes)).where(CheckpointRow.owner == owner)
            return int(session.scalar(query) or 0)

    def _find(self, run_id: str, kind: str, name: str) -> CheckpointRow | None:
        query = _alive().where(CheckpointRow.run_id == run_id, CheckpointRow.kind == kind, CheckpointRow.name == name)
        return next(iter(self._store.all(query)), None)

    def close(self) -> None:
        self._keeping.shutdown()
        self._storage.close()

    # Ending ---------------------------------------------------------------------------------------------------------

    def delete(self, row: CheckpointRow) -> None:
        try:
            self._store.replace([row])
        except OperationalError as error:
            if not is_full(error):
                raise
            self._storage.delete(row.folder)  # which makes the room that forgetting it takes
            self._store.replace([row])
        else:
            self._storage.delete(row.folder)

    def sweep(self) -> None:
        for row in self._store.all(select(CheckpointRow).where(CheckpointRow.expires <= time.time())):
            self.delete(row)

    # Describing -----------------------------------------------------------------------------------------------------

    def describe(self, row: CheckpointRow) -> Checkpoint:
        return Checkpoint(
            checkpoint_id=f"{row.kind}/{row.name}",
            checkpoint_type=CHECKPOINT_KINDS[row.kind],
            time=moment(row.created),
            tinker_path=row.path,
            size_bytes=row.size_bytes,
            public=row.public,
            expires_at=None if row.expires is None else moment(row.expires),
            user_metadata=row.user_metadata,
        )

    def describe_run(
        self, run: RunRow, user: User, last_request: float | None = None, corrupted: bool = False
    ) -> TrainingRun:
        """Whoever sees the run only because something of it was published is told of that alone."""
        within = user.sees(run.owner)
        training, sampler = (self.newest(run.id, kind, not within) for kind in ("weights", "sampler_weights"))
        return TrainingRun(
            training_run_id=run.id,
            base_model=run.base_model,
            model_owner=run.owner,
            is_lora=True,
            last_request_time=moment(last_request or run.last_request),
            corrupted=corrupted,
            lora_rank=run.rank,
            last_checkpoint=self.describe(training) if training else None,
            last_sampler_checkpoint=self.describe(sampler) if sampler else None,
            user_metadata=run.user_metadata if within else {},
        )


def agree_on_storage(store: Store, storage: Storage) -> None:
    """All servers of one database must keep their checkpoints in one place: each lists and deletes those of all."""
    found = f"{storage.identity()} {storage.url}"
    if store.get(SettingRow, _STORAGE) is None:
        with contextlib.suppress(IntegrityError):  # another server was first
            store.add(SettingRow(name=_STORAGE, value=found))
    known = store.get(SettingRow, _STORAGE)
    assert known is not None
    if known.value.split()[0] == found.split()[0]:
        return
    empty = not store.all(select(CheckpointRow).limit(1))
    if not (empty and store.alone(lambda: store.update(known, value=found))):
        raise BadRequest(
            f"the checkpoints of this database are at {known.value.partition(' ')[2]}, and this server was told to "
            f"keep them at {storage.url}, which is another place. Give --checkpoints as the others do; to move them, "
            f"end all servers and copy everything there, the file {IDENTITY} included."
        )


def cursor(limit: int, offset: int, total: int) -> Cursor:
    return Cursor(offset=offset, limit=limit, total_count=total)


def lora_of(run: RunRow) -> LoraConfig:
    return LoraConfig(
        rank=run.rank, train_unembed=run.train_unembed, train_mlp=run.train_mlp, train_attn=run.train_attn
    )


def _alive() -> Select[CheckpointRow]:
    return select(CheckpointRow).where(or_(CheckpointRow.expires.is_(None), CheckpointRow.expires > time.time()))
