"""The resident tier has what the store has, however often that changes, and no more memory than it may."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace

import torch
from support.small_engine import DEVICES, link_to
from torch import Tensor

from cpu_kv import KVLayout, PagedKVStore, TransferEngine
from offload_rt.caches.resident import ResidentTier

PAGE, LAYERS = 16, 2
LAYOUT = KVLayout(LAYERS, kv_heads=1, head_dim=16, dtype=torch.bfloat16, page_size=PAGE, packed=True)
RAW = replace(LAYOUT, packed=False)


def drawn(tokens: int, odd: float, source: torch.Generator) -> Tensor:
    """`[layers, 2, kv_heads, tokens, head_dim]`; no page with one of a share of tokens can be packed."""
    kv = torch.randn(LAYERS, 2, 1, tokens, 16, generator=source)
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
def test_it_has_what_the_store_has(device: torch.device) -> None:
    """Tokens are added, loaded and cut off again, and the range begins somewhere else."""
    with closing(link_to(device)) as link, PagedKVStore(LAYOUT, pin=device.type == "cuda") as store:
        for seed in range(40 if device.type == "cpu" else 8):
            choose = random.Random(seed)
            segment = choose.randint(1, 3) * PAGE
            sequence = store.new_sequence()
            with closing(TransferEngine(sequence, link, segment_tokens=segment, ring_buffers=1)) as engine:
                check_changes(engine, choose)
            sequence.close()


def check_changes(engine: TransferEngine, choose: random.Random) -> None:
    source = torch.Generator().manual_seed(choose.randrange(99))
    kv, start = drawn(0, 0.0, source), 0
    capacity, packed = choose.randint(0, 9) * PAGE, choose.random() < 0.7
    tier = ResidentTier(engine, capacity, packed=packed)
    for _ in range(4):
        count = choose.randint(1, 99)
        kv = torch.cat([kv, drawn(count, choose.choice([0.0, 0.05, 1.0]), source)], dim=3)
        engine.write_back(kv[:, :, :, -count:].to(engine.link.device))
        engine.flush()
        start += PAGE if choose.random() < 0.2 and start + PAGE <= kv.shape[3] else 0
        tier.load(start)
        assert tier.tokens == fitting(engine, capacity, start, packed)
        assert tier.nbytes <= capacity * (LAYOUT if packed else RAW).stored_token_bytes
        check(tier, kv)
        length = round(choose.uniform(0.2, 1.2) * kv.shape[3])
        kv, before = kv[:, :, :, :length], tier.tokens
        engine.sequence.truncate(kv.shape[3])
        tier.truncate(kv.shape[3])
        assert tier.tokens == max(0, min(before, (kv.shape[3] - start) // PAGE * PAGE))
        check(tier, kv)
        start = min(start, kv.shape[3] // PAGE * PAGE)
    tier.release()
    assert tier.nbytes == tier.tokens == 0


def check(tier: ResidentTier, kv: Tensor) -> None:
    """All that it has, and less: up to any page."""
    for layer in range(LAYERS):
        for stop in range(tier.first, tier.first + tier.tokens + 1, PAGE):
            segments = tier.segments(layer, tier.first, stop)
            found = [torch.stack(pages.head_major()).cpu() for pages in segments]
            whole = torch.cat([kv[layer, :, :, :0], *found], dim=2)
            assert torch.equal(whole, kv[layer, :, :, tier.first : stop])
