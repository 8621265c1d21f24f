"""Keys, usage and the runs of snapshots."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

LARGE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("hint", sa.String(), nullable=False),
        sa.Column("admin", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("changed", sa.Double(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=True),
        sa.Column("revoked", sa.Double(), nullable=True),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", LARGE, nullable=True),
        sa.Column("concurrent", sa.Integer(), nullable=True),
        sa.Column("adapters", sa.Integer(), nullable=True),
        sa.Column("disk_bytes", LARGE, nullable=True),
        sa.Column("budget_tokens", LARGE, nullable=True),
        sa.Column("budget_seconds", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("digest"),
    )
    with op.batch_alter_table("api_keys", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_api_keys_changed"), ["changed"], unique=False)
        batch_op.create_index(batch_op.f("ix_api_keys_name"), ["name"], unique=False)

    op.create_table(
        "snapshots",
        sa.Column("sampler_id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("sampler_id"),
    )
    op.create_table(
        "usage",
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("run", sa.String(), nullable=False),
        sa.Column("hour", sa.Integer(), nullable=False),
        sa.Column("requests", LARGE, nullable=False),
        sa.Column("prompt_tokens", LARGE, nullable=False),
        sa.Column("sampled_tokens", LARGE, nullable=False),
        sa.Column("trained_tokens", LARGE, nullable=False),
        sa.Column("engine_seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "run", "hour"),
    )
