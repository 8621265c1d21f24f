"""How much a sampler may hold and do at once, from the machine's and the model's facts."""

from __future__ import annotations

from dataclasses import dataclass

from mint.engine.memory import free_memory
from mint.engine.model import BaseModel

# Tokens a block. Small blocks waste little at the end of a sequence and share more of a prefix; large ones make
# shorter tables.
BLOCK_SIZE = 16

# On a CPU the pool begins small and doubles on demand: a laptop has other things to do with its memory, and a tiny
# model never needs more. A quarter of what is free leaves room for training and for the user.
CPU_START_BYTES = 64 * 2**20
CPU_SHARE = 0.25

# On a GPU the memory is ours, and taking it at once keeps the tensors where they are. Training needs the rest.
GPU_SHARE = 0.4


@dataclass(frozen=True)
class Limits:
    block_size: int
    blocks: int
    """Key/value blocks to begin with."""
    max_blocks: int
    token_budget: int
    """Tokens read in one step, so how long a prompt's chunk may hold up the others."""
    max_sequences: int
    """Samples that run at once."""

    @classmethod
    def of(cls, model: BaseModel) -> Limits:
        per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.dtype.itemsize
        free = free_memory(model.device)
        if model.device.type == "cpu":
            start, most = CPU_START_BYTES, int(CPU_SHARE * free)
            budget, sequences = 512, 256
        else:
            start = most = int(GPU_SHARE * free)
            budget, sequences = 16384, 1024
        blocks, max_blocks = (max(1, size // (per_token * BLOCK_SIZE)) for size in (min(start, most), most))
        return cls(BLOCK_SIZE, blocks, max_blocks, budget, sequences)
