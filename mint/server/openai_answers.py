"""What the OpenAI-compatible routes say: choices of chats and of plain completions, whole or as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from mint.chat import FolderTokenizer, cut_at_stop, parse_tool_calls
from mint.server.completions import Piece
from mint.types import SampledSequence, SampleResponse, TopkRow


def error_body(status: int, text: str) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": text, "type": kind, "param": None, "code": None}}


def usage(prompt_tokens: int, responses: Sequence[SampleResponse]) -> dict[str, int]:
    drawn = sum(len(sequence.tokens) for response in responses for sequence in response.sequences)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": drawn, "total_tokens": prompt_tokens + drawn}


class Answers(Protocol):
    object: str
    chunk_object: str
    live: bool
    """Whether tokens can be told as they come; what is read off the whole text, or scored beside it, cannot."""

    def whole(self, choice: int, response: SampleResponse, sequence: SampledSequence) -> dict[str, Any]: ...

    def opening(self, choice: int) -> dict[str, Any] | None: ...

    def piece(self, text: str, piece: Piece) -> dict[str, Any]: ...

    def late(self, whole: dict[str, Any]) -> dict[str, Any]:
        """A whole choice as one chunk."""
        ...

    def closing(self, choice: int, reason: str) -> dict[str, Any]: ...


class ChatAnswers:
    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, tokenizer: FolderTokenizer, request_id: str, stops: Sequence[str], tools: bool, logprobs: bool, topk: int
    ) -> None:
        self._tokenizer = tokenizer
        self._request_id = request_id
        self._stops = stops
        self._tools = tools
        self._logprobs = logprobs
        self.live = not tools and not topk

    def whole(self, choice: int, response: SampleResponse, sequence: SampledSequence) -> dict[str, Any]:
        text = cut_at_stop(self._tokenizer.decode(sequence.tokens, skip_special_tokens=True), self._stops)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        reason: str = sequence.stop_reason
        if self._tools and (reply := parse_tool_calls(text)).tool_calls:
            reason = "tool_calls"
            message = {"role": "assistant", "content": reply.content or None}
            message["tool_calls"] = [
                {
                    "index": n,
                    "id": f"call_{self._request_id[-12:]}_{choice}_{n}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for n, call in enumerate(reply.tool_calls)
            ]
        logprobs = _chat_logprobs(self._tokenizer, sequence) if self._logprobs else None
        return {"index": choice, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, choice: int) -> dict[str, Any] | None:
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def piece(self, text: str, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            part = SampledSequence(list(piece.tokens), list(piece.logprobs), "stop")
            logprobs = _chat_logprobs(self._tokenizer, part)
        return self._chunk(piece.choice, {"content": text}, logprobs)

    def late(self, whole: dict[str, Any]) -> dict[str, Any]:
        return self._chunk(whole["index"], whole["message"], whole["logprobs"])

    def closing(self, choice: int, reason: str) -> dict[str, Any]:
        return self._chunk(choice, {}) | {"finish_reason": reason}

    def _chunk(self, choice: int, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}


class TextAnswers:
    object = chunk_object = "text_completion"

    def __init__(
        self,
        tokenizer: FolderTokenizer,
        prompts: Sequence[Sequence[int]],
        each: int,
        stops: Sequence[str],
        logprobs: bool,
        echo: bool,
        silent: bool,
    ) -> None:
        """`silent`: max_tokens was 0, and the one token that was drawn is not told."""
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._each = each
        self._stops = stops
        self._logprobs = logprobs
        self._echo = echo
        self._silent = silent
        self.live = not (logprobs or echo or silent)

    def whole(self, choice: int, response: SampleResponse, sequence: SampledSequence) -> dict[str, Any]:
        if self._silent:
            sequence = SampledSequence([], [], "length")
        prompt = self._prompts[choice // self._each]
        text = cut_at_stop(self._tokenizer.decode(sequence.tokens, skip_special_tokens=True), self._stops)
        if self._echo:
            text = self._tokenizer.decode(prompt) + text
        logprobs = None
        if self._logprobs:
            rows = _text_rows(prompt, response) if self._echo else []
            logprobs = _text_logprobs(self._tokenizer, [*rows, *_sampled_rows(self._tokenizer, sequence)])
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": sequence.stop_reason}

    def opening(self, choice: int) -> dict[str, Any] | None:
        return None

    def piece(self, text: str, piece: Piece) -> dict[str, Any]:
        return {"index": piece.choice, "text": text, "logprobs": None, "finish_reason": None}

    def late(self, whole: dict[str, Any]) -> dict[str, Any]:
        return whole | {"finish_reason": None}

    def closing(self, choice: int, reason: str) -> dict[str, Any]:
        return {"index": choice, "text": "", "logprobs": None, "finish_reason": reason}


# Log-probs ----------------------------------------------------------------------------------------------------------

Scored = tuple[int, float | None, TopkRow | None]


def _sampled_rows(tokenizer: FolderTokenizer, sequence: SampledSequence) -> list[Scored]:
    """The sampled tokens but for the special one that ended them, which is not part of the text."""
    spoken = list(sequence.tokens)
    if sequence.stop_reason == "stop" and spoken and spoken[-1] in tokenizer.all_special_ids:
        spoken.pop()
    logprobs, best = sequence.logprobs or [], sequence.topk_logprobs
    return [(token, logprobs[n], best[n] if best else None) for n, token in enumerate(spoken)]


def _text_rows(prompt: Sequence[int], response: SampleResponse) -> Iterator[Scored]:
    scores = response.prompt_logprobs or [None] * len(prompt)
    best: Sequence[TopkRow | None] = response.topk_prompt_logprobs or [None] * len(prompt)
    return zip(prompt, scores, best, strict=True)


def _chat_logprobs(tokenizer: FolderTokenizer, sequence: SampledSequence) -> dict[str, Any]:
    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = tokenizer.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    rows = _sampled_rows(tokenizer, sequence)
    content = [entry(t, p) | {"top_logprobs": [entry(*pair) for pair in best or []]} for t, p, best in rows]
    return {"content": content, "refusal": None}


def _text_logprobs(tokenizer: FolderTokenizer, rows: Sequence[Scored]) -> dict[str, Any]:
    texts = [tokenizer.token_text(token) for token, _, _ in rows]
    ends = [0]
    for text in texts:
        ends.append(ends[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": [logprob for _, logprob, _ in rows],
        "top_logprobs": [best and {tokenizer.token_text(t): p for t, p in best} for _, _, best in rows],
        "text_offset": ends[:-1],
    }
