"""How often a small cache of the target would draft what the full cache accepts.

The acceptance of a proposal q by p is 1 minus their total variation, the sum of min(p, q). Both follow the
same true text (teacher forcing) at temperature 1: p over the full KV, q over the small cache. Text goes by in
rounds of `ROUND` tokens, as in decoding: the small cache passes over the round's tokens, then the full cache
does and commits them, and the small cache adopts the verified KV. The nth token of a round is therefore
drafted n tokens behind the latest refresh, as a decoder that drafts `ROUND` tokens would do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bench.context import ContextReader
from cpu_kv import exact_top_k, head_major
from offload_rt.attention import attend, fold, folded_mask, merge
from offload_rt.caches.base import Verified
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.full import FullCache
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.caches.selection import DECAY, ByAttention, ByMeanKeys
from offload_rt.caches.streaming import StreamingCache
from offload_rt.config import RefreshPolicy
from offload_rt.sampling import Sampler

ROUND = 8
STRIDE = 128
SINKS = 16
NEVER = "stride:1000000000"
"""A refresh policy: what H2O evicts is gone."""
RETRIEVAL = "retrieval"
RETRIEVAL_STRIDE = f"retrieval, stride:{STRIDE}"
WITHOUT_REST = "retrieval, rest left out"
MEAN_KEYS = "mean keys (TriForce)"
MEAN_KEYS_REST = "mean keys, rest estimated"
HEAVY_HITTERS = "heavy hitters (H2O)"
TOP_K = "exact top-k"
TOP_K_FIRST_WHOLE = "exact top-k, first layer whole"
STREAMING = "StreamingLLM"


class ExactTopKCache(BoundedCache):
    """The entries of the largest true attention mass, for each layer and KV head.

    Chosen by the very queries that it then serves, which is known only afterwards: not a system, but the
    reference for every choice by mass. No bound on acceptance, though: where attention is spread evenly, as
    in the first layer of many models, its heaviest entries are a biased sample of the whole. `adopt` turns
    the cache to the tokens *before* those that it is told of.

    Args:
        whole: first layers whose KV is attended to in full.
    """

    def __init__(self, source: FullCache, budget: int, whole: int = 0) -> None:
        super().__init__(source.layout, source.device, budget, source.backend)
        self._source = source
        self._whole = whole

    def build(self, queries: Tensor) -> None:
        """Nothing to choose by: the queries to serve are not known yet."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if layer >= self._whole:
            return super().attend(layer, queries, keys, values, scale)
        assert self._new is not None
        source, backend = self._source, self._source.backend
        parts = []
        for run in source.sequence.views(layer, 0, self.verified_length):
            seen_keys, seen_values = (part.to(source.device) for part in run)
            parts.append(attend(backend, queries, seen_keys, seen_values, scale))
        mask = folded_mask(backend, self._new.mask(0, keys), queries, len(keys))
        parts.append(attend(backend, queries, keys, values, scale, mask))
        return merge(parts)[0]

    def adopt(self, verified: Verified) -> None:
        source = self._source
        source.engine.flush()
        self.verified_length = source.verified_length - verified.keys.shape[2]
        self.entries = min(self.budget, self.verified_length)
        for layer in range(source.layout.layers):
            views = source.sequence.views(layer, 0, self.verified_length)
            keys = torch.cat([head_major(keys) for keys, _ in views], dim=1)
            queries = fold(verified.queries[layer], source.layout.kv_heads)
            chosen = exact_top_k(queries, keys.to(queries.device), self.entries, source.scale)
            found = source.engine.gather_chunks(layer, chosen, 1)
            self.keys[layer, :, : self.entries], self.values[layer, :, : self.entries] = found

    def _victims(self, count: int) -> list[int]:
        raise NotImplementedError("chosen anew for every pass")


def count_prompt(reader: ContextReader) -> None:
    """Counts what the text's own queries attended to, as H2O does: `ROUND` of them behind each page."""
    full, tokens, page = reader.full, reader.tokens, reader.full.layout.page_size
    assert full.attended is not None
    full.attended.reset()
    for at in range(page, len(tokens) - ROUND, page):
        full.start_from(at)
        reader.logits(full, tokens[at : at + ROUND], 1)
    full.rewind()


def _retrieved(
    reader: ContextReader, budget: int, policy: str, decay: float | None, rest: bool
) -> RetrievedCache:
    full, settings = reader.full, reader.config.retrieval
    pages = full.layout.pages(reader.room)
    return RetrievedCache(
        full,
        budget=budget,
        chunk=settings.chunk,
        recent=min(settings.recent, budget // 4),
        refresh=RefreshPolicy.parse(policy),
        backend=reader.backend,
        selection=ByMeanKeys(full) if decay is None else ByAttention(full, settings.chunk, decay, pages),
        room=pages if rest else 0,
    )


def _streaming(reader: ContextReader, budget: int) -> StreamingCache:
    return StreamingCache(
        reader.model.kv_layout(),
        reader.model.rotary_frequencies,
        sinks=SINKS,
        window=budget - SINKS,
        backend=reader.backend,
        source=reader.full,
    )


CACHES: dict[str, Callable[[ContextReader, int], BoundedCache]] = {
    RETRIEVAL: lambda reader, budget: _retrieved(reader, budget, "every", DECAY, True),
    RETRIEVAL_STRIDE: lambda reader, budget: _retrieved(reader, budget, f"stride:{STRIDE}", DECAY, True),
    WITHOUT_REST: lambda reader, budget: _retrieved(reader, budget, "every", DECAY, False),
    MEAN_KEYS: lambda reader, budget: _retrieved(reader, budget, "every", None, False),
    MEAN_KEYS_REST: lambda reader, budget: _retrieved(reader, budget, "every", None, True),
    HEAVY_HITTERS: lambda reader, budget: _retrieved(reader, budget, NEVER, 1.0, False),
    TOP_K: lambda reader, budget: ExactTopKCache(reader.full, budget),
    TOP_K_FIRST_WHOLE: lambda reader, budget: ExactTopKCache(reader.full, budget, whole=1),
    STREAMING: _streaming,
}
"""Small caches of a reader's model, with so many entries."""

USUAL = (RETRIEVAL, RETRIEVAL_STRIDE, MEAN_KEYS, TOP_K, TOP_K_FIRST_WHOLE, STREAMING)


@torch.inference_mode()
def acceptance(
    reader: ContextReader,
    tokens: Sequence[int],
    budgets: Mapping[str, int],
    kinds: Sequence[str] = USUAL,
) -> dict[tuple[str, str], Tensor]:
    """Acceptance at each of `tokens`, which follow what `reader` has read, by (kind, budget's name).

    Their count is a multiple of `ROUND`.

    Args:
        kinds: of `CACHES`.

    Returns:
        `[tokens]` each, float64: for what follows that token.
    """
    if len(tokens) % ROUND:
        raise ValueError(f"{len(tokens)} tokens are not rounds of {ROUND}")
    found, full = {}, reader.full
    for name, budget in budgets.items():
        for kind in kinds:
            full.rewind()
            full.derived.clear()
            full.attended = None
            cache = CACHES[kind](reader, budget)
            full.derived.append(cache)
            full.build_derived()
            if kind == HEAVY_HITTERS:
                assert isinstance(cache, RetrievedCache)
                count_prompt(reader)
                cache.fill(full.last_queries)
            found[kind, name] = torch.cat(
                [_round(reader, cache, tokens[at : at + ROUND]) for at in range(0, len(tokens), ROUND)]
            )
    full.derived.clear()
    full.attended = None
    return found


def _round(reader: ContextReader, cache: BoundedCache, block: Sequence[int]) -> Tensor:
    sampler, hindsight = Sampler(temperature=1.0), isinstance(cache, ExactTopKCache)
    drafted = None if hindsight else sampler.probs(reader.logits(cache, block, ROUND))
    true = sampler.probs(reader.logits(reader.full, block, ROUND))
    reader.full.commit(range(ROUND))
    if drafted is None:
        drafted = sampler.probs(reader.logits(cache, block, ROUND))
    return torch.minimum(true, drafted).sum(-1).double().cpu()


def by_distance(values: Tensor, period: int, width: int = 1) -> list[float]:
    """Means by distance behind a refresh, which comes every `period` tokens, in bins of `width`.

    Args:
        values: `[…, tokens]`.
    """
    whole = values[..., : values.shape[-1] // period * period].reshape(-1, period // width, width)
    return [float(mean) for mean in whole.mean(dim=(0, 2))]
