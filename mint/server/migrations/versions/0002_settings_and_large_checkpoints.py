"""What all servers of a database agree on; checkpoints of 2 GiB and more on PostgreSQL, whose integers end there."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "settings",
        sa.Column("name", sa.String(), primary_key=True),
        sa.Column("value", sa.String(), nullable=False),
    )
    if op.get_context().dialect.name != "sqlite":  # whose integers have no end
        op.alter_column("checkpoints", "size_bytes", type_=sa.BigInteger())
