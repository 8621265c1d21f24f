"""Sessions, runs, samplers and checkpoints.

Databases from before there were revisions have these tables, so each is made only where it is missing.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("sdk_version", sa.String()),
        sa.Column("display_name", sa.String()),
        sa.Column("project_id", sa.String()),
        sa.Column("ended", sa.String()),
        if_not_exists=True,
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("session_id", sa.String(), sa.ForeignKey("sessions.id")),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("last_request", sa.Double(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "samplers",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("session_id", sa.String(), sa.ForeignKey("sessions.id"), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("model_path", sa.String()),
        sa.Column("ephemeral", sa.Boolean(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("run_id", sa.String(), sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("folder", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("expires", sa.Double()),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.JSON()),
        sa.UniqueConstraint("run_id", "kind", "name"),
        sqlite_autoincrement=True,
        if_not_exists=True,
    )
    for table, column in (
        ("sessions", "owner"),
        ("runs", "session_id"),
        ("runs", "owner"),
        ("samplers", "session_id"),
        ("checkpoints", "run_id"),
        ("checkpoints", "owner"),
    ):
        op.create_index(f"ix_{table}_{column}", table, [column], if_not_exists=True)
