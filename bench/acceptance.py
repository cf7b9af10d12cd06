"""How often a small cache of the target would draft what the full cache accepts.

The acceptance of a proposal q by p is 1 minus their total variation, the sum of min(p, q). Both follow the
same true text (teacher forcing) at temperature 1: p over the full KV, q over the small cache. Text goes by in
rounds of `ROUND` tokens, as in decoding: the small cache passes over the round's tokens, then the full cache
does and commits them, and the small caches adopt the verified KV. The nth token of a round is therefore
drafted n tokens behind the latest refresh, as a decoder that drafts `ROUND` tokens would do it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bench.context import ContextReader
from cpu_kv import exact_top_k, head_major
from offload_rt.attention import fold
from offload_rt.caches.base import DerivedCache, Verified
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.full import FullCache
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.caches.streaming import StreamingCache
from offload_rt.config import RefreshPolicy
from offload_rt.sampling import Sampler

ROUND = 8
STRIDE = 128
SINKS = 16
RETRIEVAL = "retrieval"
RETRIEVAL_STRIDE = f"retrieval, stride:{STRIDE}"
TOP_K = "exact top-k"
STREAMING = "StreamingLLM"


class ExactTopKCache(BoundedCache):
    """The entries of the largest true attention mass, for each layer and KV head.

    Chosen by the very queries that it then serves, which is known only afterwards: not a system, but the
    reference for every choice by mass. No bound on acceptance, though: where attention is spread evenly, its
    heaviest entries are a biased sample, and a recent window comes nearer to the full output. `adopt` turns
    the cache to the tokens *before* those that it is told of.
    """

    def __init__(self, source: FullCache, budget: int) -> None:
        super().__init__(source.layout, source.device, budget, source.backend)
        self._source = source

    def build(self, queries: Tensor) -> None:
        """Nothing to choose by: the queries to serve are not known yet."""

    def catch_up(self) -> None:
        """Nothing to do: it is built whenever it is read."""

    def refill(self) -> None:
        """Nothing to take."""

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
            out = (self.keys[layer, :, : self.entries], self.values[layer, :, : self.entries])
            source.engine.gather_chunks(layer, chosen, 1, out)

    def _victims(self, count: int) -> list[int]:
        raise NotImplementedError("chosen anew for every pass")


def small_caches(reader: ContextReader, budgets: Mapping[str, int]) -> dict[tuple[str, str], DerivedCache]:
    """The caches to measure by (kind, budget's name); the full cache keeps them true from here on."""
    full, model, settings = reader.full, reader.model, reader.config.retrieval
    caches: dict[tuple[str, str], DerivedCache] = {}
    for name, budget in budgets.items():
        for kind, policy in ((RETRIEVAL, "every"), (RETRIEVAL_STRIDE, f"stride:{STRIDE}")):
            caches[kind, name] = RetrievedCache(
                full,
                budget=budget,
                chunk=settings.chunk,
                recent=min(settings.recent, budget // 4),
                refresh=RefreshPolicy.parse(policy),
                backend=reader.backend,
            )
        caches[TOP_K, name] = ExactTopKCache(full, budget)
        caches[STREAMING, name] = StreamingCache(
            model.kv_layout(),
            model.rotary_frequencies,
            sinks=SINKS,
            window=budget - SINKS,
            backend=reader.backend,
            source=full,
        )
    full.derived[:] = caches.values()
    return caches


@torch.inference_mode()
def acceptance(
    reader: ContextReader, tokens: Sequence[int], budgets: Mapping[str, int]
) -> dict[tuple[str, str], Tensor]:
    """Acceptance at each of `tokens`, which follow what `reader` holds, by (kind, budget's name).

    Afterwards the tokens are in the full cache. Their count is a multiple of `ROUND`.

    Returns:
        `[tokens]` each, float64: for what follows that token.
    """
    if len(tokens) % ROUND:
        raise ValueError(f"{len(tokens)} tokens are not rounds of {ROUND}")
    sampler = Sampler(temperature=1.0)
    caches = small_caches(reader, budgets)
    reader.full.build_derived()
    found: dict[tuple[str, str], list[Tensor]] = {key: [] for key in caches}
    for start in range(0, len(tokens), ROUND):
        block = tokens[start : start + ROUND]
        probs: dict[tuple[str, str], Tensor] = {}
        for key, cache in caches.items():
            if key[0] != TOP_K:
                probs[key] = sampler.probs(reader.logits(cache, block, ROUND))
        true = sampler.probs(reader.logits(reader.full, block, ROUND))
        reader.full.commit(range(ROUND))
        for key, cache in caches.items():
            if key[0] == TOP_K:
                probs[key] = sampler.probs(reader.logits(cache, block, ROUND))
            found[key].append(torch.minimum(true, probs[key]).sum(-1).double().cpu())
    reader.full.derived.clear()
    return {key: torch.cat(parts) for key, parts in found.items()}


def by_distance(values: Tensor, period: int, width: int = 1) -> list[float]:
    """Means by distance behind a refresh, which comes every `period` tokens, in bins of `width`."""
    whole = values[: len(values) // period * period].view(-1, period // width, width)
    return [float(mean) for mean in whole.mean(dim=(0, 2))]
