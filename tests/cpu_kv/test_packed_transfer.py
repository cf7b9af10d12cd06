"""Packed pages over a link: what arrives, and what is sent, is what raw pages are, in fewer bytes."""

from __future__ import annotations

from contextlib import closing

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.uneven_link import UnevenLink
from torch import Tensor

from cpu_kv import KVLayout, Link, PacedLink, PackedPages, PagedKVStore, TransferEngine

PAGE = 8
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, dtype=torch.bfloat16, page_size=PAGE, packed=True)


def drawn(tokens: int, small: int, seed: int) -> Tensor:
    """`[layers, 2, kv_heads, tokens, head_dim]`, where one of every `small` pages cannot be packed."""
    source = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, 2, 2, tokens, 8, generator=source)
    odd = torch.arange(tokens) // PAGE % small == 0
    tiny = torch.rand(kv.shape, generator=source) < 0.5
    return torch.where(tiny & odd[:, None], kv * 2.0**-50, kv).to(torch.bfloat16)


def check_loaded(engine: TransferEngine, kv: Tensor) -> None:
    """All full pages stay on the device: packed ones as they are, or unpacked."""
    whole, raw = kv.shape[3] // PAGE * PAGE, LAYOUT.layer_token_bytes

    def check_pages(layer: int, start: int, end: int, *, packed: bool) -> None:
        size = (end - start) // PAGE * (LAYOUT.page_bytes if packed else PAGE * raw)
        memory = torch.empty(size, dtype=torch.uint8)
        engine.load(layer, start, end, memory, packed=packed)
        found = torch.stack(engine.resident_pages(memory, packed=packed).head_major())
        assert torch.equal(found, kv[layer, :, :, start:end])

    for layer in range(2):
        for start, end, unpacked in engine.sequence.forms(layer, 0, whole):
            check_pages(layer, start, end, packed=unpacked is None)
        if whole:
            check_pages(layer, 0, whole, packed=False)


def check(engine: TransferEngine, kv: Tensor) -> None:
    """A stream of all full pages, twice; all of them at once; and all tokens."""
    whole = kv.shape[3] // PAGE * PAGE
    for stream in (engine.stream(whole), engine.stream(whole)):
        for layer in range(2):
            at = 0
            for pages in stream.segments(layer):
                found = torch.stack(pages.head_major())
                assert torch.equal(found, kv[layer, :, :, at : at + found.shape[2]])
                at += found.shape[2]
            assert at == whole
    check_loaded(engine, kv)
    assert torch.equal(engine.read(0, kv.shape[3]), kv)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    prompt=st.lists(st.integers(1, 3), max_size=4),
    rest=st.integers(0, PAGE - 1),
    small=st.sampled_from([1, 2, 99]),
    segment=st.integers(1, 4),
    ring=st.integers(1, 3),
    later=st.lists(st.tuples(st.integers(1, 12), st.floats(0, 1)), max_size=3),
    seed=st.integers(0, 99),
)
def test_what_crosses_is_what_was_written(
    prompt: list[int],
    rest: int,
    small: int,
    segment: int,
    ring: int,
    later: list[tuple[int, float]],
    seed: int,
) -> None:
    """A prompt in portions; then tokens are added and cut off again."""
    tokens = sum(prompt) * PAGE + rest
    kv = drawn(tokens, small, seed)
    with closing(UnevenLink(seed, 2e-4)) as link, PagedKVStore(LAYOUT, slab_tokens=16) as store:
        sequence = store.new_sequence(page_means=True)
        with closing(
            TransferEngine(sequence, link, segment_tokens=segment * PAGE, ring_buffers=ring)
        ) as engine:
            for layer in range(2):
                at = 0
                for count in [pages * PAGE for pages in prompt] + [rest] * (rest > 0):
                    engine.write_prompt(layer, *kv[layer, :, :, at : at + count].clone())
                    at += count
            engine.flush()
            check(engine, kv)
            for count, share in later:
                more = drawn(count, small, seed + count)
                engine.write_back(more.clone())
                kv = torch.cat([kv, more], dim=3)
                check(engine, kv)
                length = round(share * kv.shape[3])
                sequence.truncate(length)
                kv = kv[:, :, :, :length]
                check(engine, kv)
            assert sequence.page_means is not None
            means = (
                kv[0, :, :, : kv.shape[3] // PAGE * PAGE]
                .unflatten(2, (-1, PAGE))
                .mean(3, dtype=torch.float32)
            )
            torch.testing.assert_close(sequence.page_means.means(0), means.to(torch.bfloat16))


def test_packed_pages_cross_as_they_are() -> None:
    """As one copy a segment, of fewer bytes; what cannot be packed crosses as it was."""
    links: list[Link] = [PacedLink(1e9), PacedLink(1e9)]
    layout = KVLayout(2, kv_heads=2, head_dim=64, dtype=torch.bfloat16, page_size=64, packed=True)
    raw = 4 * 64 * layout.layer_token_bytes
    for link, odd in zip(links, (False, True), strict=True):
        kv = torch.randn(2, 2, 2, 256, 64, generator=torch.Generator().manual_seed(0))
        kv[:, :, :, 70:100, ::2] *= 2.0 ** (-40 * odd)
        with (
            closing(link),
            PagedKVStore(layout) as store,
            closing(TransferEngine(store.new_sequence(), link, segment_tokens=128, ring_buffers=3)) as engine,
        ):
            for layer in range(2):
                engine.write_prompt(layer, *kv[layer].to(torch.bfloat16))
            engine.flush()
            written = engine.counters.bytes_to_host
            assert written == 2 * 4 * layout.page_bytes + odd * 2 * 64 * layout.layer_token_bytes
            copies, stream = engine.counters.copies, engine.stream(256)
            kinds = [[isinstance(one, PackedPages) for one in stream.segments(n)] for n in range(2)]
            assert kinds == [[True, False, True] if odd else [True, True]] * 2
            crossed = engine.counters.bytes_to_device
            if odd:
                assert crossed == 2 * (3 * layout.page_bytes + 64 * layout.layer_token_bytes)
            else:
                assert crossed == 2 * 4 * layout.page_bytes <= 0.77 * 2 * raw
                assert engine.counters.copies == copies + 4
