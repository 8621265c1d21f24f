"""Stop strings, matched on the text of a growing list of tokens. Stop token ids need no more than a set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Tokens decoded again in front of a new one: its text may depend on them (leading spaces, split characters).
CONTEXT = 4

# What an incomplete character decodes to.
REPLACEMENT = "\ufffd"


class StopText:
    """Says after each token whether one of the strings has appeared in the text generated so far.

    Only the end of the text is kept, so a token costs the same however long the text has become.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any, prompt: Sequence[int]) -> None:
        self._strings = strings
        self._tokenizer = tokenizer
        self._keep = max(len(s) for s in strings) - 1  # characters that may be the beginning of a stop
        self._window = list(prompt[-CONTEXT:])
        self._known = len(self._decode())
        self._tail = ""

    def push(self, token: int) -> bool:
        self._window.append(token)
        text = self._decode()
        seen = self._tail + text[self._known :]
        if any(s in seen for s in self._strings):
            return True
        # A character takes four bytes at most: a longer wait is for one that never completes.
        if not text.endswith(REPLACEMENT) or len(self._window) > 3 * CONTEXT:
            self._tail = seen[len(seen) - self._keep :] if len(seen) > self._keep else seen
            self._window = self._window[-CONTEXT:]
            self._known = len(self._decode())
        return False

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False, clean_up_tokenization_spaces=False)
