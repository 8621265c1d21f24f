"""How a question is put to the model and where in its response the answer stands; shared by the bridges."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mint.errors import BadRequest
from mint.rl.answers import extract_answer


@dataclass(frozen=True)
class PromptFormat:
    template: str
    """With `{question}` in it."""
    extract: Callable[[str], str | None]
    """The answer as the response gives it; None if it is not where it was asked to be."""

    def prompt(self, question: str) -> str:
        return self.template.replace("{question}", question)


def _last(pattern: str) -> Callable[[str], str | None]:
    compiled = re.compile(pattern, re.DOTALL)

    def extract(response: str) -> str | None:
        found = compiled.findall(response)
        return found[-1].strip() if found else None

    return extract


def _whole(response: str) -> str | None:
    return response.strip() or None


_TWICE_NESTED = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"

FORMATS = {
    "boxed": PromptFormat(
        "{question}\n\nWrite your final answer in \\boxed{}.", _last(rf"\\boxed\{{({_TWICE_NESTED})\}}")
    ),
    "hashes": PromptFormat("{question}\n\nEnd with your final answer after ####.", _last(r"####([^\n]*)")),
    "tags": PromptFormat(
        "{question}\n\nWrite your final answer as <answer>...</answer>.", _last(r"<answer>(.*?)</answer>")
    ),
    # For base models: the first takes the number a response gives, the second all of the response.
    "qa": PromptFormat("Q: {question}\nA:", extract_answer),
    "completion": PromptFormat("{question}", _whole),
}


def find_format(name: str) -> PromptFormat:
    if name not in FORMATS:
        raise BadRequest(f"the prompt format {name!r} is none of {', '.join(FORMATS)}")
    return FORMATS[name]
