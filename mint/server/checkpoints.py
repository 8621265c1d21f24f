"""The catalogue of checkpoints: where they lie, what they are called, who may see them and until when.

What is in a checkpoint is the backend's business; packing and unpacking archives lives in `mint.server.archive`.
"""

from __future__ import annotations

import re
import shutil
import time
import uuid
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Select, func, or_, select, true

from mint.errors import BadRequest, Forbidden, NotFound
from mint.server.auth import User
from mint.server.store import CheckpointRow, RunRow, Store
from mint.types import CHECKPOINT_KINDS, Checkpoint, Cursor, LoraConfig, ParsedCheckpointTinkerPath, TrainingRun

_NAME = re.compile(r"[^/\\\x00-\x1f\x7f]{1,120}")
_LONGEST_TTL = 10 * 366 * 24 * 3600
UPLOADS, UPLOAD_NAME = "ckpt_", "uploaded"


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def expiry(ttl_seconds: int | None) -> float | None:
    if ttl_seconds is None:
        return None
    if not 1 <= ttl_seconds <= _LONGEST_TTL:
        raise BadRequest(f"ttl_seconds is {ttl_seconds}; it must be between 1 and {_LONGEST_TTL} (ten years), or null.")
    return time.time() + ttl_seconds


class Checkpoints:
    def __init__(self, store: Store, root: Path) -> None:
        self._store = store
        self._root = root
        self._being_saved: set[tuple[str, str, str]] = set()

    # Saving ---------------------------------------------------------------------------------------------------------

    def reserve(self, run_id: str, kind: str, name: str, overwrite: bool = False) -> Path:
        """A folder to write to, once the name is known to be good and free; `release_name` ends the claim."""
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise BadRequest(
                f"checkpoint name {name!r} cannot be used; give 1 to 120 characters without slashes or control "
                "characters, for example 'step_0010'."
            )
        if (run_id, kind, name) in self._being_saved:
            raise BadRequest(f"tinker://{run_id}/{kind}/{name} is being saved already.")
        if not overwrite and self._find(run_id, kind, name) is not None:
            raise BadRequest(
                f"tinker://{run_id}/{kind}/{name} exists already; choose another name, delete it first, or pass "
                "overwrite=True to save_state."
            )
        self._being_saved.add((run_id, kind, name))
        folder = self._root / quote(run_id, safe="") / kind / quote(name, safe=" ")
        return folder.with_name(f"{folder.name}~{uuid.uuid4().hex[:8]}") if folder.exists() else folder

    def reserve_again(self, run_id: str, kind: str, name: str, folder: str) -> Path:
        """For a save that was accepted before and is carried out again: to where it was going then."""
        self._being_saved.add((run_id, kind, name))
        return self._root / folder

    def relative(self, folder: Path) -> str:
        return str(folder.relative_to(self._root))

    def release_name(self, run_id: str, kind: str, name: str) -> None:
        self._being_saved.discard((run_id, kind, name))

    def record(
        self,
        run: RunRow,
        kind: str,
        name: str,
        folder: Path,
        size_bytes: int,
        expires: float | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> CheckpointRow:
        """Enters a written folder into the catalogue; one of the same name is replaced."""
        same_name = select(CheckpointRow).where(
            CheckpointRow.run_id == run.id, CheckpointRow.kind == kind, CheckpointRow.name == name
        )
        replaced = self._store.all(same_name)  # expired ones too
        row = CheckpointRow(
            run_id=run.id,
            kind=kind,
            name=name,
            owner=run.owner,
            folder=self.relative(folder),
            size_bytes=size_bytes,
            expires=expires,
            user_metadata=user_metadata,
        )
        self._store.replace(replaced, row)
        for old in replaced:
            if old.folder != row.folder:  # a save that is carried out again replaces itself
                shutil.rmtree(self.folder(old), ignore_errors=True)
        return row

    def copy(self, source: CheckpointRow, run: RunRow, expires: float | None) -> CheckpointRow:
        folder = self.reserve(run.id, source.kind, source.name)
        try:
            shutil.copytree(self.folder(source), folder)
            return self.record(run, source.kind, source.name, folder, source.size_bytes, expires, source.user_metadata)
        finally:
            self.release_name(run.id, source.kind, source.name)

    def adopt(self, unpacked: Path, base_model: str, lora: LoraConfig, user: User) -> CheckpointRow:
        """A checkpoint that came from elsewhere, with a run of its own to live in."""
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
            user_metadata={"source": "upload"},
        )
        folder = self._root / run_id / "weights" / UPLOAD_NAME
        folder.parent.mkdir(parents=True)
        unpacked.rename(folder)
        self._store.add(run)
        return self.record(run, "weights", UPLOAD_NAME, folder, size_bytes)

    # Finding --------------------------------------------------------------------------------------------------------

    def folder(self, row: CheckpointRow) -> Path:
        return self._root / row.folder

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
            return session.scalar(query) or 0

    def _find(self, run_id: str, kind: str, name: str) -> CheckpointRow | None:
        query = _alive().where(CheckpointRow.run_id == run_id, CheckpointRow.kind == kind, CheckpointRow.name == name)
        return next(iter(self._store.all(query)), None)

    # Ending ---------------------------------------------------------------------------------------------------------

    def delete(self, row: CheckpointRow) -> None:
        self._store.replace([row])
        shutil.rmtree(self.folder(row), ignore_errors=True)

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


def cursor(limit: int, offset: int, total: int) -> Cursor:
    return Cursor(offset=offset, limit=limit, total_count=total)


def lora_of(run: RunRow) -> LoraConfig:
    return LoraConfig(
        rank=run.rank, train_unembed=run.train_unembed, train_mlp=run.train_mlp, train_attn=run.train_attn
    )


def _alive() -> Select[CheckpointRow]:
    return select(CheckpointRow).where(or_(CheckpointRow.expires.is_(None), CheckpointRow.expires > time.time()))
