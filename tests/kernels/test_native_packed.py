"""The native kernel over packed pages: bit by bit what it is over the pages that they stand for."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_kv import PackedPages, PlainPages
from cpu_kv.packed import PackedShape, PageCodec
from offload_rt.attention.backends import NativeCpuBackend, TorchCpuBackend
from offload_rt.attention.page_codec import MachineCodec
from offload_rt.attention.sums import AttentionSum
from offload_rt.kernels import native

RANGES = settings(derandomize=True, deadline=None, max_examples=12)


@RANGES
@given(
    heads=st.integers(1, 3),
    group=st.sampled_from([1, 2]),
    count=st.sampled_from([1, 3, 17, 70]),
    page=st.sampled_from([16, 64, 256]),
    pages=st.integers(1, 40),
    dim=st.sampled_from([16, 64, 80, 128]),
    chunk=st.sampled_from([None, 8]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_packed_pages_are_attended_as_plain_ones(
    kernel: native.Kernel,
    heads: int,
    group: int,
    count: int,
    page: int,
    pages: int,
    dim: int,
    chunk: int | None,
    threads: int,
    seed: int,
) -> None:
    source, shape = torch.Generator().manual_seed(seed), PackedShape(heads, page, dim)
    values = torch.randn(min(pages, 4096 // page), 2, heads, page, dim, generator=source)
    values[:, :, :, ::7, 0] *= 2.0**-30  # escapes
    plain = values.to(torch.bfloat16)
    packed = PageCodec().encode(shape, plain)
    fits = ~shape.overflows(packed)
    plain, packed = plain[fits], packed[fits]
    if not len(plain):
        return
    queries = torch.randn(heads * group, count, dim, generator=source).to(torch.bfloat16)
    found = []
    for form in (PackedPages(packed, shape, MachineCodec(kernel)), PlainPages.of(plain)):
        total = AttentionSum(NativeCpuBackend(kernel, threads), queries, heads, dim**-0.5, chunk)
        total.track_mass(0, len(plain) * page)
        total.attend_tracked(form)
        scores = torch.zeros(heads, len(plain) * page // (chunk or 1))
        if chunk:
            total.add_mass_to(scores, 1.0)
        found.append((total.result(), total.lse, scores))
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_torch_attends_packed_pages_too(built: dict[str, Path]) -> None:
    shape, source = PackedShape(2, 16, 16), torch.Generator().manual_seed(0)
    plain = torch.randn(3, 2, 2, 16, 16, generator=source).to(torch.bfloat16)
    queries = torch.randn(4, 5, 16, generator=source).to(torch.bfloat16)
    codec = PageCodec()
    found = []
    for pages in (PackedPages(codec.encode(shape, plain), shape, codec), PlainPages.of(plain)):
        total = AttentionSum(TorchCpuBackend(), queries, 2, 0.25, 8)
        total.track_mass(0, 48)
        total.attend_tracked(pages)
        scores = torch.zeros(2, 6)
        total.add_mass_to(scores, 1.0)
        found.append((total.result(), scores))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
