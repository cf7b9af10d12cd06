"""The resident tier has what the store has, however often that changes, and no more memory than it may."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_engine import DEVICES, link_to
from torch import Tensor

from cpu_kv import KVLayout, PagedKVStore, TransferEngine, head_major
from offload_rt.caches.resident import ResidentTier

PAGE, LAYERS = 8, 2
LAYOUT = KVLayout(LAYERS, kv_heads=2, head_dim=8, dtype=torch.bfloat16, page_size=PAGE, packed=True)
RAW = replace(LAYOUT, packed=False)


def drawn(tokens: int, odd: float, source: torch.Generator) -> Tensor:
    """`[layers, 2, kv_heads, tokens, head_dim]`; of tokens like a share of them no page can be packed."""
    kv = torch.randn(LAYERS, 2, 2, tokens, 8, generator=source)
    tiny = torch.rand(kv.shape, generator=source) < 0.5
    tiny &= torch.rand(LAYERS, 1, 1, tokens, 1, generator=source) < odd
    return torch.where(tiny, kv * 2.0**-50, kv).to(torch.bfloat16)


def fitting(engine: TransferEngine, capacity: int, start: int, packed: bool) -> int:
    """How many tokens have room, by the forms of their pages."""
    sequence, found = engine.sequence, []
    layout = LAYOUT if packed else RAW
    for layer in range(LAYERS):
        room, tokens = capacity // PAGE * layout.page_bytes, 0
        for at in range(start, min(start + capacity, sequence.length // PAGE * PAGE), PAGE):
            ((*_, unpacked),) = sequence.forms(layer, at, at + PAGE)
            room -= (layout if unpacked is None else RAW).page_bytes
            tokens += PAGE if room >= 0 else 0
        found.append(tokens)
    return min(found)


@DEVICES
@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    capacity=st.integers(0, 6),
    packed=st.booleans(),
    segment=st.integers(1, 3),
    steps=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([0.0, 0.1, 1.0]), st.floats(0, 1), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 99),
)
def test_it_has_what_the_store_has(
    device: torch.device,
    capacity: int,
    packed: bool,
    segment: int,
    steps: list[tuple[int, float, float, bool]],
    seed: int,
) -> None:
    """Tokens are added, loaded and cut off again, and the range begins somewhere else."""
    source = torch.Generator().manual_seed(seed)
    kv = drawn(0, 0.0, source)
    capacity *= PAGE
    with (
        closing(link_to(device)) as link,
        PagedKVStore(LAYOUT, pin=device.type == "cuda", slab_tokens=16) as store,
        closing(
            TransferEngine(store.new_sequence(), link, segment_tokens=segment * PAGE, ring_buffers=1)
        ) as engine,
    ):
        tier, start = ResidentTier(engine, capacity, packed=packed), 0
        for count, odd, share, moves in steps:
            kv = torch.cat([kv, drawn(count, odd, source)], dim=3)
            if count:
                engine.write_back(kv[:, :, :, -count:].to(device))
                engine.flush()
            start += PAGE if moves and start + PAGE <= kv.shape[3] else 0
            tier.load(start)
            assert tier.tokens == fitting(engine, capacity, start, packed)
            assert tier.nbytes <= capacity * (LAYOUT if packed else RAW).stored_token_bytes
            check(tier, kv)
            length = round(share * kv.shape[3])
            kv, before = kv[:, :, :, :length], tier.tokens
            engine.sequence.truncate(length)
            tier.truncate(length)
            assert tier.tokens == max(0, min(before, (length - start) // PAGE * PAGE))
            check(tier, kv)
            start = min(start, length // PAGE * PAGE)
        tier.release()
        assert tier.nbytes == tier.tokens == 0


def check(tier: ResidentTier, kv: Tensor) -> None:
    """All that it has, and less: up to any page."""
    for layer in range(LAYERS):
        for stop in range(tier.first, tier.first + tier.tokens + 1, PAGE):
            pairs = tier.segments(layer, tier.first, stop)
            found = [torch.stack([head_major(side) for side in pair]).cpu() for pair in pairs]
            whole = torch.cat([kv[layer, :, :, :0], *found], dim=2)
            assert torch.equal(whole, kv[layer, :, :, tier.first : stop])
