"""Faults between client and server: each is waited out or told in one clear sentence, never hung upon."""

import asyncio
import base64
import json
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

import mint
from mint import types
from mint.client import transport
from mint.client.auth import expiry
from mint.client.futures import start
from mint.client.http import Response
from mint.client.transport import Transport
from tests import hourglass
from tests.client.serving import kept_port, serving
from tests.client.stub import Answer, Stub
from tests.server.live import Live
from tests.waiting import PATIENCE, eventually


def test_a_wrong_key_is_one_clear_error_and_no_retry(stub: Stub) -> None:
    stub.faults["client/config"].append(Answer({"detail": "unknown key; set MINT_API_KEY"}, 401))
    with serving(stub) as url, pytest.raises(mint.Unauthorized, match="set MINT_API_KEY"):
        mint.ServiceClient(url, "wrong").create_lora_training_client("base")
    assert stub.paths() == ["client/config"]
    assert stub.received[0].headers["x-api-key"] == "wrong"


def test_an_address_where_nobody_listens_is_told_soon() -> None:
    with kept_port() as port:
        url = f"http://127.0.0.1:{port}"
        service = mint.ServiceClient(url)  # no error yet: nothing was asked
        with pytest.raises(mint.ConnectionFailed, match=f"no connection to {url}.*mint serve") as raised:
            service.get_server_capabilities()  # later calls go on trying for longer than a test may take
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(mint.BadRequest, match="base_url"):
        mint.ServiceClient(url).get_server_capabilities()


def test_a_base_url_with_a_path_keeps_it(stub: Stub) -> None:
    with serving(stub) as url:
        mint.RestClient(f"{url}/behind/a/proxy/").list_sessions()
        eventually(lambda: stub.received)
    assert stub.received[0].path == "/behind/a/proxy/api/v1/client/config"


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/api/v1"])
def test_the_address_openai_clients_use_is_told_from_the_servers_own(live: Live, path: str) -> None:
    with pytest.raises(mint.NotFound, match=f"without the path that other clients want: {live.url}$"):
        mint.ServiceClient(live.url + path, "k").get_server_capabilities()
    with pytest.raises(mint.NotFound, match=r"something answers there\..*`mint serve` prints"):
        mint.ServiceClient(f"{live.url}/elsewhere", "k").get_server_capabilities()


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
def test_passing_faults_are_tried_again_as_the_same_request(stub: Stub, status: int) -> None:
    stub.faults["create_session"].extend([Answer({"detail": "later"}, status)] * 2)
    with serving(stub) as url, mint.ServiceClient(url) as service:
        service.create_sampling_client(base_model="base")
    tries = [r for r in stub.received if r.path == "create_session"]
    assert len(tries) == 3
    assert len({r.headers["x-idempotency-key"] for r in tries}) == 1
    assert len({r.headers["x-idempotency-key"] for r in stub.received}) == len(stub.received) - 2


def test_a_fault_of_the_server_is_tried_a_few_times_then_told(stub: Stub) -> None:
    stub.faults["create_session"].extend([Answer({"detail": "a bug"}, 500)] * 50)
    with serving(stub) as url, pytest.raises(mint.Internal, match="a bug"):
        mint.ServiceClient(url).create_sampling_client(base_model="base")
    assert stub.paths().count("create_session") == 1 + transport.FAULT_RETRIES


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, mint.BadRequest),
        (403, mint.Forbidden),
        (404, mint.NotFound),
        (409, mint.BadRequest),
        (413, mint.BadRequest),
        (422, mint.BadRequest),
    ],
)
def test_each_status_is_one_error_with_the_servers_words(stub: Stub, status: int, kind: type[Exception]) -> None:
    stub.faults["create_session"].append(Answer({"detail": [{"msg": "field x"}]}, status))
    with serving(stub) as url, pytest.raises(kind, match="field x"):
        mint.ServiceClient(url).create_sampling_client(base_model="base")
    assert stub.paths().count("create_session") == 1


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    async def closed(*_: object) -> Response:
        asked.append(asyncio.get_running_loop().time())
        return Response(503, {}, b'{"detail": "closed for today"}')

    async def ask() -> None:
        monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
        there = Transport("http://127.0.0.1:1", None)
        there._posts.request, there._met = closed, True  # type: ignore[method-assign]
        await there.post("x", {}, patience=60.0)

    with pytest.raises(mint.Internal, match="closed for today"):
        hourglass.run(ask())
    waits = [later - earlier for earlier, later in pairwise(asked)]
    assert 0.07 <= waits[0] <= 0.13 and waits[:4] == sorted(waits[:4]), "back-off, not a hot loop"
    assert max(waits) <= 6.5 and 60 - 6.5 <= asked[-1] <= 60


def test_retry_after_is_obeyed(stub: Stub) -> None:
    stub.faults["create_session"].append(Answer({}, 429, {"retry-after": "0.4"}))
    with serving(stub) as url, mint.ServiceClient(url) as service:
        begun = time.monotonic()
        service.create_sampling_client(base_model="base")
        assert time.monotonic() - begun >= 0.4


def test_a_server_that_comes_back_is_found_again(stub: Stub, prompt: types.ModelInput) -> None:
    with kept_port() as port:
        with serving(stub, port) as url:
            service = mint.ServiceClient(url)
            training = service.create_lora_training_client("base")
            sampler = service.create_sampling_client(base_model="base")
        step = training.optim_step(types.AdamParams())
        sample = sampler.sample(prompt, 1, types.SamplingParams())
        time.sleep(0.3)  # long enough for some tries, on most machines
        assert not step.done()
        with serving(stub, port):
            step.result(timeout=PATIENCE)
            assert sample.result(timeout=PATIENCE).sequences
            service.close().result()


@pytest.mark.parametrize(
    "wait", [Answer({}, 408), Answer({"type": "try_again", "request_id": "f0", "queue_state": "active"})]
)
def test_polls_go_on_until_there_is_a_result_but_not_in_a_hot_loop(stub: Stub, wait: Answer) -> None:
    stub.faults["retrieve_future"].extend([wait] * 4)
    with serving(stub) as url, mint.ServiceClient(url) as service:
        service.create_lora_training_client("base")
        polls = [r for r in stub.received if r.path == "retrieve_future"]
    assert [r.headers["x-tinker-request-iteration"] for r in polls] == ["0", "1", "2", "3", "4"]
    assert {r.headers["x-tinker-request-type"] for r in polls} == {"CreateModel"}


def test_a_paused_queue_is_told_to_the_user(
    stub: Stub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mint.client.polling._last_notice", -1e9)
    waiting = {"queue_state": "paused_capacity", "queue_state_reason": "all engines are busy"}
    stub.faults["retrieve_future"].extend([Answer(waiting, 408)] * 3)
    with serving(stub) as url, mint.ServiceClient(url) as service:
        service.create_lora_training_client("base")
    assert [r.getMessage() for r in caplog.records if r.name == "mint"] == [
        "the server has paused this request: all engines are busy"
    ]


# --------------------------------------------------------------------------------------------------------------------
# Keys and tokens


def _jwt(expires: float, n: int = 0) -> str:
    payload = base64.urlsafe_b64encode(json.dumps({"exp": expires, "n": n}).encode()).decode().rstrip("=")
    return f"eyJ.{payload}.signature"


def test_the_end_of_a_token_is_read_from_it() -> None:
    assert expiry(_jwt(123.0)) == 123.0
    assert expiry("opaque") is None
    assert expiry("a.b.c") is None


def test_keys_are_exchanged_for_a_token_when_the_server_asks(stub: Stub) -> None:
    token = _jwt(time.time() + 3600)
    stub.settings = {"pjwt_auth_enabled": True}
    stub.faults["auth/token"].append(Answer({"jwt": token}))
    with serving(stub) as url, mint.ServiceClient(url, "sk-abc") as service:
        service.create_lora_training_client("base")
    keys = [(r.path, r.headers["x-api-key"]) for r in stub.received]
    assert keys[:2] == [("client/config", "sk-abc"), ("auth/token", "sk-abc")]
    assert {key for _, key in keys[2:]} == {token}


def test_a_token_near_its_end_is_replaced_before_use(stub: Stub) -> None:
    stub.settings = {"pjwt_auth_enabled": True}
    old, new = _jwt(time.time() + 5), _jwt(time.time() + 3600)
    stub.faults["auth/token"].extend([Answer({"jwt": old}), Answer({"jwt": new})])
    with serving(stub) as url, mint.ServiceClient(url, "sk-abc") as service:
        service.create_lora_training_client("base")
    assert stub.paths().count("auth/token") == 2


def test_a_refused_token_is_replaced_once(stub: Stub) -> None:
    stub.settings = {"pjwt_auth_enabled": True}
    stub.faults["create_session"].append(Answer({"detail": "expired"}, 401))
    with serving(stub) as url, mint.ServiceClient(url, "sk-abc") as service:
        service.create_sampling_client(base_model="base")
    assert stub.paths().count("auth/token") == 2


def test_a_key_of_any_form_is_sent_as_it_is(stub: Stub) -> None:
    with serving(stub) as url:
        for key in ("sk-1", "tml-1", "anything at all"):
            with mint.ServiceClient(url, key) as service:
                service.create_sampling_client(base_model="base")
    assert {r.headers["x-api-key"] for r in stub.received} == {"sk-1", "tml-1", "anything at all"}


# --------------------------------------------------------------------------------------------------------------------
# Sessions


def test_nothing_is_sent_before_the_first_call_and_one_session_serves_all(stub: Stub) -> None:
    with serving(stub) as url:
        service = mint.ServiceClient(url, user_metadata={"who": "me"}, project_id="p")
        assert not stub.received
        threads = [threading.Thread(target=service.create_sampling_client, args=(None, "base")) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        service.close().result()
    assert stub.said("create_session") == [
        {
            "tags": [],
            "user_metadata": {"who": "me"},
            "sdk_version": "0.36.0",
            "project_id": "p",
            "type": "create_session",
        }
    ]
    assert sorted(s["sampling_session_seq_id"] for s in stub.said("create_sampling_session")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("error", "ending"), [(None, "success"), (ValueError, "errored"), (KeyboardInterrupt, "interrupted")]
)
def test_leaving_the_block_finishes_the_session(stub: Stub, error: type[BaseException] | None, ending: str) -> None:
    with serving(stub) as url:
        try:
            with mint.ServiceClient(url) as service:
                service.create_sampling_client(base_model="base")
                if error is not None:
                    raise error("x")
        except (ValueError, KeyboardInterrupt):
            pass
        with pytest.raises(RuntimeError, match="closed"):
            service.create_sampling_client(base_model="base")
        service.close().result()
    assert [said["reason"] for said in stub.said("sessions/s/finish")] == [{"type": ending}]


@pytest.mark.parametrize(
    ("then", "ending"), [("", "success"), ("raise ValueError", "errored"), ("raise KeyboardInterrupt", "interrupted")]
)
def test_the_end_of_a_script_finishes_its_session(stub: Stub, then: str, ending: str) -> None:
    with serving(stub) as url:
        code = f"import mint\nclient = mint.ServiceClient({url!r}).create_sampling_client(base_model='b')\n{then}"
        subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False, timeout=60)
    assert [said["reason"] for said in stub.said("sessions/s/finish")] == [{"type": ending}]


@pytest.mark.parametrize(("then", "under_way"), [("", 3), ("raise ValueError", 0)])
def test_the_end_of_a_script_tells_in_one_line_what_nobody_asked_for(stub: Stub, then: str, under_way: int) -> None:
    stub.faults["save_weights"].extend([Answer({"detail": "no room"}, 400)] * 2)
    code = f"""
import concurrent.futures, sys, mint
training = mint.ServiceClient(sys.argv[1]).create_lora_training_client("base")
failed = [training.save_state(name) for name in "ab"]
concurrent.futures.wait(failed)
print("hold", flush=True), input()
late = [training.optim_step(mint.AdamParams(learning_rate=1e-3)) for _ in range(3)]
{then}
"""
    with serving(stub) as url:
        piped = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
        script = subprocess.Popen([sys.executable, "-c", code, url], text=True, **piped)  # type: ignore[call-overload]
        assert script.stdout.readline() == "hold\n"
        stub.let_go.clear()
        told = [line for line in script.communicate("\n", timeout=PATIENCE)[1].splitlines() if "nobody" in line]
        stub.let_go.set()
    lost = f"; {under_way} are under way and may be lost" if under_way else ""
    assert told == [
        f"the program ends and nobody has asked for the results of {2 + under_way} calls: 2 failed (BadRequest: no "
        f"room){lost}. Take every result before the end, by .result() or await."
    ]


def test_heartbeats_keep_the_session_alive_and_end_with_it(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mint.client.session.HEARTBEAT_EVERY", 0.02)
    stub.faults["session_heartbeat"].append(Answer({}, 503))  # a missed one is no news
    with serving(stub) as url:
        with mint.ServiceClient(url) as service:
            service.create_sampling_client(base_model="base")
            eventually(lambda: len(stub.said("session_heartbeat")) > 3)
        beats = stub.said("session_heartbeat")
        assert beats[0] == {"session_id": "s", "type": "session_heartbeat"}
        time.sleep(0.1)
        assert len(stub.said("session_heartbeat")) <= len(beats) + 1


def test_proxies_are_not_used_for_this_machine(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with serving(stub) as url, mint.ServiceClient(url) as service:
        service.create_sampling_client(base_model="base")


def test_a_key_without_an_address_is_refused() -> None:
    with pytest.raises(mint.BadRequest, match="MINT_BASE_URL"):
        mint.ServiceClient(api_key="sk-abc")


def test_a_long_outage_is_told_to_the_user(caplog: pytest.LogCaptureFixture) -> None:
    stub = Stub()
    with kept_port() as port:
        with serving(stub, port) as url:
            service = mint.ServiceClient(url)
            service.create_sampling_client(base_model="base")
        again = start(service._create_model("base", types.LoraConfig(), None))
        told = eventually(
            lambda: [r.getMessage() for r in caplog.records if r.name == "mint" and url in r.getMessage()]
        )
        assert [text[:16] for text in told] == ["no connection to"]
        with serving(stub, port):
            again.result(timeout=PATIENCE)
            service.close().result()


def test_a_script_that_logs_at_info_does_not_see_every_request(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), serving(stub) as url, mint.ServiceClient(url) as service:
        service.create_lora_training_client("base")
    assert not [r for r in caplog.records if r.name == "httpx"]


def test_a_training_client_refuses_to_work_in_a_forked_process(training: mint.TrainingClient) -> None:
    child = os.fork()
    if child == 0:
        try:
            training.optim_step(types.AdamParams()).result(timeout=PATIENCE)
        except RuntimeError as error:
            os._exit(0 if "belongs to the process" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
