"""Attention over one segment of keys at a time, and the exact merge of such partial results.

Attention over a long context is a sum over places: partial outputs merge exactly through their
log-sum-exp, wherever the keys lay. Shapes in this file, for one sequence:

    queries `[heads, query, head_dim]`, keys and values `[kv_heads, tokens, head_dim]`,
    out `[heads, query, head_dim]`, lse `[heads, query]` in float32 (float64 for float64 queries).

`heads` is a multiple of `kv_heads`; query head h reads key head h // (heads / kv_heads). Grouped heads
are folded into the query length, so keys and values are never repeated in memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from offload_rt.native import Kernel, load_kernel


class AttentionBackend(Protocol):
    """One way to compute attention on folded heads.

    queries `[kv_heads, folded_query, head_dim]`, keys and values `[kv_heads, tokens, head_dim]`, mask
    additive `[folded_query, tokens]` or None; returns out and lse `[kv_heads, folded_query]`.
    """

    name: str

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...

    def causal(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Square causal attention: queries `[heads, n, head_dim]` over as many keys, not folded."""


class TorchCpuBackend:
    """torch's flash kernel for CPUs. Reads strided keys in place.

    Args:
        threads: how many threads compute (default: torch's number). torch keeps that number for each calling
            thread, so a call sets it for its own thread alone, and puts it back.
    """

    name = "torch-cpu"

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if keys.shape[1] == 0:  # torch's kernel divides by zero there, and the process dies of it
            wide = torch.promote_types(queries.dtype, torch.float32)
            return torch.zeros_like(queries), queries.new_full(queries.shape[:2], -torch.inf, dtype=wide)
        with _torch_threads(self.threads):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries[None], keys[None], values[None], 0.0, False, attn_mask=mask, scale=scale
            )
        out, lse = out[0], lse[0]
        if mask is not None:
            # It says 0 for the log-sum-exp of a query that sees nothing: merged, such a part would count.
            lse.masked_fill_(torch.isneginf(mask).all(-1), -torch.inf)
        return out, lse

    def causal(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        # Key heads become the batch and their query heads the heads, with stride 0 on the keys: a causal
        # mask needs each query head's rows apart, and this still repeats nothing.
        batch, group = len(keys), len(queries) // len(keys)
        with _torch_threads(self.threads):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries.unflatten(0, (batch, group)),
                keys[:, None].expand(-1, group, -1, -1),
                values[:, None].expand(-1, group, -1, -1),
                0.0,
                True,
                scale=scale,
            )
        return out.flatten(0, 1), lse.flatten(0, 1)


@contextmanager
def _torch_threads(count: int | None) -> Iterator[None]:
    """torch computes with `count` threads for the calling thread within."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class NativeCpuBackend(TorchCpuBackend):
    """Our own kernel (`native/attention.cpp`) for what it covers, torch's for the rest.

    Args:
        threads: how many threads compute (default: torch's number). Calls from several threads of a program
            may run at the same time, each with its own team.
    """

    name = "native-cpu"

    def __init__(self, kernel: Kernel, threads: int | None = None) -> None:
        super().__init__(threads)
        self._kernel = kernel

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self._kernel.fits(queries, keys, values):
            return self._kernel.attend(queries, keys, values, scale, mask, self.threads)
        return super().__call__(queries, keys, values, scale, mask)


class TorchCudaBackend:
    """torch's fused kernels for CUDA: flash without a mask in 16 bits, else the memory-efficient one."""

    name = "torch-cuda"
    _mask_alignment = 8  # the efficient kernel reads its bias in rows of this many entries

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if mask is None and queries.dtype in (torch.float16, torch.bfloat16):
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                queries[None], keys[None], values[None], 0.0, False, False, scale=scale
            )
            return out[0], lse[0]
        bias = None
        if mask is not None:
            rows, columns = mask.shape
            padded = -(-columns // self._mask_alignment) * self._mask_alignment
            bias = queries.new_zeros(rows, padded)[:, :columns]
            bias.copy_(mask)
            bias = bias.expand(1, len(queries), rows, columns)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            queries[None], keys[None], values[None], bias, True, 0.0, False, scale=scale
        )
        return out[0], lse[0, :, : queries.shape[1]]  # the kernel pads lse to a multiple of 32

    def causal(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        group = len(queries) // len(keys)
        batched = queries.unflatten(0, (len(keys), group))
        wide_keys = keys[:, None].expand(-1, group, -1, -1)
        wide_values = values[:, None].expand(-1, group, -1, -1)
        if queries.dtype in (torch.float16, torch.bfloat16):
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                batched, wide_keys, wide_values, 0.0, True, False, scale=scale
            )
        else:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                batched, wide_keys, wide_values, None, True, 0.0, True, scale=scale
            )
            lse = lse[..., : queries.shape[1]]
        return out.flatten(0, 1), lse.flatten(0, 1)


class FlashAttnBackend:
    """The flash-attn package, for what it covers (16 bits, no mask); torch's kernels for the rest."""

    name = "flash-attn"

    def __init__(self) -> None:
        from flash_attn import flash_attn_func

        self._flash = flash_attn_func
        self._masked = TorchCudaBackend()

    def _run(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse, _ = self._flash(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            softmax_scale=scale,
            causal=causal,
            return_attn_probs=True,
        )
        return out[0].transpose(0, 1), lse[0]

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if mask is not None or queries.dtype not in (torch.float16, torch.bfloat16):
            return self._masked(queries, keys, values, scale, mask)
        return self._run(queries, keys, values, scale, causal=False)

    def causal(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if queries.dtype not in (torch.float16, torch.bfloat16):
            return self._masked.causal(queries, keys, values, scale)
        return self._run(queries, keys, values, scale, causal=True)


def choose_backend(device: torch.device, threads: int | None = None) -> AttentionBackend:
    """The fastest backend for `device`: flash-attn or our CPU kernel where there is one, else torch's own.

    Args:
        threads: of a CPU, that compute a call (default: torch's number).
    """
    if device.type == "cpu":
        kernel = load_kernel()
        return TorchCpuBackend(threads) if kernel is None else NativeCpuBackend(kernel, threads)
    if importlib.util.find_spec("flash_attn") is not None:
        return FlashAttnBackend()
    return TorchCudaBackend()


def fold(queries: Tensor, kv_heads: int) -> Tensor:
    """`[heads, n, d]` to `[kv_heads, heads / kv_heads * n, d]`: grouped heads become more queries."""
    heads, n, dim = queries.shape
    return queries.reshape(kv_heads, heads // kv_heads * n, dim)


def unfold(out: Tensor, lse: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Undoes `fold` on an attention result."""
    kv_heads, folded, dim = out.shape
    n = kv_heads * folded // heads
    return out.reshape(heads, n, dim), lse.reshape(heads, n)


def attend(
    backend: AttentionBackend,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of `queries` over one segment; see the top of the file for shapes.

    Args:
        mask: additive, `[query, tokens]`, the same for every head; None: every key is seen.
    """
    heads, kv_heads = len(queries), len(keys)
    if heads == kv_heads:
        return backend(queries, keys, values, scale, mask)
    if mask is not None:
        mask = mask.repeat(heads // kv_heads, 1)
    return unfold(*backend(fold(queries, kv_heads), keys, values, scale, mask), heads)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint segments, from the (out, lse) of each.

    Sums in float32 or wider and returns out in the dtype of the parts.
    """
    out, lse = parts[0]
    if len(parts) == 1:
        return out, lse
    dtype = out.dtype
    out = out.to(lse.dtype)
    for part, part_lse in parts[1:]:
        out = torch.lerp(out, part.to(lse.dtype), torch.sigmoid(part_lse - lse)[..., None])
        lse = torch.logaddexp(lse, part_lse)
    return out.to(dtype), lse
