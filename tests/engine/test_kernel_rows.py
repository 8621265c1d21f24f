"""Each kernel over rows gives what plain torch gives, for rows of several adapters.

Needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1) on a CPU.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from mint.engine.kernels import low_rank, products
from mint.engine.kernels import rows as kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device"),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
RANKS = (0, 5, 16, 24)
SLOTS = [1, 2, 2, 0, 3, 3]
ROWS = len(SLOTS) * low_rank.TILE


class Case:
    """Rows of four adapters, one of them the base model, on the linears of one projection."""

    def __init__(self, inputs: int, sizes: list[int], steady: bool = False) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(ROWS, inputs, device=DEVICE)
        self.sizes = sizes
        tables = low_rank.Tables(len(RANKS), len(sizes), 32, DEVICE)
        self.pairs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for slot, rank in enumerate(RANKS):
            tables.scale[slot] = 0.5 * slot
            for linear, size in enumerate(sizes):
                a, b = torch.randn(rank, inputs, device=DEVICE), torch.randn(rank, size, device=DEVICE)
                self.pairs[slot, linear] = a, b
                tables.a[slot, linear], tables.b[slot, linear] = a.data_ptr(), b.data_ptr()
                tables.rank[slot, linear] = rank
        self.scale = tables.scale
        slot_of_tile = torch.tensor(SLOTS, dtype=torch.int32, device=DEVICE)
        self.adapters = low_rank.Adapters(tables, slot_of_tile, torch.float32, steady)

    @property
    def y(self) -> Tensor:
        return low_rank.shrink(self.x, self.adapters, 0, len(self.sizes))

    def product(self, out: Tensor) -> kernels.Product:
        """Of a projection that gives `out`, in parts, each with room behind its rows."""
        parts = torch.randn(3, ROWS, out.shape[1] + 16, device=DEVICE)
        parts[2, :, : out.shape[1]] = out - parts[:2, :, : out.shape[1]].sum(0)
        return kernels.Product(parts[..., : out.shape[1]], self.y, 0)

    def low_rank(self) -> Tensor:
        """[rows, all outputs] by plain products."""
        parts = []
        for tile, slot in enumerate(SLOTS):
            x = self.x[tile * low_rank.TILE : (tile + 1) * low_rank.TILE]
            pairs = (self.pairs[slot, linear] for linear in range(len(self.sizes)))
            parts.append(torch.cat([self.scale[slot] * (x @ a.T @ b) for a, b in pairs], dim=1))
        return torch.cat(parts)


@pytest.fixture(params=["few rows", "many rows", "steady"])
def steady(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The kernels treat the rows as few, or as many, or as they always do."""
    if request.param != "few rows":
        monkeypatch.setattr(low_rank, "_MANY_ROWS", 1)
        monkeypatch.setattr(kernels, "_WIDE_ROWS", 1)
    return request.param == "steady"


def assert_close(one: Tensor, other: Tensor) -> None:
    assert float((one - other).abs().max()) < 1e-5 * float(other.abs().max())


def test_a_low_rank_product_is_added_to_each_row_by_its_own_adapter(steady: bool) -> None:
    case = Case(40, [200], steady)
    out = torch.randn(ROWS, 200, device=DEVICE)
    expected = out + case.low_rank()
    low_rank.add_low_rank(out, case.y, case.adapters, 0)
    assert_close(out, expected)


@pytest.mark.parametrize("room", [32, 48])
def test_rows_are_widened_by_what_the_second_half_multiplies(room: int) -> None:
    case = Case(200, [70])
    wide = low_rank.widened(case.x, case.adapters, 0, room)
    assert wide[:, :200].equal(case.x)
    tiles = wide[:, 200:].split(low_rank.TILE)
    products = [tile[:, : RANKS[slot]] @ case.pairs[slot, 0][1] for tile, slot in zip(tiles, SLOTS, strict=True)]
    assert_close(torch.cat(products), case.low_rank())
    assert all(not tile[:, RANKS[slot] :].any() for tile, slot in zip(tiles, SLOTS, strict=True))


@pytest.mark.parametrize("gelu", [False, True])
def test_the_gate_adds_the_low_rank_parts_of_both_its_linears(gelu: bool, steady: bool) -> None:
    case = Case(40, [72, 72], steady)
    gate_up = torch.randn(ROWS, 144, device=DEVICE)
    gate, up = (gate_up + 0.01 * case.low_rank()).chunk(2, dim=1)
    case.adapters.tables.scale *= 0.01
    opened = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
    assert_close(kernels.gate(case.product(gate_up), case.adapters, gelu), opened * up)


def test_the_parts_of_a_product_of_few_rows_add_up() -> None:
    torch.manual_seed(0)
    for rows, inputs, outputs in ((16, 1000, 200), (32, 512, 70), (48, 300, 90)):
        x, weight = torch.randn(rows, inputs, device=DEVICE), torch.randn(outputs, inputs, device=DEVICE)
        assert_close(products.few_rows(x, weight).sum(0), x.double() @ weight.double().T)


@pytest.mark.parametrize("twice", [False, True])
def test_the_norm_follows_the_residual_with_its_low_rank_part(twice: bool, steady: bool) -> None:
    """`twice`: what is added goes through a norm of its own, and both are multiplied in float32."""
    case = Case(40, [48], steady)
    residual, delta, weight = (torch.randn(*shape, device=DEVICE) for shape in ((ROWS, 48), (ROWS, 48), (48,)))
    added, inner = delta + case.low_rank(), torch.randn(48, device=DEVICE)
    expected = residual + (F.rms_norm(added, (48,), inner, 1e-6) if twice else added)
    normed = kernels.add_and_norm(
        residual, case.product(delta), weight, 1e-6, case.adapters, twice, inner if twice else None
    )
    assert_close(residual, expected)
    assert_close(normed, F.rms_norm(expected, (48,), weight, 1e-6))


def test_heads_are_normed_turned_and_put_into_the_cache(steady: bool) -> None:
    heads, kv_heads, size = 4, 2, 32
    case = Case(40, [heads * size, kv_heads * size, kv_heads * size], steady)
    qkv = torch.randn(ROWS, (heads + 2 * kv_heads) * size, device=DEVICE)
    norm, positions = torch.randn(heads + kv_heads, size, device=DEVICE), torch.arange(ROWS, device=DEVICE) % 7
    half = torch.randn(2, 7, size // 2, device=DEVICE)
    cos, sin = torch.cat((half, half), dim=2)
    slots = torch.arange(ROWS, device=DEVICE) * 3 % 101
    slots[::5] = -1
    cache = torch.zeros(2, 13, 8, kv_heads, size, device=DEVICE)
    whole = (qkv + case.low_rank()).unflatten(1, (-1, size))
    turning, values = whole[:, : heads + kv_heads], whole[:, heads + kv_heads :]
    turning = F.rms_norm(turning, (size,), None, 1e-6) * norm
    swapped = torch.cat((-turning[..., size // 2 :], turning[..., : size // 2]), dim=-1)
    turned = turning * cos[positions][:, None] + swapped * sin[positions][:, None]
    queries = kernels.heads(
        case.product(qkv), norm, (cos, sin), positions.int(), slots, (cache[0], cache[1]), (heads, kv_heads, size),
        1e-6, case.adapters,
    )  # fmt: skip
    assert_close(queries, turned[:, :heads])
    written = slots >= 0
    flat = cache.flatten(1, 2)
    assert_close(flat[0, slots[written]], turned[written, heads:])
    assert_close(flat[1, slots[written]], values[written])
    untouched = torch.ones(flat.shape[1], dtype=torch.bool, device=DEVICE)
    untouched[slots[written]] = False
    assert not flat[:, untouched].any()
