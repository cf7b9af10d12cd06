"""Attention of a GPU over packed pages: sums and attention mass, for few and many queries."""

from __future__ import annotations

import pytest
import torch
from support.small_engine import CUDA
from torch import Tensor

from cpu_kv import KVPages, PackedPages, PlainPages
from cpu_kv.packed import PackedShape, PageCodec
from offload_rt.attention.cuda_backends import ByQueryBackend
from offload_rt.attention.sums import AttentionSum

pytestmark = pytest.mark.gpu

SHAPE = PackedShape(kv_heads=2, page_size=64, head_dim=16)
PAGES, GROUP = 7, 4


class CountingCodec(PageCodec):
    """Plain torch; counts the pages that it unpacks."""

    unpacked = 0

    def decode(self, shape: PackedShape, packed: Tensor, out: Tensor, first_side: int = 0) -> None:
        CountingCodec.unpacked += len(packed)
        super().decode(shape, packed, out, first_side)


def attended(queries: Tensor, pages: KVPages, chunk: int, first: int) -> list[Tensor]:
    """The result, and scores of chunks: `first` pages, and the others behind them in the same range."""
    total = AttentionSum(ByQueryBackend(), queries, SHAPE.kv_heads, 0.3, chunk)
    total.track_mass(0, PAGES * SHAPE.page_size)
    for some in (slice(0, first), slice(first, PAGES)):
        if len(pages[some]):
            total.attend_tracked(pages[some])
    scores = torch.zeros(SHAPE.kv_heads, PAGES * SHAPE.page_size // chunk, device=CUDA)
    total.add_mass_to(scores, 0.0)
    return [total.result(), scores]


@pytest.mark.parametrize("chunk", [4, 16, 32, 64])
@pytest.mark.parametrize(("count", "unpacked"), [(1, 1), (16, 1), (80, PAGES)])
@pytest.mark.parametrize("first", [0, 3])
def test_packed_pages_are_attended_as_plain_ones(chunk: int, count: int, unpacked: int, first: int) -> None:
    """Only the page that brings the reference of the mass is unpacked, or each page once for many queries."""
    generator = torch.Generator().manual_seed(chunk + count)
    pages = torch.randn(PAGES, 2, 2, 64, 16, generator=generator).to(torch.bfloat16)
    queries = torch.randn(2 * GROUP, count, 16, generator=generator).to(CUDA, torch.bfloat16)
    packed = PageCodec().encode(SHAPE, pages).to(CUDA)
    buffer = torch.empty(2, 2, 2, 64, 16, dtype=torch.bfloat16, device=CUDA)
    pages = pages.to(CUDA)
    expected = attended(queries, PlainPages.of(pages), chunk, first)
    CountingCodec.unpacked = 0
    found = attended(queries, PackedPages(packed, SHAPE, CountingCodec(), buffer), chunk, first)
    assert CountingCodec.unpacked == unpacked
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)
