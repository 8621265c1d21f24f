"""How many tokens a micro-batch of training may have: from the model's shape, and on a GPU from what was measured.

On a CPU the number depends on the model alone, because it decides in which order gradients are summed, and the same
calls must give the same bits whatever else the machine is doing.
"""

from __future__ import annotations

import math

from mint.engine.device import cores
from mint.engine.memory import free_memory
from mint.engine.model import BaseModel

# Memory one micro-batch may fill with activations kept for the backward pass. 2 GiB fits beside the weights on a
# laptop and keeps sampling steps from waiting long.
ACTIVATION_BYTES = {"cpu": 2 * 2**30, "cuda": 32 * 2**30}
# Beyond this a larger micro-batch gains nothing, however small the model: on a CPU (measured on a 0.8M-parameter model)
# its activations leave the cache, and it takes a tenth longer a token; on a GPU (H200, 0.6B) kernels are long enough by
# then to hide what happens between them, and sampling should not wait for longer.
MOST_TOKENS = {"cpu": 2048, "cuda": 16384}
FEWEST_TOKENS = 256
# On a CPU a call is cut into as many micro-batches as there are cores to compute them side by side, unless they would
# have fewer tokens than this: what happens between their products would take longer than the products.
FEWEST_SIDE_BY_SIDE = 128
# Where several cores share a micro-batch they take blocks of rows, an even number (`blocks_of` in `training_space.h`).
ROW_BLOCK = 96
UNDIVIDED = 48
# Micro-batches may have so much more rather than leave a small one on a GPU, where 1,093 tokens by themselves took
# 19 ms (H200, 0.6B), as long as 2,700 in a full micro-batch; or rather than be twice as many on a CPU.
SLACK = 0.125
# What attention costs on a CPU beside the products with weights: multiplications by a key or value, forward and back,
# which run at three quarters of the others' speed, over those by a weight. By it a token among 8,192 costs 5.0 times as
# much as one alone; measured (hidden size 256, 4 layers), 4.5 times one among 128.
PAIR_TO_WEIGHT = 4.0
# Of a GPU's free memory; the rest is for logits, gradients and whoever samples.
SHARE_OF_FREE = 0.5


class TokenBudget:
    def __init__(self, model: BaseModel, lean: bool, fixed: int | None = None) -> None:
        """`fixed`: this many, and nothing is measured."""
        self._device = model.device
        self._kind = model.device.type if model.device.type in MOST_TOKENS else "cpu"
        self._adapts = fixed is None and self._kind == "cuda"
        self._most = MOST_TOKENS[self._kind]
        tokens = max(1, ACTIVATION_BYTES[self._kind] // _bytes_per_token(model, lean))
        side_by_side = min(cores().count, max(1, tokens // FEWEST_SIDE_BY_SIDE))
        self.lanes = side_by_side if fixed is None and model.trains_side_by_side else 1
        """Micro-batches that may be computed at once, each in its share of the memory."""
        self.tokens = fixed or self._within(tokens // self.lanes)
        self._shares = model.native_training is not None
        self._alone = self._within(tokens)  # of a micro-batch beside which there is no other
        self.pair_cost = _pair_cost(model) if self.lanes > 1 else 0.0
        """What a token pays for each one that it looks at, beside 1 for itself; 0 where micro-batches need not end at
        the same time."""

    def parts(self, tokens: int) -> int:
        """Into how many micro-batches so many tokens are best cut, if each has a core of its own."""
        least = self._fewest(tokens)
        if self.lanes == 1:
            return least
        most = max(1, tokens // FEWEST_SIDE_BY_SIDE)
        return max(least, min(most, -(-least // self.lanes) * self.lanes))

    def choices(self, tokens: int) -> set[int]:
        """That number, and the least where cores may share a micro-batch."""
        if not self._shares:
            return {self.parts(tokens)}
        return {self.parts(tokens), 1 if tokens <= self._alone else self._fewest(tokens)}

    def sharing(self, tokens: int) -> int:
        """How many cores so many tokens keep busy at most, if cores may share a micro-batch: one for each block."""
        return 2 * math.ceil(tokens / (2 * ROW_BLOCK)) if self._shares and tokens > UNDIVIDED else 1

    def measured(self, tokens: int, kept: int) -> None:
        """A forward pass over so many tokens kept so many bytes for its backward pass, which is over."""
        if self._adapts and tokens >= FEWEST_TOKENS and kept > 0:
            self.tokens = self._within(int(SHARE_OF_FREE * free_memory(self._device) * tokens / kept))

    def halve(self) -> None:
        """Memory ran out: not so many again."""
        self._most = max(FEWEST_TOKENS, self._most // 2)
        self.tokens = min(self.tokens, self._most)

    def _fewest(self, tokens: int) -> int:
        slack = SLACK if self._adapts or self.lanes > 1 else 0.0
        return max(1, math.ceil(tokens / (self.tokens * (1 + slack))))

    def _within(self, tokens: int) -> int:
        return max(1, min(self._most, tokens))


def _bytes_per_token(model: BaseModel, lean: bool) -> int:
    """What autograd keeps of each token: about ten hidden-sized and four MLP-sized activations a layer, of all layers
    or, where layers are computed again, of one."""
    per_layer = (10 * model.hidden_size + 4 * model.intermediate_size) * model.dtype.itemsize
    kept_of_others = model.hidden_size * model.dtype.itemsize if lean else per_layer
    return per_layer + (model.num_layers - 1) * kept_of_others


def _pair_cost(model: BaseModel) -> float:
    weights = sum(linear.weight.numel() for linear in model.linears.values())
    return PAIR_TO_WEIGHT * model.num_layers * model.num_heads * model.head_dim / weights
