"""The draw in kernels finds what the draw in plain torch finds, whatever filters are asked for.

Needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1) on a CPU.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mint.engine.kernels import draw as kernels
from mint.engine.kernels.filters import Filters
from mint.engine.kernels.low_rank import Adapters, Tables, shrink
from mint.engine.sampler import logits as plain

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device"),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
VOCABULARY = 2500
DTYPES = [torch.float32, torch.bfloat16]


def on_device(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(values).to(DEVICE, dtype)


def logits_of(dtype: torch.dtype, count: int, spread: float = 3.0) -> Tensor:
    """In bfloat16 many of them are equal."""
    return (spread * torch.randn(count, VOCABULARY, device=DEVICE)).to(dtype)


def drawn(logits_NV: Tensor, source: list[int], params: plain.DrawParams, filtered: bool) -> tuple[Tensor, Tensor]:
    count = len(source)
    filters = Filters(
        on_device(params.top_k_N, torch.int32),
        on_device(params.top_p_N, torch.float32),
        on_device(params.min_p_N, torch.float32),
    )
    uniform = np.zeros((2, count))
    uniform[1] = params.uniform_N
    draws = kernels.Draws(
        torch.tensor(source, dtype=torch.int32, device=DEVICE), on_device(params.temperature_N, torch.float32),
        on_device(uniform, torch.float32), torch.full((2, count), -1, device=DEVICE),
        torch.zeros(2, count, device=DEVICE), torch.ones(1, dtype=torch.int32, device=DEVICE),
        filters if filtered else None,
    )  # fmt: skip
    kernels.draw(logits_NV, draws)
    assert (draws.ids_SM[0] == -1).all()  # another turn's
    return draws.ids_SM[1], draws.logprobs_SM[1]


def params_of(
    count: int, temperature: object = 1.0, top_k: object = -1, top_p: object = 1.0, min_p: object = 0.0
) -> plain.DrawParams:
    rng = np.random.default_rng(count)
    given = (np.resize(np.asarray(value, dtype=np.float64), count) for value in (temperature, top_p, min_p))
    temperature_N, top_p_N, min_p_N = given
    top_k_N = np.resize(np.asarray(top_k), count)
    return plain.DrawParams(temperature_N, top_k_N, top_p_N, min_p_N, rng.random(count))


def assert_same(found: tuple[Tensor, Tensor], logits_MV: Tensor, params: plain.DrawParams) -> None:
    expected = plain.draw(logits_MV.float(), params)
    assert found[0].tolist() == expected.tolist()
    logprobs = plain.logprobs_of(logits_MV.float(), expected[:, None])[:, 0]
    assert float((found[1] - logprobs).abs().max()) < 1e-4


@pytest.fixture(autouse=True, params=["few draws", "many draws"])
def _as_if_they_were(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: a program takes one piece of the vocabulary, or several."""
    monkeypatch.setattr(kernels, "_MANY_DRAWS", 1 if request.param == "many draws" else 10**9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [[1.0], [0.7, 0.0, 1.0, 2.5, 1e-6]])
def test_a_draw_inverts_the_distribution_of_its_row(dtype: torch.dtype, temperature: list[float]) -> None:
    torch.manual_seed(0)
    logits_NV, source = logits_of(dtype, 11), [3, 3, 3, 0, 10, 7, 7, 1, 2, 9, 8, 4, 5, 6, 3, 0, 1, 2, 3, 4]
    params = params_of(len(source), temperature)
    assert_same(drawn(logits_NV, source, params, False), logits_NV[source], params)


FILTERS = {
    "top-k": {"top_k": [1, 2, 7, 40, 400, 2499, 2500, 9000]},
    "top-p": {"top_p": [0.0, 0.01, 0.3, 0.8, 0.95, 0.9999, 1.0, 0.10013]},
    "min-p": {"min_p": [0.0, 0.01, 0.2, 0.9, 1.0]},
    "all of them": {
        "top_k": [-1, 3, 50, 700, 20], "top_p": [0.5, 0.9, 1.0, 0.97, 0.2, 0.99], "min_p": [0.0, 0.05, 0.001],
        "temperature": [1.0, 0.0, 0.6, 1.7],
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FILTERS)
def test_filters_leave_what_sorting_leaves(dtype: torch.dtype, name: str) -> None:
    torch.manual_seed(1)
    logits_NV = logits_of(dtype, 24)
    logits_NV[4:8] = logits_NV[4:8].sign() + logits_NV[4:8].abs().log2().floor()  # nothing but ties
    logits_NV[8] = 1.0
    params = params_of(24, **FILTERS[name])
    assert_same(drawn(logits_NV, list(range(24)), params, True), logits_NV, params)


def test_who_draws_nothing_is_left_alone() -> None:
    torch.manual_seed(2)
    logits_NV, params = logits_of(torch.float32, 20), params_of(20, top_k=5)
    source = [-1 if n % 3 else n for n in range(20)]
    for filtered in (False, True):
        ids, _ = drawn(logits_NV, source, params, filtered)
        assert [bool(found == -1) for found in ids] == [row == -1 for row in source]


@pytest.mark.parametrize("rank", [16, 21])
def test_the_unembedding_s_low_rank_part_is_added_on_the_way(rank: int) -> None:
    torch.manual_seed(3)
    tables = Tables(3, 1, 32, DEVICE)
    logits_NV, x = logits_of(torch.float32, 48), torch.randn(48, 40, device=DEVICE)
    a, b = torch.randn(rank, 40, device=DEVICE), 0.2 * torch.randn(rank, VOCABULARY, device=DEVICE)
    tables.a[2], tables.b[2], tables.rank[2], tables.scale[2] = a.data_ptr(), b.data_ptr(), rank, 0.5
    slot_of_tile = torch.tensor([2, 0, 2], dtype=torch.int32, device=DEVICE)
    adapters = Adapters(tables, slot_of_tile, torch.float32)
    whole_NV = logits_NV.clone()
    whole_NV += 0.5 * (x @ a.T @ b)
    whole_NV[16:32] = logits_NV[16:32]  # the base model's
    source = torch.arange(48, dtype=torch.int32, device=DEVICE)
    params = params_of(48, [1.0, 0.5])
    draws = kernels.Draws(
        source, on_device(params.temperature_N, torch.float32), on_device(params.uniform_N[None], torch.float32),
        torch.full((1, 48), -1, device=DEVICE), torch.zeros(1, 48, device=DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    state = kernels.State(*(torch.full((48,), n, dtype=torch.int32, device=DEVICE) for n in (0, 9, 2)))
    state.left_N[5] = 1
    kernels.draw(logits_NV, draws, kernels.LowRank(shrink(x, adapters, 0, 1), adapters, 0), state)
    assert_same((draws.ids_SM[0], draws.logprobs_SM[0]), whole_NV, params)
    assert state.token_N.tolist() == draws.ids_SM[0].tolist()
    assert state.left_N.tolist() == [0 if n == 5 else 1 for n in range(48)]
    assert state.position_N.tolist() == [9 if n == 5 else 10 for n in range(48)]
