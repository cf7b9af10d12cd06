"""Attention over one segment of keys at a time, with the fastest kernel of the device.

Shapes in this package, for one sequence:

    queries `[heads, query, head_dim]`, keys and values `[pages, kv_heads, tokens, head_dim]` (`KVPages`);
    out `[heads, query, head_dim]`, lse `[heads, query]` in float32 (float64 for float64 queries).

`heads` is a multiple of `kv_heads`; query head h reads key head h // (heads / kv_heads). Grouped heads are
folded into the query length, so keys and values are never repeated in memory: a backend takes queries
`[kv_heads, folded_query, head_dim]`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from cpu_kv import KVLayout, KVPages, PackedPages, PlainPages, head_major
from offload_rt.attention.mass import Sample
from offload_rt.kernels import operators
from offload_rt.kernels.native import Kernel, load_kernel
from offload_rt.kernels.quantized import QuantizedLayer
from offload_rt.kernels.sizes import MASKED_PAGE, MOST_PACKED_QUERIES, PACKED_TILE
from offload_rt.kernels.tail import TailView

_HALVES = (torch.float16, torch.bfloat16)
RESERVED_CORES = 3  # for the threads that run a pass, draft and choose chunks while the CPU attends
MAX_TIME_RATIO = 0.95  # another kernel replaces torch's if it takes less than this share of its time

Total = tuple[Tensor, Tensor]
"""A sum of attention over segments, `[kv_heads, folded_query, head_dim]`, and its log-sum-exp `[kv_heads,
folded_query]`; float32 or wider."""


class AttentionBackend(ABC):
    """An implementation of attention on folded heads.

    Attributes:
        operators: namespace of the functions of `operators.py`.
    """

    name: str
    operators: Any = operators

    @abstractmethod
    def parts(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Computes attention over disjoint parts of a segment, for `combine` to merge.

        Args:
            queries: `[kv_heads, folded_query, head_dim]`.
            keys, values: `[pages, kv_heads, tokens, head_dim]`.
            mask: from `mask`; None: every key is seen.

        Returns:
            `[parts, kv_heads, folded_query, head_dim]` and their log-sum-exp `[parts, kv_heads,
            folded_query]`.
        """

    @abstractmethod
    def causal(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Computes causal attention of n unfolded queries over n keys.

        Args:
            queries: `[heads, n, head_dim]`.
            keys, values: `[kv_heads, n, head_dim]`.

        Returns:
            `[heads, n, head_dim]` and the log-sum-exp `[heads, n]`.
        """

    def mask(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Prepares an additive mask `[folded_query, tokens]` for calls with queries of `dtype`."""
        return mask

    def add(
        self,
        total: Total | None,
        queries: Tensor,
        pages: KVPages,
        scale: float,
        mask: Tensor | None = None,
    ) -> Total:
        """Adds attention over a segment to a sum; the tensors are as in `parts`.

        Args:
            total: the sum so far; None: nothing was added. It stays as it is.
            mask: of plain pages.
        """
        for some in pages.portions():
            total = self.combined(total, *self.parts(queries, some.keys, some.values, scale, mask))
        assert total is not None
        return total

    def add_tail(
        self,
        total: Total | None,
        queries: Tensor,
        tail: PlainPages,
        scale: float,
        mask: Tensor | None,
        view: TailView,
    ) -> Total:
        """Does `add` over a tail, one page, which the queries see by `mask` and, said otherwise, by `view`.

        A backend whose results do not depend on the other queries goes by `view`.
        """
        return self.add(total, queries, tail, scale, mask)

    def add_prompt(
        self, total: Total | None, queries: Tensor, tail: PlainPages, scale: float, view: TailView
    ) -> Total:
        """Does `add_tail` for many queries in order, without a mask."""
        own, before = tail.cut(view.shared, tail.tokens), tail.cut(0, view.shared)
        heads = queries.unflatten(1, (-1, view.count)).flatten(0, 1)
        out, lse = self.causal(heads, own.keys[0], own.values[0], scale)
        total = self.combined(total, fold(out, len(queries))[None], lse.reshape(1, len(queries), -1))
        return self.add(total, queries, before, scale) if view.shared else total

    def by_query(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Returns whether a query's result depends on nothing but the keys that it sees, and their order."""
        return False

    def combined(self, total: Total | None, outs: Tensor, lses: Tensor) -> Total:
        """Adds what `parts` returns to a sum."""
        found: Total = self.operators.combine(outs, lses, *(total or (None, None)))
        return found

    def add_with_mass(
        self,
        total: Total | None,
        queries: Tensor,
        pages: KVPages,
        scale: float,
        sample: Sample,
        mass: Tensor,
        reference: Tensor | None,
    ) -> Total:
        """Does `add` without a mask, and takes attention mass.

        Args:
            mass: output, see `operators.chunk_mass_`.
            reference: what the mass is relative to; None: the log-sum-exp of the result.
        """
        operators, every = self.operators, (sample.period, sample.step)
        chunks, at = mass.shape[2] // max(1, len(pages)), 0
        for some in pages.portions():
            part = mass[:, :, at : at + len(some) * chunks]
            at += len(some) * chunks
            if total is None or reference is None:
                total = self.add(total, queries, some, scale)
                operators.chunk_mass_(part, queries, some.keys, total[1], scale, *every)
            else:
                parts = self.parts(queries, some.keys, some.values, scale, None)
                total = operators.combine_with_mass_(
                    part, *parts, *total, queries, some.keys, reference, scale, *every
                )
        assert total is not None
        return total

    def wants_reference(self, pages: KVPages) -> bool:
        """Returns whether `add_with_mass` over several pages needs a reference."""
        return False

    def add_quantized(
        self, total: Total | None, queries: Tensor, layer: QuantizedLayer, scale: float, count: Tensor | None
    ) -> Total:
        """Does `add` over the first `count` tokens of quantised keys and values; None: all of them."""
        return self.combined(total, *self.operators.attend_quantized(queries, *layer, count, scale))


class _TorchBackend(AttentionBackend):
    """A torch op on batches `[batch, heads, tokens, head_dim]`, which does not know pages."""

    @abstractmethod
    def _dense(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns attention and its log-sum-exp `[batch, heads, query]`."""

    def parts(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if keys.numel() == 0:
            # torch's kernel for CPUs divides by zero, which kills the process. Those for CUDA return a
            # log-sum-exp that would count in a merge.
            wide = torch.promote_types(queries.dtype, torch.float32)
            return torch.zeros_like(queries)[None], queries.new_full(
                (1, *queries.shape[:2]), -torch.inf, dtype=wide
            )
        # Each page is a batch entry. Where results would be larger than the keys, the pages are put side by
        # side first.
        pages, _, tokens, _ = keys.shape
        if pages > 1 and (mask is not None or queries.shape[1] > tokens):
            keys, values = head_major(keys)[None], head_major(values)[None]
            pages = 1
        return self._dense(queries.expand(pages, -1, -1, -1), keys, values, scale, mask, causal=False)

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
    """torch's flash attention for CPUs.

    Args:
        threads: number of threads per call (default: torch's). torch keeps that number for each calling
            thread, so a call sets it for its own thread and restores it.
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

    def parts(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        with torch_threads(self.threads):
            outs, lses = super().parts(queries, keys, values, scale, mask)
        if mask is not None:
            # torch returns log-sum-exp 0 for a query that sees no key: in a merge that would count.
            lses.masked_fill_(torch.isneginf(mask).all(-1), -torch.inf)
        return outs, lses

    def causal(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        with torch_threads(self.threads):
            return super().causal(queries, keys, values, scale)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Sets torch's number of threads for the calling thread within the context; None: leaves it."""
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
    """Our own kernel (`kernels/csrc/attention.cpp`) where it supports the tensors, else torch's.

    Args:
        threads: number of threads per call (default: torch's). Concurrent calls have teams of their own.
    """

    name = "native-cpu"

    def __init__(self, kernel: Kernel, threads: int | None = None) -> None:
        super().__init__(threads)
        self._kernel = kernel

    def by_query(self, dtype: torch.dtype, head_dim: int) -> bool:
        return self._kernel.supports_rows(dtype, head_dim)

    def add(
        self,
        total: Total | None,
        queries: Tensor,
        pages: KVPages,
        scale: float,
        mask: Tensor | None = None,
    ) -> Total:
        if self._kernel.supports(queries, pages):
            return self._kernel.attend(queries, pages, scale, mask, self.threads, total)
        return super().add(total, queries, pages, scale, mask)

    def add_tail(
        self,
        total: Total | None,
        queries: Tensor,
        tail: PlainPages,
        scale: float,
        mask: Tensor | None,
        view: TailView,
    ) -> Total:
        if self._kernel.supports(queries, tail):
            return self._kernel.attend_tail(queries, tail, scale, view, self.threads, total)
        return super().add_tail(total, queries, tail, scale, mask, view)

    def add_prompt(
        self, total: Total | None, queries: Tensor, tail: PlainPages, scale: float, view: TailView
    ) -> Total:
        if self._kernel.supports(queries, tail):
            return self._kernel.attend_tail(queries, tail, scale, view, self.threads, total)
        return super().add_prompt(total, queries, tail, scale, view)

    def add_with_mass(
        self,
        total: Total | None,
        queries: Tensor,
        pages: KVPages,
        scale: float,
        sample: Sample,
        mass: Tensor,
        reference: Tensor | None,
    ) -> Total:
        kernel, chunk, every = self._kernel, pages.tokens // mass.shape[2], (sample.period, sample.step)
        if not kernel.supports(queries, pages):
            return super().add_with_mass(total, queries, pages, scale, sample, mass, reference)
        if kernel.supports_mass(pages, chunk):
            return kernel.attend(queries, pages, scale, None, self.threads, total, mass, reference, *every)
        total = self.add(total, queries, pages, scale)
        reference, at = total[1] if reference is None else reference, 0
        for some in pages.portions():
            part = mass[:, :, at : at + some.tokens // chunk]
            at += some.tokens // chunk
            self.operators.chunk_mass_(part, queries, some.keys, reference, scale, *every)
        return total

    def add_quantized(
        self, total: Total | None, queries: Tensor, layer: QuantizedLayer, scale: float, count: Tensor | None
    ) -> Total:
        if count is not None or not self._kernel.supports_quantized(queries, layer):
            return super().add_quantized(total, queries, layer, scale, count)
        return self._kernel.attend_quantized(queries, layer, scale, self.threads, total)


class TorchCudaBackend(_TorchBackend):
    """torch's kernels for CUDA: flash attention for 16 bits without a mask, else the memory-efficient one."""

    name = "torch-cuda"
    operators = torch.ops.offload_rt
    _mask_alignment = 8  # the efficient kernel reads its bias in rows of this many entries
    _unseen: ClassVar = {torch.float16: -6e4}

    def wants_reference(self, pages: KVPages) -> bool:
        return isinstance(pages, PackedPages)  # their mass is taken while they are attended

    def add(
        self,
        total: Total | None,
        queries: Tensor,
        pages: KVPages,
        scale: float,
        mask: Tensor | None = None,
    ) -> Total:
        packed = self._attended_packed(queries, pages)
        if packed is None:
            return super().add(total, queries, pages, scale, mask)
        none = None, None, 1, 1
        found = self.operators.attend_packed(queries, packed.data, packed.page_tokens, scale, *none)
        return self.combined(total, *found)

    @staticmethod
    def _attended_packed(queries: Tensor, pages: KVPages) -> PackedPages | None:
        """Returns pages that a kernel attends to as they are; None: they are plain, or unpacked first."""
        few = len(pages) > 0 and queries.shape[1] <= MOST_PACKED_QUERIES
        return pages if few and isinstance(pages, PackedPages) else None

    def add_with_mass(
        self,
        total: Total | None,
        queries: Tensor,
        pages: KVPages,
        scale: float,
        sample: Sample,
        mass: Tensor,
        reference: Tensor | None,
    ) -> Total:
        if reference is None and len(pages) > 1 and self.wants_reference(pages):
            raise ValueError("attention mass of packed pages needs a reference: attend to one page first")
        packed = self._attended_packed(queries, pages)
        if reference is None or packed is None:
            return super().add_with_mass(total, queries, pages, scale, sample, mass, reference)
        # Chunks that a tile does not hold as a whole are summed from parts of them.
        chunk = pages.tokens // mass.shape[2]
        parts = chunk // math.gcd(chunk, PACKED_TILE)
        fine = mass if parts == 1 else mass.new_empty(*mass.shape[:2], mass.shape[2] * parts)
        found = self.operators.attend_packed(
            queries, packed.data, packed.page_tokens, scale, fine, reference, sample.period, sample.step
        )
        if parts > 1:
            torch.sum(fine.unflatten(2, (-1, parts)), -1, out=mass)
        return self.combined(total, *found)

    def _dense(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        if mask is None and queries.dtype in _HALVES:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                queries, keys, values, 0.0, causal, False, scale=scale
            )
            return out, lse
        bias = None if mask is None else mask.expand(len(keys), keys.shape[1], -1, -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            queries, keys, values, bias, True, 0.0, causal, scale=scale
        )
        return out, lse[..., : queries.shape[2]]  # the kernel pads lse to a multiple of 32

    def parts(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        pages, _, tokens, _ = keys.shape
        if mask is None or pages > 1 or tokens % MASKED_PAGE or tokens <= MASKED_PAGE:
            return super().parts(queries, keys, values, scale, mask)
        # The kernel gives each key head one thread block per tile of queries, and a draft has few queries:
        # 8 to 32 blocks on a GPU of 128 multiprocessors. Splitting the keys into pages makes more blocks.
        keys, values = (side[0].unflatten(1, (-1, MASKED_PAGE)).transpose(0, 1) for side in (keys, values))
        mask = mask.unflatten(1, (-1, MASKED_PAGE)).transpose(0, 1)[:, None]
        return self._dense(queries.expand(len(keys), -1, -1, -1), keys, values, scale, mask, causal=False)

    def mask(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        rows, columns = mask.shape
        padded = -(-columns // self._mask_alignment) * self._mask_alignment
        bias = mask.new_zeros(rows, padded, dtype=dtype)[:, :columns]
        # Finite, because the kernel returns NaN for a page that is masked completely. The log-sum-exp of such
        # a page is so low that it does not count when pages are merged.
        return bias.copy_(mask.clamp(min=self._unseen.get(dtype, -1e30)))


class FlashAttnBackend(TorchCudaBackend):
    """The flash-attn package for 16 bits without a mask, else torch's kernels.

    Raises:
        ImportError: the package is missing, broken, or another one of that name (flash-attn-4).
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
        # flash-attn supports grouped heads.
        out, lse = self._dense(queries[None], keys[None], values[None], scale, None, causal=True)
        return out[0], lse[0]


def choose_backend(device: torch.device, threads: int | None = None) -> AttentionBackend:
    """Returns the fastest backend for `device`: flash-attn or our CPU kernel where faster, else torch's.

    Args:
        threads: CPU threads per call (default: torch's number).
    """
    if device.type == "cpu":
        kernel = load_kernel()
        return TorchCpuBackend(threads) if kernel is None else NativeCpuBackend(kernel, threads)
    return _cuda_backend(device)


def cpu_share_backend(device: torch.device) -> AttentionBackend:
    """Returns the CPU backend for a range of KV that the CPU attends on behalf of `device`."""
    threads = None if device.type == "cpu" else max(1, torch.get_num_threads() - RESERVED_CORES)
    return choose_backend(torch.device("cpu"), threads)


_CHECKED: dict[tuple[KVLayout, int] | None, str | None] = {}
"""Reasons why Triton kernels do not run, by the KV that they were checked for; None: they do."""


def use_triton(layout: KVLayout | None = None, group: int = 1) -> str | None:
    """Registers the Triton kernels as the operators of CUDA devices; returns the reason if that fails.

    The kernels are first compiled and compared with the plain form on the current device: an old compiler or
    driver must not cost a generation. Once they have failed for one model, they serve none.

    Args:
        layout, group: of a model's KV, and its query heads for each KV head; None: whatever the kernels were
            checked for, or small sizes.
    """
    shape = None if layout is None else (layout, group)
    if shape not in _CHECKED and not (shape is None and _CHECKED):
        _CHECKED[shape] = _check_triton(() if shape is None else shape)
    return next((reason for reason in _CHECKED.values() if reason is not None), None)


def _check_triton(shape: tuple[KVLayout, int] | tuple[()]) -> str | None:
    try:
        from offload_rt.kernels import triton_operators

        triton_operators.check(TorchCudaBackend().parts, *shape)
    except Exception as error:  # Triton raises errors of many kinds, and some of the C compiler's
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    _register_triton()
    return None


@cache
def _register_triton() -> None:
    from offload_rt.kernels import triton_operators

    for name in operators.NAMES:
        kernel, plain = getattr(triton_operators, name), getattr(operators, name)
        operators.LIBRARY.impl(name, partial(_run_checked, kernel, plain), "CUDA")


def _run_checked(kernel: Callable[..., Any], plain: Callable[..., Any], *given: Any) -> Any:
    """Runs a kernel, or its plain form where a later check has failed."""
    return (plain if use_triton() else kernel)(*given)


@cache
def _cuda_backend(device: torch.device) -> AttentionBackend:
    use_triton()
    torch_backend = TorchCudaBackend()
    try:
        flash = FlashAttnBackend()
    except (ImportError, OSError):
        return torch_backend
    return preferred(torch_backend, flash, partial(_decoding_ms, device=device))


def preferred(
    torch_backend: AttentionBackend, flash: AttentionBackend, ms: Callable[[AttentionBackend], float]
) -> AttentionBackend:
    """Returns flash-attn if it is clearly faster on this GPU, else torch's op, which supports every GPU."""
    try:
        flash_ms = ms(flash)
    except RuntimeError:  # built for other GPUs
        return torch_backend
    return flash if flash_ms < MAX_TIME_RATIO * ms(torch_backend) else torch_backend


def _decoding_ms(backend: AttentionBackend, device: torch.device) -> float:
    """Returns the ms of a verification's attention: 17 queries over a segment of 16 pages."""
    queries = torch.randn(32, 17, 128, dtype=torch.float16, device=device)
    keys = torch.randn(16, 32, 256, 128, dtype=torch.float16, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    stream = torch.cuda.current_stream(device)
    for _ in range(10):
        start.record(stream)
        backend.parts(queries, keys, keys, 128**-0.5, None)
        end.record(stream)
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def fold(queries: Tensor, kv_heads: int) -> Tensor:
    """Folds grouped heads into queries: `[heads, n, d]` to `[kv_heads, heads / kv_heads * n, d]`."""
    heads, n, dim = queries.shape
    return queries.reshape(kv_heads, heads // kv_heads * n, dim)


def unfold(out: Tensor, heads: int) -> Tensor:
    """Undoes `fold`: `[kv_heads, folded_query, …]` to `[heads, n, …]`."""
    return out.reshape(heads, out.shape[0] * out.shape[1] // heads, *out.shape[2:])


def folded_mask(backend: AttentionBackend, mask: Tensor, queries: Tensor, kv_heads: int) -> Tensor:
    """Returns an additive mask `[query, tokens]`, shared by all heads, in the form of `AttentionSum.attend`.

    Made once per pass, for all layers.
    """
    return backend.mask(mask.repeat(len(queries) // kv_heads, 1), queries.dtype)
