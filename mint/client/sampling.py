"""SamplingClient: completions and log-probs from one frozen policy."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

from mint.checks import check_sample
from mint.client.connection import Connection, shared_connection
from mint.client.futures import APIFuture, start
from mint.client.http import Response
from mint.client.polling import ResultLost, finished, read_sample, retrieve
from mint.client.session import Session
from mint.client.tokenizers import load_tokenizer
from mint.client.transport import Transport
from mint.config import ClientConfig
from mint.errors import BadRequest, Internal, MintError
from mint.types import GetSamplerResponse, ModelInput, SampleRequest, SampleResponse, SamplingParams, TensorData
from mint.wire import HELD, HOLD, JSON, PROTOBUF, from_json, sample_request_to_json

BACKPRESSURE_PATIENCE = 7200.0
"""Seconds a sample waits for room: the server's 429 means "not yet", not "no"."""
RESUBMISSIONS = 5
"""Times a sample is asked for again when the server has lost its result, as after a restart."""

TOKEN_IDS = 2**31
"""Token ids travel as 32-bit numbers; the server knows how many its model has."""

_BLOCK = 10**9
"""Request numbers of one copy of a client: copies (pickled or forked) must not share numbers."""


class SamplingClient:
    """Samples from the weights as they were when this client was made. May be pickled and sent to other processes."""

    def __init__(self, connection: Connection, sampling_session_id: str, session: Session | None = None) -> None:
        """`session` is kept alive by this client; a copy in another process has none."""
        self._connection = connection
        self._id = sampling_session_id
        self._session = session
        self._pid = os.getpid()
        self._numbers: itertools.count[int] | None = None if session is None else itertools.count()
        self._join = asyncio.Lock()
        self._slots: asyncio.Semaphore | None = None

    def __reduce__(self) -> tuple[Callable[..., SamplingClient], tuple[str | None, str | None, str]]:
        config = self._connection.config
        return _reopen, (config.base_url, config.api_key, self._id)

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """`num_samples` independent completions of one prompt; see `mint.types.SampleRequest` for the extras."""
        _check_kinds(prompt, num_samples, sampling_params)
        request = SampleRequest(
            prompt=prompt,
            sampling_params=sampling_params,
            num_samples=num_samples,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=(
                None if target_prompt_logprobs is None else TensorData.of(target_prompt_logprobs, "int64")
            ),
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
        )
        check_sample(request, vocab_size=TOKEN_IDS)
        self._notice_fork()
        return start(self._sample(request), cancellable=True, hurry=self._hurry)

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> SampleResponse:
        return await self.sample(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """The log-prob of every token of `prompt` given those before it; None where there is none, as for the first."""
        response = self.sample(
            prompt,
            1,
            SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
        )
        return start(_prompt_logprobs(response), cancellable=True)

    async def compute_logprobs_async(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        return await self.compute_logprobs(prompt, prompt_logprobs_last_n)

    def get_tokenizer(self) -> Any:
        """A Hugging Face tokenizer for the base model."""
        return load_tokenizer(self.get_base_model())

    async def get_tokenizer_async(self) -> Any:
        return load_tokenizer(await self.get_base_model_async())

    def get_base_model(self) -> str:
        return start(self._info()).result().base_model

    async def get_base_model_async(self) -> str:
        return (await start(self._info())).base_model

    # ----------------------------------------------------------------------------------------------------------------

    async def _info(self) -> GetSamplerResponse:
        transport = await self._connection.open()
        return from_json(GetSamplerResponse, await transport.get(f"samplers/{self._id}"))

    async def _sample(self, request: SampleRequest) -> SampleResponse:
        transport = await self._connection.open()
        if self._slots is None:
            self._slots = asyncio.Semaphore(self._connection.settings.sample_max_concurrent_requests)
        body = sample_request_to_json(request) | {"sampling_session_id": self._id, "type": "sample"}
        async with self._slots:
            for attempt in range(RESUBMISSIONS + 1):
                body["seq_id"] = await self._next_number(transport)
                try:
                    return _honoured(request, await self._request(transport, body))
                except ResultLost:
                    if attempt == RESUBMISSIONS:
                        raise
                    await asyncio.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")

    async def _request(self, transport: Transport, body: dict[str, Any]) -> SampleResponse:
        """Asks for the result as the answer, where a connection may be spared for the wait: that is half the requests.
        Any other server, or ours when it takes long, answers with an id by which the result is fetched."""
        content = json.dumps(body).encode()
        if transport.may_hold:
            batches = self._connection.batches
            try:
                answer = batches and await batches.ask(content)
                answer = answer or await _post(transport, content, hold=True)
            except asyncio.CancelledError:
                start(_give_up_unnamed(transport, content))
                raise
            if (held := answer.headers.get(HELD)) is not None:
                finished(answer)
                response = read_sample(answer)
                return _named(response, [f"{held}:{n}" for n in range(len(response.sequences))])
        else:
            answer = Response(408, {}, b"")
        if answer.status_code == 408:
            answer = await _post(transport, content)
        envelope = answer.json()
        request_id = envelope["request_id"]
        try:
            response = await retrieve(transport, request_id, "Sample", read_sample)
        except asyncio.CancelledError:
            start(_give_up(transport, request_id))
            raise
        return _named(response, envelope.get("sample_sequence_ids") or [None] * len(response.sequences))

    def _hurry(self) -> None:
        if self._connection.batches is not None:
            self._connection.batches.hurry()

    async def _next_number(self, transport: Transport) -> int:
        if self._numbers is None:
            async with self._join:
                if self._numbers is None:
                    self._numbers = itertools.count(_BLOCK * await self._copy_number(transport))
        return next(self._numbers)

    async def _copy_number(self, transport: Transport) -> int:
        if not self._connection.settings.sample_join_sampling_session:
            return random.SystemRandom().randint(1, _BLOCK)
        body = {"sampling_session_id": self._id, "type": "join_sampling_session"}
        return int((await transport.post("join_sampling_session", body))["client_counter"])

    def _notice_fork(self) -> None:
        """In a forked child this is another copy, on another event loop."""
        if os.getpid() != self._pid:
            reopen, address = self.__reduce__()
            vars(self).update(vars(reopen(*address)))


async def open_sampler(
    session: Session, model_path: str | None = None, base_model: str | None = None
) -> SamplingClient:
    """A sampling session on a checkpoint or on a base model."""
    transport, session_id = await session.open()
    body = {
        "session_id": session_id,
        "sampling_session_seq_id": next(session.sampler_numbers),
        "type": "create_sampling_session",
    }
    body |= {"base_model": base_model} if model_path is None else {"model_path": model_path}
    answer = await transport.post("create_sampling_session", body)
    return SamplingClient(session.connection, answer["sampling_session_id"], session)


def _reopen(base_url: str | None, api_key: str | None, sampling_session_id: str) -> SamplingClient:
    return SamplingClient(shared_connection(ClientConfig(base_url, api_key)), sampling_session_id)


async def _post(transport: Transport, content: bytes, hold: bool = False) -> Response:
    headers = {"X-Tinker-Sampling-Backpressure": "1"}
    if hold:
        headers |= {HOLD: "1", "Accept": f"{PROTOBUF}, {JSON}"}
    return await transport.send(
        "POST", "asample", content=content, headers=headers, held=hold, patience_when_full=BACKPRESSURE_PATIENCE
    )


def _named(response: SampleResponse, names: Sequence[str | None]) -> SampleResponse:
    sequences = [
        dataclasses.replace(sequence, sequence_id=name)
        for sequence, name in zip(response.sequences, names, strict=True)
    ]
    return dataclasses.replace(response, sequences=sequences)


async def _give_up_unnamed(transport: Transport, content: bytes) -> None:
    """The server knows a request it has by its number, and tells its id again."""
    with contextlib.suppress(MintError):
        await _give_up(transport, (await _post(transport, content)).json()["request_id"])


async def _give_up(transport: Transport, request_id: str) -> None:
    with contextlib.suppress(MintError):  # it may be done already, or the server may not know how
        await transport.post("cancel_future", {"request_id": request_id}, patience=0.0, timeout=30.0)


async def _prompt_logprobs(future: APIFuture[SampleResponse]) -> list[float | None]:
    logprobs = (await future).prompt_logprobs
    if logprobs is None:
        raise Internal("the server returned no prompt log-probs although they were asked for.")
    return logprobs


def _check_kinds(prompt: object, num_samples: object, sampling_params: object) -> None:
    if not isinstance(prompt, ModelInput):
        hint = "encode text, then " if isinstance(prompt, str) else ""
        raise BadRequest(
            f"prompt must be a types.ModelInput, got {type(prompt).__name__}; {hint}wrap token ids in "
            "types.ModelInput.from_ints(tokens)."
        )
    if isinstance(num_samples, bool) or not isinstance(num_samples, int):
        raise BadRequest(f"num_samples is {num_samples!r}; it must be a whole number, at least 1.")
    if not isinstance(sampling_params, SamplingParams):
        raise BadRequest(f"sampling_params must be a types.SamplingParams, got {type(sampling_params).__name__}.")


def _honoured(request: SampleRequest, response: SampleResponse) -> SampleResponse:
    """The response, if it holds all that was asked for: a server that knows fewer options may drop them quietly."""
    if len(response.sequences) != request.num_samples:
        raise Internal(f"asked for {request.num_samples} samples, the server returned {len(response.sequences)}.")
    answers = {
        "prompt_logprobs": response.prompt_logprobs,
        "topk_prompt_logprobs": response.topk_prompt_logprobs,
        "target_prompt_logprobs": response.target_prompt_logprobs,
        "prompt_alt_tokens_k": response.prompt_alt_tokens,
    }
    # A prompt of one token has no position to score, and so nothing need come back.
    asked = [name for name in answers if getattr(request, name)] if request.prompt.length > 1 else []
    if ignored := [name for name in asked if answers[name] is None]:
        raise Internal(f"the server ignored {', '.join(ignored)}; it seems not to support that.")
    return response
