"""Decoder layers whose dense parts run in the native library, on a CPU.

A layer qualifies if its module's `forward` does exactly the operations of `_Reference`: attention with rotary
positions and a gated MLP, each behind an RMS norm and added to its input. A comparison on a few tokens then
tells whether the library computes what the module does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from offload_rt.attention.sums import Softmax
from offload_rt.caches.layer_kinds import LayerKinds
from offload_rt.kernels.dense import (
    LayerWeights,
    Linear,
    NativeLayer,
    NativeProduct,
    RmsNorm,
    dtype_of,
    supports,
)
from offload_rt.kernels.planes import PlaneLinear
from offload_rt.model.architecture import CACHE_ARGUMENT
from offload_rt.model.attention_hook import LayerPass
from offload_rt.model.expressions import Expressions, on_meta

_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_HEAD_NORMS = ("q_norm", "k_norm")


class _Native:
    """What takes the place of modules."""

    def __init__(self, *modules: nn.Module) -> None:
        self._hooks = [hooks for module in modules for hooks in hooks_of(module)]

    @property
    def native(self) -> bool:
        """The native library computes it: its modules have no hooks."""
        return not any(self._hooks)


class DenseLayer(_Native):
    """A decoder layer; goes through its module where that does more, as with hooks (see `_as_stored`)."""

    def __init__(self, block: Any, weights: LayerWeights) -> None:
        super().__init__(block)
        self._block = block
        self._layer = int(block.self_attn.layer_idx)
        self._softmax = Softmax(float(block.self_attn.scaling))
        self._native = NativeLayer(weights)
        self._dtype = weights.mlp_norm.weight.dtype

    def __call__(self, hidden: Tensor, **arguments: Any) -> Any:
        """Returns what the module returns: hidden states, in some models in a tuple."""
        if not (self.native and _as_stored(hidden, self._dtype)):
            return self._block(hidden, **arguments)
        hidden = hidden.contiguous()
        cosines, sines = (one.contiguous() for one in arguments["position_embeddings"])
        inputs = self._native.attention_inputs(hidden, cosines, sines)
        attended = arguments["attention_pass"].attend(self._layer, *inputs, self._softmax)
        return self._native.after_attention(hidden, attended)


class DenseHead(_Native):
    """The final norm and the head; through their modules as in `DenseLayer`."""

    def __init__(self, norm: nn.Module, head: Linear, weights: RmsNorm) -> None:
        super().__init__(norm, head)
        self._norm, self._head, self._dtype = norm, head, dtype_of(head)
        self._native = NativeProduct(head, weights)

    def __call__(self, hidden: Tensor) -> Tensor:
        if not (self.native and _as_stored(hidden, self._dtype)):
            logits: Tensor = self._head(self._norm(hidden))
            return logits
        return self._native(hidden[0].contiguous())[None]


def dense_layer(block: Any, dtype: torch.dtype, kinds: LayerKinds) -> DenseLayer | None:
    """Returns a decoder layer in the native library; None: it computes anything else, at any position."""
    weights = _dense_weights(block, dtype, kinds, supports)
    return None if weights is None else DenseLayer(block, weights)


def is_dense(block: Any, dtype: torch.dtype, kinds: LayerKinds) -> bool:
    """Returns whether a decoder layer, on any device, does exactly the operations of `_Reference`."""
    return _dense_weights(block, dtype, kinds, _is_plain) is not None


def is_dense_head(norm: nn.Module, head: Any, dtype: torch.dtype) -> bool:
    """Returns whether final norm and head, on any device, are an RMS norm and a product."""
    return _head_norm(norm, head, dtype, _is_plain) is not None


def _dense_weights(
    block: Any, dtype: torch.dtype, kinds: LayerKinds, supported: Callable[[Any, torch.dtype], bool]
) -> LayerWeights | None:
    """Returns the weights of a layer that does the operations of `_Reference`; None: it does others.

    Args:
        supported: whether a module is a product that may be among them.
    """
    children = dict(block.named_children())
    if {*children} != {*_PARTS} or not _own_forwards(block):
        return None
    attention, mlp = children["self_attn"], children["mlp"]
    norms = [_rms_norm(children[name], dtype) for name in ("input_layernorm", "post_attention_layernorm")]
    parts, mlp_parts = dict(attention.named_children()), dict(mlp.named_children())
    mlp_parts.pop("act_fn", None)
    head_norms = [_rms_norm(parts.pop(name, None), dtype) for name in _HEAD_NORMS]
    head_dim = getattr(attention, "head_dim", 0)
    qualifies = (
        None not in norms
        and {*parts} == {*_PROJECTIONS}
        and {*mlp_parts} == {*_MLP}
        and all(supported(linear, dtype) for linear in (*parts.values(), *mlp_parts.values()))
        and (None in head_norms) == (not any(head_norms))
        and head_dim > 0
        and head_dim % 2 == 0
        and isinstance(getattr(attention, "scaling", None), float)
        and _is_reference(block, kinds)
    )
    if not qualifies:
        return None
    linears = [*(parts[name] for name in _PROJECTIONS), *(mlp_parts[name] for name in _MLP)]
    weights: Any = (*norms, *head_norms, *linears, head_dim)
    return LayerWeights(*weights)


def _is_plain(linear: Any, dtype: torch.dtype) -> bool:
    return type(linear) in (nn.Linear, PlaneLinear) and dtype_of(linear) == dtype


class _Reference(nn.Module):
    """What the native library computes of a layer (`layer.h`), by the layer's own modules and in torch."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block: Any = block

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor, layer_pass: LayerPass) -> Tensor:
        """Returns the layer's hidden states `[1, tokens, hidden_size]`."""
        block, attention, mlp = self.block, self.block.self_attn, self.block.mlp
        normed = _normalize(block.input_layernorm, hidden)
        shape = (*hidden.shape[:-1], -1, attention.head_dim)
        heads = [getattr(attention, name)(normed).view(shape) for name in _PROJECTIONS[:3]]
        for at, name in enumerate(_HEAD_NORMS):
            if hasattr(attention, name):
                heads[at] = _normalize(getattr(attention, name), heads[at])
        queries, keys, values = (part.transpose(1, 2) for part in heads)
        queries, keys = (_rotate(part, cosines, sines) for part in (queries, keys))
        softmax = Softmax(float(attention.scaling))
        attended = layer_pass.attend(int(attention.layer_idx), queries[0], keys[0], values[0], softmax)
        attended = attended.transpose(0, 1)[None].contiguous()
        hidden = hidden + attention.o_proj(attended.reshape(*hidden.shape[:-1], -1))
        normed = _normalize(block.post_attention_layernorm, hidden)
        gate = nn.functional.silu(mlp.gate_proj(normed))
        result: Tensor = hidden + mlp.down_proj(gate * mlp.up_proj(normed))
        return result


def _normalize(norm: Any, given: Tensor) -> Tensor:
    exact = given.to(torch.float32)
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    normed: Tensor = norm.weight * exact.to(given.dtype)
    return normed


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cosines.unsqueeze(1) + turned * sines.unsqueeze(1)


def _is_reference(block: nn.Module, kinds: LayerKinds) -> bool:
    """Returns whether the operations of a layer are those of `_Reference`, for one token and for several."""
    reference = _Reference(block)
    for tokens in (1, 3):
        own, wanted = (_expressions(reference, tokens, kinds, own=own) for own in (True, False))
        if own is None or own != wanted:
            return False
    return True


def _expressions(
    reference: _Reference, tokens: int, kinds: LayerKinds, *, own: bool
) -> tuple[str, list[object]] | None:
    """Returns the expression of the hidden states behind a layer, and those that its attention is given.

    Computed on the meta device, without the weights. None: it depends on values, or cannot run there.

    Args:
        own: of the layer's module rather than of `_Reference`.
    """
    attention = reference.block.self_attn
    dtype = dtype_of(attention.q_proj)
    weights = on_meta(reference)
    hidden = torch.empty(1, tokens, attention.q_proj.in_features, dtype=dtype, device="meta")
    cosines, sines = torch.empty(2, 1, tokens, attention.head_dim, dtype=dtype, device="meta").unbind()
    positions = torch.empty(tokens, dtype=torch.int64, device="meta")
    given = {"hidden": hidden, "cosines": cosines.clone(), "sines": sines.clone(), "positions": positions}
    expressions = Expressions(weights | given)
    recorded = _RecordedAttention(expressions)
    layer_pass = LayerPass(kinds, recorded, positions)
    rotation = given["cosines"], given["sines"]
    try:
        with expressions:
            if own:
                arguments = {
                    "attention_mask": None,
                    "position_ids": positions[None],
                    "position_embeddings": rotation,
                    "attention_pass": layer_pass,
                    CACHE_ARGUMENT: layer_pass,
                }
                names = {name.removeprefix("block."): weight for name, weight in weights.items()}
                out = functional_call(reference.block, names, (hidden,), arguments)
            else:
                out = functional_call(reference, weights, (hidden, *rotation, layer_pass))
    except (RuntimeError, ValueError, TypeError):
        return None  # it does something that the reference does not
    out = out[0] if isinstance(out, tuple) else out
    return None if expressions.reads_values else (expressions.of(out), recorded.given)


class _RecordedAttention:
    """Attention that keeps the expressions of what it is given, and returns a tensor by a name of its own."""

    def __init__(self, expressions: Expressions) -> None:
        self.given: list[object] = []
        self._expressions = expressions

    @property
    def local(self) -> Any:
        return self

    def attend(self, _: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        self.given += [self._expressions.of(one) for one in (queries, keys, values)]
        self.given.append((softmax.scale, softmax.sinks is None))
        attended = torch.empty(queries.shape, dtype=queries.dtype, device="meta")
        return self._expressions.name("attended", attended)


def dense_head(norm: nn.Module, head: Any, dtype: torch.dtype) -> DenseHead | None:
    """Returns the final norm and the head in the native library; None: they compute anything else."""
    weights = _head_norm(norm, head, dtype, supports)
    return None if weights is None else DenseHead(norm, head, weights)


def _head_norm(
    norm: nn.Module, head: Any, dtype: torch.dtype, supported: Callable[[Any, torch.dtype], bool]
) -> RmsNorm | None:
    """Returns the norm in front of a head; None: it is another one, or the head no product."""
    weights = _rms_norm(norm, dtype)
    if weights is None or not (_own_forwards(norm) and _own_forwards(head) and supported(head, dtype)):
        return None
    meta, found = on_meta(norm), []
    hidden = torch.empty(1, 3, head.in_features, dtype=dtype, device="meta")
    for module, prefix in ((norm, ""), (_ReferenceNorm(norm), "norm.")):
        named = {prefix + name: one for name, one in meta.items()}
        with Expressions(meta | {"hidden": hidden}) as expressions:
            found.append(expressions.of(functional_call(module, named, (hidden,))))
    return weights if found[0] == found[1] else None


class _ReferenceNorm(nn.Module):
    """An RMS norm as the native library computes it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: Tensor) -> Tensor:
        return _normalize(self.norm, hidden)


def computes_the_same(given: Tensor, module: Tensor, native: Tensor) -> bool:
    """Returns whether what a layer adds to its input `given` is, but for rounding, what its module adds."""
    exact = module.dtype == torch.float32
    added, error = (module - given).float().norm(), (native - module).float().norm()
    # In bfloat16 every hidden state is rounded, however little is added to it.
    allowed = 1e-4 * added if exact else 3e-2 * added + 2**-8 * given.float().norm()
    return bool(error <= allowed)


def _rms_norm(norm: Any, dtype: torch.dtype) -> RmsNorm | None:
    """Returns what an RMS norm with the attributes of Llama's holds; None: it is another module."""
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not (isinstance(weight, Tensor) and isinstance(epsilon, float)):
        return None
    return RmsNorm(weight, epsilon) if weight.dtype == dtype and weight.is_contiguous() else None


def _as_stored(hidden: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether only the result is wanted, in the dtype of the weights: no gradients, no autocast."""
    return hidden.dtype == dtype and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def _own_forwards(module: nn.Module) -> bool:
    """Returns whether calling the module's parts calls their classes' `forward`."""
    return not any("forward" in vars(part) for part in module.modules())


def hooks_of(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Returns the registers of hooks of the module's parts, empty or not; hooks may compute anything."""
    return [hooks for part in module.modules() for hooks in (part._forward_hooks, part._forward_pre_hooks)]
