"""An ASGI application on a real socket of this machine, for as long as a test wants it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn


@contextlib.contextmanager
def serving(app: Callable[..., Any], port: int = 0, lifespan: str = "off") -> Iterator[str]:
    config = uvicorn.Config(app, port=port, log_level="error", lifespan=lifespan, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
