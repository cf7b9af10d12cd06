"""Calls of the dense parts of a decoder layer in the native library (`layer.h`), on a CPU.

A row of a product is the same whatever the others are. torch's products are no faster, except those of many
rows of float32 with AVX-512, which take 0.7 of the time.

The weights stay where they are: the structures point to a model's own.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cpu_kv.sizes import dtype_name
from offload_rt.kernels.native import Kernel, load_kernel
from offload_rt.kernels.planes import PlaneLinear, reads_draft_plane_alone

TILED_BYTES = 2**20
"""Layers and heads of at most so many bytes of weights use vectors even where there are tiles (AMX): it takes
a few microseconds to wake these."""

_BYTES_PER_THREAD = 2**18  # of weights: with fewer, waking a thread takes longer than its share


class _Planes(ctypes.Structure):
    """`Planes` of `planes.h`."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("codes", "rests", "lows", "starts", "columns", "listed")]


class _Matrix(ctypes.Structure):
    """`Matrix` of `products.h`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("outs", "ins", "stride")),
        ("planes", ctypes.POINTER(_Planes)),
    ]


class _Norm(ctypes.Structure):
    """`Norm` of `layer.h`."""

    _fields_ = [("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


class _Layer(ctypes.Structure):
    """`Layer` of `layer.h`."""

    _fields_ = [
        *((name, _Norm) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _Matrix) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *((name, ctypes.c_int64) for name in ("head_dim", "tiled")),
    ]


class _LayerCall(ctypes.Structure):
    """`LayerCall` of `layer.h`."""

    _fields_ = [
        ("layer", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "threads", "draft")),
        *((name, ctypes.c_void_p) for name in ("hidden", "cosines", "sines", "queries", "keys", "values")),
        ("attended", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("head_stride", "row_stride")),
        ("result", ctypes.c_void_p),
    ]


class _ProductCall(ctypes.Structure):
    """`ProductCall` of `layer.h`."""

    _fields_ = [
        ("norm", _Norm),
        ("matrix", _Matrix),
        *((name, ctypes.c_int64) for name in ("rows", "threads", "draft", "input_stride", "tiled")),
        *((name, ctypes.c_void_p) for name in ("input", "result")),
    ]


Linear = nn.Linear | PlaneLinear


@dataclass(frozen=True)
class RmsNorm:
    """An RMS norm: divides by the root mean square, then multiplies by `weight`."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a decoder layer: attention with rotary positions, and a gated MLP with SiLU.

    Without a norm in front of it, attention takes inputs of its own width.
    """

    attention_norm: RmsNorm | None
    mlp_norm: RmsNorm
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    gate: Linear
    up: Linear
    down: Linear
    head_dim: int


class _Entries:
    """The functions of the library for one dtype."""

    def __init__(self, kernel: Kernel, dtype: torch.dtype) -> None:
        suffix = dtype_name(dtype)
        kernel.check_size(_Layer)
        self.attention_inputs = kernel.function(f"attention_inputs_{suffix}", _LayerCall)
        self.after_attention = kernel.function(f"after_attention_{suffix}", _LayerCall)
        self.product = kernel.function(f"product_{suffix}", _ProductCall)
        self.step = kernel.number(f"product_step_{suffix}")


@functools.cache
def _entries(dtype: torch.dtype) -> _Entries | None:
    """Returns the functions for a dtype; None: there is no library, or it does not know the dtype."""
    kernel = load_kernel()
    if kernel is None or dtype not in (torch.float32, torch.bfloat16):
        return None
    return _Entries(kernel, dtype)


def supports(linear: Any, dtype: torch.dtype) -> bool:
    """Returns whether a module is a plain product with a weight that the library can read in place."""
    entries = _entries(dtype)
    if entries is None or type(linear) not in (nn.Linear, PlaneLinear):
        return False
    weight: Tensor = linear.codes if isinstance(linear, PlaneLinear) else linear.weight
    return bool(
        dtype_of(linear) == dtype
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and linear.in_features % entries.step == 0
        and (linear.bias is None or linear.bias.is_contiguous())
    )


class NativeLayer:
    """The dense parts of a decoder layer.

    Args:
        weights: of modules that `supports` holds for, with an even head_dim.
    """

    def __init__(self, weights: LayerWeights) -> None:
        self._weights = weights  # whose memory the structure points to
        entries = _entries(weights.mlp_norm.weight.dtype)
        assert entries is not None
        self._entries = entries
        norms = (weights.attention_norm, weights.mlp_norm, weights.query_norm, weights.key_norm)
        attention = (weights.query, weights.key, weights.value, weights.output)
        linears = (*attention, weights.gate, weights.up, weights.down)
        self._bytes = sum(map(_weight_bytes, linears))
        tiled = self._bytes > TILED_BYTES
        self._layer = _Layer(*map(_norm, norms), *map(_matrix, linears), weights.head_dim, tiled)
        self._address = ctypes.addressof(self._layer)
        self._heads = weights.query.out_features // weights.head_dim
        self._kv_heads = weights.key.out_features // weights.head_dim

    def attention_inputs(
        self, hidden: Tensor, cosines: Tensor, sines: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries `[heads, tokens, head_dim]`, keys and values of hidden states.

        Args:
            hidden: contiguous, `[1, tokens, width]`; the width is that of the queries' weight.
            cosines, sines: contiguous, `[1, tokens, head_dim]`.
        """
        rows, dim = hidden.shape[1], self._weights.head_dim
        queries = hidden.new_empty(self._heads, rows, dim)
        keys, values = hidden.new_empty(2, self._kv_heads, rows, dim)
        tensors = (hidden, cosines, sines, queries, keys, values)
        call = self._call(rows, *(one.data_ptr() for one in tensors))
        self._entries.attention_inputs(ctypes.byref(call))
        return queries, keys, values

    def after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Returns the layer's hidden states `[1, tokens, hidden_size]`.

        Args:
            hidden: to which the results are added, contiguous, `[1, tokens, hidden_size]`.
            attended: output of attention, `[heads, tokens, head_dim]`.
        """
        rows = hidden.shape[1]
        attended = attended if attended.stride(2) == 1 else attended.contiguous()
        result = torch.empty_like(hidden)
        call = self._call(rows, hidden.data_ptr())
        call.attended, call.head_stride, call.row_stride = attended.data_ptr(), *attended.stride()[:2]
        call.result = result.data_ptr()
        self._entries.after_attention(ctypes.byref(call))
        return result

    def _call(self, rows: int, *addresses: int) -> _LayerCall:
        draft = reads_draft_plane_alone()
        return _LayerCall(self._address, rows, _threads(self._bytes), draft, *addresses)


class NativeProduct:
    """A product with a matrix, behind an RMS norm or without one.

    Args:
        linear: a module that `supports` holds for.
    """

    def __init__(self, linear: Linear, norm: RmsNorm | None) -> None:
        self._linear, self._behind = linear, norm  # whose memory the structures point to
        entries = _entries(dtype_of(linear))
        assert entries is not None
        self._product = entries.product
        self._norm, self._matrix = _norm(norm), _matrix(linear)
        self._bytes = _weight_bytes(linear)
        self._tiled = self._bytes > TILED_BYTES

    def __call__(self, inputs: Tensor) -> Tensor:
        """Returns `[tokens, outputs]` of inputs `[tokens, width]`, each of whose rows is contiguous."""
        result = inputs.new_empty(len(inputs), self._linear.out_features)
        call = _ProductCall(self._norm, self._matrix, len(inputs), _threads(self._bytes))
        call.draft, call.input_stride, call.tiled = reads_draft_plane_alone(), inputs.stride(0), self._tiled
        call.input, call.result = inputs.data_ptr(), result.data_ptr()
        self._product(ctypes.byref(call))
        return result


def dtype_of(linear: Linear) -> torch.dtype:
    """Returns the dtype of the weights, in planes or not."""
    return linear.dtype if isinstance(linear, PlaneLinear) else linear.weight.dtype


def _threads(weight_bytes: int) -> int:
    return max(1, min(torch.get_num_threads(), weight_bytes // _BYTES_PER_THREAD))


def _norm(norm: RmsNorm | None) -> _Norm:
    return _Norm() if norm is None else _Norm(norm.weight.data_ptr(), norm.epsilon)


def _weight_bytes(linear: Linear) -> int:
    """Returns the bytes of its weights when they are not in planes: both are to be computed alike."""
    if not isinstance(linear, PlaneLinear):
        return linear.weight.nbytes
    return linear.out_features * linear.in_features * torch.bfloat16.itemsize


def _matrix(linear: Linear) -> _Matrix:
    bias = None if linear.bias is None else linear.bias.data_ptr()
    if isinstance(linear, PlaneLinear):
        parts = (part.data_ptr() for part in vars(linear.planes).values())
        outs, ins = linear.planes.shape
        return _Matrix(None, bias, outs, ins, ins, ctypes.pointer(_Planes(*parts)))
    weight = linear.weight
    return _Matrix(weight.data_ptr(), bias, linear.out_features, linear.in_features, weight.stride(0))
