"""The requests of the OpenAI-compatible routes, field by field.

Parameters this server cannot honour are refused by name; those that change nothing about the answer are let through.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from mint.errors import BadRequest
from mint.server.requests import ValidText
from mint.types import SamplingParams


def _only(*allowed: Any) -> AfterValidator:
    """For parameters of which one value is honoured."""

    def check(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"this server honours only {' or '.join(map(repr, allowed))}")
        return value

    return AfterValidator(check)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: Annotated[bool, _only(False)] = False


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Annotated[bool | None, _only(None, True)] = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema goes with the type "json_schema", and with no other')
        return self

    @property
    def wanted_schema(self) -> dict[str, Any] | None:
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class CommonBody(ValidText):
    model_config = ConfigDict(strict=True)  # neither true nor "2" is a number

    model: str
    n: int = Field(default=1, ge=1, le=128)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    """Completions may ask for 0, to have their prompt scored; chats are refused it with the other parameters."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    user: str | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, max_tokens: int | None, stop_ids: Sequence[int] = ()) -> SamplingParams:
        stops: list[str | int] = [*self.stop_strings, *(self.stop_token_ids or []), *stop_ids]
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self.seed,
            stop=stops or None,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=-1 if self.top_k is None else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=0.0 if self.min_p is None else self.min_p,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias,  # type: ignore[arg-type]
            regex=self.regex,
            json_schema=None if self.response_format is None else self.response_format.wanted_schema,
        )


class CompletionBody(CommonBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    best_of: Annotated[int | None, _only(None, 1)] = None
    suffix: Annotated[str | None, _only(None, "")] = None


class ChatBody(CommonBody):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, _only(None, "auto", "none")] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: Annotated[bool | None, _only(None, False)] = None
    service_tier: str | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    def template_messages(self) -> list[dict[str, Any]]:
        """Messages as templates read them: text parts joined, tool arguments as objects."""
        return [_template_message(n, message) for n, message in enumerate(self.messages)]


def _template_message(n: int, message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"messages[{n}] has no role.")
    ready = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        if bad := [part for part in content if not isinstance(part, dict) or part.get("type") != "text"]:
            raise BadRequest(f"messages[{n}].content holds {bad[0]!r:.80}; this server reads text parts only.")
        ready["content"] = "".join(str(part.get("text", "")) for part in content)
    elif content is not None and not isinstance(content, str):
        raise BadRequest(f"messages[{n}].content must be text or a list of text parts.")
    if calls := message.get("tool_calls"):
        ready["tool_calls"] = [_template_call(n, call) for call in calls]
        ready.setdefault("content", "")
    return ready


def _template_call(n: int, call: Any) -> dict[str, Any]:
    try:
        function = dict(call["function"])
        if isinstance(function["arguments"], str):
            function["arguments"] = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest(f"messages[{n}].tool_calls holds a call without a function and JSON arguments.") from error
    return {**call, "function": function}
