"""Run by Alembic for each of its commands, over the connection it was handed."""

from alembic import context

from mint.server.store import Row

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Row.metadata,
    render_as_batch=True,  # SQLite changes a table by making it anew
)
with context.begin_transaction():
    context.run_migrations()
