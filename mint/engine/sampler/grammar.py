"""Regular expressions and JSON schemas that answers have to follow: compiled once (`Grammars`), then followed by each
sequence on its own (`Guide`). The work is llguidance's; here is what it knows of a model and how its errors are told.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Set
from functools import cached_property
from typing import Any

import numpy as np

from mint.engine.model import BaseModel
from mint.errors import BadRequest, MintError, NotFound
from mint.types import SamplingParams

KEPT = 32
"""Compiled grammars that are kept for the next request: a loop asks for one and the same all the time."""

LAYOUT = {"whitespace_pattern": r" ?|\n[ \t]{0,20}"}
"""Between the parts of JSON a blank, or a line break and its indentation. A weak policy would write blanks for ever."""


class Grammar:
    """A compiled grammar, at its beginning."""

    def __init__(self, name: str, matcher: Any) -> None:
        """`name` is how errors speak of it."""
        self.name = name
        self.matcher = matcher


class Grammars:
    """Of one model. Compiling may take a second, so it is called on a thread of its own."""

    def __init__(self, model: BaseModel) -> None:
        self._model = model
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()

    def compiled(self, params: SamplingParams) -> Grammar:
        name, text = _text(params)
        if text not in self._compiled:
            limits = _llguidance().LLParserLimits(verbose_errors=False)
            grammar = Grammar(name, _llguidance().LLMatcher(self._tokenizer, text, log_level=0, limits=limits))
            if (
                error := _plain(grammar.matcher.get_error()) or _error_at_first(grammar, self._model.eos_ids)
            ) is not None:
                raise BadRequest(f"the {name} cannot be followed: {error}")
            self._compiled[text] = grammar
        self._compiled.move_to_end(text)
        while len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        return self._compiled[text]

    @cached_property
    def _tokenizer(self) -> Any:
        if not self._model.eos_ids:
            raise BadRequest(f"{self._model.facts.name} has no end-of-sequence token to end an answer with.")
        try:
            backend = self._model.tokenizer.backend_tokenizer
        except (AttributeError, NotFound) as error:
            raise BadRequest(
                f"{self._model.facts.name} has no tokenizer of the tokenizers library (tokenizer.json), which regex "
                "and json_schema need."
            ) from error
        return _llguidance().LLTokenizer(
            backend.to_str(), n_vocab=self._model.facts.vocab_size, eos_token=sorted(self._model.eos_ids)
        )


class Guide:
    """One sequence's way through a grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self._name = grammar.name
        self._matcher = grammar.matcher.deep_copy()
        self._consumed = 0
        self.fault: MintError | None = None
        """Why it cannot go on."""

    def forbidden(self, drawn: list[int]) -> np.ndarray:
        """True for each token that may not follow those drawn."""
        new, self._consumed = drawn[self._consumed :], len(drawn)
        self._matcher.consume_tokens(new)
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed_V = np.unpackbits(mask, bitorder="little").astype(bool)
        if self._matcher.is_error() or not allowed_V.any():
            self.fault = BadRequest(
                f"no token continues the answer in the sense of the {self._name}, after {len(drawn)} tokens: "
                f"{_plain(self._matcher.get_error()) or 'the vocabulary has none'}."
            )
        return ~allowed_V


def _text(params: SamplingParams) -> tuple[str, str]:
    """What it is called, and how llguidance writes it."""
    matcher = _llguidance().LLMatcher
    if params.regex is not None:
        return "regex", matcher.grammar_from_regex(params.regex)
    try:
        return "json_schema", matcher.grammar_from_json_schema(json.dumps(params.json_schema), overrides=LAYOUT)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the json_schema cannot be followed: {error}") from error


def _error_at_first(grammar: Grammar, ends: Set[int]) -> str | None:
    """Two tokens of the way: what grows out of bounds mostly does so at once, and here it holds up nobody."""
    guide, drawn = Guide(grammar), list[int]()
    for _ in range(2):
        allowed = np.flatnonzero(~guide.forbidden(drawn)).tolist()
        if guide.fault is not None:
            return str(guide.fault)
        if (token := next((token for token in allowed if token not in ends), None)) is None:
            break
        drawn.append(token)
    return None


def _plain(error: str) -> str:
    return error.replace("<non-verbose/>", "").strip().rstrip(".")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise BadRequest("regex and json_schema need the package llguidance on the server: pip install it.") from error
    return llguidance
