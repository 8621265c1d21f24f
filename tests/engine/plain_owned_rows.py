"""The operators of `mint.engine.kernels.owned_rows` written out, for a CPU: one adapter's rows after the other's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

_MATRIX = "Tensor matrix, Tensor owner_T, int[] sizes, bool apart"


def _diagonal(matrix: Tensor, sizes: Sequence[int], apart: bool) -> Tensor:
    """One adapter's matrix as [outputs or inputs, all ranks]."""
    return torch.block_diag(*matrix.split(list(sizes))) if apart else matrix.T


def shrink(x: Tensor, matrix: Tensor, owner: Tensor, sizes: Sequence[int], apart: bool) -> Tensor:
    z = x.new_zeros(len(x), matrix.shape[2] * len(sizes) if apart else matrix.shape[1])
    for n in owner.unique().tolist():
        z[owner == n] = x[owner == n] @ _diagonal(matrix[n], sizes, apart)
    return z


def add(x: Tensor, z: Tensor, matrix: Tensor, owner: Tensor, sizes: Sequence[int], apart: bool) -> Tensor:
    out = x.clone()
    add_(out, z, matrix, owner, sizes, apart)
    return out


def add_(x: Tensor, z: Tensor, matrix: Tensor, owner: Tensor, sizes: Sequence[int], apart: bool) -> None:
    for n in owner.unique().tolist():
        x[owner == n] += z[owner == n] @ _diagonal(matrix[n], sizes, apart).T


def sums(x: Tensor, z: Tensor, starts: Tensor, sizes: Sequence[int], apart: bool) -> Tensor:
    found = []
    for low, high in pairwise(starts.tolist()):
        if not apart:
            found.append(z[low:high].T @ x[low:high])
            continue
        columns = zip(x[low:high].split(list(sizes), dim=1), z[low:high].chunk(len(sizes), dim=1), strict=True)
        found.append(torch.cat([part.T @ inner for part, inner in columns]))
    return torch.stack(found)


def sums_(total: Tensor, x: Tensor, z: Tensor, starts: Tensor) -> None:
    total += sums(x, z, starts, [x.shape[1]], True)


PLAIN = {
    "owned_shrink": (shrink, f"(Tensor x_TV, {_MATRIX}) -> Tensor", ()),
    "owned_add": (add, f"(Tensor x_TV, Tensor z_TR, {_MATRIX}) -> Tensor", ()),
    "owned_add_": (add_, f"(Tensor(a!) x_TV, Tensor z_TR, {_MATRIX}) -> ()", ("x_TV",)),
    "owned_sums": (sums, "(Tensor x_TV, Tensor z_TR, Tensor starts, int[] sizes, bool apart) -> Tensor", ()),
    "owned_sums_": (sums_, "(Tensor(a!) total, Tensor x_TV, Tensor z_TR, Tensor starts) -> ()", ("total",)),
}


def register() -> None:
    """Makes them known where there is no Triton to define them, and known to the CPU where there is."""
    try:
        from mint.engine.kernels import owned_rows
    except ImportError:
        for name, (function, schema, mutated) in PLAIN.items():
            torch.library.custom_op(f"mint::{name}", function, mutates_args=mutated, schema=schema, device_types="cpu")
    else:
        for name, (function, _, _) in PLAIN.items():
            getattr(owned_rows, name).register_kernel("cpu")(function)


register()
