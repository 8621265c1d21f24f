"""Writes docs/arguments.md from the table of `tests/arguments/table.py`: python -m docs.generate_arguments"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from mint.rl.config import Config
from tests.arguments.table import TABLE, Entry, Inert, Refused

PAGE = Path(__file__).parent / "arguments.md"

HEAD = """# Every argument, and what it does

Made by `python -m docs.generate_arguments` from the table that the tests hold against the code: an argument that is
neither honoured nor refused by name, and is not listed here as inert with a reason, fails the tests.

- **honoured**: the test named shows that it changes what happens.
- **refused**: given a value other than the default it is answered with 400 and its name, by the test named.
- **inert**: it is accepted and does nothing, for the reason given.

Whatever is not on this page is refused by name: unknown JSON fields, unknown protobuf fields (by number), unknown
keyword arguments, unknown loss options and inputs. `get_server_capabilities` lists the losses with their options, and
the fields that are honoured and refused.
"""

CONFIG = """
## `mint.rl.train.Config`

Every one of its {count} fields changes what a run asks the service or writes, by
`tests/rl/test_config_fields.py`, which varies them one by one; an unknown one is refused.
"""


def page() -> str:
    parts = [HEAD]
    for title, surfaces in TABLE.items():
        parts.append(f"\n## {title}\n\n| where | argument | | shown by, or why |\n|---|---|---|---|\n")
        for where, arguments in surfaces.items():
            for name, entry in arguments.items():
                parts.append(f"| `{where}` | `{name}` | {_row(entry)} |\n")
    parts.append(CONFIG.format(count=len(fields(Config))))
    return "".join(parts)


def _row(entry: Entry) -> str:
    if isinstance(entry, Inert):
        return f"inert | {entry.reason}"
    if isinstance(entry, Refused):
        return f"refused | `tests/{entry.test}`"
    return f"honoured | `tests/{entry}`"


if __name__ == "__main__":
    PAGE.write_text(page())
