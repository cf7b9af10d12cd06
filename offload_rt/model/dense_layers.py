"""Decoder layers whose dense parts run in the native library, for a few tokens on a CPU.

A layer qualifies by its structure (attention with rotary positions and a gated MLP, each behind an RMS norm
and added to its input), and then by computing what its own module computes on a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from offload_rt.attention.sums import Softmax
from offload_rt.native.dense import (
    MOST_ROWS,
    LayerWeights,
    NativeLayer,
    NativeProduct,
    RmsNorm,
    supports,
)

_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_HEAD_NORMS = ("q_norm", "k_norm")


class DenseLayer:
    """A decoder layer; more tokens than `MOST_ROWS`, and all while it has hooks, go through its module."""

    def __init__(self, block: Any, weights: LayerWeights) -> None:
        self._block = block
        self._layer = int(block.self_attn.layer_idx)
        self._softmax = Softmax(float(block.self_attn.scaling))
        self._native = NativeLayer(weights)
        self._hooks = _hooks(block)

    def __call__(self, hidden: Tensor, **arguments: Any) -> Any:
        """Returns what the module returns: hidden states, in some models in a tuple."""
        if hidden.shape[1] > MOST_ROWS or any(self._hooks):
            return self._block(hidden, **arguments)
        hidden = hidden.contiguous()
        cosines, sines = arguments["position_embeddings"]
        inputs = self._native.attention_inputs(hidden, cosines, sines)
        attended = arguments["attention_pass"].attend(self._layer, *inputs, self._softmax)
        return self._native.after_attention(hidden, attended)


class DenseHead:
    """The final norm and the head; through their modules as in `DenseLayer`."""

    def __init__(self, norm: nn.Module, head: nn.Linear, weights: RmsNorm) -> None:
        self._norm, self._head = norm, head
        self._native = NativeProduct(head, weights)
        self._hooks = [*_hooks(norm), *_hooks(head)]

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.shape[1] > MOST_ROWS or any(self._hooks):
            logits: Tensor = self._head(self._norm(hidden))
            return logits
        return self._native(hidden[0])[None]


def dense_layer(block: Any, dtype: torch.dtype) -> DenseLayer | None:
    """Returns a decoder layer in the native library; None: by its structure it is not one of these."""
    children = dict(block.named_children())
    if {*children} != {*_PARTS} or not _own_forwards(block):
        return None
    attention, mlp = children["self_attn"], children["mlp"]
    norms = [_rms_norm(children[name], dtype) for name in ("input_layernorm", "post_attention_layernorm")]
    parts, mlp_parts = dict(attention.named_children()), dict(mlp.named_children())
    activation = mlp_parts.pop("act_fn", None)
    head_norms = [_rms_norm(parts.pop(name, None), dtype) for name in _HEAD_NORMS]
    head_dim = getattr(attention, "head_dim", 0)
    qualifies = (
        None not in norms
        and {*parts} == {*_PROJECTIONS}
        and {*mlp_parts} == {*_MLP}
        and isinstance(activation, nn.SiLU | SiLUActivation)
        and all(supports(linear, dtype) for linear in (*parts.values(), *mlp_parts.values()))
        and (None in head_norms) == (not any(head_norms))
        and head_dim > 0
        and head_dim % 2 == 0
        and isinstance(getattr(attention, "scaling", None), float)
    )
    if not qualifies:
        return None
    linears = [*(parts[name] for name in _PROJECTIONS), *(mlp_parts[name] for name in _MLP)]
    weights: Any = (*norms, *head_norms, *linears, head_dim)
    return DenseLayer(block, LayerWeights(*weights))


def dense_head(norm: nn.Module, head: Any, dtype: torch.dtype) -> DenseHead | None:
    """Returns the final norm and the head in the native library; None: they are other modules."""
    weights = _rms_norm(norm, dtype)
    if weights is None or not (_own_forwards(norm) and _own_forwards(head) and supports(head, dtype)):
        return None
    return DenseHead(norm, head, weights)


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


def _own_forwards(module: nn.Module) -> bool:
    """Returns whether calling the module's parts calls their classes' `forward`."""
    return not any("forward" in vars(part) for part in module.modules())


def _hooks(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Returns the registers of hooks of the module's parts, empty or not."""
    return [hooks for part in module.modules() for hooks in (part._forward_hooks, part._forward_pre_hooks)]
