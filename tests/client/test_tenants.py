"""Our client as a tenant: it reads its usage, and waits where a limit says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mint
from mint import types
from mint.server.keyring import Quota
from tests.server.live import Live
from tests.server.tenants import Keychain
from tests.waiting import eventually


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    live = Live(tmp_path / "data")
    yield live
    live.stop()


def test_usage_is_told_by_key_run_and_time(live: Live) -> None:
    chain = Keychain(live)
    alice = chain.tenant("alice")
    _, root = chain.ring.create("root", admin=True)
    model = alice.model()
    alice.fetch(alice.train(model, 1))
    rest = mint.RestClient(live.url, root)
    assert [line.key for line in rest.get_usage().result().usage] == ["root"]
    told = rest.get_usage(key="alice").result().usage
    assert [(line.run, line.trained_tokens) for line in told] == [("", 0), (model, 2)]
    assert rest.get_usage(key=chain.id("alice")).result().usage == told
    assert [line.run for line in rest.get_usage(key="all", run=model).result().usage] == [model]
    assert rest.get_usage(key="all", since=time.time() + 7200).result().usage == []
    with pytest.raises(mint.NotFound, match="no key 'carol'"):
        rest.get_usage(key="carol").result()


def test_our_client_waits_for_a_limit_and_says_so(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    _, key = Keychain(live).ring.create("alice", Quota(concurrent=1))
    with mint.ServiceClient(live.url, key) as service:
        sampler = service.create_sampling_client(base_model="mint/tiny")
        live.backend.hold()
        prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=3)
        futures = [sampler.sample(prompt, 1, params) for _ in range(3)]
        eventually(lambda: "as many as it may (concurrent)" in caplog.text)
        live.backend.let_go()
        assert [len(future.result().sequences) for future in futures] == [1, 1, 1]
