"""Our own HTTP/1.1: every form an answer may have, and every way a connection may end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from mint.client.http import (
    PIECE,
    Direct,
    Lanes,
    Listener,
    Proxied,
    Request,
    Response,
    Silent,
    Unreachable,
    connector,
    target,
)
from mint.client.transport import Transport
from mint.errors import BadRequest
from tests.client.serving import serving
from tests.client.stub import Stub

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Scripted:
    """Gives one answer after another, to whoever asks, and remembers what it was asked on which connection."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, bytes]] = []
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections = self.connections + 1
        while self.answers:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            self.asked.append((number, head + await reader.readexactly(length)))
            answer = self.answers.pop(0)
            writer.write(answer.removesuffix(b"EOF"))
            if answer.endswith(b"EOF"):
                break
        writer.close()


@asynccontextmanager
async def lane(serve: Serve) -> AsyncIterator[Lanes]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    lanes = Lanes(1, connector(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    yield lanes
    await lanes.close()
    server.close()


def ask(script: Scripted, times: int = 2, **options: float) -> list[Response | Exception]:
    async def run() -> list[Response | Exception]:
        answers: list[Response | Exception] = []
        async with lane(script) as lanes:
            for _ in range(times):
                try:
                    answers.append(await lanes.request(Request("POST", "/a", b"hi", **options)))  # type: ignore[arg-type]
                except (Silent, Unreachable) as error:
                    answers.append(error)
        return answers

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "body", "connections"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello", 1),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"", 1),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", 1),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok", 1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n", b"hello", 1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-Sum: 1\r\n\r\n", b"a", 1),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nokEOF", b"ok", 2),
        (b"HTTP/1.1 200 OK\r\n\r\nup to the endEOF", b"up to the end", 2),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nokEOF", b"ok", 2),
    ],
)
def test_every_form_of_an_answer_is_read_and_the_connection_kept_where_it_may_be(
    answer: bytes, body: bytes, connections: int
) -> None:
    script = Scripted(answer, OK)
    first, second = ask(script)
    assert isinstance(first, Response) and first.content == body and first.is_success
    assert isinstance(second, Response) and second.content == b"ok"
    assert script.connections == connections
    assert all(text.startswith(b"POST /a HTTP/1.1\r\nHost: 127.0.0.1:") for _, text in script.asked)
    assert all(text.endswith(b"\r\n\r\nhi") for _, text in script.asked)


@pytest.mark.parametrize(
    "answer",
    [
        b"EOF",
        b"HTTP/1.1 200 OK\r\nContent-LenEOF",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ntoo shortEOF",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nheEOF",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot a number\r\nEOF",
        b"this is no HTTP\r\n\r\nEOF",
    ],
)
def test_an_answer_that_ends_early_or_is_none_is_a_lost_connection_and_the_next_works(answer: bytes) -> None:
    first, second = ask(Scripted(answer, OK))
    assert isinstance(first, Unreachable)
    assert isinstance(second, Response) and second.content == b"ok"


def test_silence_ends_the_wait_and_the_late_answer_is_not_taken_for_the_next() -> None:
    release = asyncio.Event()
    script = Scripted(OK)

    async def silent_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if script.connections == 0:
            script.connections = 1
            await reader.readuntil(b"hi")
            await release.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlate")
            return
        release.set()
        await script(reader, writer)

    async def run() -> Response:
        async with lane(silent_first) as lanes:
            with pytest.raises(Silent):
                await lanes.request(Request("POST", "/a", b"hi", timeout=0.05))
            return await lanes.request(Request("POST", "/a", b"hi"))

    assert asyncio.run(run()).content == b"ok"


def test_a_cancelled_request_leaves_no_answer_behind() -> None:
    script = Scripted(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nhalf", OK)

    async def run() -> Response:
        async with lane(script) as lanes:
            begun = asyncio.Event()
            task = asyncio.create_task(
                lanes.request(Request("POST", "/a", b"hi", listener=Listener(lambda _: begun.set())))
            )
            await begun.wait()
            task.cancel()
            await asyncio.wait([task])
            return await lanes.request(Request("POST", "/a", b"hi"))

    assert asyncio.run(run()).content == b"ok"


def test_a_connection_closed_while_idle_is_opened_anew_without_a_failure() -> None:
    async def run() -> list[Response]:
        closed = asyncio.Event()
        script = Scripted(OK)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await script(reader, writer)  # closes when it has no more answers
            closed.set()

        async with lane(serve) as lanes:
            first = await lanes.request(Request("POST", "/a", b"hi"))
            await closed.wait()
            await asyncio.sleep(0)
            script.answers.append(OK)
            return [first, await lanes.request(Request("POST", "/a", b"hi"))]

    assert [response.content for response in asyncio.run(run())] == [b"ok", b"ok"]


def test_a_body_of_many_pieces_arrives_whole_and_an_early_refusal_is_heard() -> None:
    body = bytes(range(256)) * (5 * PIECE // 256)

    async def run(script: Scripted) -> Response:
        async with lane(script) as lanes:
            return await lanes.request(Request("POST", "/a", body))

    script = Scripted(OK)
    asyncio.run(run(script))
    assert script.asked[0][1].endswith(body)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
        while await reader.read(PIECE):  # read on: a socket closed on unread data would take the answer with it
            pass
        writer.close()

    async def refused() -> Response:
        async with lane(refuse) as lanes:
            return await lanes.request(Request("POST", "/a", body))

    assert asyncio.run(refused()).status_code == 413


@pytest.mark.parametrize("key", ["a\r\nX-Admin: 1", "a\nb", "schlüssel"])
def test_a_header_cannot_break_the_line(key: str) -> None:
    connection = Direct(urlsplit("http://127.0.0.1:1"), None)
    with pytest.raises(BadRequest, match="line break"):
        asyncio.run(connection.request(Request("POST", "/a", b"", {"X-API-Key": key}, 1.0)))


def test_queries_are_spelled_as_servers_expect() -> None:
    assert (
        target("/api/v1/runs", {"limit": 3, "all": True, "name": "a b&c"})
        == "/api/v1/runs?limit=3&all=true&name=a+b%26c"
    )
    assert target("/a b/s:sample:1%2F", None) == "/a%20b/s:sample:1%2F"


def test_what_is_outside_goes_through_the_proxy_and_this_machine_does_not(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def capabilities() -> object:
        transport = Transport("http://mint.invalid", None)
        return await transport.get("get_server_capabilities")

    with serving(stub) as url:
        monkeypatch.setenv("HTTP_PROXY", url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        asyncio.run(capabilities())
        assert isinstance(connector("http://127.0.0.1:1")(), Direct)
        monkeypatch.setenv("NO_PROXY", "mint.invalid")
        assert isinstance(connector("http://mint.invalid")(), Direct)
        monkeypatch.delenv("NO_PROXY")
        assert isinstance(connector("http://mint.invalid")(), Proxied)
    assert stub.received[0].headers["host"] == "mint.invalid"
    assert stub.received[0].path == "get_server_capabilities"


def test_nobody_there_through_a_proxy_is_a_lost_connection_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with pytest.raises(Unreachable):
        asyncio.run(Proxied("http://mint.invalid").request(Request("GET", "/", timeout=1.0)))
