"""Random streams by counter: the number a sample draws at a position depends on its seed, its index in the request and
the position, and on nothing else that runs. SplitMix64 (Steele, Lea, Flood 2014) throughout."""

from __future__ import annotations

import numpy as np

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def stream_of(seed: int, index: int) -> int:
    """The stream of sample `index` under `seed`; any integers."""
    return _mix_one((_mix_one(seed & _MASK) + index) & _MASK)


def uniforms(stream_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (stream, position)."""
    counter_N = (position_N.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return (_mix(stream_N + counter_N) >> np.uint64(11)) * 2.0**-53


def _mix(x_N: np.ndarray) -> np.ndarray:
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(_MIX[0])
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(_MIX[1])
    return x_N ^ (x_N >> np.uint64(31))


def _mix_one(x: int) -> int:
    """`_mix` of one number, without an array around it."""
    x = (x ^ (x >> 30)) * _MIX[0] & _MASK
    x = (x ^ (x >> 27)) * _MIX[1] & _MASK
    return x ^ (x >> 31)
