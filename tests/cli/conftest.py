"""A run on a pretended service, and a real server with the bundled model."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mint
from mint.cli.__main__ import app
from mint.rl.rundir import RunDir
from mint.rl.train import Config, train
from tests.rl.conftest import tiny_server
from tests.rl.fake_service import FakeService, HalfDataset

__all__ = ["tiny_server"]

Invoke = Callable[..., tuple[int, str]]


def invoke(*arguments: object) -> tuple[int, str]:
    """Status and everything printed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """`mint serve` logs to what is standard error while it is called, which is closed afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


class ClosedService(FakeService):
    async def close(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with three checkpoints, on a service that `mint.ServiceClient()` gives too."""
    service = ClosedService(tmp_path / "service")
    monkeypatch.setattr(mint, "ServiceClient", lambda address=None: service)
    config = Config(
        learning_rate=0.05, dataset_builder=HalfDataset(tests=4, groups_per_batch=6, group_size=2), model_name="fake",
        recipe_name="test", max_tokens=4, log_path=str(tmp_path / "run"), loggers=(), eval_every=2, save_every=2,
    )  # fmt: skip
    return train(config, service)
