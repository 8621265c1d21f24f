"""Which runner carries out a sampler's plans, and through which reader: kernels on a GPU, native code on a CPU, where
the model, the device and the machine allow it; torch everywhere else."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Protocol

import torch

from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.native.decoder import NativeDecoder
from mint.engine.sampler.drawing import Drawn
from mint.engine.sampler.native_reader import NativeReader
from mint.engine.sampler.paged import Blocks
from mint.engine.sampler.runner import Reader, Runner
from mint.engine.sampler.scheduler import Plan
from mint.engine.sampler.torch_reader import TorchReader
from mint.errors import BadRequest


class PlanRunner(Protocol):
    @property
    def store(self) -> Blocks: ...

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
            "that the sampler has kernels for (Llama, Qwen2, Qwen3 and Gemma 3 without softcaps, with heads of 32, 64, "
            "128 or 256). Serve it without --deterministic, or on a CPU."
        )
    return Runner(model, reader_for(model, block_size))


def reader_for(model: BaseModel, block_size: int) -> Reader:
    if model.packed is not None:
        return NativeReader(model, NativeDecoder(model.packed, block_size), block_size)
    return TorchReader(model, block_size)
