"""What a model reads: token ids in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import index
from typing import Literal

from mint.errors import BadRequest


@dataclass(frozen=True)
class EncodedTextChunk:
    """A run of token ids."""

    tokens: Sequence[int]
    type: Literal["encoded_text"] = "encoded_text"

    @property
    def length(self) -> int:
        return len(self.tokens)


ModelInputChunk = EncodedTextChunk


@dataclass(frozen=True)
class ModelInput:
    """The tokens a model reads: a list of chunks, of which text is the only kind this system has."""

    chunks: Sequence[ModelInputChunk]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        return cls([EncodedTextChunk(_token_ids(tokens))])

    @classmethod
    def empty(cls) -> ModelInput:
        return cls([])

    def to_ints(self) -> list[int]:
        return list(chain.from_iterable(map(int, chunk.tokens) for chunk in self.chunks))

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        return ModelInput([*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        return self.append(EncodedTextChunk([int(token)]))


def _token_ids(tokens: object) -> list[int]:
    """Of a list, an array or a tensor: whole numbers and nothing that would have to be rounded to one."""
    if isinstance(tokens, str):
        raise BadRequest(f"from_ints takes token ids, got the text {tokens[:40]!r}; use tokenizer.encode(text).")
    if isinstance(tokens, Mapping):  # what a tokenizer gives when it is called
        raise BadRequest(f"from_ints takes a list of token ids, got a mapping of {list(tokens)}; take ['input_ids'].")
    if isinstance(tokens, Iterable):
        with suppress(TypeError):
            return list(map(index, tokens))
    raise BadRequest(
        f"from_ints takes one flat list of token ids, got {tokens!r:.60}; tokenizer.encode(text) makes one of a text."
    )
