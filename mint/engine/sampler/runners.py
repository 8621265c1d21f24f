"""Which runner carries out a sampler's plans: the one in kernels where the model and the device allow it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Protocol

import torch

from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.sampler.drawing import Drawn
from mint.engine.sampler.paged import BlockStore
from mint.engine.sampler.runner import Runner
from mint.engine.sampler.scheduler import Plan


class PlanRunner(Protocol):
    store: BlockStore
    burst: int
    """Tokens a sequence may draw in one step (see the scheduler)."""

    def run(self, plan: Plan) -> Iterable[Drawn]:
        """May return before the device is done; who reads the tokens waits for it."""
        ...

    def forget(self, adapter: Adapter) -> None:
        """It will hardly be asked again."""
        ...


def runner_for(model: BaseModel, block_size: int) -> PlanRunner:
    if model.device.type == "cuda" and model.fused is not None and find_spec("triton"):
        from mint.engine.sampler.kernel_pass import HEAD_SIZES
        from mint.engine.sampler.kernel_runner import KernelRunner

        if model.head_dim in HEAD_SIZES and torch.cuda.get_device_capability(model.device) >= (8, 0):
            return KernelRunner(model, model.fused, block_size)
    return Runner(model, block_size)
