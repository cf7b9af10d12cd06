"""The native CPU kernel against float64, for every kind of processor; and where it cannot be built."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.native_kernels import processor_flags
from support.reference_attention import ReferenceBackend, attend, merge
from torch import Tensor

from cpu_kv import KVLayout, PlainPages
from offload_rt.attention.backends import NativeCpuBackend, TorchCpuBackend, torch_threads
from offload_rt.attention.selector import choose_backend
from offload_rt.attention.sums import AttentionSum
from offload_rt.kernels import building, native, operators
from offload_rt.kernels.quantized import QuantizedKV
from offload_rt.kernels.sizes import GROUP
from offload_rt.system.memory import CACHE_FOLDER


def expected(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    return attend(ReferenceBackend(), queries.double(), keys.double(), values.double(), scale, mask)


def drawn(
    heads: int, count: int, tokens: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[heads, count, dim]`, keys and values in one page."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys, values = (
        torch.randn(heads, n, dim, generator=generator).to(dtype) for n in (count, tokens, tokens)
    )
    return queries, keys[None], values[None]


def assert_as_exact_as_torch(
    kernel: native.Kernel,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    threads: int | None = None,
) -> None:
    """At most twice the error of torch's own kernel on the same data."""
    scale = queries.shape[-1] ** -0.5
    want, want_lse = expected(queries, keys, values, scale, mask)
    out, lse = kernel.attend(queries, PlainPages(keys, values), scale, mask, threads)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float64)
    peer, peer_lse = attend(TorchCpuBackend(), queries, keys, values, scale, mask)
    # torch may be lucky, over one query most of all: its error counts as no less than rounding brings.
    least = (1 if queries.dtype == torch.bfloat16 else 8) * torch.finfo(queries.dtype).eps
    usual = max(float((peer - want).abs().max()), least * float(want.abs().max()))
    assert float((out - want).abs().max()) <= 2 * usual
    slack = 2e-6 * max(1.0, float(want_lse.abs().max()))
    assert float((lse - want_lse).abs().max()) <= 2 * float((peer_lse - want_lse).abs().max()) + slack


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    heads=st.integers(1, 4),
    count=st.sampled_from([1, 2, 5, 7, 17, 30, 64, 130]),
    tokens=st.integers(1, 70) | st.integers(1, 5000),
    dim=st.sampled_from([16, 32, 64, 80, 96, 112, 128, 256]),
    page=st.sampled_from([None, 16, 48, 128, 256, 300]),
    masked=st.booleans(),
    threads=st.sampled_from([1, 2, 3, 7]),
)
def test_error_is_at_most_twice_torchs(
    kernel: native.Kernel,
    dtype: torch.dtype,
    heads: int,
    count: int,
    tokens: int,
    dim: int,
    page: int | None,
    masked: bool,
    threads: int,
) -> None:
    """In pages, and in rows further apart than they are long; what lies beside them is NaN.

    Splits and blocks end within a page. All heads at once go through long histories only, with few queries.
    """
    queries = drawn(heads, count, 0, dim, dtype)[0]
    pages = 1 if page is None else -(-tokens // page)
    memory = torch.full((pages + 2, 2, heads, page or tokens + 3, dim + 32 * (page is None)), torch.nan)
    within = memory.to(dtype)[1:-1, :, :, : page or tokens, :dim]
    within.copy_(torch.randn(within.shape, generator=torch.Generator().manual_seed(1)))
    tokens, mask = pages * (page or tokens), None
    if masked:
        hidden = torch.rand(count, tokens, generator=torch.Generator().manual_seed(2)) < 0.4
        hidden[:, -1] = False
        mask = torch.zeros(count, tokens).masked_fill(hidden, -torch.inf)
    assert_as_exact_as_torch(kernel, queries, within[:, 0], within[:, 1], mask, threads)


@DTYPES
@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    bits=st.sampled_from([8, 4]),
    heads=st.integers(1, 3),
    count=st.sampled_from([1, 7, 30, 130]),
    groups=st.integers(1, 40) | st.just(160),
    dim=st.sampled_from([32, 64, 96]),
    threads=st.sampled_from([1, 3]),
)
def test_quantised_entries(
    kernel: native.Kernel,
    dtype: torch.dtype,
    bits: int,
    heads: int,
    count: int,
    groups: int,
    dim: int,
    threads: int,
) -> None:
    """Are quantised as the plain form does it, and attended as the entries that they stand for."""
    tokens = groups * GROUP
    queries, keys, values = drawn(heads, count, tokens, dim, dtype, groups)
    keys = keys + 5 * (torch.arange(dim) % 7 == 3)
    layout = KVLayout(1, heads, dim, dtype)
    layers = [QuantizedKV.empty(layout, tokens + GROUP, bits, torch.device("cpu")).layer(0) for _ in range(2)]
    plain, quick = (layer.first(tokens) for layer in layers)
    operators.quantize_(keys[0], values[0], *plain)
    if not kernel.supports_quantized(queries, quick):
        assert dim % (2 * kernel.lanes)
        return
    kernel.quantize(keys[0], values[0], quick)
    assert all(map(torch.equal, plain, quick))
    out, lse = kernel.attend_quantized(queries, quick, dim**-0.5, threads)
    keys, values = (side[None] for side in plain.dequantized(dtype))
    same, same_lse = kernel.attend(queries, PlainPages(keys, values), dim**-0.5, None, threads)
    assert torch.equal(out, same) or float((out - same).abs().max()) < 1e-6
    want, want_lse = expected(queries, keys, values, dim**-0.5, None)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), want.double(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, same_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse.double(), rtol=tolerance, atol=tolerance)


def test_rounded_weights_are_not_biased(kernel: native.Kernel) -> None:
    queries, keys, values = drawn(1, 64, 1000, 64, torch.bfloat16)
    values = values + 1  # whose mean shows whether the weights are too small as a whole
    want, _ = expected(queries, keys, values, 0.125, None)
    out, _ = kernel.attend(queries, PlainPages(keys, values), 0.125, None)
    assert abs(float((out - want).mean())) < 2e-4


@DTYPES
@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    heads=st.sampled_from([1, 2, 8]),
    count=st.sampled_from([1, 2, 3, 5, 17, 40, 70, 130]),
    pages=st.integers(1, 9),
    page=st.sampled_from([16, 48, 256, 300, 2048]),
    dim=st.sampled_from([32, 64, 96]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_not_a_bit_of_a_query_depends_on_other_queries_calls_or_threads(
    kernel: native.Kernel,
    dtype: torch.dtype,
    heads: int,
    count: int,
    pages: int,
    page: int,
    dim: int,
    seed: int,
    data: st.DataObject,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(heads, count, dim, generator=generator).to(dtype)
    kv = 2 * torch.randn(pages, 2, heads, page, dim, generator=generator).to(dtype)
    whole = kernel.attend(queries, PlainPages.of(kv), dim**-0.5, None, threads=1)
    first = data.draw(st.integers(0, count - 1))
    some = slice(first, data.draw(st.integers(first + 1, count)))
    cut = data.draw(st.integers(0, pages))
    total = None
    for part in (kv[:cut], kv[cut:]):
        if len(part):
            threads = data.draw(st.integers(1, 4))
            total = kernel.attend(
                queries[:, some], PlainPages.of(part), dim**-0.5, None, threads=threads, before=total
            )
    assert total is not None
    assert torch.equal(total[0], whole[0][:, some]) and torch.equal(total[1], whole[1][:, some])


@DTYPES
def test_every_number_of_queries(kernel: native.Kernel, dtype: torch.dtype) -> None:
    queries, keys, values = drawn(1, 66, 201, 64, dtype)
    for count in range(1, 67):
        assert_as_exact_as_torch(kernel, queries[:, :count], keys, values)


@DTYPES
def test_every_number_of_tokens(kernel: native.Kernel, dtype: torch.dtype) -> None:
    queries, keys, values = drawn(1, 5, 270, 64, dtype)
    for tokens in (*range(1, 67), *range(120, 136), 255, 256, 257):
        assert_as_exact_as_torch(kernel, queries, keys[:, :, :tokens], values[:, :, :tokens])


@DTYPES
def test_extreme_scores_neither_overflow_nor_vanish(kernel: native.Kernel, dtype: torch.dtype) -> None:
    queries = torch.full((1, 2, 32), 40.0)
    queries[0, 1] = -40.0
    # Rising for one query, so that every block raises the peak, and falling for the other.
    keys = torch.linspace(-30, 30, 400)[None, :, None].expand(1, 400, 32).contiguous()[None]
    values = torch.randn(1, 1, 400, 32, generator=torch.Generator().manual_seed(0))
    queries, keys, values = (part.to(dtype) for part in (queries, keys, values))
    out, lse = kernel.attend(queries, PlainPages(keys, values), 1.0, None)
    want, want_lse = expected(queries, keys, values, 1.0, None)
    precision = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), want, atol=precision / 10, rtol=precision)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-2, rtol=1e-6)


@DTYPES
def test_nan_in_nan_out(kernel: native.Kernel, dtype: torch.dtype) -> None:
    for tokens, place in ((50, 20), (3000, 2999)):
        for where in (1, 2):
            parts = drawn(1, 2, tokens, 32, dtype)
            parts[where][0, 0, place, 3] = torch.nan
            out, lse = kernel.attend(parts[0], PlainPages(*parts[1:]), 1.0, None)
            # A value that is not a number is so in its dimension, a key in all of them.
            assert out[:, :, 3].isnan().all() and bool(lse.isnan().all()) == (where == 1)
            assert bool(out.isnan().all()) == (where == 1)


@DTYPES
def test_a_query_that_sees_nothing_vanishes_when_merged(kernel: native.Kernel, dtype: torch.dtype) -> None:
    for backend in (NativeCpuBackend(kernel), TorchCpuBackend()):
        for tokens in (40, 4100):
            queries, keys, values = drawn(2, 3, tokens, 32, dtype)
            mask = torch.zeros(3, tokens)
            mask[1] = -torch.inf
            mask[2, : tokens - 10] = -torch.inf  # whole blocks and splits that it does not see
            out, lse = attend(backend, queries, keys, values, 0.3, mask)
            assert out[:, 1].eq(0).all() and lse[:, 1].isneginf().all()
            want, want_lse = expected(queries[:, ::2], keys, values, 0.3, mask[::2])
            precision = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(out[:, ::2].double(), want, atol=precision, rtol=precision)
            torch.testing.assert_close(lse[:, ::2].double(), want_lse, atol=precision, rtol=1e-5)
            whole = attend(backend, queries, keys, values, 0.3)
            merged, merged_lse = merge([whole, (out, lse)])
            assert torch.equal(merged[:, 1], whole[0][:, 1]) and torch.equal(merged_lse[:, 1], whole[1][:, 1])
        out, lse = attend(backend, queries, keys[:, :, :0], values[:, :, :0], 0.3)
        assert out.eq(0).all() and lse.isneginf().all() and lse.shape == (2, 3)
    out, lse = kernel.attend(queries[:, :0], PlainPages(keys, values), 0.3, None)
    assert out.shape == (2, 0, 32) and lse.shape == (2, 0)


@DTYPES
def test_a_sum_over_segments_of_very_different_weight(kernel: native.Kernel, dtype: torch.dtype) -> None:
    """Whole, and with 4,100 tokens in splits; some queries see nothing of one segment or of all."""
    backend, sizes = NativeCpuBackend(kernel), (7, 4100, 40)
    queries, keys, values = drawn(2, 4, sum(sizes), 32, dtype)
    keys[:, :, 7:4107] *= 12  # their scores, up or down, outweigh the others'
    mask = torch.zeros(4, sum(sizes))
    mask[0, :7] = mask[1, 7:] = mask[3] = -torch.inf
    total = AttentionSum(backend, queries, 2, 0.3)
    for part in torch.arange(sum(sizes)).split(sizes):
        total.attend(PlainPages(keys[:, :, part], values[:, :, part]), mask[:, part])
    assert total.lse is not None
    found, lse = total.result(), total.lse
    assert found[:, 3].eq(0).all() and lse[:, 3].isneginf().all()
    want, want_lse = expected(queries[:, :3], keys, values, 0.3, mask[:3])
    precision = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[:, :3].double(), want, atol=precision, rtol=precision)
    torch.testing.assert_close(lse[:, :3].double(), want_lse, atol=precision, rtol=1e-5)
    nothing = AttentionSum(backend, queries, 2, 0.3)
    nothing.attend(PlainPages(keys.new_full((1, 2, 3, 32), torch.nan), values[:, :, :3]))
    nothing.attend(PlainPages(keys, values))
    assert nothing.result().isnan().all(), "what is not a number stays so"


@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float64, 64), (torch.float16, 64), (torch.float32, 20)], ids=str
)
def test_what_it_does_not_cover_goes_to_torch(kernel: native.Kernel, dtype: torch.dtype, dim: int) -> None:
    if dim % kernel.lanes == 0:
        pytest.skip("short vectors: covered")
    queries, keys, values = drawn(2, 3, 40, dim, dtype)
    assert not kernel.supports(queries, PlainPages(keys, values))
    out, lse = attend(NativeCpuBackend(kernel), queries, keys, values, 0.1)
    peer, peer_lse = attend(TorchCpuBackend(), queries, keys, values, 0.1)
    assert torch.equal(out, peer) and torch.equal(lse, peer_lse)


def test_builds_use_what_their_processor_has(built: dict[str, Path]) -> None:
    kernels = {processor: native.Kernel(path) for processor, path in built.items()}
    lanes = {"x86-64-v4": 16, "x86-64-v3": 8, "x86-64": 4, "cooperlake": 16}
    for processor, kernel in kernels.items():
        assert kernel.lanes == lanes.get(processor, kernel.lanes)
        has_dots = processor in ("native", "cooperlake") and "avx512_bf16" in processor_flags()
        assert kernel.bfloat16_dots == has_dots
        assert kernel.bfloat16_tiles == (processor == "native" and "amx_bf16" in processor_flags())


# threads


@DTYPES
def test_calls_at_the_same_time_do_not_meet(kernel: native.Kernel, dtype: torch.dtype) -> None:
    drawn_parts = [drawn(2, 3 + 5 * i, 3000 + i, 64, dtype, seed=i) for i in range(3)]
    calls = [(queries, PlainPages(*pages)) for queries, *pages in drawn_parts]
    alone = [kernel.attend(*parts, 0.125, None, 2) for parts in calls]
    together = threading.Barrier(len(calls))

    def attend(index: int) -> bool:
        together.wait()
        results = [kernel.attend(*calls[index], 0.125, None, 2) for _ in range(10)]
        return all(torch.equal(a, b) for found in results for a, b in zip(found, alone[index], strict=True))

    with ThreadPoolExecutor(len(calls)) as pool:
        assert list(pool.map(attend, range(len(calls)))) == [True] * len(calls)


def test_a_backend_says_how_many_threads(kernel: native.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    teams: list[int] = []

    def record(entry: Callable[..., None]) -> Callable[..., None]:
        def recorded(call: Any) -> None:
            teams.append(call._obj.threads)
            entry(call)

        return recorded

    monkeypatch.setattr(kernel, "_entry", {dtype: record(entry) for dtype, entry in kernel._entry.items()})
    parts = drawn(1, 2, 30, 16, torch.float32)
    for threads in (3, None):
        attend(NativeCpuBackend(kernel, threads=threads), *parts, 0.25)
    assert teams == [3, torch.get_num_threads()]


def test_torchs_threads_are_set_for_the_calling_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, seen = torch.get_num_threads(), []

    def inside() -> None:
        with torch_threads(usual + 2):
            seen.append(torch.get_num_threads())
            inner.set()
            outer.wait()
        seen.append(torch.get_num_threads())

    inner, outer = threading.Event(), threading.Event()
    thread = threading.Thread(target=inside)
    thread.start()
    inner.wait()
    here = torch.get_num_threads()
    outer.set()
    thread.join()
    assert here == usual and seen == [usual + 2, usual]
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    backend = TorchCpuBackend(threads=usual + 1)
    queries, keys, values = drawn(1, 4, 4, 16, torch.float32)
    attend(backend, queries, keys, values, 0.25)
    backend.causal(queries, keys[0], values[0], 0.25)
    assert counts == [usual + 1, usual] * 2


# building

STAND_IN = """
extern "C" long offload_rt_lanes() { return 16; }
extern "C" int offload_rt_bfloat16_dots() { return 0; }
extern "C" int offload_rt_bfloat16_tiles() { return 0; }
extern "C" void offload_rt_attend_float32(void*) {}
extern "C" void offload_rt_attend_bfloat16(void*) {}
extern "C" void offload_rt_attend_packed(void*) {}
extern "C" void offload_rt_attend_paths_float32(void*, void*) {}
extern "C" void offload_rt_attend_paths_bfloat16(void*, void*) {}
extern "C" void offload_rt_attend_float32_8(void*) {}
extern "C" void offload_rt_attend_float32_4(void*) {}
extern "C" void offload_rt_attend_bfloat16_8(void*) {}
extern "C" void offload_rt_attend_bfloat16_4(void*) {}
extern "C" void offload_rt_quantize_float32_8(void*) {}
extern "C" void offload_rt_quantize_float32_4(void*) {}
extern "C" void offload_rt_quantize_bfloat16_8(void*) {}
extern "C" void offload_rt_quantize_bfloat16_4(void*) {}
extern "C" void offload_rt_pack() {}
extern "C" void offload_rt_unpack() {}
#include <cstring>
extern "C" long offload_rt_sizeof(const char* name) {
    const struct { const char* name; long size; } sizes[] = { SIZES };
    for (auto& one : sizes) if (!std::strcmp(one.name, name)) return one.size;
    return 0;
}
"""
STRUCTURES: list[type[ctypes.Structure]] = [
    native._Pages,
    native._PackedShape,
    native._PackedPages,
    native._Quantized,
    native._Quantize,
    native._Call,
    native._PathCall,
    native._PackedCall,
    native._QuantizedCall,
]
SIZES = ", ".join(f'{{"{one.__name__.lstrip("_")}", {ctypes.sizeof(one)}}}' for one in STRUCTURES)
STAND_IN = STAND_IN.replace("SIZES", SIZES)
"""A kernel that is compiled in no time."""


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, no memory of an earlier build, and little to build."""
    source, folder = tmp_path / "attention.cpp", tmp_path / "cache"
    source.write_text(STAND_IN)
    folder.mkdir()
    monkeypatch.setattr(native, "SOURCE", source)
    monkeypatch.setattr(native, "SOURCES", (source,))
    monkeypatch.setenv(CACHE_FOLDER, str(folder))
    native.load_kernel.cache_clear()
    yield folder
    native.load_kernel.cache_clear()


def test_falls_back_without_a_compiler_that_works(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    assert native.load_kernel() is None
    assert type(choose_backend(torch.device("cpu"))) is TorchCpuBackend
    assert list(unbuilt.iterdir()) == []


def test_is_switched_off_by_the_environment(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.load_kernel() is None


def test_is_built_once(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.load_kernel() is None:
        pytest.skip("no C++ compiler here")
    (path,) = unbuilt.iterdir()  # nothing else is left
    native.load_kernel.cache_clear()
    monkeypatch.setattr(native, "build", lambda *given: pytest.fail("built again"))
    kernel = native.load_kernel()
    assert kernel is not None and kernel.lanes == 16
    assert list(unbuilt.iterdir()) == [path]


def test_a_build_appears_whole_or_not_at_all(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler writes where nobody looks, and what it leaves when it fails is removed."""
    real = os.environ.get("CXX") or shutil.which("g++")
    if real is None:
        pytest.skip("no C++ compiler here")
    compiler, log = unbuilt.parent / "compiler", unbuilt.parent / "log"
    for status in (1, 0):
        script = f"""#!/bin/sh
            [ "$1" = --version ] && exec {real} --version
            {real} "$@"; ls {unbuilt} >> {log}; exit {status}"""
        compiler.write_text(script)
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        native.load_kernel.cache_clear()
        assert (native.load_kernel() is None) == bool(status)
        assert len(list(unbuilt.glob("*.so"))) == 1 - status and len(list(unbuilt.iterdir())) == 1 - status
    assert ".so" not in log.read_text(), "seen by another process while it was built"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:100],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:-40] + content[-39:] + b"x",
        lambda content: content[:2000] + bytes(64) + content[2064:],
        lambda content: b"no library",
    ],
    ids=["empty", "head", "half", "a byte less", "moved", "zeros", "foreign"],
)
def test_a_damaged_library_is_built_anew(unbuilt: Path, damage: Callable[[bytes], bytes]) -> None:
    """Loading one that is cut short would end the process."""
    if native.load_kernel() is None:
        pytest.skip("no C++ compiler here")
    (path,) = unbuilt.iterdir()
    whole = path.read_bytes()
    path.unlink()  # it is mapped
    path.write_bytes(damage(whole))
    native.load_kernel.cache_clear()
    kernel = native.load_kernel()
    assert kernel is not None and kernel.lanes == 16 and building.intact(path)
    assert list(unbuilt.iterdir()) == [path]


def test_what_a_killed_build_has_left_is_removed(unbuilt: Path) -> None:
    """Not what another process is still building."""
    endings = building.LOCK, building.BUILT
    left = [building.beside(unbuilt / name, ending) for name in "ab" for ending in endings]
    for path in left:
        path.touch()
    with left[2].open("ab") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        if native.load_kernel() is None:
            pytest.skip("no C++ compiler here")
        assert {*unbuilt.glob(".*")} == {*left[2:]}


def slow_compiler(folder: Path, seconds: float) -> Path:
    """A compiler that takes its time, and notes each of its builds in `log`."""
    real = os.environ.get("CXX") or shutil.which("g++")
    if real is None:
        pytest.skip("no C++ compiler here")
    compiler = folder / "slow"
    compiler.write_text(f"""#!/bin/sh
        [ "$1" = --version ] && exec {real} --version
        echo build >> {folder}/log; sleep {seconds}; exec {real} "$@" """)
    compiler.chmod(0o755)
    return compiler


def test_a_build_that_takes_long_is_there_at_a_later_start(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unbuilt.parent
    monkeypatch.setenv("CXX", str(slow_compiler(folder, 1.0)))
    monkeypatch.setattr(native, "build", partial(building.build, patience_s=0.3))
    for _ in range(2):
        with pytest.warns(
            UserWarning, match="takes longer than 0.3 s to build: until it is built and loaded"
        ):
            assert native.load_kernel() is None
        native.load_kernel.cache_clear()
    monkeypatch.undo()
    monkeypatch.setenv("CXX", str(folder / "slow"))
    until = time.monotonic() + 30
    while not list(unbuilt.glob("*.so")) and time.monotonic() < until:
        time.sleep(0.05)
    (path,) = unbuilt.glob("*.so")
    assert building.intact(path) and (folder / "log").read_text().split() == ["build"]


def test_two_processes_build_once(unbuilt: Path) -> None:
    compiler, path = slow_compiler(unbuilt.parent, 0.5), unbuilt / "one.so"
    command = [sys.executable, building.__file__, str(compiler), str(path), "-shared", str(native.SOURCE)]
    builders = [subprocess.Popen(command) for _ in range(2)]
    assert [builder.wait(60) for builder in builders] == [0, 0]
    assert building.intact(path) and (unbuilt.parent / "log").read_text().split() == ["build"]
    assert [*unbuilt.iterdir()] == [path]


def test_a_compiler_that_outlives_its_builder_is_waited_for(unbuilt: Path) -> None:
    """It would write to the output of the next build, which could take a digest of what is not whole."""
    folder, path = unbuilt.parent, unbuilt / "one.so"
    compiler = slow_compiler(folder, 1.0)
    real = os.environ.get("CXX") or shutil.which("g++")
    log = f"{folder}/log"
    compiler.write_text(f'#!/bin/sh\necho build >> {log}; sleep 1; {real} "$@"; echo end >> {log}\n')
    command = [sys.executable, building.__file__, str(compiler), str(path), "-shared", str(native.SOURCE)]
    killed = subprocess.Popen(command)
    until = time.monotonic() + 20
    while not (folder / "log").exists() and time.monotonic() < until:
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    assert subprocess.run(command, check=False, timeout=60).returncode == 0 and building.intact(path)
    assert (folder / "log").read_text().split() == ["build", "end", "build", "end"]


def test_structures_of_another_size_are_noticed(unbuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    native.SOURCE.write_text(STAND_IN.replace(f'"Pages", {ctypes.sizeof(native._Pages)}', '"Pages", 48'))
    with pytest.raises(TypeError, match="Pages takes 40 bytes, and 48 in the native library"):
        native.load_kernel()


def test_another_source_is_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    before = native._fingerprint(compiler)
    assert {source.name for source in native.SOURCES} == {
        path.name for path in native.SOURCE.parent.iterdir() if path.suffix in (".cpp", ".h")
    }
    for index, source in enumerate(native.SOURCES):
        changed = tmp_path / source.name
        changed.write_bytes(source.read_bytes() + b"\n")
        sources = (*native.SOURCES[:index], changed, *native.SOURCES[index + 1 :])
        monkeypatch.setattr(native, "SOURCES", sources)
        assert native._fingerprint(compiler) != before
        monkeypatch.undo()
