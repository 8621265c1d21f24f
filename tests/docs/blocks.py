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
SMALL = ["--groups-per-batch", "4", "--tests", "4"]


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
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in block.text.replace("\\\n", " ").splitlines()]
    lines = [line for line in lines if line]
    if not all(line.startswith("mint ") for line in lines) or any(re.search(r"[|&;<$]", line) for line in lines):
        return None
    return [shortened(shlex.split(line)[1:]) for line in lines]


def shortened(words: list[str]) -> list[str]:
    """Runs that train do so in small batches, and two steps of them where the document lets them run to the end."""
    if words[0] == "quickstart":
        return [*words, "--steps", "2"]
    if words[0] != "train" or {"--list", "--fields"} & set(words):
        return words
    steps = "5" if "--dry-run" in words else "2"  # an estimate needs more than the four steps of its pilot
    limit = [] if "--max-steps" in words else ["--max-steps", steps]
    return [*words, *SMALL, *limit]
