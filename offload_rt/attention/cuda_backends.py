"""Attention on GPUs: torch's kernels, flash-attn's, and our own Triton kernels for the passes that verify."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from cpu_kv import KVLayout, KVPages, PackedPages, PlainPages
from offload_rt.attention.backends import AttentionBackend, StartedTail, TorchBackend, Total, with_mass
from offload_rt.attention.mass import Sample
from offload_rt.kernels import operators
from offload_rt.kernels.sizes import MASKED_PAGE, MOST_PACKED_QUERIES, TILE
from offload_rt.kernels.tail import TailView

_HALVES = (torch.float16, torch.bfloat16)
MAX_TIME_RATIO = 0.95  # another kernel replaces torch's if it takes less than this share of its time


class TorchCudaBackend(TorchBackend):
    """torch's kernels for CUDA: flash attention for 16 bits without a mask, else the memory-efficient one."""

    name = "torch-cuda"
    operators = torch.ops.offload_rt
    tails_first = True
    _mask_alignment = 8  # the efficient kernel reads its bias in rows of this many entries
    _unseen: ClassVar = {torch.float16: -6e4}

    def begin_tail(
        self, queries: Tensor, tail: PlainPages, scale: float, mask: Tensor | None, view: TailView
    ) -> StartedTail:
        parts = self.parts(queries, tail.keys, tail.values, scale, mask)
        return StartedTail(lambda total: self.combined(total, *parts), parts[1].amax(0))

    def by_query(self, dtype: torch.dtype, head_dim: int) -> AttentionBackend | None:
        fits = dtype != torch.float64 and head_dim % 2 == 0 and use_triton() is None
        return ByQueryBackend() if fits and queries_are_alike(dtype, head_dim) else None

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


class ByQueryBackend(TorchCudaBackend):
    """Our Triton kernels, which attend page by page, each query by itself; torch's for masks and prompts."""

    name = "by-query"

    def parts(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if mask is not None:
            return super().parts(queries, keys, values, scale, mask)
        return self._attended(queries, PlainPages(keys, values), scale)

    def by_query(self, dtype: torch.dtype, head_dim: int) -> AttentionBackend | None:
        return self

    def add(
        self,
        total: Total | None,
        queries: Tensor,
        pages: KVPages,
        scale: float,
        mask: Tensor | None = None,
    ) -> Total:
        if mask is not None or queries.shape[1] > MOST_PACKED_QUERIES or not len(pages):
            return super().add(total, queries, pages, scale, mask)
        return self.combined(total, *self._attended(queries, pages, scale))

    def begin_tail(
        self, queries: Tensor, tail: PlainPages, scale: float, mask: Tensor | None, view: TailView
    ) -> StartedTail:
        seen = view.page, view.count, view.shared, view.paths, view.lengths
        parts = self.operators.attend_tail(queries, tail.keys[0], tail.values[0], *seen, scale)
        first_page = parts[1][0]  # of which every query sees something
        return StartedTail(lambda total: self.combined(total, *parts), first_page)

    def wants_reference(self, pages: KVPages) -> bool:
        return True  # the mass is taken while the pages are attended

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
        if reference is None:
            return super().add_with_mass(total, queries, pages, scale, sample, mass, reference)
        # Chunks that a tile does not hold as a whole are summed from parts of them.
        chunk = pages.tokens // mass.shape[2]
        parts = chunk // math.gcd(chunk, TILE)
        fine = mass if parts == 1 else mass.new_empty(*mass.shape[:2], mass.shape[2] * parts)
        portions = [pages] if queries.shape[1] <= MOST_PACKED_QUERIES else pages.portions()
        for some, part in with_mass(portions, fine, len(pages)):
            found = self._attended(queries, some, scale, part, reference, sample.period, sample.step)
            total = self.combined(total, *found)
        if parts > 1:
            torch.sum(fine.unflatten(2, (-1, parts)), -1, out=mass)
        assert total is not None
        return total

    def _attended(
        self,
        queries: Tensor,
        pages: KVPages,
        scale: float,
        mass: Tensor | None = None,
        reference: Tensor | None = None,
        period: int = 1,
        step: int = 1,
    ) -> tuple[Tensor, Tensor]:
        taken = scale, mass, reference, period, step
        found: tuple[Tensor, Tensor]
        if isinstance(pages, PackedPages):
            found = self.operators.attend_packed(queries, pages.data, pages.page_tokens, *taken)
        else:
            found = self.operators.attend_pages(queries, pages.side(0), pages.side(1), *taken)
        return found


@cache
def queries_are_alike(dtype: torch.dtype, head_dim: int, device: str = "cuda") -> bool:
    """Returns whether the Triton kernels give a query the same bits beside others and alone.

    And over a page whether it is plain, packed or a tail: a compiler may choose a layout for each kernel.
    """
    from offload_rt.kernels import triton_operators

    try:
        return triton_operators.queries_are_alike(dtype, head_dim, device)
    except Exception:  # as `_check_triton` says; these sizes may not compile
        return False


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
    # A copy, as another thread may open a model meanwhile.
    return next((reason for reason in list(_CHECKED.values()) if reason is not None), None)


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
def cuda_backend(device: torch.device) -> AttentionBackend:
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
    """Returns the ms of attention of a few queries, 17 of each head, over 16 pages."""
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
