"""Rows about tenants: their keys, what they used, which run a snapshot was taken of. Times: seconds since 1970."""

from __future__ import annotations

import time

from sqlalchemy.orm import Mapped, mapped_column

from mint.server.store import LARGE, Row


class KeyRow(Row):
    """An API key. It is never deleted, so that what it owns keeps its owner and a server never falls open."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    """Owner of whatever is made with the key; stays when the key is renamed or replaced."""
    name: Mapped[str] = mapped_column(index=True)
    digest: Mapped[str] = mapped_column(unique=True)
    """SHA-256 of the key, in hex."""
    hint: Mapped[str]
    """How the key begins, for people who look for it."""
    admin: Mapped[bool] = mapped_column(default=False)
    created: Mapped[float] = mapped_column(default=time.time)
    changed: Mapped[float] = mapped_column(default=time.time, index=True)
    """Running servers look for newer ones than they know."""
    expires: Mapped[float | None]
    revoked: Mapped[float | None]
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None] = mapped_column(LARGE)
    concurrent: Mapped[int | None]
    adapters: Mapped[int | None]
    disk_bytes: Mapped[int | None] = mapped_column(LARGE)
    budget_tokens: Mapped[int | None] = mapped_column(LARGE)
    budget_seconds: Mapped[float | None]


class UsageRow(Row):
    """What one owner used in one hour, for one of its runs or, under the empty name, for none."""

    __tablename__ = "usage"

    owner: Mapped[str] = mapped_column(primary_key=True)
    run: Mapped[str] = mapped_column(primary_key=True)
    hour: Mapped[int] = mapped_column(primary_key=True)
    requests: Mapped[int] = mapped_column(LARGE, default=0)
    prompt_tokens: Mapped[int] = mapped_column(LARGE, default=0)
    sampled_tokens: Mapped[int] = mapped_column(LARGE, default=0)
    trained_tokens: Mapped[int] = mapped_column(LARGE, default=0)
    engine_seconds: Mapped[float] = mapped_column(default=0.0)


class SnapshotRow(Row):
    """The run that the snapshot behind a sampling session was taken of."""

    __tablename__ = "snapshots"

    sampler_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str]
