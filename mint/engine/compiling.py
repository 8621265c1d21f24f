"""`torch.compile` for a GPU's training functions: changing sizes, and a cache on disk that outlives the process.

Compiling takes some tens of seconds the first time a model's shape is trained on a machine; later processes read the
result from the cache. Nothing is compiled for a CPU, where a user would wait for it at every new shape.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
import torch.fx.experimental._config as shapes_config
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

T = TypeVar("T")

# torch's own choice, which it may have written into the environment when it was imported.
_TEMPORARY = default_cache_dir()
# One function serves several kinds of layer, with and without gradients, of several models.
_MOST_VARIANTS = 64


@cache
def compiled(function: Callable[..., T]) -> Callable[..., T]:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", _TEMPORARY) == _TEMPORARY:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(home / "mint" / "compiled")
    torch._dynamo.config.recompile_limit = _MOST_VARIANTS
    torch._dynamo.config.accumulated_recompile_limit = 8 * _MOST_VARIANTS
    # Sizes that happen to be equal once are not the same: a single sequence is as long as all tokens together.
    shapes_config.use_duck_shape = False
    return torch.compile(function)


def of_any_length(*tensors: Tensor, dim: int = 0) -> None:
    """Tells the compiler that this size changes from call to call."""
    for tensor in tensors:
        if tensor.dim() > dim:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
