"""A real server on loopback over a fake backend, and a client that speaks raw HTTP to it."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from mint import wire
from mint.config import ServerConfig
from mint.server.app import create_app
from mint.server.connections import bounded
from mint.server.limits import Limits
from mint.types import Datum, ModelInput
from tests.fakes import FakeBackend
from tests.waiting import PATIENCE, eventually

LIMITS = {
    "poll_seconds": 45.0,
    "gap_seconds": 60.0,
    "load_wait_seconds": 60.0,
    "sweep_seconds": 0.05,
    "keys_seconds": 0.0,
    "least_free_memory": 0,
}
"""Quick where something is looked after, patient where something is waited for: a test that is about the end of a wait
says how long it is, and the others do not fail on a machine that is slow or full."""


class Live:
    """`create_app` under uvicorn in a thread; `restart` is a new server on the same data."""

    def __init__(
        self,
        data: Path,
        keys: tuple[str, ...] = (),
        models: tuple[str, ...] = (),
        port: int = 0,
        database: str | None = None,
        checkpoints: str | None = None,
        **limits: Any,
    ) -> None:
        """With a port, which need not be the one it listens on, a later server takes up what this one leaves."""
        self.config = ServerConfig(
            models=models, port=port, data=data, api_keys=keys, database=database, checkpoints=checkpoints
        )
        self.limits = Limits(**(LIMITS | limits))
        self._start(FakeBackend())

    def _start(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.app = app = create_app(self.config, backend, self.limits)
        settings = uvicorn.Config(
            app,
            port=0,
            http=bounded(self.limits),
            log_level="warning",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=int(PATIENCE),
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        eventually(lambda: self._server.started or not self._thread.is_alive())
        assert self._server.started, "the server did not start"
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        key = self.config.api_keys[0] if self.config.api_keys else "tml-any"
        self.http = self._client(key)

    def _client(self, key: str) -> httpx.Client:
        """With one connection, for as long as it asks one thing after another."""
        keep = httpx.Limits(keepalive_expiry=None)
        return httpx.Client(base_url=f"{self.url}/api/v1", headers={"X-API-Key": key}, timeout=PATIENCE, limits=keep)

    def tenant(self, key: str) -> Live:
        """The same server, asked with another key; not to be stopped."""
        other = copy.copy(self)
        other.http = self._client(key)
        return other

    def change_limits(self, **limits: Any) -> None:
        """From now on, for what begins from now on."""
        for name, value in limits.items():
            object.__setattr__(self.limits, name, value)

    def stop(self) -> None:
        self.backend.let_go()
        self.http.close()
        self._server.should_exit = True
        self._thread.join()

    def restart(self, finish: bool = True) -> None:
        """Without `finish`, what the backend holds is never done: as after a crash."""
        if not finish:
            self.backend.forget_held()
        self.stop()
        self._start(FakeBackend())

    def connections(self) -> int:
        return len(self._server.server_state.connections)

    def open_requests(self) -> int:
        """Requests being answered now, but for the one that asks."""
        page = httpx.get(f"{self.url}/metrics", headers=self.http.headers).text
        return int(float(page.partition("\nmint_requests_open ")[2].partition("\n")[0])) - 1

    def fall_silent(self, session: str, seconds: float) -> None:
        """As if nothing had been heard of the session for so long."""
        self.app.state.server.sessions._live[session].last_seen -= seconds

    # Calls ----------------------------------------------------------------------------------------------------------

    def post(self, path: str, body: Any = None, ok: bool = True, **headers: str) -> Any:
        answer = self.http.post(path, json=body if body is not None else {}, headers=headers)
        if ok:
            assert answer.is_success, answer.text
            return answer.json() if answer.content else None
        return answer

    def get(self, path: str, **params: Any) -> Any:
        answer = self.http.get(path, params=params)
        assert answer.is_success, answer.text
        return answer.json()

    def refused(self, path: str, body: Any, status: int = 400) -> str:
        """The server's words of refusal; every refusal must have a body with a length."""
        answer = self.post(path, body, ok=False)
        assert answer.status_code == status, f"{answer.status_code}: {answer.text}"
        assert int(answer.headers["content-length"]) > 0
        return answer.json()["detail"]

    def fetch(self, envelope: dict[str, Any]) -> dict[str, Any]:
        return self.post("/retrieve_future", {"request_id": envelope["request_id"], "allow_metadata_only": True})

    def fetch_proto(self, envelope: dict[str, Any]) -> httpx.Response:
        body = {"request_id": envelope["request_id"], "allow_metadata_only": True}
        return self.post("/retrieve_future", body, ok=False, accept=wire.PROTOBUF)

    # Ready-made things ----------------------------------------------------------------------------------------------

    def session(self) -> str:
        return self.post("/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"})["session_id"]

    def model(self, session: str | None = None, number: int = 0, **more: Any) -> str:
        body = {"session_id": session or self.session(), "model_seq_id": number, "base_model": "mint/tiny"} | more
        return self.fetch(self.post("/create_model", body))["model_id"]

    def train(self, model: str, seq_id: int | None, data: list[Any] | None = None, **more: Any) -> dict[str, Any]:
        return self.post("/forward_backward", train_body(model, seq_id, data, **more))

    def step(self, model: str, seq_id: int | None, ok: bool = True, **adam: Any) -> Any:
        adam_params = {"learning_rate": 1e-3} | adam
        return self.post("/optim_step", {"model_id": model, "seq_id": seq_id, "adam_params": adam_params}, ok=ok)

    def save(self, model: str, seq_id: int, name: str = "one", kind: str = "save_weights", **more: Any) -> str:
        body = {"model_id": model, "seq_id": seq_id, "path": name} | more
        return self.fetch(self.post(f"/{kind}", body))["path"]

    def sampler(self, session: str | None = None, number: int = 0, **target: Any) -> str:
        body = {"session_id": session or self.session(), "sampling_session_seq_id": number}
        body |= target or {"base_model": "mint/tiny"}
        return self.post("/create_sampling_session", body)["sampling_session_id"]

    def sample(self, sampler: str, seq_id: int, **more: Any) -> dict[str, Any]:
        return self.post("/asample", sample_body(sampler, seq_id, **more))


def datum_json(tokens: list[int], **inputs: list[float]) -> dict[str, Any]:
    tensors = {"target_tokens": {"data": tokens[1:], "dtype": "int64"}}
    tensors |= {key: {"data": values, "dtype": "float32"} for key, values in inputs.items()}
    return {"model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]}, "loss_fn_inputs": tensors}


def train_body(model: str, seq_id: int | None, data: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    given = {"data": [datum_json([1, 2, 3])] if data is None else data, "loss_fn": "cross_entropy"} | more
    return {"model_id": model, "seq_id": seq_id, "forward_backward_input": given}


def sample_body(sampler: str | None, seq_id: int | None, tokens: tuple[int, ...] = (1, 2, 3), **more: Any) -> Any:
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]},
        "num_samples": 1,
        "sampling_params": {"max_tokens": 8, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "type": "sample",
    }
    return body | more


def datum(tokens: list[int], **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], **inputs})
