"""Packed pages bit by bit: every bfloat16 value comes back, by plain torch and by the native kernel alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpu_kv import PackedPages, PlainPages
from cpu_kv.packed import PackedShape, PageCodec
from cpu_kv.views import cut_alike
from offload_rt.attention.page_codec import MachineCodec
from offload_rt.kernels.native import load_kernel

PLAIN, NATIVE = PageCodec(), MachineCodec(load_kernel())
SHAPES = st.builds(
    PackedShape,
    kv_heads=st.integers(1, 3),
    page_size=st.sampled_from([1, 4, 16, 32]),
    head_dim=st.sampled_from([2, 6, 16, 64, 80]),
)
SPECIAL = torch.tensor([0, 1, 0x7F, 0x80, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF, 0x3F80]).to(torch.int16)
"""Zero, subnormals, the least normal value, infinity, NaNs with three payloads, one; of either sign below."""


def drawn(shape: PackedShape, pages: int, kind: str, specials: int, seed: int) -> Tensor:
    """Pages of bfloat16: of one scale, with a scale for each channel, or of any bits."""
    source = torch.Generator().manual_seed(seed)
    sizes = (pages, 2, shape.kv_heads, shape.page_size, shape.head_dim)
    if kind == "any":
        bits = torch.randint(-(2**15), 2**15, sizes, generator=source).to(torch.int16)
    else:
        scales = torch.randint(-60, 60, (shape.head_dim,), generator=source) * (kind == "channels")
        bits = (torch.randn(sizes, generator=source) * 2.0**scales).to(torch.bfloat16).view(torch.int16)
    specials *= pages > 0
    chosen = torch.randint(0, max(1, bits.numel()), (specials,), generator=source)
    signs = torch.randint(0, 2, (specials,), generator=source).to(torch.int16) << 15
    bits.view(-1)[chosen] = SPECIAL[torch.randint(0, len(SPECIAL), (specials,), generator=source)] | signs
    return bits.view(torch.bfloat16)


def same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit: NaNs too."""
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


def escapes(pages: Tensor) -> Tensor:
    """Of each page: values whose exponent is more than 14 below the largest of their channel."""
    exponents = pages.view(torch.int16).int() >> 7 & 255
    return (exponents < exponents.amax(3, keepdim=True) - 14).flatten(1).sum(1)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    shape=SHAPES,
    pages=st.integers(0, 3),
    kind=st.sampled_from(["one", "channels", "any"]),
    specials=st.sampled_from([0, 1, 5, 40]),
    seed=st.integers(0, 2**32),
)
def test_every_value_comes_back(shape: PackedShape, pages: int, kind: str, specials: int, seed: int) -> None:
    values = drawn(shape, pages, kind, specials, seed)
    packed = PLAIN.encode(shape, values)
    assert packed.shape == (pages, shape.nbytes) and torch.equal(NATIVE.encode(shape, values), packed)
    expected = escapes(values)
    assert torch.equal(shape.escapes(packed)[:, 0], expected.int())
    fits = ~shape.overflows(packed)
    assert torch.equal(fits, expected <= shape.capacity)
    for codec in (PLAIN, NATIVE):
        out = torch.empty_like(values)
        codec.decode(shape, packed, out)
        assert same(out[fits], values[fits])
        found, plain = PackedPages(packed, shape, codec), PackedPages(packed, shape, codec).plain()
        for side, both in enumerate((plain.keys, plain.values)):
            assert same(found.side(side)[fits], values[fits][:, side])
            assert same(both[fits], values[fits][:, side])


@settings(derandomize=True, deadline=None, max_examples=80)
@given(
    shape=SHAPES,
    specials=st.integers(0, 12),
    length=st.sampled_from([1, 2, 4]),
    count=st.integers(0, 9),
    seed=st.integers(0, 2**32),
)
def test_chosen_tokens_of_a_side(
    shape: PackedShape, specials: int, length: int, count: int, seed: int
) -> None:
    values, source = drawn(shape, 3, "one", specials, seed), torch.Generator().manual_seed(seed)
    packed, length = PLAIN.encode(shape, values), min(length, shape.page_size)
    bounds = 3, shape.kv_heads, shape.page_size - length + 1
    page, head, token = (torch.randint(0, bound, (count,), generator=source) for bound in bounds)
    for codec in (PLAIN, NATIVE):
        for side in range(2):
            out = torch.empty(count, length, shape.head_dim, dtype=torch.bfloat16)
            codec.take(shape, packed, side, page, head, token, out)
            for p, h, t, found in zip(page, head, token, out, strict=True):
                assert same(found, values[p, side, h, t : t + length]) or shape.overflows(packed)[p]


@pytest.mark.parametrize("room", [None, 1, 2, 9])
def test_packed_pages_are_read_as_the_plain_ones_that_they_stand_for(room: int | None) -> None:
    shape = PackedShape(2, 4, 6)
    values = drawn(shape, 5, "one", 3, seed=1).nan_to_num()
    buffer = None if room is None else torch.empty(room, *values.shape[1:], dtype=torch.bfloat16)
    packed = PackedPages(NATIVE.encode(shape, values), shape, NATIVE, buffer)
    plain = PlainPages.of(values)
    portions = [(len(one), one.keys.clone(), one.values.clone()) for one in packed.portions()]
    assert [count for count, *_ in portions] == {1: [1] * 5, 2: [2, 2, 1]}.get(room or 0, [5])
    assert torch.equal(torch.cat([keys for _, keys, _ in portions]), plain.keys)
    assert torch.equal(torch.cat([held for *_, held in portions]), plain.values)
    some = packed[1:4]
    assert some.data.data_ptr() == packed.data[1:].data_ptr() and torch.equal(some.side(0), plain.keys[1:4])
    for pages in (packed, plain):
        assert (len(pages), pages.kv_heads, pages.page_tokens, pages.tokens) == (5, 2, 4, 20)
        for start, end in ((0, 20), (0, 0), (3, 17), (5, 7), (4, 12)):
            wanted = values.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, start:end]
            assert torch.equal(torch.stack(pages.head_major(start, end)), wanted)
            found = torch.empty_like(wanted)
            for part, *places in cut_alike(pages.span(start, end), *found):
                part.copy_to(*places)
            assert torch.equal(found, wanted)
    forms = [type(one) for one in packed.span(3, 17)]
    assert forms == [PlainPages, PackedPages, PlainPages], "what is cut is unpacked"


@pytest.mark.parametrize("heads", [1, 8, 32])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_page_takes_at_most_76_percent(heads: int, dim: int) -> None:
    shape = PackedShape(heads, 256, dim)
    assert shape.supported and shape.nbytes <= 0.76 * 2 * shape.values
    assert shape.capacity >= shape.values / 256 - 1
