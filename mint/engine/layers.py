"""A decoder's layers for training, as functions of tensors: one pass over packed tokens, forward and backward.

transformers' modules stay what sampling runs and what these functions are compared with: `FusedLayers.of` reads the
weights of a decoder, computes a few tokens both ways, and gives None for a family it does not reproduce, which then
trains through its own modules. On a GPU a layer is compiled, once for all layers of a kind and all numbers of tokens;
the first layer's input needs no gradient, so none is computed.

Shapes: T packed tokens, M hidden size, H query heads, K key/value heads, D head size, I inputs and O outputs of
linears, R ranks of the adapted ones together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mint.engine.attention import Attend
from mint.engine.compiling import compiled, of_any_length
from mint.engine.fused import FIXED_ROTARY
from mint.engine.lora import Adapter, LoraLinear
from mint.engine.shared_attention import FlashLayout, TreeAttention, flash_attention
from mint.engine.tree import Tree


class LowRank(NamedTuple):
    """What an adapter adds to a linear: up (scale * (down x))."""

    down: Tensor
    """[R, in]"""
    up: Tensor
    """[out, R]"""
    scale: Tensor
    """[]: a number the compiler does not take for a constant."""


class Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class Norm(NamedTuple):
    """x / rms(x) * weight"""

    weight: Tensor
    plus_one: bool
    """The weight is stored less 1, and multiplied in float32."""
    eps: float


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


@dataclass(frozen=True)
class Kind:
    """What layers that share one function have in common."""

    head_dim: int
    scale: float
    window: int | None
    act: Callable[[Tensor], Tensor]
    attention: Attention

    def __call__(
        self,
        x_TM: Tensor,
        layer: Layer,
        adapted: Mapping[str, LowRank],
        cos_TD: Tensor,
        sin_TD: Tensor,
        layout: Any,
    ) -> Tensor:
        def linear(x: Tensor, *names: str) -> tuple[Tensor, ...]:
            return project(x, [layer.linears[name] for name in names], [adapted.get(name) for name in names])

        def norm(name: str, x: Tensor) -> Tensor:
            return rms_norm(x, layer.norms[name]) if name in layer.norms else x

        x = norm("input_layernorm", x_TM)
        heads = linear(x, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in heads)
        q, k = norm("self_attn.q_norm", q), norm("self_attn.k_norm", k)
        q, k = rotate(q, cos_TD, sin_TD), rotate(k, cos_TD, sin_TD)
        seen = self.attention(layout, q, k, v, self.scale, self.window)
        (attended,) = linear(seen.flatten(1), "self_attn.o_proj")
        if "pre_feedforward_layernorm" in layer.norms:  # norms before and after each half, as in Gemma 3
            x_TM = x_TM + norm("post_attention_layernorm", attended)
            x = norm("pre_feedforward_layernorm", x_TM)
        else:
            x_TM = x_TM + attended
            x = norm("post_attention_layernorm", x_TM)
        gate, up = linear(x, "mlp.gate_proj", "mlp.up_proj")
        (x,) = linear(self.act(gate) * up, "mlp.down_proj")
        return x_TM + norm("post_feedforward_layernorm", x)


def project(x_TI: Tensor, linears: Sequence[Linear], added: Sequence[LowRank | None]) -> tuple[Tensor, ...]:
    """Linears with one input as one product, what the adapter adds included: [x, z] @ [W, up]^T, z = scale * down x.

    So a product's output is written once, and the backward pass gets the gradients of x and z from one product too.
    """
    sizes = [len(linear.weight) for linear in linears]
    if not any(added):
        return tuple(F.linear(x_TI, linear.weight, linear.bias) for linear in linears)
    weight_OI = torch.cat([linear.weight for linear in linears])
    biased = [linear.bias is not None for linear in linears]
    bias_O = None
    if any(biased):
        bias_O = torch.cat([weight_OI.new_zeros(len(w)) if bias is None else bias for w, bias in linears])
    ours = [low for low in added if low is not None]
    down_RI = torch.cat([low.down for low in ours]).to(x_TI.dtype)
    none = weight_OI.new_zeros(0)
    up_OR = torch.block_diag(
        *(none.reshape(size, 0) if low is None else low.up for size, low in zip(sizes, added, strict=True))
    ).to(x_TI.dtype)
    return _Project.apply(x_TI, weight_OI, bias_O, down_RI, up_OR, ours[0].scale).split(sizes, dim=-1)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, down_RI: Tensor, up_OR: Tensor, scale: Tensor
    ) -> Tensor:
        z_TR = (x_TI @ down_RI.T) * scale
        ctx.save_for_backward(x_TI, z_TR, weight_OI, down_RI, up_OR, scale)
        return F.linear(torch.cat([x_TI, z_TR], dim=1), torch.cat([weight_OI, up_OR], dim=1), bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TO,) = grads
        x_TI, z_TR, weight_OI, down_RI, up_OR, scale = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            both = grad_TO @ torch.cat([weight_OI, up_OR], dim=1)
            grad_TR = both[:, x_TI.shape[1] :] * scale
            # Not addmm, which would copy first: compiled, the sum joins what comes next.
            grad_TI = both[:, : x_TI.shape[1]] + grad_TR @ down_RI
        else:
            grad_TR, grad_TI = (grad_TO @ up_OR) * scale, None
        return grad_TI, None, None, grad_TR.T @ x_TI, grad_TO.T @ z_TR, None


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.plus_one:
        return (wide * (1 + norm.weight.float())).to(x.dtype)
    return wide.to(x.dtype) * norm.weight


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    left, right = x_THD.chunk(2, dim=-1)
    return x_THD * cos_TD[:, None] + torch.cat((-right, left), dim=-1) * sin_TD[:, None]


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
        types = getattr(decoder.rotary_emb, "rope_type", None)
        self.fixed_rotary = FIXED_ROTARY.issuperset(types.values() if isinstance(types, dict) else [types])
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
        by_type = "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters
        types = [decoder.config.layer_types[i] if by_type else None for i in range(len(kinds))]
        return cls(decoder, ours, norms, kinds, types, flash)

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
            layer = Layer({name: Linear(linear.weight, linear.bias) for name, linear in linears.items()}, norms)
            ours = {name: adapted[linear.path] for name, linear in linears.items() if linear.path in adapted}
            inputs = (x_TM, layer, ours, *ropes[rope], attention)
            run: Callable[..., Tensor] = kind
            if self.flash:
                run = compiled(kind)
                of_any_length(x_TM)
            if lean and torch.is_grad_enabled():
                x_TM = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x_TM = run(*inputs)
        return rms_norm(x_TM, self._norm)

    def _rope(self, x_TM: Tensor, positions_T: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        cos, sin = self._decoder.rotary_emb(x_TM[None], positions_T[None], *([] if kind is None else [kind]))
        return cos[0], sin[0]


def _say_what_changes(
    adapted: Mapping[str, LowRank], ropes: Iterable[tuple[Tensor, Tensor]], layout: FlashLayout
) -> None:
    of_any_length(*(tensor for rope in ropes for tensor in rope), *(tensor for tensor in layout if tensor is not None))
    if layout.even is not None:
        of_any_length(layout.even, dim=1)
    for added in adapted.values():
        of_any_length(added.down)
        of_any_length(added.up, dim=1)


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
    return Kind(attention.head_dim, attention.scaling, window, act, flash_attention if flash else _attend)


def _attend(attend: Attend, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    return attend(0, q, k, v, scale, window)


def low_ranks(adapter: Adapter | None, dtype: torch.dtype) -> dict[str, LowRank]:
    """What the adapter adds, by the linears' paths in the model."""
    if adapter is None:
        return {}
    scale = torch.full((), adapter.scale, dtype=dtype, device=adapter.parameters()[0].device)
    return {path: LowRank(down, up, scale) for path, (down, up) in adapter.weights.items()}
