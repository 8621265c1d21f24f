"""Chat messages to tokens and back: templates, the tokens that end a turn, tool calls.

Works with any tokenizer that has `encode`, `decode` and `apply_chat_template`, such as transformers'. `FolderTokenizer`
is one made of a model folder's files alone, for places where importing transformers (two seconds, and torch with it)
is too much. Templates run sandboxed: they come with the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol

from mint.errors import BadRequest, NotFound

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    @property
    def all_special_ids(self) -> Sequence[int]: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(self, conversation: Sequence[Message], **options: Any) -> Any: ...


# Messages to tokens -------------------------------------------------------------------------------------------------


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **template_options: Any,
) -> list[int]:
    """The tokens of a conversation, by default up to where the assistant speaks next."""
    text = tokenizer.apply_chat_template(
        messages,
        tools=list(tools) if tools else None,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **template_options,
    )
    return tokenizer.encode(text, add_special_tokens=False)  # the template writes them out


def turn_end_tokens(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that end an assistant's turn: end of sequence, and what the template puts after its words."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    mark = "@@words@@"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=False)
    after = tokenizer.encode(text.rpartition(mark)[2], add_special_tokens=False)
    if after and after[0] in tokenizer.all_special_ids:
        ends.append(after[0])
    return list(dict.fromkeys(ends))


# Tokens to messages -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the assistant said, its tool calls taken out of the text."""

    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)


def decode_chat(tokenizer: Tokenizer, tokens: Sequence[int], stop_strings: Sequence[str] = ()) -> Reply:
    text = cut_at_stop(tokenizer.decode(list(tokens), skip_special_tokens=True), stop_strings)
    return parse_tool_calls(text)


def cut_at_stop(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    return text[: min((at for stop in stop_strings if (at := text.find(stop)) >= 0), default=len(text))]


_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"


def parse_tool_calls(text: str) -> Reply:
    """Tool calls as Qwen and Hermes write them (<tool_call> tags), Mistral ([TOOL_CALLS] and a list) or Llama (one JSON
    object and nothing else); text that only looks like a call stays text."""
    if tagged := _TAGGED.findall(text):
        calls = [_tool_call(block) for block in tagged]
        content = _TAGGED.sub("", text).strip()
    elif _MISTRAL in text:
        content, _, written = text.partition(_MISTRAL)
        listed = _json(written)
        calls = [_tool_call(item) for item in listed] if isinstance(listed, list) and listed else [None]
        content = content.strip()
    else:
        calls, content = [_tool_call(text)], ""
    found = [call for call in calls if call is not None]
    return Reply(content, found) if len(found) == len(calls) else Reply(text)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _tool_call(written: Any) -> ToolCall | None:
    value = _json(written.strip()) if isinstance(written, str) else written
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else None


class TextStream:
    """Text from tokens as they come. Held back is what may still change: half a character, the start of a stop."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = list(stop_strings)
        self._tokens: list[int] = []
        self._start = 0  # tokens before it are settled; decoding a short tail keeps long texts cheap
        self._settled = 0  # how many of the tail's tokens have been turned into text
        self._text = ""
        self._sent = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is new and final."""
        self._tokens += tokens
        self._decode(final=False)
        end = len(self._text) - self._held_back()
        cut = len(cut_at_stop(self._text, self._stops))
        return self._send(min(end, cut))

    def finish(self) -> str:
        """The rest, up to a stop string."""
        self._decode(final=True)
        return self._send(len(cut_at_stop(self._text, self._stops)))

    def _decode(self, final: bool) -> None:
        tail = self._tokens[self._start :]
        before = self._tokenizer.decode(tail[: self._settled], skip_special_tokens=True)
        now = self._tokenizer.decode(tail, skip_special_tokens=True)
        if not final and now.endswith("\ufffd"):
            return
        self._text += now[len(before) :]
        self._start, self._settled = self._start + self._settled, len(tail) - self._settled

    def _held_back(self) -> int:
        """Length of the longest end of the text with which a stop string may be beginning."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stops):
                return size
        return 0

    def _send(self, end: int) -> str:
        new = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        return new


# A tokenizer from files ---------------------------------------------------------------------------------------------


class FolderTokenizer:
    """The tokenizer and chat template of a model folder, without transformers."""

    def __init__(self, folder: str | Path) -> None:
        from tokenizers import Tokenizer as Fast

        self._folder = Path(folder)
        file = self._folder / "tokenizer.json"
        if not file.is_file():
            raise NotFound(f"{folder} holds no tokenizer.json; save the tokenizer there with its fast version.")
        self._fast = Fast.from_file(str(file))
        self._fast.no_truncation()
        self._fast.no_padding()
        self._config = _read_json(self._folder / "tokenizer_config.json")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """One token by itself, special ones too."""
        return self._fast.decode([token], skip_special_tokens=False)

    @cached_property
    def all_special_ids(self) -> list[int]:
        return [id for id, token in self._fast.get_added_tokens_decoder().items() if token.special]

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and so on, as templates call them."""
        named = _read_json(self._folder / "special_tokens_map.json") | self._config
        texts = {k: v["content"] if isinstance(v, dict) else v for k, v in named.items() if k.endswith("_token")}
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    @cached_property
    def eos_token_id(self) -> int | None:
        text = self.special_tokens.get("eos_token")
        return None if text is None else self._fast.token_to_id(text)

    @cached_property
    def turn_ends(self) -> list[int]:
        return turn_end_tokens(self)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **options: Any,
    ) -> Any:
        given = {"tools": tools, "add_generation_prompt": add_generation_prompt, **self.special_tokens, **options}
        try:
            text = self._template.render(messages=list(conversation), **given)
        except Exception as error:  # a border: the template is the model's code, and can fail in any way
            raise BadRequest(f"the model's chat template cannot render these messages: {error}.") from error
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @cached_property
    def _template(self) -> Any:
        source = self._template_source()
        if source is None:
            raise BadRequest(f"{self._folder.name} has no chat template; complete plain text instead of chatting.")
        return _environment().from_string(source)

    def _template_source(self) -> str | None:
        file = self._folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text()
        source = self._config.get("chat_template")
        if isinstance(source, list):  # several by name
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        return source


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}


def _environment() -> Any:
    """Jinja as chat templates expect it: what transformers gives them."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's words for training; here it only lets them through."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
