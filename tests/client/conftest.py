from collections.abc import Iterator
from pathlib import Path

import pytest

import mint
from mint import types
from tests.client.serving import serving
from tests.client.stub import Stub
from tests.server.live import Live


@pytest.fixture(autouse=True)
def no_address_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MINT_BASE_URL", "MINT_API_KEY", "TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stub() -> Stub:
    return Stub()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    """The real server, with the key `k`."""
    server = Live(tmp_path / "data", keys=("k",))
    yield server
    server.stop()


@pytest.fixture
def service(stub: Stub) -> Iterator[mint.ServiceClient]:
    with serving(stub) as url:
        client = mint.ServiceClient(url, "key")
        yield client
        client.close().result()


@pytest.fixture
def training(service: mint.ServiceClient) -> mint.TrainingClient:
    return service.create_lora_training_client("base")


@pytest.fixture
def sampler(service: mint.ServiceClient) -> mint.SamplingClient:
    return service.create_sampling_client(base_model="base")


@pytest.fixture
def prompt() -> types.ModelInput:
    return types.ModelInput.from_ints([1, 2, 3])
