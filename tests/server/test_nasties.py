"""A list of hand-made nasties: each is answered with a 4xx that says why, and the server goes on serving."""

import gzip
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
import zstandard

from mint import wire
from mint.types import Datum, ModelInput
from tests.server.live import Live, datum_json, sample_body, train_body
from tests.waiting import PATIENCE, eventually

Serve = Callable[..., Live]


def good(live: Live) -> None:
    assert live.get("/healthz") == {"status": "ok"} and live.fetch(live.step(live.model(), 1))["metrics"]


NUMBERS = ["1e999", "-1e999", "NaN", "Infinity", "1" * 5000, "0" * 10 + "1", "--1", "0x10"]
DEEP = "[" * 100_000 + "]" * 100_000
DEEP_OBJECT = '{"a":' * 50_000 + "1" + "}" * 50_000


@pytest.mark.parametrize("path", ["/create_session", "/optim_step", "/forward_backward", "/asample", "/weights_info"])
def test_numbers_and_nestings_no_parser_likes(live: Live, path: str) -> None:
    bodies = [*NUMBERS, DEEP, DEEP_OBJECT, "", " ", "null", "[]", '"', "{", "\x00", '{"a":1}}', "tru"]
    bodies += [f'{{"model_id": {n}, "seq_id": {n}, "tags": {n}, "prompt": {n}}}' for n in (*NUMBERS, DEEP)]
    bodies += ['{"model_id": "a", "model_id": {"b": 1}}', '{"": 1}', '{"\\ud800": "\\udfff"}', "{'a': 1}"]
    for body in bodies:
        answer = live.http.post(path, content=body.encode(), headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500 and answer.json()["detail"], f"{body[:60]!r}: {answer.text[:300]}"


def test_content_types_and_encodings_that_lie(live: Live) -> None:
    model = live.model()
    body = json.dumps(train_body(model, 1)).encode()
    lies: list[dict[str, str]] = [
        {"content-type": wire.PROTOBUF},
        {"content-type": "application/json", "content-encoding": "zstd"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-type": "application/json", "content-encoding": "br"},
        {"content-type": "application/json", "content-encoding": "gzip, zstd"},
    ]
    for headers in lies:
        answer = live.http.post("/forward_backward", content=body, headers=headers)
        assert 400 <= answer.status_code < 500 and answer.json()["detail"], f"{headers}: {answer.text}"
    good(live)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gzip", "zstd"])
def test_a_packed_body_is_read_and_a_bomb_is_refused_without_unpacking_it(serve: Serve, pack: Any) -> None:
    live = serve(body_bytes=1 << 20)
    encoding = "gzip" if pack is gzip.compress else "zstd"
    headers = {"content-type": "application/json", "content-encoding": encoding}
    model = live.model()
    fine = live.http.post("/forward_backward", content=pack(json.dumps(train_body(model, 1)).encode()), headers=headers)
    assert live.fetch(fine.json())["metrics"]
    bomb = pack(b" " * (64 << 20))
    assert len(bomb) < 1 << 20
    answer = live.http.post("/forward_backward", content=bomb, headers=headers)
    assert answer.status_code == 413, answer.text
    cut = live.http.post("/forward_backward", content=pack(b"{}" * 1000)[:-9], headers=headers)
    assert cut.status_code == 400, cut.text


def test_a_request_that_would_cost_too_much_is_refused_before_it_does(serve: Serve) -> None:
    live = serve(datums=3)
    model, sampler = live.model(), live.sampler()
    assert "4 datums" in live.refused("/forward_backward", train_body(model, 1, [datum_json([1, 2, 3])] * 4))
    assert "more than the context of 1024" in live.refused(
        "/forward_backward", train_body(model, 2, [datum_json([1] * 2000)])
    )
    long = tuple([1] * 2000)
    for more, said in [
        ({"num_samples": 10**6}, "num_samples"),
        ({"sampling_params": {"max_tokens": 10**9}}, "context"),
        ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
        ({"tokens": long}, "more than the context"),
    ]:
        assert said in live.refused("/asample", sample_body(sampler, 1, **more)), more
    assert not [name for name in live.backend.names() if name in ("forward_backward", "sample")]
    good(live)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "..",
        ".",
        "/abs",
        "a/../../b",
        "a\x00b",
        "a\nb",
        "x" * 5000,
        "",
        " ",
        "%2e%2e%2f",
        "con/..",
        "ü" * 200,
    ],
)
def test_names_that_want_out_of_their_folder(live: Live, name: str, tmp_path: Any) -> None:
    before = {path for path in tmp_path.rglob("*") if "journal" not in str(path)}
    model = live.model()
    for seq_id, kind in enumerate(("save_weights", "save_weights_for_sampler", "save_weights_external"), 1):
        answer = live.post(f"/{kind}", {"model_id": model, "seq_id": seq_id, "path": name}, ok=False)
        assert answer.status_code < 500, answer.text
        if answer.is_success and "error" not in (told := live.fetch(answer.json())):
            assert told["path"].startswith(f"tinker://{model}/")
    written = {path for path in tmp_path.rglob("*") if "journal" not in str(path)} - before
    assert all(tmp_path / "data" in path.parents for path in written)
    good(live)


@pytest.mark.parametrize(
    "path",
    [
        "/training_runs/../../../etc/passwd",
        "/training_runs/%2e%2e%2f%2e%2e%2fetc/checkpoints/weights/x/archive",
        "/training_runs/a/checkpoints/weights/..%2f..%2f..%2fetc%2fpasswd/archive",
        "/training_runs/%00/checkpoints",
        "/training_runs/" + "a" * 20_000,
        "/downloads/eyJhbGciOiJub25lIn0.eyJ1c2UiOiJkb3dubG9hZCJ9./checkpoint.tar.gz",
        "/downloads/../../secret/file",
        "/downloads/%ff%fe/file",
        "/sessions/%ed%a0%80",
        "/samplers/" + "%20" * 300,
        "/training_runs?limit=1&limit=x&offset=99999999999999999999",
        "/checkpoints?offset=9223372036854775807",
        "/training_runs?offset=9223372036854775808",
        "/checkpoints?limit=%00",
    ],
)
def test_addresses_that_go_nowhere(live: Live, path: str) -> None:
    answer = live.http.get(path)
    assert answer.status_code < 500, answer.text
    assert b"root:" not in answer.content
    good(live)


def test_headers_that_are_not_what_they_should_be(live: Live) -> None:
    for headers in (
        {"X-API-Key": "\x7f" * 10},
        {"X-API-Key": "k" * 30_000},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer " + "eyJ." * 100},
        {"X-Request-Id": "a" * 5000},
        {"Accept": "\x7f;q=nan"},
        {"User-Agent": "AsyncTinker/Python 0.999999999999999999999.x"},
        {"X-Tinker-Request-Iteration": "-1"},
    ):
        answer = live.http.get("/training_runs", headers=headers)
        assert answer.status_code < 500, f"{headers}: {answer.text}"
    good(live)


def raw(live: Live, data: bytes, more: bytes | None = None) -> bytes:
    """What comes back on a bare socket."""
    port = int(live.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(data)
        if more is not None:
            connection.sendall(more)
        received = b""
        try:
            while piece := connection.recv(65536):
                received += piece
                if b"\r\n\r\n" in received:
                    break
        except (TimeoutError, ConnectionError):
            pass
        return received


@pytest.mark.parametrize(
    "request_",
    [
        b"GARBAGE\r\n\r\n",
        b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"POST /api/v1/asample HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabc",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * 200_000 + b"\r\n\r\n",
    ],
    ids=lambda value: value[:24].decode() + str(len(value)),
)
def test_bytes_that_are_no_http(live: Live, request_: bytes) -> None:
    answer = raw(live, request_)
    assert not answer or b" 4" in answer.split(b"\r\n", 1)[0], answer[:200]
    good(live)


def test_half_a_body_is_not_waited_for_for_ever(serve: Serve) -> None:
    live = serve(body_seconds=0.2)
    head = b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    answer = raw(live, head + b'{"model_id"')
    assert b" 408 " in answer.split(b"\r\n", 1)[0] and b"no more of the body" in answer
    good(live)


def test_clients_that_hang_up_in_the_middle_leave_nothing_behind(live: Live) -> None:
    port = int(live.url.rpartition(":")[2])
    for n in range(20):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(
                b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"[: 40 + 3 * n]
            )
    good(live)
    eventually(lambda: live.open_requests() == 0)


def test_protobuf_that_means_something_else(live: Live) -> None:
    model = live.model()
    headers = {"content-type": wire.PROTOBUF}
    fine = wire.forward_backward_to_proto(
        wire.ForwardBackwardCall(
            model, 1, [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})], "cross_entropy"
        )
    )
    for at in range(0, len(fine), 3):
        for flip in (0x01, 0x80, 0xFF):
            bent = bytearray(fine)
            bent[at] ^= flip
            answer = live.http.post("/forward_backward", content=bytes(bent), headers=headers)
            assert answer.status_code < 500, answer.text
            if answer.is_success:
                assert "the server failed" not in str(live.fetch(answer.json()))
    for cut in range(1, len(fine), 2):
        assert live.http.post("/forward_backward", content=fine[:cut], headers=headers).status_code < 500
    good(live)


@pytest.mark.parametrize("content_type", ["text/plain", "application/xml", "", "multipart/form-data", wire.PROTOBUF])
def test_a_body_that_is_not_called_json_is_refused_where_json_is_read(live: Live, content_type: str) -> None:
    for path in ("/create_session", "/optim_step", f"{live.url}/v1/completions", f"{live.url}/v1/chat/completions"):
        answer = live.http.post(path, content=b'{"tags": []}', headers={"content-type": content_type})
        assert answer.status_code == 400 and "application/json" in answer.text, answer.text


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br", "deflate", "x" * 300])
def test_a_packed_body_is_refused_by_name_where_none_is_unpacked(live: Live, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    answer = live.http.post("/create_session", content=b'{"tags": []}', headers=headers)
    assert answer.status_code == 415 and "content-encoding" in answer.json()["detail"]
    good(live)


@pytest.mark.parametrize(
    "body",
    [
        {"tags": ["x" * 2000]},
        {"tags": ["x"] * 100},
        {"display_name": "x" * 3_000_000},
        {"sdk_version": "x" * 3_000_000},
        {"user_metadata": {"k" * 70_000: "v"}},
        {"user_metadata": {f"{n}": "v" * 100 for n in range(1000)}},
    ],
    ids=lambda body: next(iter(body)),
)
def test_what_is_kept_for_good_has_a_length(live: Live, body: dict[str, Any]) -> None:
    assert live.refused("/create_session", body)
    if "user_metadata" in body:
        model = {"session_id": live.session(), "model_seq_id": 0, "base_model": "mint/tiny"}
        assert "metadata" in live.refused("/create_model", model | body)
    good(live)


def test_a_batch_of_samples_is_bounded_before_anything_is_made_of_it(live: Live) -> None:
    empty = wire.framed([b""] * 1025)
    answer = live.http.post("/mint/samples", content=empty, headers={"content-type": wire.FRAMES})
    assert answer.status_code == 400 and "more than 1024 frames" in answer.json()["detail"]
    packed = {"content-type": wire.FRAMES, "content-encoding": "gzip"}
    bomb = gzip.compress(bytes(4) * 10_000_000)
    assert live.http.post("/mint/samples", content=bomb, headers=packed).status_code == 400
    body = json.dumps(sample_body(live.sampler(), 1)).encode()
    answer = live.http.post("/mint/samples", content=gzip.compress(wire.framed([body])), headers=packed)
    assert answer.is_success and len(wire.read_frames(answer.content)) == 1
