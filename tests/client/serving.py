"""An ASGI application on a real socket of this machine, for as long as a test wants it."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from tests.waiting import eventually


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """A port that stays ours while nobody listens on it: nothing else on the machine is given it meanwhile."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]


@contextlib.contextmanager
def serving(app: Callable[..., Any], port: int = 0, lifespan: str = "off") -> Iterator[str]:
    config = uvicorn.Config(app, port=port, log_level="error", lifespan=lifespan, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started or not thread.is_alive())
    assert server.started, "the server did not start"
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
