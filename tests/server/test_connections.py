"""Clients that are slow on purpose, on real sockets: they are let go of, and others are served meanwhile."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from mint.server import bodies
from tests.server.live import Live
from tests.waiting import PATIENCE, eventually

Serve = Callable[..., Live]
POST = b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"


@contextlib.contextmanager
def connected(live: Live, count: int) -> Iterator[list[socket.socket]]:
    port = int(live.url.rpartition(":")[2])
    with contextlib.ExitStack() as open_ones:
        yield [
            open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
            for _ in range(count)
        ]


def all_of(connection: socket.socket) -> bytes:
    """What the server says until it ends the connection."""
    told = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            told += piece
    return told


def status_of(told: bytes) -> int:
    return int(told.split(b" ", 2)[1])


def serves(live: Live) -> None:
    assert live.fetch(live.step(live.model(), 1))["metrics"]


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"GET /healthz"], ids=len)
def test_connections_whose_headers_do_not_come_are_ended_while_others_are_served(live: Live, sent: bytes) -> None:
    serves(live)
    live.change_limits(header_seconds=0.5)
    with connected(live, 200) as slow:
        for connection in slow:
            with contextlib.suppress(ConnectionError):  # ended already
                connection.sendall(sent)
        serves(live)
        for connection in slow:
            told = all_of(connection)
            assert status_of(told) == 408 and b"did not come within 0.5 s" in told
    serves(live)


def test_headers_that_come_byte_by_byte_are_not_waited_for_either(serve: Serve) -> None:
    live = serve(header_seconds=0.4)
    with connected(live, 1) as [drip]:
        drip.settimeout(0.01)
        told = b""
        for byte in b"GET /healthz HTTP/1.1\r\nX-Slow: " + b"a" * 10_000:
            with contextlib.suppress(ConnectionError):
                drip.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError, ConnectionError):
                if told := drip.recv(4096):
                    break
        assert status_of(told) == 408


def test_the_second_request_of_a_connection_is_bounded_like_the_first(live: Live) -> None:
    with connected(live, 1) as [connection]:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status_of(connection.recv(4096)) == 200
        live.change_limits(header_seconds=0.4)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHo")
        assert status_of(all_of(connection)) == 408


def test_headers_without_end_are_refused_before_they_take_memory(live: Live) -> None:
    with connected(live, 1) as [connection]:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
            for n in range(2000):
                connection.sendall(b"X-%d: %s\r\n" % (n, b"a" * 100))
        with contextlib.suppress(ConnectionError):
            assert status_of(all_of(connection)) == 431
    serves(live)


def test_a_body_that_drips_is_too_slow_although_it_never_stops(serve: Serve) -> None:
    live = serve(body_seconds=0.4)
    with connected(live, 1) as [drip]:
        drip.sendall(POST)
        drip.settimeout(0.02)

        def drop() -> bytes:
            with contextlib.suppress(ConnectionError):
                drip.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                return drip.recv(4096)
            return b""

        told = eventually(drop)
        assert status_of(told) == 408 and b"bytes a second" in told


class Clock:
    """Tells how often it was asked, and goes on when it is told to."""

    def __init__(self) -> None:
        self.asked, self.ahead = 0, 0.0

    def monotonic(self) -> float:
        self.asked += 1
        return time.monotonic() + self.ahead


def test_a_body_slower_than_its_patience_but_not_too_slow_is_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = serve(body_seconds=300, body_rate=1)
    body = json.dumps({"tags": ["x" * 800]}).encode()
    clock = Clock()
    monkeypatch.setattr(bodies, "time", clock)
    with connected(live, 1) as [slow]:
        slow.sendall(b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: %d\r\n\r\n" % len(body))
        for piece, at in enumerate(range(0, len(body), 300), 1):
            eventually(lambda piece=piece: clock.asked == 1 + piece)  # when it began, and at each wait
            clock.ahead = 200.0 * piece  # beyond its patience soon; each piece gives it 300 more
            slow.sendall(body[at : at + 300])
        assert status_of(slow.recv(4096)) == 200


def test_a_client_that_does_not_read_its_answer_is_let_go_of(serve: Serve) -> None:
    live = serve(send_seconds=0.3)
    size = len(live.http.get(f"{live.url}/openapi.json").content)
    ask = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * (20_000_000 // size)  # more than the system buffers
    with connected(live, 4) as deaf:
        for connection in deaf:
            connection.sendall(ask)
        serves(live)
        eventually(lambda: live.connections() <= 1)  # ours
    serves(live)


def test_there_are_only_so_many_connections_and_those_that_are_there_are_served(serve: Serve) -> None:
    live = serve(connections=20, header_seconds=30)
    serves(live)  # ours is one of them now
    with connected(live, 19):
        eventually(lambda: live.connections() >= 20)
        with connected(live, 1) as [late]:
            told = all_of(late)
            assert status_of(told) == 503 and b"retry-after" in told
        serves(live)
    eventually(lambda: live.connections() <= 1)
    with connected(live, 1) as [early]:
        early.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert status_of(all_of(early)) == 200


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/api/v1/checkpoints/upload", "/api/v1/asample", "/api/v1/telemetry"]
)
@pytest.mark.parametrize("length", [b"Content-Length: 1000000", b"Transfer-Encoding: chunked"])
def test_a_stranger_is_turned_away_before_a_large_body_is_read(serve: Serve, path: str, length: bytes) -> None:
    live = serve(keys=("tml-house",))
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nX-API-Key: %s\r\n%s\r\n\r\n"
    with connected(live, 2) as [stranger, known]:
        stranger.sendall(head % (path.encode(), b"tml-guess", length))
        told = all_of(stranger)
        assert status_of(told) == 401 and b"not known here" in told
        known.sendall(head % (path.encode(), b"tml-house", length))
        known.settimeout(0.1)
        with contextlib.suppress(TimeoutError):  # the rest of it is waited for, unless something else is wrong with it
            assert status_of(known.recv(4096)) != 401
