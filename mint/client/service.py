"""ServiceClient: the way in. Finds the server, opens the session, makes the other clients."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from mint.client.futures import APIFuture, start
from mint.client.polling import json_field, retrieve
from mint.client.rest import RestClient
from mint.client.sampling import SamplingClient, open_sampler
from mint.client.session import Ending, Session
from mint.client.training import TrainingClient
from mint.config import ClientConfig
from mint.errors import BadRequest
from mint.types import GetServerCapabilitiesResponse, LoraConfig, WeightsInfoResponse
from mint.wire import from_json, to_json


class ServiceClient:
    """Opens a server: the one at `base_url`, else at MINT_BASE_URL (or TINKER_BASE_URL), else a local one, started for
    as long as this process lives. Nothing is sent before the first call."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
    ) -> None:
        if base_url is not None and not isinstance(base_url, str):
            raise BadRequest(f"base_url must be a string such as http://127.0.0.1:8000, got {type(base_url).__name__}.")
        if api_key is not None and ClientConfig.resolve(base_url).base_url is None:
            raise BadRequest(
                "api_key was given but no address: pass base_url= or set MINT_BASE_URL, or leave the key out to have a "
                "local server started, which needs none."
            )
        self._session = Session(ClientConfig.resolve(base_url, api_key), user_metadata, project_id)

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ending: Ending = "success"
        if kind is not None:
            ending = "errored" if issubclass(kind, Exception) else "interrupted"
        self.close(ending, None if error is None else repr(error)).result()

    def close(self, status: Ending = "success", detail: str | None = None) -> APIFuture[None]:
        """Ends the session on the server; what was saved stays, what was not is let go."""
        return start(self._session.finish(status, detail))

    # ----------------------------------------------------------------------------------------------------------------

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """The models the server has, and its losses with their options."""
        return start(self._capabilities()).result()

    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        return await start(self._capabilities())

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 16,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        """A fresh LoRA adapter on `base_model`: a Hub id, a local folder, or `mint/tiny`."""
        lora = LoraConfig(rank, seed, train_unembed=train_unembed, train_mlp=train_mlp, train_attn=train_attn)
        return start(self._create_model(base_model, lora, user_metadata)).result()

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 16,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        lora = LoraConfig(rank, seed, train_unembed=train_unembed, train_mlp=train_mlp, train_attn=train_attn)
        return await start(self._create_model(base_model, lora, user_metadata))

    def create_training_client_from_state(
        self, path: str, user_metadata: Mapping[str, str] | None = None
    ) -> TrainingClient:
        """A new adapter with the weights saved at `path` and a fresh optimizer."""
        return start(self._create_from_state(path, user_metadata, optimizer=False)).result()

    async def create_training_client_from_state_async(
        self, path: str, user_metadata: Mapping[str, str] | None = None
    ) -> TrainingClient:
        return await start(self._create_from_state(path, user_metadata, optimizer=False))

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: Mapping[str, str] | None = None
    ) -> TrainingClient:
        """A new adapter with the weights and the optimizer's state saved at `path`."""
        return start(self._create_from_state(path, user_metadata, optimizer=True)).result()

    async def create_training_client_from_state_with_optimizer_async(
        self, path: str, user_metadata: Mapping[str, str] | None = None
    ) -> TrainingClient:
        return await start(self._create_from_state(path, user_metadata, optimizer=True))

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> SamplingClient:
        """Samples from a saved checkpoint (`model_path`) or from a base model, one of the two."""
        _exactly_one(model_path, base_model)
        return start(open_sampler(self._session, model_path, base_model)).result()

    async def create_sampling_client_async(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient:
        _exactly_one(model_path, base_model)
        return await start(open_sampler(self._session, model_path, base_model))

    def create_rest_client(self) -> RestClient:
        """Runs, sessions and checkpoints, for looking after them."""
        return RestClient(connection=self._session.connection)

    async def create_rest_client_async(self) -> RestClient:
        return self.create_rest_client()

    # ----------------------------------------------------------------------------------------------------------------

    async def _capabilities(self) -> GetServerCapabilitiesResponse:
        transport = await self._session.connection.open()
        return from_json(GetServerCapabilitiesResponse, await transport.get("get_server_capabilities"))

    async def _create_model(
        self, base_model: str, lora: LoraConfig, user_metadata: Mapping[str, str] | None
    ) -> TrainingClient:
        transport, session_id = await self._session.open()
        body: dict[str, Any] = {
            "session_id": session_id,
            "model_seq_id": next(self._session.model_numbers),
            "base_model": base_model,
            "lora_config": to_json(lora),
            "type": "create_model",
        }
        if user_metadata is not None:
            body["user_metadata"] = dict(user_metadata)
        envelope = await transport.post("create_model", body)
        model_id = await retrieve(transport, envelope["request_id"], "CreateModel", json_field("model_id"))
        return TrainingClient(self._session, str(model_id))

    async def _create_from_state(
        self, path: str, user_metadata: Mapping[str, str] | None, optimizer: bool
    ) -> TrainingClient:
        transport = await self._session.connection.open()
        saved = from_json(WeightsInfoResponse, await transport.post("weights_info", {"tinker_path": path}))
        if not saved.is_lora or saved.lora_rank is None:
            raise BadRequest(f"{path} is not a LoRA checkpoint, so no LoRA training can start from it.")
        lora = LoraConfig(
            rank=saved.lora_rank,
            train_unembed=saved.train_unembed is not False,
            train_mlp=saved.train_mlp is not False,
            train_attn=saved.train_attn is not False,
        )
        client = await self._create_model(saved.base_model, lora, user_metadata)
        await (client.load_state_with_optimizer(path) if optimizer else client.load_state(path))
        return client


def _exactly_one(model_path: str | None, base_model: str | None) -> None:
    if (model_path is None) == (base_model is None):
        raise BadRequest(
            f"give either model_path, a checkpoint, or base_model, a model's name; got model_path={model_path!r}, "
            f"base_model={base_model!r}."
        )
