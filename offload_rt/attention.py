"""Attention over one segment of keys at a time, and the exact merge of such partial results.

Attention over a long context is a sum over places: partial outputs merge exactly through their
log-sum-exp, wherever the keys lay. Shapes in this file, for one sequence:

    queries `[heads, query, head_dim]`, keys and values `[pages, kv_heads, tokens, head_dim]`, or without
    pages; out `[heads, query, head_dim]`, lse `[heads, query]` in float32 (float64 for float64 queries).

`heads` is a multiple of `kv_heads`; query head h reads key head h // (heads / kv_heads). Grouped heads
are folded into the query length, so keys and values are never repeated in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor

from cpu_kv import head_major
from offload_rt.native import Kernel, load_kernel
from offload_rt.weighing import Weighed

_HALVES = (torch.float16, torch.bfloat16)
CORES_FOR_THE_GPU = 3  # of the threads that run a pass, draft, and choose chunks meanwhile
WORTH_IT = 0.95  # of the time of torch's op: what another one must stay under


class AttentionBackend(ABC):
    """One way to compute attention on folded heads."""

    name: str
    weighed_tokens = 4096  # whose scores are in memory at a time

    @abstractmethod
    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Out and lse `[kv_heads, folded_query]`.

        Queries `[kv_heads, folded_query, head_dim]`, keys and values `[pages, kv_heads, tokens, head_dim]`;
        a mask as `mask` prepares it, None: every key is seen.
        """

    @abstractmethod
    def causal(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Square causal attention: queries `[heads, n, head_dim]` over as many keys, not folded."""

    def mask(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """An additive mask `[folded_query, tokens]` as calls with queries of `dtype` take it."""
        return mask

    def weighed(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, unit: int, weighed: Weighed
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Out, lse, and how much the weighed queries attend to every `unit` tokens.

        A unit is a part of a page. The last are `[kv_heads, weighed_query, units]` in float32; a query's are
        one in all. By one more product, over keys that are there anyway.
        """
        out, lse = self(queries, keys, values, scale, None)
        # Scaled before the product, whose sums may be more than float16 holds.
        asking, asked = scale * weighed.rows(queries), weighed.rows(lse)[..., None]
        tokens = max(unit, self.weighed_tokens // unit * unit)
        columns = []
        for part in keys.split(tokens, dim=2):
            rows = [
                ((asking @ pages.mT).to(lse.dtype) - asked).exp_().unflatten(-1, (-1, unit)).sum(-1)
                for pages in part.split(max(1, tokens // part.shape[2]))
            ]
            columns.append(torch.cat(rows))
        units = torch.cat(columns, dim=-1).permute(1, 2, 0, 3).flatten(2)
        return out, lse, units.float()


class _TorchBackend(AttentionBackend):
    """By an op for batches `[batch, heads, tokens, head_dim]` that knows no pages."""

    @abstractmethod
    def _dense(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Out and lse `[batch, heads, query]`."""

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # Each page is a batch entry, and their results merge. Where that would be larger than the keys, the
        # pages are put side by side first.
        pages, _, tokens, _ = keys.shape
        if pages > 1 and (mask is not None or queries.shape[1] > tokens):
            keys, values = head_major(keys)[None], head_major(values)[None]
            pages = 1
        out, lse = self._dense(queries.expand(pages, -1, -1, -1), keys, values, scale, mask, causal=False)
        if pages == 1:
            return out[0], lse[0]
        total = lse.logsumexp(0)
        weights = (lse - total).exp()[..., None]
        return (out.to(lse.dtype) * weights).sum(0).to(out.dtype), total

    def causal(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        # Key heads become the batch and their query heads the heads, with stride 0 on the keys: a causal
        # mask needs each query head's rows apart, and this still repeats nothing.
        group = len(queries) // len(keys)
        keys, values = (part[:, None].expand(-1, group, -1, -1) for part in (keys, values))
        out, lse = self._dense(
            queries.unflatten(0, (len(keys), group)), keys, values, scale, None, causal=True
        )
        return out.flatten(0, 1), lse.flatten(0, 1)


class TorchCpuBackend(_TorchBackend):
    """torch's flash kernel for CPUs.

    Args:
        threads: how many threads compute (default: torch's number). torch keeps that number for each calling
            thread, so a call sets it for its own thread alone, and puts it back.
    """

    name = "torch-cpu"

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads

    def _dense(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, causal, attn_mask=mask, scale=scale
        )
        return found

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if keys.numel() == 0:  # torch's kernel divides by zero there, and the process dies of it
            wide = torch.promote_types(queries.dtype, torch.float32)
            return torch.zeros_like(queries), queries.new_full(queries.shape[:2], -torch.inf, dtype=wide)
        with _torch_threads(self.threads):
            out, lse = super().__call__(queries, keys, values, scale, mask)
        if mask is not None:
            # It says 0 for the log-sum-exp of a query that sees nothing: merged, such a part would count.
            lse.masked_fill_(torch.isneginf(mask).all(-1), -torch.inf)
        return out, lse

    def causal(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        with _torch_threads(self.threads):
            return super().causal(queries, keys, values, scale)


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

    def weighed(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, unit: int, weighed: Weighed
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = self._kernel
        if not (kernel.fits(queries, keys, values) and kernel.fits_units(keys, unit)):
            return super().weighed(queries, keys, values, scale, unit, weighed)
        rows = queries.shape[1] // weighed.period * weighed.count
        units = torch.empty(len(queries), rows, len(keys) * keys.shape[2] // unit)
        every = (weighed.period, weighed.step)
        return *kernel.attend(queries, keys, values, scale, None, self.threads, units, *every), units


class TorchCudaBackend(_TorchBackend):
    """torch's fused kernels for CUDA: flash without a mask in 16 bits, else the memory-efficient one."""

    name = "torch-cuda"
    _mask_alignment = 8  # the efficient kernel reads its bias in rows of this many entries

    def _dense(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        if mask is None and queries.dtype in _HALVES:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                queries, keys, values, 0.0, causal, False, scale=scale
            )
            return out, lse
        bias = None if mask is None else mask.expand(1, keys.shape[1], -1, -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            queries, keys, values, bias, True, 0.0, causal, scale=scale
        )
        return out, lse[..., : queries.shape[2]]  # the kernel pads lse to a multiple of 32

    def mask(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        rows, columns = mask.shape
        padded = -(-columns // self._mask_alignment) * self._mask_alignment
        bias = mask.new_zeros(rows, padded, dtype=dtype)[:, :columns]
        return bias.copy_(mask)


class FlashAttnBackend(TorchCudaBackend):
    """The flash-attn package, for what it covers (16 bits, no mask); torch's kernels for the rest.

    Raises:
        ImportError: the package is not there, is another one of that name (flash-attn-4), or is broken.
    """

    name = "flash-attn"

    def __init__(self) -> None:
        from flash_attn import flash_attn_func

        self._flash = flash_attn_func

    def _dense(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        if mask is not None or queries.dtype not in _HALVES:
            return super()._dense(queries, keys, values, scale, mask, causal)
        parts = (part.transpose(1, 2) for part in (queries, keys, values))
        out, lse, _ = self._flash(*parts, softmax_scale=scale, causal=causal, return_attn_probs=True)
        return out.transpose(1, 2), lse

    def causal(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if queries.dtype not in _HALVES:
            return super().causal(queries, keys, values, scale)
        # It knows grouped heads.
        out, lse = self._dense(queries[None], keys[None], values[None], scale, None, causal=True)
        return out[0], lse[0]


def choose_backend(device: torch.device, threads: int | None = None) -> AttentionBackend:
    """The fastest backend for `device`: flash-attn or our CPU kernel where that pays, else torch's own.

    Args:
        threads: of a CPU, that compute a call (default: torch's number).
    """
    if device.type == "cpu":
        kernel = load_kernel()
        return TorchCpuBackend(threads) if kernel is None else NativeCpuBackend(kernel, threads)
    return _cuda_backend(device)


def cpu_share_backend(device: torch.device) -> AttentionBackend:
    """For the share of attention that the CPU takes off `device`."""
    threads = None if device.type == "cpu" else max(1, torch.get_num_threads() - CORES_FOR_THE_GPU)
    return choose_backend(torch.device("cpu"), threads)


@cache
def _cuda_backend(device: torch.device) -> AttentionBackend:
    torch_backend = TorchCudaBackend()
    try:
        flash = FlashAttnBackend()
    except (ImportError, OSError):
        return torch_backend
    return preferred(torch_backend, flash, partial(_decoding_ms, device=device))


def preferred(
    torch_backend: AttentionBackend, flash: AttentionBackend, ms: Callable[[AttentionBackend], float]
) -> AttentionBackend:
    """flash-attn where it is clearly faster here, else torch's op, which is built for every card."""
    try:
        flash_ms = ms(flash)
    except RuntimeError:  # built for other cards
        return torch_backend
    return flash if flash_ms < WORTH_IT * ms(torch_backend) else torch_backend


def _decoding_ms(backend: AttentionBackend, device: torch.device) -> float:
    """ms of attention as a verification asks it: 17 queries over a segment of 16 pages."""
    queries = torch.randn(32, 17, 128, dtype=torch.float16, device=device)
    keys = torch.randn(16, 32, 256, 128, dtype=torch.float16, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    stream = torch.cuda.current_stream(device)
    for _ in range(10):
        start.record(stream)
        attend(backend, queries, keys, keys, 128**-0.5)
        end.record(stream)
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def fold(queries: Tensor, kv_heads: int) -> Tensor:
    """`[heads, n, d]` to `[kv_heads, heads / kv_heads * n, d]`: grouped heads become more queries."""
    heads, n, dim = queries.shape
    return queries.reshape(kv_heads, heads // kv_heads * n, dim)


def unfold(out: Tensor, lse: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Undoes `fold` on an attention result."""
    kv_heads, folded, dim = out.shape
    n = kv_heads * folded // heads
    return out.reshape(heads, n, dim), lse.reshape(heads, n)


def folded_mask(backend: AttentionBackend, mask: Tensor, queries: Tensor, kv_heads: int) -> Tensor:
    """An additive mask `[query, tokens]`, the same for every head, as `attend` takes it.

    Made once a pass, for all layers.
    """
    return backend.mask(mask.repeat(len(queries) // kv_heads, 1), queries.dtype)


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
        mask: from `folded_mask`; None: every key is seen.
    """
    if keys.dim() == 3:
        keys, values = keys[None], values[None]
    heads, kv_heads = len(queries), keys.shape[1]
    return unfold(*backend(fold(queries, kv_heads), keys, values, scale, mask), heads)


def attend_weighed(
    backend: AttentionBackend, queries: Tensor, keys: Tensor, values: Tensor, scale: float, unit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend` without a mask, and weights of a few queries (`Weighed.of`); see `AttentionBackend.weighed`.

    Keys and values have pages.
    """
    heads, kv_heads, weighed = len(queries), keys.shape[1], Weighed.of(queries.shape[1])
    out, lse, units = backend.weighed(fold(queries, kv_heads), keys, values, scale, unit, weighed)
    return *unfold(out, lse, heads), units


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
