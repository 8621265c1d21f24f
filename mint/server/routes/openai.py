"""The OpenAI-compatible surface: models, completions and chat completions over base models and saved checkpoints."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from mint.chat import FolderTokenizer, TextStream, encode_chat
from mint.errors import BadRequest, MintError
from mint.server.auth import User
from mint.server.completions import Piece, Run
from mint.server.openai_answers import Answers, ChatAnswers, TextAnswers, error_body, usage
from mint.server.openai_requests import ChatBody, CommonBody, CompletionBody
from mint.server.routes import Caller, State, Uncounted
from mint.server.samplers import Policy
from mint.server.state import Server
from mint.types import ModelInput, SampleRequest

router = APIRouter()


@router.get("/models")
async def models(server: State, user: Caller) -> Response:
    base = [{"id": name, "object": "model", "created": 0, "owned_by": "mint"} for name in server.catalogue.names()]

    def listed() -> Response:
        saved = [
            {"id": row.path, "object": "model", "created": int(row.created), "owned_by": row.owner}
            for row in server.checkpoints.samplable(user)
        ]
        return JSONResponse({"object": "list", "data": base + saved})

    return await asyncio.to_thread(listed)  # the protocol has no pages, and a long list takes seconds


@router.get("/models/{name:path}")
async def model(name: str, server: State, user: Caller) -> dict[str, Any]:
    policy, path = _policy(server, user, name)
    return {"id": path or policy.base_model, "object": "model", "created": 0, "owned_by": "mint"}


def _policy(server: Server, user: User, name: str) -> tuple[Policy, str | None]:
    saved = name.startswith(("tinker://", "mint://", "ckpt_"))
    return server.policies.named(None if saved else name, name if saved else None, user)


@router.post("/chat/completions")
async def chat_completions(body: ChatBody, request: Request, server: State, user: Uncounted) -> Response:
    policy, _ = _policy(server, user, body.model)
    tokenizer = await server.catalogue.tokenizer(policy.base_model)
    tools, topk = body.offered_tools, body.top_logprobs or 0
    prompt = encode_chat(tokenizer, body.template_messages(), tools, **(body.chat_template_kwargs or {}))
    params = body.sampling_params(body.limit, tokenizer.turn_ends)
    ask = SampleRequest(ModelInput.from_ints(prompt), params, body.n, topk_sample_logprobs=topk)
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    answers = ChatAnswers(tokenizer, request_id, body.stop_strings, bool(tools), bool(body.logprobs), topk)
    run = Run(server.samplers, policy, [ask], user.name)
    return await _respond(request, body, run, answers, tokenizer, request_id, len(prompt))


@router.post("/completions")
async def completions(body: CompletionBody, request: Request, server: State, user: Uncounted) -> Response:
    policy, _ = _policy(server, user, body.model)
    tokenizer = await server.catalogue.tokenizer(policy.base_model)
    prompts = _prompts(body, tokenizer)
    wanted = 16 if body.max_tokens is None else body.max_tokens
    params = body.sampling_params(max(wanted, 1))
    topk = body.logprobs or 0
    scored = body.echo and body.logprobs is not None
    asks = [
        SampleRequest(
            ModelInput.from_ints(prompt),
            params,
            body.n,
            prompt_logprobs=scored,
            topk_prompt_logprobs=topk if scored else 0,
            topk_sample_logprobs=topk,
        )
        for prompt in prompts
    ]
    answers = TextAnswers(
        tokenizer, prompts, body.n, body.stop_strings, body.logprobs is not None, body.echo, silent=wanted == 0
    )
    run = Run(server.samplers, policy, asks, user.name)
    prompt_tokens = sum(map(len, prompts))
    return await _respond(request, body, run, answers, tokenizer, f"cmpl-{uuid.uuid4().hex}", prompt_tokens)


def _prompts(body: CompletionBody, tokenizer: FolderTokenizer) -> list[list[int]]:
    """One prompt or several, as text or as tokens."""
    given: Sequence[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if given and isinstance(given[0], int):
        given = [given]
    prompts = [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in given]
    if not prompts or not all(prompts):
        raise BadRequest("prompt is empty; give at least one token of text.")
    return prompts


# Answering ----------------------------------------------------------------------------------------------------------


async def _respond(
    request: Request,
    body: CommonBody,
    run: Run,
    answers: Answers,
    tokenizer: FolderTokenizer,
    request_id: str,
    prompt_tokens: int,
) -> Response:
    frame = {"id": request_id, "created": int(time.time()), "model": body.model}
    await run.start()
    if body.stream:
        events = _events(body, run, answers, tokenizer, frame, prompt_tokens)
        return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
    responses = await _unless_disconnected(request, run)
    choices: list[dict[str, Any]] = []
    for response in responses:
        for sequence in response.sequences:
            choices.append(answers.whole(len(choices), response, sequence))
    told = usage(prompt_tokens, responses)
    return JSONResponse({**frame, "object": answers.object, "choices": choices, "usage": told})


async def _unless_disconnected(request: Request, run: Run) -> Any:
    """The results; if the client goes away first, nothing is sampled on for nobody."""
    results = asyncio.ensure_future(run.results())
    gone = asyncio.ensure_future(request.receive())  # the body was read, so the next message is the farewell
    await asyncio.wait([results, gone], return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not results.done():
        run.cancel()
    return await results


async def _events(
    body: CommonBody,
    run: Run,
    answers: Answers,
    tokenizer: FolderTokenizer,
    frame: dict[str, Any],
    prompt_tokens: int,
) -> AsyncIterator[str]:
    frame = {**frame, "object": answers.chunk_object}

    def event(*choices: dict[str, Any], **more: Any) -> str:
        return f"data: {json.dumps({**frame, 'choices': list(choices), **more})}\n\n"

    try:
        streams: dict[int, TextStream] = {}
        async for piece in run.pieces() if answers.live else _nothing():
            if piece.choice not in streams:
                streams[piece.choice] = TextStream(tokenizer, body.stop_strings)
                if (opening := answers.opening(piece.choice)) is not None:
                    yield event(opening)
            yield event(answers.piece(streams[piece.choice].push(piece.tokens), piece))
        choice, responses = 0, await run.results()
        for response in responses:
            for sequence in response.sequences:
                whole = answers.whole(choice, response, sequence)
                if not answers.live:
                    yield event(answers.late(whole))
                elif choice in streams and (rest := streams[choice].finish()):
                    yield event(answers.piece(rest, Piece(choice, [], [])))
                yield event(answers.closing(choice, whole["finish_reason"]))
                choice += 1
        if body.wants_usage:
            yield event(usage=usage(prompt_tokens, responses))
        yield "data: [DONE]\n\n"
    except MintError as error:
        yield f"data: {json.dumps(error_body(error.status, str(error)))}\n\n"
    finally:
        run.cancel()


async def _nothing() -> AsyncIterator[Piece]:
    return
    yield
