"""A decoder's layers for training, as functions of tensors: one pass over packed tokens, forward and backward.

transformers' modules stay what sampling runs and what these functions are compared with: `FusedLayers.of` reads the
weights of a decoder, computes a few tokens both ways, and gives None for a family it does not reproduce, which then
trains through its own modules. On a GPU a layer is compiled, once for all layers of a kind and all numbers of tokens;
the first layer's input needs no gradient, so none is computed.

Shapes: T packed tokens, M hidden size, H query heads, D head size, R rank.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mint.engine import layer_parts
from mint.engine.attention import Attend
from mint.engine.compiling import compiled, of_any_length
from mint.engine.fused import has_fixed_rotary, rotary_types
from mint.engine.layer_parts import Linear, LowRank, Norm, project, rms_norm
from mint.engine.lora import Adapter, LoraLinear
from mint.engine.shared_attention import FlashLayout, TreeAttention, flash_attention
from mint.engine.tree import Tree


class Layer(NamedTuple):
    """One layer's weights by the names of `LINEARS` and `NORMS`."""

    linears: dict[str, Linear]
    norms: dict[str, Norm]


LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
# Computed as one product.
TOGETHER = (LINEARS[:3], LINEARS[4:6])
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
)

Attention = Callable[[Any, Tensor, Tensor, Tensor, float, int | None], Tensor]
"""(layout, q, k, v, scale, window) -> [T, H, D]"""
Added = Sequence[LowRank | None]
Heads = Callable[
    [Tensor, Sequence[Linear], Added, tuple[Norm, Norm] | None, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]
]
"""`layer_parts.heads_of`"""
Mlp = Callable[[Callable[[Tensor], Tensor], Tensor, Sequence[Linear], Added], Tensor]
"""`layer_parts.mlp`"""


@dataclass(frozen=True)
class Kind:
    """What layers that share one function have in common."""

    head_dim: int
    scale: float
    window: int | None
    act: Callable[[Tensor], Tensor]
    attention: Attention
    heads_of: Heads
    mlp: Mlp

    def __call__(
        self,
        x_TM: Tensor,
        layer: Layer,
        adapted: Mapping[str, LowRank],
        cos_TD: Tensor,
        sin_TD: Tensor,
        layout: Any,
    ) -> Tensor:
        def linears(*names: str) -> tuple[list[Linear], list[LowRank | None]]:
            return [layer.linears[name] for name in names], [adapted.get(name) for name in names]

        def norm(name: str, x: Tensor) -> Tensor:
            return rms_norm(x, layer.norms[name]) if name in layer.norms else x

        q_norm, k_norm = layer.norms.get("self_attn.q_norm"), layer.norms.get("self_attn.k_norm")
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        qkv = linears("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        q, k, v = self.heads_of(norm("input_layernorm", x_TM), *qkv, norms, cos_TD, sin_TD)
        seen = self.attention(layout, q, k, v, self.scale, self.window)
        attended = project(seen.flatten(1), *linears("self_attn.o_proj"))
        if "pre_feedforward_layernorm" in layer.norms:  # norms before and after each half, as in Gemma 3
            x_TM = x_TM + norm("post_attention_layernorm", attended)
            x = norm("pre_feedforward_layernorm", x_TM)
        else:
            x_TM = x_TM + attended
            x = norm("post_attention_layernorm", x_TM)
        x = self.mlp(self.act, x, *linears("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
        return x_TM + norm("post_feedforward_layernorm", x)


class FusedLayers:
    def __init__(
        self,
        decoder: Any,
        linears: Sequence[Mapping[str, LoraLinear]],
        norms: Sequence[dict[str, Norm]],
        kinds: Sequence[Kind],
        rope_types: Sequence[str | None],
        flash: bool,
    ) -> None:
        """One entry a layer in each sequence."""
        self._decoder = decoder
        self._linears, self._norms, self._kinds, self._rope_types = linears, norms, kinds, rope_types
        self._norm = _read_norm(decoder.norm)
        self.flash = flash
        """Takes a `FlashLayout`."""
        self.fixed_rotary = has_fixed_rotary(decoder)
        """Nothing about the rotary embedding depends on what the positions are."""

    @classmethod
    def of(cls, decoder: Any, windows: Sequence[int | None], flash: bool) -> FusedLayers | None:
        """None where the decoder is not made of the parts known here. Whether it computes the same is for the caller
        to check. `flash`: compiled layers with flash attention, for a GPU in half precision."""
        modules = getattr(decoder, "layers", None)
        if not isinstance(modules, nn.ModuleList) or not all(
            hasattr(decoder, name) for name in ("embed_tokens", "rotary_emb", "norm")
        ):
            return None
        ours, norms, kinds = [], [], []
        for module, window in zip(modules, windows, strict=True):
            found = {name: _find(module, name) for name in LINEARS}
            if not all(isinstance(linear, LoraLinear) for linear in found.values()):
                return None
            ours.append(found)
            read = {name: _find(module, name) for name in NORMS}
            norms.append({name: _read_norm(norm) for name, norm in read.items() if norm is not None})
            kinds.append(_read_kind(module, _find(modules[0], "mlp.act_fn"), window, flash))
        return cls(decoder, ours, norms, kinds, rotary_types(decoder), flash)

    def __call__(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        layout: Tree | FlashLayout,
        adapted: Mapping[str, LowRank],
        lean: bool = False,
    ) -> Tensor:
        """The final hidden states [T, M]. `layout`: for flash attention the tree's, which may have more rows. `adapted`
        by path in the model. `lean`: the backward pass computes each layer again instead of keeping what it needs."""
        x_TM = self._decoder.embed_tokens(tokens_T[None])[0]
        ropes = {kind: self._rope(x_TM, positions_T, kind) for kind in set(self._rope_types)}
        if isinstance(layout, FlashLayout):
            attention: Any = layout
            _say_what_changes(adapted, ropes.values(), layout)
        else:
            attention = TreeAttention(layout, x_TM.device)
        parts = zip(self._kinds, self._linears, self._norms, self._rope_types, strict=True)
        for kind, linears, norms, rope in parts:
            # Read now: somebody may have laid the weights out anew.
            layer = Layer(_weights(linears), norms)
            ours = {name: adapted[linear.path] for name, linear in linears.items() if linear.path in adapted}
            inputs = (x_TM, layer, ours, *ropes[rope], attention)
            run: Callable[..., Tensor] = kind
            if self.flash:
                run = compiled(kind)
                of_any_length(x_TM)
            if lean and torch.is_grad_enabled():
                x_TM = _computed_again(run, *inputs)
            else:
                x_TM = run(*inputs)
        return rms_norm(x_TM, self._norm)

    def _rope(self, x_TM: Tensor, positions_T: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        cos, sin = self._decoder.rotary_emb(x_TM[None], positions_T[None], *([] if kind is None else [kind]))
        return cos[0], sin[0]


def _computed_again(run: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """In the backward pass, instead of keeping what it needs."""
    try:
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
    except BaseException as error:
        # Before 2.13 torch stops noting what is saved when a frame of its own goes; whoever holds the error, to try
        # once more or for a log, would have the next pass noted too.
        traceback.clear_frames(error.__traceback__)
        raise


def _weights(linears: Mapping[str, LoraLinear]) -> dict[str, Linear]:
    found = {name: Linear(linear.weight, linear.bias) for name, linear in linears.items()}
    for names in TOGETHER:
        found[names[0]] = found[names[0]]._replace(together=_one_weight([found[name].weight for name in names]))
    return found


def _one_weight(weights: Sequence[Tensor]) -> Tensor | None:
    """The weights as one matrix, if they lie below one another in memory, as `mint.engine.fused` lays them."""
    first, rows = weights[0], sum(len(weight) for weight in weights)
    at, memory = first.data_ptr(), first.untyped_storage()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == memory.data_ptr() and weight.data_ptr() == at
        if not same or not weight.is_contiguous():
            return None
        at += weight.nbytes
    return first.as_strided((rows, first.shape[1]), first.stride())


def _say_what_changes(
    adapted: Mapping[str, LowRank], ropes: Iterable[tuple[Tensor, Tensor]], layout: FlashLayout
) -> None:
    of_any_length(*(tensor for rope in ropes for tensor in rope), *(tensor for tensor in layout if tensor is not None))
    if layout.even is not None:
        of_any_length(layout.even, dim=1)
    for down, up, owners in adapted.values():
        if owners is None:
            of_any_length(down)
            of_any_length(up, dim=1)
        else:
            of_any_length(down, up, *owners)
            of_any_length(down, dim=1)
            of_any_length(up, dim=2)


def _find(module: nn.Module, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)  # type: ignore[assignment]
    return module


@torch.no_grad()
def _read_norm(norm: Any) -> Norm:
    ones = torch.ones_like(norm.weight)
    plus_one = not torch.allclose(norm(ones), norm.weight, rtol=1e-2, atol=1e-2)
    return Norm(norm.weight, plus_one, getattr(norm, "variance_epsilon", None) or norm.eps)


def _read_kind(module: Any, act: Callable[[Tensor], Tensor], window: int | None, flash: bool) -> Kind:
    """Layers whose kinds are equal share one compiled function, so `act` is the first layer's for all."""
    attention = module.self_attn
    heads_of, mlp = _fastest(module, act)
    attend = flash_attention if flash else _attend
    return Kind(attention.head_dim, attention.scaling, window, act, attend, heads_of, mlp)


@torch.no_grad()
def _fastest(module: nn.Module, act: Callable[[Tensor], Tensor]) -> tuple[Heads, Mlp]:
    """The ways to heads and through the MLP: on a GPU in kernels of our own."""
    device = next(module.parameters()).device
    if device.type != "cuda":
        return layer_parts.heads_of, layer_parts.mlp
    from mint.engine import gpu_parts  # there only where there is Triton

    numbers = torch.linspace(-8, 8, 65, device=device)
    is_silu = torch.allclose(act(numbers), F.silu(numbers), atol=1e-6)
    return gpu_parts.heads_of, gpu_parts.silu_mlp if is_silu else layer_parts.mlp


def _attend(attend: Attend, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    return attend(0, q, k, v, scale, window)


def low_ranks(adapter: Adapter | None, dtype: torch.dtype) -> dict[str, LowRank]:
    """What the adapter adds, by the linears' paths in the model."""
    if adapter is None:
        return {}
    downs, ups = zip(*adapter.weights.values(), strict=True)
    pairs = zip(_cast(downs, dtype, adapter.scale), _cast(ups, dtype), strict=True)
    return {path: LowRank(down, up) for path, (down, up) in zip(adapter.weights, pairs, strict=True)}


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    """Times the scale; all at once, and so are their gradients: one by one it would be some kernels for each."""
    together = torch.cat([tensor.reshape(-1) for tensor in tensors])
    parts = (together if scale == 1.0 else together * scale).to(dtype).split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
