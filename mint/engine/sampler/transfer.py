"""Between the host and the device without either waiting for the other: through memory the device can reach itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, there by the time anything enqueued after this call runs."""
    return _reachable(array, device).to(device, non_blocking=True)


def put(array: np.ndarray, target: Tensor) -> None:
    """Into a tensor on the device, behind everything that was enqueued before."""
    target.copy_(_reachable(array, target.device), non_blocking=True)


class Fetched:
    """Tensors on their way to the host; `arrays` waits for them, and for nothing that was enqueued later."""

    def __init__(self, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        on_gpu = tensors[0].is_cuda
        self._copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=on_gpu) for t in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        if on_gpu:
            self._event = torch.cuda.Event()
            self._event.record()

    def arrays(self) -> list[np.ndarray]:
        if self._event is not None:
            self._event.synchronize()
        return [copy.numpy() for copy in self._copies]


def _reachable(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
