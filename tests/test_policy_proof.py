"""Wrong weights in the sampler are refused by name, end to end: a client over HTTP, the server, the real engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import uvicorn

import mint
from mint import types
from mint.config import ServerConfig
from mint.engine.engine import Engine
from mint.engine.lora import Adapter
from mint.server.app import create_app
from tests.waiting import eventually

TEXT = [81, 58, 32, 87, 104, 97, 116, 32, 105, 115]


@dataclass
class System:
    """A server whose engine can be reached, to plant faults in it."""

    engine: Engine
    service: mint.ServiceClient

    def trained(self, seed: int) -> mint.TrainingClient:
        client = self.service.create_lora_training_client("mint/tiny", rank=4, seed=seed)
        step(client, 1.0 if seed else -1.0)
        return client

    def plant(self, sampler: mint.SamplingClient, adapter: Adapter | None) -> None:
        """Before anything is sampled from it."""
        name = sampler._id
        eventually(lambda: name in self.engine._policies.by_name)

        def exchange() -> None:
            self.engine._policies.by_name[name] = replace(self.engine._policies.by_name[name], adapter=adapter)

        self.engine._worker.submit(name, exchange).result(60)

    def adapter_of(self, client: mint.TrainingClient) -> Adapter:
        return self.engine._tenants[client.model_id].adapter


def step(client: mint.TrainingClient, weight: float, rate: float = 1e-2) -> dict[str, float]:
    inputs = {"target_tokens": TEXT[1:], "weights": [weight] * (len(TEXT) - 1)}
    client.forward_backward([types.Datum(types.ModelInput.from_ints(TEXT[:-1]), inputs)], "cross_entropy")
    return client.optim_step(types.AdamParams(learning_rate=rate)).result().metrics or {}


def ask(sampler: mint.SamplingClient) -> types.SampleResponse:
    params = types.SamplingParams(max_tokens=2, seed=0, stop=[])
    return sampler.sample(types.ModelInput.from_ints(TEXT), 1, params).result()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    engine = Engine(["mint/tiny"])
    config = ServerConfig(models=("mint/tiny",), data=tmp_path_factory.mktemp("data"))
    server = uvicorn.Server(uvicorn.Config(create_app(config, engine), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    eventually(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    with mint.ServiceClient(f"http://127.0.0.1:{port}", api_key="tml-any") as service:
        yield System(engine, service)
    server.should_exit = True
    thread.join()


def base(system: System, client: mint.TrainingClient) -> Adapter | None:
    return None


def stale(system: System, client: mint.TrainingClient) -> Adapter | None:
    ask(client.save_weights_and_get_sampling_client())
    old = system.adapter_of(client).snapshot()
    step(client, 1.0)
    return old


def one_layer_missing(system: System, client: mint.TrainingClient) -> Adapter | None:
    wrong = system.adapter_of(client).snapshot()
    wrong.weights = {path: pair for path, pair in wrong.weights.items() if ".layers.1." not in path}
    assert 0 < len(wrong.weights) < len(system.adapter_of(client).weights)
    return wrong


def scaled_by_two(system: System, client: mint.TrainingClient) -> Adapter | None:
    wrong = system.adapter_of(client).snapshot()
    wrong.scale *= 2
    return wrong


def another_tenants(system: System, client: mint.TrainingClient) -> Adapter | None:
    return system.adapter_of(system.trained(0)).snapshot()


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (base, "the sampler has the base model's weights"),
        (stale, "the sampler has the weights of an earlier snapshot"),
        (one_layer_missing, "sampler and trainer disagree"),
        (scaled_by_two, "sampler and trainer disagree"),
        (another_tenants, "sampler and trainer disagree"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_sampler_with_other_weights_is_refused_at_its_first_sample(
    system: System, fault: Callable[[System, mint.TrainingClient], Adapter | None], named: str
) -> None:
    client = system.trained(1)
    wrong = fault(system, client)
    sampler = client.save_weights_and_get_sampling_client()
    system.plant(sampler, wrong)
    with pytest.raises(mint.MintError, match="policy refused") as refusal:
        ask(sampler)
    assert named in str(refusal.value)
    again = client.save_weights_and_get_sampling_client()  # the weights in training are right: the next one serves
    assert len(ask(again).sequences[0].tokens) == 2


def test_the_figures_of_the_proof_reach_the_client(system: System, tmp_path: Path) -> None:
    client = system.trained(1)
    ask(client.save_weights_and_get_sampling_client())
    metrics = step(client, 1.0)
    assert metrics["policy/logprob_gap_max"] < 1e-4 < metrics["policy/distance_from_base"]
