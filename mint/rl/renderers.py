"""Between messages and tokens, as environments need it.

`Renderer` is the border; anything with these three methods will do. Two come with it: plain text for base models
(`"Q: ... A:"` prompts) and the tokenizer's own chat template, through `mint.chat`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from mint.chat import Tokenizer, cut_at_stop, encode_chat, turn_end_tokens
from mint.rl.types import Message, StopCondition
from mint.types import ModelInput


class Renderer(Protocol):
    def build_generation_prompt(self, messages: Sequence[Message]) -> ModelInput:
        """The conversation so far, ready for the assistant to speak."""
        ...

    def get_stop_sequences(self) -> StopCondition: ...

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, bool]:
        """The assistant's message, and whether it was properly ended."""
        ...


@dataclass(frozen=True)
class PlainRenderer:
    """The contents of all messages, one after another, and nothing else; ends at end-of-sequence or a stop string."""

    tokenizer: Tokenizer
    stop_strings: tuple[str, ...] = ()

    def build_generation_prompt(self, messages: Sequence[Message]) -> ModelInput:
        return ModelInput.from_ints(self.tokenizer.encode("".join(message["content"] for message in messages)))

    def get_stop_sequences(self) -> StopCondition:
        eos = self.tokenizer.eos_token_id
        return [*self.stop_strings, *([] if eos is None else [eos])]

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, bool]:
        whole = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        text = cut_at_stop(whole, self.stop_strings)
        ended = len(text) < len(whole) or (len(tokens) > 0 and tokens[-1] == self.tokenizer.eos_token_id)
        return {"role": "assistant", "content": text}, ended


@dataclass(frozen=True)
class ChatRenderer:
    """The tokenizer's chat template. A message keeps the text of its tool calls as it was written, so that rendering it
    again gives the tokens that were sampled and several turns stay one sequence."""

    tokenizer: Tokenizer
    tools: tuple[Mapping[str, Any], ...] = ()
    """Descriptions of tools, for templates that show them to the model."""

    @cached_property
    def _ends(self) -> list[int]:
        return turn_end_tokens(self.tokenizer)

    def build_generation_prompt(self, messages: Sequence[Message]) -> ModelInput:
        return ModelInput.from_ints(encode_chat(self.tokenizer, messages, self.tools))

    def get_stop_sequences(self) -> StopCondition:
        return list(self._ends)

    def parse_response(self, tokens: Sequence[int]) -> tuple[Message, bool]:
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return {"role": "assistant", "content": text}, len(tokens) > 0 and tokens[-1] in self._ends
