"""TrainingClient: gradients, optimizer steps and checkpoints of one adapter.

Every call is numbered when it is made and sent in that order, without waiting for the results of earlier ones.
"""

from __future__ import annotations

import asyncio
import json
import threading
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from mint.checks import LOSS_FNS, check_data
from mint.client import custom_loss
from mint.client.chunks import combine, split
from mint.client.futures import APIFuture, keep, start
from mint.client.http import Response
from mint.client.polling import Accepted, json_as, read_forward_backward, read_reverse_kl, submit
from mint.client.sampling import TOKEN_IDS, SamplingClient, open_sampler
from mint.client.session import Session
from mint.client.tokenizers import load_tokenizer
from mint.columns import compact
from mint.errors import BadRequest, Internal
from mint.mistakes import check_plausible, warnings_about
from mint.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    ReverseKLDatum,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from mint.wire import JSON, PROTOBUF, SAMPLER, ForwardBackwardCall, forward_backward_to_proto, from_json, to_json

T = TypeVar("T")

SAVE_FOR_SAMPLER = "save_weights_for_sampler"
_SAVED_FOR_SAMPLER = ("SaveWeightsForSampler", json_as(SaveWeightsForSamplerResponse))
"""Kind and reader of its result."""


class TrainingClient:
    """Made by `ServiceClient.create_lora_training_client` and its siblings."""

    def __init__(self, session: Session, model_id: str) -> None:
        self.model_id = model_id
        self._session = session
        self._lock = threading.Lock()  # numbers and order of calls made from several threads
        self._turn = asyncio.Lock()  # posts one after another, in that order
        self._last_seq_id = 0
        self._sampler_names: set[str] = set()
        self._warned: set[str] = set()

    # ----------------------------------------------------------------------------------------------------------------
    # Gradients

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Losses and log-probs, leaving the gradients alone."""
        return self._run(data, loss_fn, loss_fn_config, forward_only=True)

    async def forward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Adds the gradient of the loss, a plain sum over all tokens of all data, to those since the last step."""
        return self._run(data, loss_fn, loss_fn_config, forward_only=False)

    async def forward_backward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward(data, loss_fn, loss_fn_config)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: custom_loss.CustomLossFn
    ) -> APIFuture[ForwardBackwardOutput]:
        """`forward_backward` with a loss of your own: `loss_fn(data, logprobs)` gets one torch tensor a datum and
        returns (loss, metrics). It runs here, in the calling thread, between a forward and a backward pass."""
        data = _listed(data)
        forward = self.forward(custom_loss.for_forward(data), "cross_entropy").result()
        surrogate = custom_loss.differentiate(loss_fn, data, forward)
        return self._backward_custom(surrogate)

    async def forward_backward_custom_async(
        self, data: Sequence[Datum], loss_fn: custom_loss.CustomLossFn
    ) -> APIFuture[ForwardBackwardOutput]:
        data = _listed(data)
        forward = await self.forward(custom_loss.for_forward(data), "cross_entropy")
        surrogate = custom_loss.differentiate(loss_fn, data, forward)
        return self._backward_custom(surrogate)

    def _backward_custom(self, surrogate: custom_loss.Surrogate) -> APIFuture[ForwardBackwardOutput]:
        backward = self.forward_backward(surrogate.data, "cross_entropy")

        async def report() -> ForwardBackwardOutput:
            return custom_loss.report(surrogate, await backward)

        return start(report())

    def forward_backward_reverse_kl(
        self, data: Sequence[ReverseKLDatum], reference_model_path: str, temperature: float = 1.0
    ) -> APIFuture[ForwardBackwardOutput]:
        """Adds the gradient of the sum of weight * KL(this model || the reference) over the whole vocabulary, both at
        this temperature. The reference is a saved path, or the base model by its name. `loss_fn_outputs` holds the
        `loss` at every position."""
        if not isinstance(data, Sequence) or not all(isinstance(datum, ReverseKLDatum) for datum in data):
            raise BadRequest("data must be a list of types.ReverseKLDatum.")
        body = {"reference_model_path": reference_model_path, "data": to_json(list(data)), "temperature": temperature}
        path = "mint/forward_backward_reverse_kl"
        return self._call(path, body, "MintForwardBackwardReverseKL", read_reverse_kl)

    async def forward_backward_reverse_kl_async(
        self, data: Sequence[ReverseKLDatum], reference_model_path: str, temperature: float = 1.0
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward_reverse_kl(data, reference_model_path, temperature)

    def optim_step(self, adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
        """Applies the accumulated gradients and clears them; without any, a no-op that says so in its metrics."""
        if not isinstance(adam_params, AdamParams):
            raise BadRequest(f"optim_step takes types.AdamParams, got {type(adam_params).__name__}.")
        body = {"adam_params": to_json(adam_params), "type": "optim_step"}
        return self._call("optim_step", body, "OptimStep", json_as(OptimStepResponse))

    async def optim_step_async(self, adam_params: AdamParams) -> APIFuture[OptimStepResponse]:
        return self.optim_step(adam_params)

    # ----------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Saves weights and optimizer state, from which training can go on."""
        body = _save_body(name, ttl_seconds, user_metadata) | {"overwrite": overwrite, "type": "save_weights"}
        return self._call("save_weights", body, "SaveWeights", json_as(SaveWeightsResponse))

    async def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        return self.save_state(name, ttl_seconds, overwrite, user_metadata)

    def load_state(self, path: str) -> APIFuture[LoadWeightsResponse]:
        """Loads weights and starts a fresh optimizer."""
        return self._load(path, optimizer=False)

    async def load_state_async(self, path: str) -> APIFuture[LoadWeightsResponse]:
        return self.load_state(path)

    def load_state_with_optimizer(self, path: str) -> APIFuture[LoadWeightsResponse]:
        """Loads weights and the optimizer's state: training goes on as if it had not stopped."""
        return self._load(path, optimizer=True)

    async def load_state_with_optimizer_async(self, path: str) -> APIFuture[LoadWeightsResponse]:
        return self.load_state_with_optimizer(path)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Saves weights for sampling; `create_sampling_client(model_path=result.path)` opens them."""
        body = _save_body(name, ttl_seconds, user_metadata) | {"type": SAVE_FOR_SAMPLER}
        if overwrite:  # an addition of ours to the protocol, so only said when it matters
            body["overwrite"] = True
        return self._call(SAVE_FOR_SAMPLER, body, *_SAVED_FOR_SAMPLER)

    async def save_weights_for_sampler_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        return self.save_weights_for_sampler(name, ttl_seconds, user_metadata, overwrite)

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient:
        """A client that samples from the weights as they are after all calls made so far.

        It need not wait for these calls: what is sampled does, and hears of it if the snapshot fails. With a name the
        weights are also kept as a checkpoint, which is there then; a name used before by this client is overwritten."""
        return self._sampling_client(name).result()

    async def save_weights_and_get_sampling_client_async(self, name: str | None = None) -> SamplingClient:
        return await self._sampling_client(name)

    def create_sampling_client(self, model_path: str) -> SamplingClient:
        """Samples from a checkpoint made by `save_weights_for_sampler`."""
        return start(open_sampler(self._session, model_path=model_path)).result()

    async def create_sampling_client_async(self, model_path: str) -> SamplingClient:
        return await start(open_sampler(self._session, model_path=model_path))

    # ----------------------------------------------------------------------------------------------------------------
    # Facts

    def get_info(self) -> GetInfoResponse:
        return start(self._info()).result()

    async def get_info_async(self) -> GetInfoResponse:
        return await start(self._info())

    def get_tokenizer(self) -> Any:
        """A Hugging Face tokenizer for the base model."""
        return _tokenizer_of(self.get_info())

    async def get_tokenizer_async(self) -> Any:
        return _tokenizer_of(await self.get_info_async())

    # ----------------------------------------------------------------------------------------------------------------

    async def _info(self) -> GetInfoResponse:
        transport, _ = await self._session.open()
        answer = await transport.post("get_info", {"model_id": self.model_id, "type": "get_info"})
        return from_json(GetInfoResponse, answer)

    def _run(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None,
        forward_only: bool,
    ) -> APIFuture[ForwardBackwardOutput]:
        data = compact(_listed(data))
        if loss_fn in LOSS_FNS:  # another server may have others
            check_data(data, loss_fn, vocab_size=TOKEN_IDS)
            check_plausible(data, loss_fn, loss_fn_config)
        if not forward_only:
            self._warn(data, loss_fn)
        settings = self._session.connection.settings
        chunks = split(data, settings.fwdbwd_max_chunk_len, settings.fwdbwd_max_chunk_bytes_count)
        config = dict(loss_fn_config or {})
        with self._lock:
            first = self._reserve(len(chunks))
            calls = [
                ForwardBackwardCall(self.model_id, first + n, chunk, loss_fn, config, forward_only)
                for n, chunk in enumerate(chunks)
            ]
            return start(self._send_chunks([forward_backward_to_proto(call) for call in calls], forward_only))

    async def _send_chunks(self, bodies: list[bytes], forward_only: bool) -> ForwardBackwardOutput:
        transport, _ = await self._session.open()
        headers = {"Content-Type": PROTOBUF, "Accept": JSON}
        if self._session.connection.settings.proto_compress_fwdbwd:
            headers["Content-Encoding"] = "zstd"
            bodies = [_compressed(body) for body in bodies]
        kind = "Forward" if forward_only else "ForwardBackward"
        results: list[asyncio.Task[ForwardBackwardOutput]] = []
        try:
            async with self._turn:
                for body in bodies:
                    accepted = await submit(transport, "forward_backward", body, headers, kind, read_forward_backward)
                    results.append(accepted.result)
            return combine(await asyncio.gather(*results))
        finally:
            for result in results:
                result.cancel()  # where one failed nobody asks for the others

    def _call(self, path: str, body: dict[str, Any], kind: str, read: Callable[[Response], T]) -> APIFuture[T]:
        with self._lock:
            return start(self._send(path, self._numbered(body), kind, read))

    async def _send(self, path: str, body: bytes, kind: str, read: Callable[[Response], T]) -> T:
        return await (await self._submit(path, body, kind, read)).result

    async def _submit(self, path: str, body: bytes, kind: str, read: Callable[[Response], T]) -> Accepted[T]:
        transport, _ = await self._session.open()
        async with self._turn:
            return await submit(transport, path, body, {}, kind, read)

    def _numbered(self, body: dict[str, Any]) -> bytes:
        """Under the lock, as the number is its place in the order."""
        return json.dumps({"model_id": self.model_id, "seq_id": self._reserve(1)} | body).encode()

    def _reserve(self, count: int) -> int:
        """The first of `count` consecutive sequence ids; they start at 1, creation being 0."""
        first = self._last_seq_id + 1
        self._last_seq_id += count
        return first

    def _load(self, path: str, optimizer: bool) -> APIFuture[LoadWeightsResponse]:
        if not isinstance(path, str):
            raise BadRequest(f"path is a {type(path).__name__}; give text, such as save_state(name).result().path.")
        body = {"path": path, "optimizer": optimizer, "type": "load_weights"}
        return self._call("load_weights", body, "LoadWeights", json_as(LoadWeightsResponse))

    def _sampling_client(self, name: str | None) -> APIFuture[SamplingClient]:
        if name is not None:
            used, self._sampler_names = name in self._sampler_names, self._sampler_names | {name}
            return start(self._opened(self.save_weights_for_sampler(name, overwrite=used)))
        with self._lock:
            body = {"sampling_session_seq_id": next(self._session.sampler_numbers), "type": SAVE_FOR_SAMPLER}
            return start(self._snapshot(self._numbered(body)))

    async def _snapshot(self, body: bytes) -> SamplingClient:
        """As soon as the server says what to sample: ours does before it has taken the snapshot."""
        accepted = await self._submit(SAVE_FOR_SAMPLER, body, *_SAVED_FOR_SAMPLER)
        if (sampler_id := accepted.head.get(SAMPLER)) is None:
            return await self._opened(accepted.result)
        keep(accepted.result)
        return SamplingClient(self._session.connection, sampler_id, self._session)

    async def _opened(self, saved: Awaitable[SaveWeightsForSamplerResponse]) -> SamplingClient:
        answer = await saved
        if answer.sampling_session_id is not None:
            return SamplingClient(self._session.connection, answer.sampling_session_id, self._session)
        if answer.path is None:
            raise Internal("the server saved weights for sampling but named neither a path nor a sampling session.")
        return await open_sampler(self._session, model_path=answer.path)

    def _warn(self, data: Sequence[Datum], loss_fn: str) -> None:
        """Each thing once: the same code says it again at every step."""
        for warning in warnings_about(data, loss_fn):
            if warning not in self._warned:
                self._warned.add(warning)
                warnings.warn(warning, stacklevel=4)


def _listed(data: object) -> list[Datum]:
    if isinstance(data, Datum):
        raise BadRequest("data is a single Datum; give a list of them.")
    if not isinstance(data, Sequence) or not all(isinstance(datum, Datum) for datum in data):
        raise BadRequest(f"data must be a list of types.Datum, got {type(data).__name__} holding something else.")
    return list(data)


def _save_body(name: str, ttl_seconds: int | None, user_metadata: Mapping[str, str] | None) -> dict[str, Any]:
    body = {"path": name, "ttl_seconds": ttl_seconds, "user_metadata": user_metadata and dict(user_metadata)}
    return {key: value for key, value in body.items() if value is not None}


def _compressed(body: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(body)


def _tokenizer_of(info: GetInfoResponse) -> Any:
    name = info.model_data.model_name or info.model_name
    if name is None:
        raise Internal(f"the server does not say which model {info.model_id} is built on.")
    return load_tokenizer(name, info.model_data.tokenizer_id)
