"""RestClient: runs, sessions and checkpoints, for looking after them. Every call has an awaited `_async` twin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urljoin

from mint.client.connection import Connection
from mint.client.futures import APIFuture, start
from mint.client.polling import json_field, retrieve
from mint.config import ClientConfig
from mint.errors import Internal
from mint.types import (
    CheckpointArchiveUrlResponse,
    CheckpointsListResponse,
    GetSamplerResponse,
    GetSessionResponse,
    ListSessionsResponse,
    ParsedCheckpointTinkerPath,
    TrainingRun,
    TrainingRunsResponse,
    UsageResponse,
    WeightsInfoResponse,
)
from mint.wire import from_json

T = TypeVar("T")
AccessScope = Literal["owned", "accessible"]


class RestClient:
    """Made by `ServiceClient.create_rest_client`, or by itself with the same arguments; needs no session."""

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, connection: Connection | None = None
    ) -> None:
        self._connection = connection or Connection(ClientConfig.resolve(base_url, api_key))

    # ----------------------------------------------------------------------------------------------------------------
    # Runs

    def list_training_runs(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> APIFuture[TrainingRunsResponse]:
        scope = {"limit": limit, "offset": offset, "access_scope": access_scope, "project_id": project_id}
        return start(self._get("training_runs", TrainingRunsResponse, scope))

    async def list_training_runs_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> TrainingRunsResponse:
        return await self.list_training_runs(limit, offset, access_scope, project_id)

    def get_training_run(self, training_run_id: str, access_scope: AccessScope = "owned") -> APIFuture[TrainingRun]:
        path = f"training_runs/{quote(training_run_id)}"
        return start(self._get(path, TrainingRun, {"access_scope": access_scope}))

    async def get_training_run_async(self, training_run_id: str, access_scope: AccessScope = "owned") -> TrainingRun:
        return await self.get_training_run(training_run_id, access_scope)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """The run a checkpoint was saved by."""
        run_id = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path).training_run_id
        return self.get_training_run(run_id, access_scope)

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> TrainingRun:
        return await self.get_training_run_by_tinker_path(tinker_path, access_scope)

    # ----------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        path = f"training_runs/{quote(training_run_id)}/checkpoints"
        return start(self._get(path, CheckpointsListResponse))

    async def list_checkpoints_async(self, training_run_id: str) -> CheckpointsListResponse:
        return await self.list_checkpoints(training_run_id)

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[CheckpointsListResponse]:
        """The checkpoints of all runs."""
        return start(self._get("checkpoints", CheckpointsListResponse, {"limit": limit, "offset": offset}))

    async def list_user_checkpoints_async(self, limit: int = 100, offset: int = 0) -> CheckpointsListResponse:
        return await self.list_user_checkpoints(limit, offset)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """Base model and LoRA shape of a checkpoint."""
        return start(self._weights_info(tinker_path))

    async def get_weights_info_by_tinker_path_async(self, tinker_path: str) -> WeightsInfoResponse:
        return await self.get_weights_info_by_tinker_path(tinker_path)

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        """`checkpoint_id` is `weights/<name>` or `sampler_weights/<name>`, as in listings."""
        return start(self._change("DELETE", _address(training_run_id, checkpoint_id)))

    async def delete_checkpoint_async(self, training_run_id: str, checkpoint_id: str) -> None:
        await self.delete_checkpoint(training_run_id, checkpoint_id)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        return start(self._change("DELETE", _address_of(tinker_path)))

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.delete_checkpoint_from_tinker_path(tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Lets everybody on the server load it."""
        return start(self._change("POST", f"{_address_of(tinker_path)}/publish"))

    async def publish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.publish_checkpoint_from_tinker_path(tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        return start(self._change("DELETE", f"{_address_of(tinker_path)}/publish"))

    async def unpublish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.unpublish_checkpoint_from_tinker_path(tinker_path)

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> APIFuture[None]:
        """Deletes the checkpoint that many seconds from now; None keeps it for good."""
        return start(self._change("PUT", f"{_address_of(tinker_path)}/ttl", {"ttl_seconds": ttl_seconds}))

    async def set_checkpoint_ttl_from_tinker_path_async(self, tinker_path: str, ttl_seconds: int | None) -> None:
        await self.set_checkpoint_ttl_from_tinker_path(tinker_path, ttl_seconds)

    def interpolate_checkpoints(
        self, source_paths: Sequence[str], coefficients: Sequence[float], name: str | None = None
    ) -> APIFuture[str]:
        """The path of new sampler weights: the sum of what the checkpoints do to the base model, each times its
        coefficient. Their ranks may differ; that of the result is their sum."""
        return start(self._interpolated(source_paths, coefficients, name))

    async def interpolate_checkpoints_async(
        self, source_paths: Sequence[str], coefficients: Sequence[float], name: str | None = None
    ) -> str:
        return await self.interpolate_checkpoints(source_paths, coefficients, name)

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """Where a tar archive of the checkpoint can be fetched, without a key, until the link expires."""
        return start(self._archive_url(_address(training_run_id, checkpoint_id)))

    async def get_checkpoint_archive_url_async(
        self, training_run_id: str, checkpoint_id: str
    ) -> CheckpointArchiveUrlResponse:
        return await self.get_checkpoint_archive_url(training_run_id, checkpoint_id)

    def get_checkpoint_archive_url_from_tinker_path(self, tinker_path: str) -> APIFuture[CheckpointArchiveUrlResponse]:
        return start(self._archive_url(_address_of(tinker_path)))

    async def get_checkpoint_archive_url_from_tinker_path_async(self, tinker_path: str) -> CheckpointArchiveUrlResponse:
        return await self.get_checkpoint_archive_url_from_tinker_path(tinker_path)

    # ----------------------------------------------------------------------------------------------------------------
    # Sessions

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        scope = {"limit": limit, "offset": offset, "access_scope": access_scope}
        return start(self._get("sessions", ListSessionsResponse, scope))

    async def list_sessions_async(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> ListSessionsResponse:
        return await self.list_sessions(limit, offset, access_scope)

    def get_session(self, session_id: str, access_scope: AccessScope = "owned") -> APIFuture[GetSessionResponse]:
        path = f"sessions/{quote(session_id)}"
        return start(self._get(path, GetSessionResponse, {"access_scope": access_scope}))

    async def get_session_async(self, session_id: str, access_scope: AccessScope = "owned") -> GetSessionResponse:
        return await self.get_session(session_id, access_scope)

    def get_sampler(self, sampler_id: str) -> APIFuture[GetSamplerResponse]:
        return start(self._get(f"samplers/{quote(sampler_id)}", GetSamplerResponse))

    async def get_sampler_async(self, sampler_id: str) -> GetSamplerResponse:
        return await self.get_sampler(sampler_id)

    # ----------------------------------------------------------------------------------------------------------------
    # Usage, which MinT servers have

    def get_usage(
        self, key: str | None = None, run: str | None = None, since: float | None = None
    ) -> APIFuture[UsageResponse]:
        """What this key used, by run, from the hour of `since` (seconds since 1970) on. An administrator's key may ask
        for another `key`, by name or id, or for "all"."""
        return start(self._get("mint/usage", UsageResponse, {"key": key, "run": run, "since": since}))

    async def get_usage_async(
        self, key: str | None = None, run: str | None = None, since: float | None = None
    ) -> UsageResponse:
        return await self.get_usage(key, run, since)

    # ----------------------------------------------------------------------------------------------------------------

    async def _interpolated(self, source_paths: Sequence[str], coefficients: Sequence[float], name: str | None) -> str:
        transport = await self._connection.open()
        body = {"source_paths": list(source_paths), "coefficients": list(coefficients), "output_path": name}
        opened = await transport.post("mint/checkpoints/interpolate", body)
        return await retrieve(transport, opened["request_id"], "MintInterpolateCheckpoints", json_field("path"))

    async def _get(self, path: str, cls: type[T], params: Mapping[str, Any] | None = None) -> T:
        transport = await self._connection.open()
        given = {key: value for key, value in (params or {}).items() if value is not None}
        return from_json(cls, await transport.get(path, params=given))

    async def _weights_info(self, tinker_path: str) -> WeightsInfoResponse:
        transport = await self._connection.open()
        return from_json(WeightsInfoResponse, await transport.post("weights_info", {"tinker_path": tinker_path}))

    async def _change(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> None:
        transport = await self._connection.open()
        await transport.send(method, path, content=None if body is None else json.dumps(body).encode())

    async def _archive_url(self, address: str) -> CheckpointArchiveUrlResponse:
        transport = await self._connection.open()
        response = await transport.send("GET", f"{address}/archive", expected=(302,))
        if response.status_code != 302:
            raise Internal(f"asked for an archive link, the server answered {response.status_code} without one.")
        expires = response.headers.get("expires")
        return CheckpointArchiveUrlResponse(
            url=urljoin(f"{transport.base_url}/api/v1/{address}/archive", response.headers["location"]),
            expires=parsedate_to_datetime(expires) if expires else datetime.now(UTC) + timedelta(minutes=15),
        )


def _address(training_run_id: str, checkpoint_id: str) -> str:
    return f"training_runs/{quote(training_run_id)}/checkpoints/{quote(checkpoint_id)}"


def _address_of(tinker_path: str) -> str:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return _address(parsed.training_run_id, parsed.checkpoint_id)
