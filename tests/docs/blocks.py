"""Code blocks of the README and the documentation, and how they are run.

Python blocks of a page run one after another in one namespace, shell blocks in one folder. A block with a title is a
file. One that cannot run says so in its first line, `# not run in the tests: <reason>`, where every reader sees it.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)(.*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')
EXCUSE = re.compile(r"\A# not run in the tests: .{10,}")
RUN = ("python", "sh")
SHOWN = ("", "text", "json", "toml", "yaml", "html")
"""Languages of which a block without a title is only shown."""
SHORTER = {
    "mint quickstart": "mint quickstart --steps 2",
    "mint train addition --group-size 4 --learning-rate 5e-4 --log-path runs/smaller":
        "mint train addition --group-size 4 --learning-rate 5e-4 --log-path runs/smaller --max-steps 2 --tests 4",
    "mint train mine.toml --dry-run": "mint train mine.toml --dry-run --max-steps 5 --tests 4",
}  # fmt: skip
"""Commands of the documents that the tests run with fewer steps."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    title: str | None
    text: str

    @property
    def excused(self) -> bool:
        return EXCUSE.match(self.text) is not None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        title = TITLE.search(match.group(2))
        line = text[: match.start()].count("\n") + 1
        found.append(Block(page, line, match.group(1), title.group(1) if title else None, match.group(3)))
    return found


def commands(block: Block) -> list[list[str]] | None:
    """The words of every line, if all are `mint` commands without shell syntax; None: a shell is needed."""
    lines = [line.strip() for line in block.text.replace("\\\n", " ").splitlines()]
    lines = [" ".join(line.split()) if "'" not in line and '"' not in line else line for line in lines]
    lines = [SHORTER.get(line, line) for line in lines if line and not line.startswith("#")]
    if not all(line.startswith("mint ") for line in lines) or any(re.search(r"[|&;<$]", line) for line in lines):
        return None
    return [shlex.split(line, comments=True)[1:] for line in lines]
