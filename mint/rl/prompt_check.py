"""Whether a prompt, as tokens, looks as if it was made for this model; asked when rollouts are logged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

MARKER = re.compile(
    r"<\|[a-z_]+\|>|<(?:start_of_turn|end_of_turn|bos|eos)>|\[/?INST\]|<</?SYS>>|</?s>|<｜[^｜<>]+｜>", re.IGNORECASE
)
"""What chat templates put around turns."""
SHARED = 0.5
"""Of the tokens. Prompts put together from pieces are nearly, not wholly, what the tokenizer makes of their text."""


def oddity(tokenizer: Any, tokens: Sequence[int], text: str) -> str | None:
    """What does not fit, as the end of a sentence about the prompt."""
    for marker in dict.fromkeys(MARKER.findall(text)):
        if len(tokenizer.encode(marker, add_special_tokens=False)) > 1:
            return f"contains {marker}, which is a marker of another model's chat template and plain text to this one"
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and list(tokens[:2]) == [bos, bos]:
        return "begins with the beginning-of-text token twice: the template adds one and so does the encoding"
    again = Counter(tokenizer.encode(text, add_special_tokens=False))
    if (again & Counter(tokens)).total() < SHARED * len(tokens):
        return "has other tokens than this model's tokenizer makes of its text"
    return None
