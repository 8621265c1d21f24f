from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, save

from mint.engine import steady
from mint.engine.model import BaseModel

torch.set_num_threads(1)
steady.ask_for_strict_sums()  # before any test multiplies


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny random model."""
    return cache(lambda family: save(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Callable[[str], Path]) -> Callable[[str], BaseModel]:
    """A family's tiny random model as the engine loads it."""
    return cache(lambda family: BaseModel.load(str(tiny_folder(family))))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(family: str, tiny_model: Callable[[str], BaseModel]) -> BaseModel:
    """Each family's model in turn."""
    return tiny_model(family)
