"""Attention over one segment of keys at a time, with the fastest kernel of the device.

Shapes in this package, for one sequence:

    queries `[heads, query, head_dim]`, keys and values `[pages, kv_heads, tokens, head_dim]` (`KVPages`);
    out `[heads, query, head_dim]`, lse `[heads, query]` in float32 (float64 for float64 queries).

`heads` is a multiple of `kv_heads`; query head h reads key head h // (heads / kv_heads). Grouped heads are
folded into the query length, so keys and values are never repeated in memory: a backend takes queries
`[kv_heads, folded_query, head_dim]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from cpu_kv import KVPages, PlainPages, head_major
from offload_rt.attention.mass import Sample
from offload_rt.kernels import operators
from offload_rt.kernels.native import Kernel
from offload_rt.kernels.quantized import QuantizedLayer
from offload_rt.kernels.tail import TailView

Total = tuple[Tensor, Tensor]
"""A sum of attention over segments, `[kv_heads, folded_query, head_dim]`, and its log-sum-exp `[kv_heads,
folded_query]`; float32 or wider."""


class StartedTail(NamedTuple):
    """Attention over a tail, which may have been computed and is not yet added.

    Attributes:
        add: adds it to a sum; None: nothing was added.
        reference: about its log-sum-exp, which attention mass may be relative to; None: it is not known yet.
    """

    add: Callable[[Total | None], Total]
    reference: Tensor | None = None


class AttentionBackend(ABC):
    """An implementation of attention on folded heads.

    Attributes:
        operators: namespace of the functions of `operators.py`.
        tails_first: a tail is attended first, as the device waits for the segments before it.
    """

    name: str
    operators: Any = operators
    tails_first: ClassVar[bool] = False

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

    def begin_tail(
        self, queries: Tensor, tail: PlainPages, scale: float, mask: Tensor | None, view: TailView
    ) -> StartedTail:
        """Starts attention over a tail, one page; queries see it by `mask` and, said otherwise, `view`.

        It is added behind all other segments.
        """
        return StartedTail(lambda total: self.add(total, queries, tail, scale, mask))

    def add_prompt(
        self, total: Total | None, queries: Tensor, tail: PlainPages, scale: float, view: TailView
    ) -> Total:
        """Does `add` over a tail, one page, for many queries in order."""
        own, before = tail.cut(view.shared, tail.tokens), tail.cut(0, view.shared)
        heads = queries.unflatten(1, (-1, view.count)).flatten(0, 1)
        out, lse = self.causal(heads, own.keys[0], own.values[0], scale)
        total = self.combined(total, fold(out, len(queries))[None], lse.reshape(1, len(queries), -1))
        return self.add(total, queries, before, scale) if view.shared else total

    def by_query(self, dtype: torch.dtype, head_dim: int) -> AttentionBackend | None:
        """Returns the backend whose result for a query depends on nothing but the keys that it sees.

        It serves the passes that verify; None: there is none on this device, for such heads.
        """
        return None

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
        if len(pages) == 1:
            pages = pages.plain()  # unpacked once
        total = self.add(total, queries, pages, scale)
        reference = total[1] if reference is None else reference
        for some, part in with_mass(pages.portions(), mass, len(pages)):
            self.operators.chunk_mass_(
                part, queries, some.side(0), reference, scale, sample.period, sample.step
            )
        return total

    def wants_reference(self, pages: KVPages) -> bool:
        """Returns whether `add_with_mass` over several pages needs a reference."""
        return False

    def add_quantized(
        self, total: Total | None, queries: Tensor, layer: QuantizedLayer, scale: float, count: Tensor | None
    ) -> Total:
        """Does `add` over the first `count` tokens of quantised keys and values; None: all of them."""
        return self.combined(total, *self.operators.attend_quantized(queries, *layer, count, scale))


def with_mass(portions: Iterable[KVPages], mass: Tensor, pages: int) -> Iterator[tuple[KVPages, Tensor]]:
    """Yields portions of so many pages, each with its part of the mass of their chunks."""
    chunks, at = mass.shape[2] // max(1, pages), 0
    for some in portions:
        yield some, mass[:, :, at : at + len(some) * chunks]
        at += len(some) * chunks


class TorchBackend(AttentionBackend):
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


class TorchCpuBackend(TorchBackend):
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

    def by_query(self, dtype: torch.dtype, head_dim: int) -> AttentionBackend | None:
        return self if self._kernel.supports_rows(dtype, head_dim) else None

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

    def begin_tail(
        self, queries: Tensor, tail: PlainPages, scale: float, mask: Tensor | None, view: TailView
    ) -> StartedTail:
        if not self._kernel.supports(queries, tail):
            return super().begin_tail(queries, tail, scale, mask, view)
        return StartedTail(partial(self._kernel.attend_tail, queries, tail, scale, view, self.threads))

    def add_prompt(
        self, total: Total | None, queries: Tensor, tail: PlainPages, scale: float, view: TailView
    ) -> Total:
        if not self._kernel.supports(queries, tail):
            return super().add_prompt(total, queries, tail, scale, view)
        return self._kernel.attend_tail(queries, tail, scale, view, self.threads, total)

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
        if kernel.supports(queries, pages) and kernel.supports_mass(pages, chunk):
            return kernel.attend(queries, pages, scale, None, self.threads, total, mass, reference, *every)
        return super().add_with_mass(total, queries, pages, scale, sample, mass, reference)

    def add_quantized(
        self, total: Total | None, queries: Tensor, layer: QuantizedLayer, scale: float, count: Tensor | None
    ) -> Total:
        if count is not None or not self._kernel.supports_quantized(queries, layer):
            return super().add_quantized(total, queries, layer, scale, count)
        return self._kernel.attend_quantized(queries, layer, scale, self.threads, total)


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
