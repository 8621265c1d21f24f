"""Tools a policy may call, and the conversation in which it calls them. `mint.rl.calculator` is an example of one.

A call is written `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`; where there is one tool with one
argument, the bare argument will do: `<tool_call>12*7</tool_call>`. Messages that come with parsed `tool_calls` are
taken as they are.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mint.chat
from mint.chat import ToolCall
from mint.errors import BadRequest
from mint.rl.completers import MessageCompleter
from mint.rl.envs import MessageEnv, MessageStepResult, ParseError
from mint.rl.rewards import Reward, RewardFn, Trace, as_reward
from mint.rl.types import Logs, Message, Metrics, StopReason

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True)
class ToolResult:
    """A tool's answer; a tool may also return a plain string."""

    content: str
    should_stop: bool = False
    """End the episode after this call."""
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True)
class Tool:
    """A function the policy may call. Make one with `@tool`."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    function: Callable[..., Any]

    def spec(self) -> dict[str, Any]:
        """As chat templates and OpenAI-compatible servers want it."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": described}

    async def run(self, arguments: Mapping[str, Any]) -> ToolResult:
        """What goes wrong inside is an answer, not a crash: the policy reads it and may do better."""
        try:
            value = self.function(**arguments)
            value = await value if inspect.isawaitable(value) else value
        except Exception as error:
            return ToolResult(f"error: {error}", metrics={"tool_errors": 1.0})
        return value if isinstance(value, ToolResult) else ToolResult(str(value))


def tool(function: Callable[..., Any]) -> Tool:
    """The function as a tool: name, docstring and annotated arguments become its description."""
    signature = inspect.signature(function, eval_str=True)
    for parameter in signature.parameters.values():
        if parameter.annotation not in JSON_TYPES:
            raise BadRequest(
                f"the argument {parameter.name!r} of the tool {function.__name__!r} is annotated "
                f"{parameter.annotation!r}; it must be one of {', '.join(kind.__name__ for kind in JSON_TYPES)}."
            )
    schema = {
        "type": "object",
        "properties": {p.name: {"type": JSON_TYPES[p.annotation]} for p in signature.parameters.values()},
        "required": [p.name for p in signature.parameters.values() if p.default is p.empty],
    }
    return Tool(function.__name__, inspect.getdoc(function) or "", schema, function)


# --------------------------------------------------------------------------------------------------------------------
# Calls in messages


def parse_tool_calls(message: Message, tools: Mapping[str, Tool]) -> list[ToolCall]:
    """The calls a message makes, in order; `ParseError` for what was meant as one and is none."""
    if message.get("tool_calls"):
        return [_structured_call(call) for call in message["tool_calls"]]
    text = str(message.get("content") or "")
    calls = mint.chat.parse_tool_calls(text).tool_calls
    if calls or "<tool_call>" not in text:
        return calls
    bodies = re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)
    only = next(iter(tools.values())) if len(tools) == 1 else None
    bare = only is not None and len(only.parameters["properties"]) == 1
    if only is None or not bare or len(bodies) != text.count("<tool_call>") or any(b.startswith("{") for b in bodies):
        raise ParseError(f'{text!r} does not hold <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>')
    return [ToolCall(only.name, {next(iter(only.parameters["properties"])): body}) for body in bodies]


def _structured_call(call: ToolCall | Mapping[str, Any]) -> ToolCall:
    """As mint.chat or an OpenAI-compatible server gives it."""
    if isinstance(call, ToolCall):
        return call
    function = call.get("function", call)
    try:
        arguments = function["arguments"]
        return ToolCall(function["name"], json.loads(arguments) if isinstance(arguments, str) else dict(arguments))
    except (KeyError, TypeError, ValueError) as error:
        raise ParseError(f"{call!r} is not a tool call with a name and an object of arguments") from error


# --------------------------------------------------------------------------------------------------------------------
# The conversation


class ToolMessageEnv(MessageEnv):
    """Turns in which the policy may call tools; a message without a call is the answer and is graded.

    Without tools this is one question, one answer, graded by a reward function. The reward sees (prompt, answer,
    trace): the last user message of the opening, the last assistant message, and what happened between.
    """

    def __init__(
        self,
        initial_messages: Sequence[Message],
        reward: Reward | RewardFn,
        tools: Sequence[Tool] = (),
        max_turns: int = 10,
        max_tool_calls: int | None = None,
        sample: Any = None,
    ) -> None:
        self.messages: list[Message] = list(initial_messages)
        self.prompt = next((m["content"] for m in reversed(initial_messages) if m["role"] == "user"), "")
        self.reward = as_reward(reward)
        self.tools = {tool.name: tool for tool in tools}
        self.max_turns = max_turns
        self.max_tool_calls = max_tool_calls
        self.sample = sample
        self.turns = 0
        self.tool_calls: list[dict[str, Any]] = []

    async def initial_observation(self) -> list[Message]:
        return list(self.messages)

    async def add_messages(self, messages: list[Message]) -> list[Message]:
        self.messages += messages
        return list(self.messages)

    @property
    def trace(self) -> Trace:
        return {"messages": list(self.messages), "tool_calls": list(self.tool_calls), "sample": self.sample}

    async def step(self, message: Message) -> MessageStepResult:
        calls = parse_tool_calls(message, self.tools) if self.tools else []
        self.messages.append(message)
        self.turns += 1
        if not calls:
            return await self._finish(message, {}, StopReason.COMPLETED)
        metrics, reason = await self._run(calls)
        if reason is None and self.turns >= self.max_turns:
            reason = StopReason.MAX_TURNS
        if reason is not None:
            return await self._finish(message, metrics, reason)
        return MessageStepResult(0.0, False, list(self.messages), metrics)

    async def _run(self, calls: Sequence[ToolCall]) -> tuple[Metrics, StopReason | None]:
        """Runs the calls one after another, as long as the budget lasts and no tool says stop."""
        metrics: Metrics = {"tool_calls": 0, "tool_errors": 0}
        for call in calls:
            if self.max_tool_calls is not None and len(self.tool_calls) >= self.max_tool_calls:
                return metrics, StopReason.MAX_TOOL_CALLS
            result = await self._call(call)
            self.messages.append({"role": "tool", "name": call.name, "content": result.content})
            self.tool_calls.append({"name": call.name, "arguments": call.arguments, "result": result.content})
            for name, value in {"tool_calls": 1, **result.metrics}.items():
                metrics[name] = metrics.get(name, 0) + value
            if result.should_stop:
                return metrics, StopReason.TOOL_STOPPED
        return metrics, None

    async def _call(self, call: ToolCall) -> ToolResult:
        if call.name in self.tools:
            return await self.tools[call.name].run(call.arguments)
        known = ", ".join(self.tools)
        return ToolResult(f"error: no tool is called {call.name!r}; there are {known}", metrics={"tool_errors": 1.0})

    async def _finish(self, message: Message, metrics: Metrics, reason: StopReason) -> MessageStepResult:
        answer = str(message.get("content") or "")
        reward, parts = await self.reward(self.prompt, answer, self.trace)
        metrics = {**metrics, "episode/tool_calls": len(self.tool_calls), "episode/turns": self.turns}
        logs: Logs = {
            "question": self.prompt,
            "response": answer,
            "tool_calls": json.dumps(self.tool_calls, default=str),
        }
        return MessageStepResult(reward, True, list(self.messages), {**metrics, **parts}, logs, stop_reason=reason)


async def sample_with_trace(
    prompt: str | Sequence[Message], policy: MessageCompleter, tools: Sequence[Tool] = (), max_turns: int = 10
) -> tuple[str, dict[str, Any]]:
    """Runs an agent on a prompt without training: its answer, and {"tool_calls": [...], "messages": [...]}."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    env = ToolMessageEnv(messages, lambda response: 0.0, tools, max_turns)
    step = MessageStepResult(0.0, False, await env.initial_observation())
    while not step.episode_done:
        step = await env.step(await policy(step.next_messages))
    answer = next((m["content"] for m in reversed(env.messages) if m["role"] == "assistant"), "")
    return str(answer or ""), {"tool_calls": env.tool_calls, "messages": env.messages}
