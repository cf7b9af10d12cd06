"""The native attention kernel, built with the machine's own compiler on first use and cached.

Without a compiler, or if the build fails, `load_kernel` returns None and attention uses torch's kernel.
`OFFLOAD_RT_NATIVE=0` in the environment does the same.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from cpu_kv import KVPages, PackedPages, PlainPages
from cpu_kv.packed import PackedShape
from offload_rt.kernels.building import StillBuilding, build, intact
from offload_rt.system.digests import digest
from offload_rt.system.memory import cache_folder

if TYPE_CHECKING:
    from offload_rt.kernels.quantized import QuantizedLayer
    from offload_rt.kernels.tail import TailView

SOURCE = Path(__file__).parent / "csrc" / "attention.cpp"
SOURCES = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
SWITCH = "OFFLOAD_RT_NATIVE"
_FLAGS = ("-O3", "-ffp-contract=off", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
"""Products are fused with sums by `add_product` of `vectors.h` alone."""


class _Pages(ctypes.Structure):
    """A tensor `[pages, heads, tokens, dim]`, as `Pages` of `attention.cpp`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("page_stride", "head_stride", "row_stride", "page_tokens")),
    ]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tensor.data_ptr(), *tensor.stride()[:3], tensor.shape[2])

    @classmethod
    def cut(cls, page: Tensor, tokens: int) -> Self:
        """Returns one page as pages of so many tokens, the last one perhaps shorter."""
        _, head_stride, row_stride, _ = page.stride()
        return cls(page.data_ptr(), tokens * row_stride, head_stride, row_stride, tokens)


class _PackedShape(ctypes.Structure):
    """The shape of packed pages, as `PackedShape` of `packed.h`."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("heads", "page_tokens", "dim", "words", "bases_at", "rows_at", "nbytes")
    ]

    @classmethod
    def of(cls, shape: PackedShape) -> Self:
        sizes = shape.kv_heads, shape.page_size, shape.head_dim
        return cls(*sizes, shape.words, shape.bases_at, shape.rows_at, shape.nbytes)


class _PackedPages(ctypes.Structure):
    """A side of packed pages, as `PackedPages` of `packed.h`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("page_tokens", "side")),
        ("shape", _PackedShape),
    ]

    @classmethod
    def of(cls, pages: PackedPages, side: int) -> Self:
        shape = pages.shape
        return cls(pages.data.data_ptr(), shape.page_size, side, _PackedShape.of(shape))


class _Quantized(ctypes.Structure):
    """One side of a `QuantizedLayer`, as `Quantized` of `quantized.h`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "ranges")),
        *((name, ctypes.c_int64) for name in ("head_stride", "row_stride", "range_head_stride")),
        *((name, ctypes.c_int64) for name in ("page_tokens", "group", "dim")),
    ]

    @classmethod
    def of(cls, codes: Tensor, ranges: Tensor, dim: int) -> Self:
        """`ranges` differ by channel in groups of tokens if they are `[heads, groups, 2, dim]`."""
        tokens = codes.shape[1]
        group = tokens // ranges.shape[1] if ranges.dim() == 4 else 1
        strides = *codes.stride()[:2], ranges.stride(0)
        return cls(codes.data_ptr(), ranges.data_ptr(), *strides, tokens, group, dim)


class _Quantize(ctypes.Structure):
    """The arguments of a quantisation, as `Quantize` of `quantized.h`."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("head_stride", "row_stride", "heads", "tokens", "threads")),
        ("into", _Quantized),
    ]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _call_over(name: str, pages: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """Returns the arguments of a call over keys and values in a form, as `Call` of `attention.cpp`."""
    fields = [
        ("queries", _Pages),
        *((name, pages) for name in ("keys", "values")),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "before", "lse_before")),
        *((name, ctypes.c_void_p) for name in ("mask", "mass", "reference")),
        *((name, ctypes.c_int64) for name in ("heads", "count", "tokens", "dim")),
        *((name, ctypes.c_int64) for name in ("threads", "mass_stride", "chunk", "period", "step")),
        *((name, ctypes.c_int64) for name in ("ordered", "shared")),
        ("scale", ctypes.c_float),
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


class _PathCall(ctypes.Structure):
    """What a tree sees, as `PathCall` of `attention.cpp`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("paths", "lengths")),
        *((name, ctypes.c_int64) for name in ("count", "shared")),
    ]


_Call = _call_over("Call", _Pages)
_PackedCall = _call_over("PackedCall", _PackedPages)
_QuantizedCall = _call_over("QuantizedCall", _Quantized)


class Kernel:
    """The compiled library of `attention.cpp`.

    Attributes:
        lanes: floats per vector register.
        bfloat16_dots: whether bfloat16 uses the processor's dot products; else it is widened to float32.
        bfloat16_tiles: whether products of bfloat16 use the processor's tiles (AMX).
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.offload_rt_sizeof.argtypes = (ctypes.c_char_p,)
        self._library.offload_rt_sizeof.restype = ctypes.c_int64
        self.lanes = self.number("lanes")
        self.bfloat16_dots = bool(self.number("bfloat16_dots"))
        self.bfloat16_tiles = bool(self.number("bfloat16_tiles"))
        self._entry: dict[torch.dtype, Callable[..., None]] = {}
        for dtype in (torch.float32, torch.bfloat16):
            name = f"attend_{str(dtype).removeprefix('torch.')}"
            self._entry[dtype] = self.function(name, _Call)
        tree = ctypes.POINTER(_PathCall)
        self.check_size(_PathCall)
        self._attend_paths = {
            dtype: self.function(f"attend_paths_{str(dtype).removeprefix('torch.')}", _Call, tree)
            for dtype in self._entry
        }
        self._quantized, self._quantize = (
            {
                (dtype, bits): self.function(f"{does}_{str(dtype).removeprefix('torch.')}_{bits}", given)
                for dtype in self._entry
                for bits in (8, 4)
            }
            for does, given in (("attend", _QuantizedCall), ("quantize", _Quantize))
        )
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._attend_packed = self.function("attend_packed", _PackedCall)
        self._pack = self.function("pack", _PackedShape, pointer, number, pointer, number)
        runs = (*[pointer] * 4, number, number)
        self._unpack = self.function("unpack", _PackedShape, *runs, pointer, number)

    def function(self, name: str, structure: type[ctypes.Structure], *types: Any) -> Callable[..., None]:
        """Returns a function of the library that takes the address of a structure, then other arguments.

        Raises:
            TypeError: the library's structure has another size.
        """
        for one in (structure, *types):
            if issubclass(one, ctypes.Structure):
                self.check_size(one)
        function: Callable[..., None] = getattr(self._library, f"offload_rt_{name}")
        function.argtypes = ctypes.POINTER(structure), *types  # type: ignore[attr-defined]
        function.restype = None  # type: ignore[attr-defined]
        return function

    def check_size(self, structure: type[ctypes.Structure]) -> None:
        """Raises TypeError where the library's structure of that name, or one within it, has another size."""
        name, here = structure.__name__.lstrip("_"), ctypes.sizeof(structure)
        there = int(self._library.offload_rt_sizeof(name.encode()))
        if here != there:
            raise TypeError(f"{name} takes {here} bytes, and {there} in the native library")
        for _, kind, *_ in structure._fields_:
            if issubclass(kind, ctypes.Structure):
                self.check_size(kind)

    def number(self, name: str) -> int:
        """Returns the result of a function of the library without arguments."""
        return int(getattr(self._library, f"offload_rt_{name}")())

    def supports(self, queries: Tensor, pages: KVPages) -> bool:
        """Returns whether it supports the tensors: float32 or bfloat16, head_dim a multiple of `lanes`."""
        rows = [queries] if isinstance(pages, PackedPages) else [queries, pages.side(0), pages.side(1)]
        return self.supports_rows(queries.dtype, queries.shape[-1]) and all(
            one.stride(-1) == 1 for one in rows
        )

    def supports_rows(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Returns whether it supports contiguous queries, keys and values of these sizes."""
        return dtype in self._entry and head_dim % self.lanes == 0

    def supports_mass(self, pages: KVPages, chunk: int) -> bool:
        """Returns whether it takes mass of such chunks: a power of two, at most 128, within a page."""
        return chunk & (chunk - 1) == 0 and chunk <= 128 and pages.page_tokens % chunk == 0

    def attend(
        self,
        queries: Tensor,
        pages: KVPages,
        scale: float,
        mask: Tensor | None,
        threads: int | None = None,
        before: tuple[Tensor, Tensor] | None = None,
        mass: Tensor | None = None,
        reference: Tensor | None = None,
        period: int = 1,
        step: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Computes attention and its log-sum-exp.

        A query that sees no key has the output zero and the log-sum-exp -inf. Concurrent calls from several
        threads have teams of their own.

        Args:
            queries: `[heads, query, dim]`.
            pages: of as many heads.
            mask: additive, `[query, tokens]`; None: every key is seen.
            threads: size of the team (default: torch's number for the calling thread).
            before: the result over other tokens, to which this is added.
            mass: output, `[heads, sampled_query, chunks]` float32: see `operators.chunk_mass_`. Only for
                chunks that `supports_mass`, and without a mask.
            reference: what the mass is relative to; None: the log-sum-exp of the result.
            period, step: which queries are sampled, see `attention.mass.Sample`.

        Returns:
            `[heads, query, dim]` in float32, and `[heads, query]` in float64: the same bits whatever other
            queries there are, however many threads, and in whichever calls the pages come, in order.
        """
        masses = mass, reference, period, step
        sides: tuple[ctypes.Structure, ctypes.Structure]
        if isinstance(pages, PackedPages):
            sides = _PackedPages.of(pages, 0), _PackedPages.of(pages, 1)
            entry, call = self._attend_packed, _PackedCall
        else:
            sides = _Pages.of(pages.side(0)), _Pages.of(pages.side(1))
            entry, call = self._entry[queries.dtype], _Call
        return self._attend(entry, call, sides, pages.tokens, queries, scale, mask, threads, before, *masses)

    def attend_tail(
        self,
        queries: Tensor,
        tail: PlainPages,
        scale: float,
        view: TailView,
        threads: int | None = None,
        before: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Does `attend` over a tail, one page, as if its tokens lay in pages of the store, in order.

        A query's result is that of a pass in which it is the only one.

        Args:
            queries: `[heads, group * view.count, dim]`, those of one head of a group behind each other.
        """
        sides = _Pages.cut(tail.keys, view.page), _Pages.cut(tail.values, view.page)
        entry = self._entry[queries.dtype]
        if view.paths is not None and view.lengths is not None:
            tree = _PathCall(view.paths.data_ptr(), view.lengths.data_ptr(), len(view.paths), view.shared)
            attend_paths, order = self._attend_paths[queries.dtype], (0, 0)

            def entry(call: Any) -> None:
                attend_paths(call, ctypes.byref(tree))

            tokens = view.shared + view.paths.shape[1]
        else:
            tokens, order = tail.tokens, (view.count, view.shared)
        return self._attend(entry, _Call, sides, tokens, queries, scale, None, threads, before, order=order)

    def _attend(
        self,
        entry: Callable[..., None],
        call: type[ctypes.Structure],
        sides: tuple[ctypes.Structure, ctypes.Structure],
        tokens: int,
        queries: Tensor,
        scale: float,
        mask: Tensor | None,
        threads: int | None,
        before: tuple[Tensor, Tensor] | None,
        mass: Tensor | None = None,
        reference: Tensor | None = None,
        period: int = 1,
        step: int = 1,
        order: tuple[int, int] = (0, 0),
    ) -> tuple[Tensor, Tensor]:
        """Does `attend` by a function of the library.

        Args:
            entry: takes a `call`.
            sides: keys and values, of `tokens` tokens.
            order: `ordered` and `shared` of `Call`.
        """
        heads, count, dim = queries.shape
        out = torch.empty(heads, count, dim, dtype=torch.float32)
        lse = torch.empty(heads, count, dtype=torch.float64)
        if out.numel() == 0:
            return out, lse
        # The tensors named here are kept until the call has ended. The mass may have gaps between its rows.
        out_before, lse_before = (None, None) if before is None else before
        out_before = None if out_before is None else out_before.contiguous()
        lse_before = None if lse_before is None else lse_before.double().contiguous()
        mask = None if mask is None else mask.float().contiguous()
        reference = None if reference is None else reference.double().contiguous()
        arguments = call(
            queries=_Pages(queries.data_ptr(), 0, *queries.stride()[:2], count),
            keys=sides[0],
            values=sides[1],
            out=out.data_ptr(),
            lse=lse.data_ptr(),
            before=_address(out_before),
            lse_before=_address(lse_before),
            mask=_address(mask),
            mass=_address(mass),
            reference=_address(reference),
            heads=heads,
            count=count,
            tokens=tokens,
            dim=dim,
            threads=torch.get_num_threads() if threads is None else threads,
            mass_stride=1 if mass is None else mass.stride(1),
            chunk=1 if mass is None else tokens // mass.shape[2],
            period=period,
            step=step,
            ordered=order[0],
            shared=order[1],
            scale=scale,
        )
        entry(ctypes.byref(arguments))
        return out, lse

    def supports_quantized(self, queries: Tensor, layer: QuantizedLayer) -> bool:
        """Returns whether it supports the tensors: as `supports`, with half a row in whole vectors."""
        return (
            (queries.dtype, layer.bits) in self._quantized
            and queries.shape[-1] % (2 * self.lanes) == 0
            and queries.stride(-1) == layer.key_codes.stride(-1) == layer.value_codes.stride(-1) == 1
        )

    def attend_quantized(
        self,
        queries: Tensor,
        layer: QuantizedLayer,
        scale: float,
        threads: int | None = None,
        before: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Does `attend` over the tokens of a quantised layer, without a mask."""
        dim = queries.shape[-1]
        keys = _Quantized.of(layer.key_codes, layer.key_ranges, dim)
        values = _Quantized.of(layer.value_codes, layer.value_ranges, dim)
        entry, tokens = self._quantized[queries.dtype, layer.bits], layer.key_codes.shape[1]
        sides = keys, values
        return self._attend(entry, _QuantizedCall, sides, tokens, queries, scale, None, threads, before)

    def quantize(self, keys: Tensor, values: Tensor, layer: QuantizedLayer) -> None:
        """Quantises keys and values `[heads, tokens, dim]` into a layer of as many tokens."""
        heads, tokens, dim = keys.shape
        for rows, codes, ranges in (
            (keys, layer.key_codes, layer.key_ranges),
            (values, layer.value_codes, layer.value_ranges),
        ):
            call = _Quantize(
                rows.data_ptr(),
                *rows.stride()[:2],
                heads,
                tokens,
                torch.get_num_threads(),
                _Quantized.of(codes, ranges, dim),
            )
            self._quantize[rows.dtype, layer.bits](ctypes.byref(call))

    def pack(self, shape: PackedShape, pages: Tensor, packed: Tensor) -> None:
        """Packs contiguous pages of bfloat16; see `PageCodec.encode`."""
        team = torch.get_num_threads()
        self._pack(_PackedShape.of(shape), pages.data_ptr(), len(pages), packed.data_ptr(), team)

    def unpack(
        self, shape: PackedShape, packed: Tensor, pages: Tensor, heads: Tensor, first: Tensor, out: Tensor
    ) -> None:
        """Unpacks runs of tokens of packed pages to `out`, contiguous `[runs, tokens, head_dim]`.

        Args:
            pages, heads, first: of each run, int64; heads of keys and values are counted together.
        """
        runs = (one.contiguous() for one in (pages, heads, first))
        kept = [packed, *runs]  # until the call has ended
        addresses = (one.data_ptr() for one in kept)
        team = torch.get_num_threads()
        self._unpack(_PackedShape.of(shape), *addresses, len(out), out.shape[1], out.data_ptr(), team)


@functools.cache
def load_kernel() -> Kernel | None:
    """Returns the kernel for this machine, building it if necessary; None if that is impossible."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if os.environ.get(SWITCH) == "0" or compiler is None:
        return None
    try:
        path = library_path(compiler)
        if not intact(path):
            _build(compiler, path)
        return Kernel(path)
    except StillBuilding as building:
        warnings.warn(
            f"{building}: until it is built and loaded at a later start, attention on the CPU is slower",
            stacklevel=2,
        )
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError):
        pass
    return None


def library_path(compiler: str) -> Path:
    """Returns where the library for this machine is kept."""
    return cache_folder() / f"attention-{_fingerprint(compiler)}.so"


def _fingerprint(compiler: str) -> str:
    """Returns a digest of sources, compiler, flags and processor, as machines may share a home folder."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=30).stdout
    try:
        flags = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")
        )
    except (OSError, StopIteration):
        flags = platform.processor()
    parts = (*(source.read_bytes() for source in SOURCES), version, flags.encode(), " ".join(_FLAGS).encode())
    return digest(b"\0".join(parts), digits=16)


def _build(compiler: str, path: Path, processor: str = "native") -> None:
    """Compiles the sources into a file at `path`, see `building.build`.

    Args:
        processor: value of the compiler's `-march`.
    """
    build(compiler, path, [f"-march={processor}", *_FLAGS, str(SOURCE)])
