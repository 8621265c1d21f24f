"""`python -m mint.server.migrations "what changes"`: writes the next revision."""

import sys
import tempfile
from pathlib import Path

from mint.server import migrations
from mint.server.database import Database

if len(sys.argv) != 2:
    sys.exit('usage: python -m mint.server.migrations "what changes"')
with tempfile.TemporaryDirectory() as folder:
    database = Database(Path(folder) / "head.db")
    print(migrations.write_revision(database.engine, sys.argv[1]))
    database.close()
