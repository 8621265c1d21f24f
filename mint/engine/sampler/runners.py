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
from mint.errors import BadRequest


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
    if model.fixed_rows is not None:
        raise BadRequest(
            f"{model.facts.name} ({model.facts.architecture}, heads of {model.head_dim}) cannot be sampled "
            "deterministically on this GPU: that takes Triton, a card of compute capability 8.0 or higher, and a model "
            "that the sampler has kernels for (Llama, Qwen2 and Qwen3 with heads of 32, 64, 128 or 256). Serve it "
            "without --deterministic, or on a CPU."
        )
    return Runner(model, block_size)
