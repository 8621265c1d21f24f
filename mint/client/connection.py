"""The way to one server, opened on first use: its address (or a local server), its settings, its transport."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass

from mint.client.auth import TokenExchange
from mint.client.batches import Batches
from mint.client.transport import Transport
from mint.config import ClientConfig
from mint.errors import NotFound
from mint.local import local_server
from mint.wire import from_json

DIALECT = "0.36.0"
"""The version of the Tinker SDK whose protocol we speak; servers read it to know what they may send."""


@dataclass(frozen=True)
class Settings:
    """What the server asks of its clients, under the protocol's names."""

    fwdbwd_max_chunk_len: int = 1024
    """Datums in one request."""
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    """Estimated bytes in one request."""
    proto_compress_fwdbwd: bool = False
    """Compress protobuf bodies with zstd."""
    pjwt_auth_enabled: bool = False
    """Exchange the key for a token."""
    sample_max_concurrent_requests: int = 2000
    """Samples of one client in flight."""
    sample_join_sampling_session: bool = False
    """Copies of a sampling client ask the server for their number."""
    sample_batches: bool = False
    """Takes many samples in one request. MinT's own."""


class Connection:
    """Opened once, by whoever needs it first; a failed attempt may be repeated."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.settings = Settings()
        self.batches: Batches | None = None
        """The way for many samples at once, once the server has said that there is one."""
        self._transport: Transport | None = None
        self._closed = False
        self._pid = os.getpid()
        self._lock = asyncio.Lock()
        if config.base_url is None:
            local_server()  # comes up while the caller goes on

    async def open(self) -> Transport:
        async with self._lock:
            if self._closed:
                raise RuntimeError("this ServiceClient is closed; make a new one.")
            if os.getpid() != self._pid:
                raise RuntimeError(
                    "this client belongs to the process it was made in; in a forked one make a new ServiceClient, or "
                    "use a SamplingClient, which may be shared."
                )
            if self._transport is None:
                self._transport = await self._connect()
            return self._transport

    async def close(self) -> None:
        async with self._lock:
            self._closed = True
            if self._transport is not None:
                await self._transport.close()

    async def _connect(self) -> Transport:
        if self.config.base_url is None:
            server = local_server()
            self.config = await asyncio.to_thread(server.wait_until_ready)
            transport = Transport(str(self.config.base_url), self.config.api_key, server.obituary)
        else:
            transport = Transport(self.config.base_url, self.config.api_key)
        try:
            answer = await transport.post("client/config", {"sdk_version": DIALECT})
        except NotFound as error:
            raise NotFound(_no_server_at(transport.base_url)) from error
        self.settings = from_json(Settings, answer)
        if self.settings.sample_batches:
            self.batches = Batches(transport)
        if self.settings.pjwt_auth_enabled:
            transport.exchange = TokenExchange()
        return transport


_shared: dict[ClientConfig, Connection] = {}
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_shared.clear)


def shared_connection(config: ClientConfig) -> Connection:
    """One connection a process for all sampling clients that were unpickled for the same server."""
    return _shared.setdefault(config, Connection(config))


def _no_server_at(base_url: str) -> str:
    """Something else answers there; what MinT serves for OpenAI clients, for instance, is one floor down."""
    own = base_url.removesuffix("/v1").removesuffix("/api")
    told = f"there is no MinT server at {base_url}, though something answers there."
    if own == base_url:
        return f"{told} base_url is the address that `mint serve` prints, such as http://127.0.0.1:8000."
    return f"{told} base_url is the address of the server itself, without the path that other clients want: {own}"
