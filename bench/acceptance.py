"""How often a small cache of the target would draft what the full cache accepts.

The acceptance of a proposal q by p is 1 minus their total variation, the sum of min(p, q). Both follow the
same true text (teacher forcing) at temperature 1: p over the full KV, q over the small cache. Text goes by in
rounds of `ROUND` tokens, as in decoding: the small cache passes over the round's tokens, then the full cache
does and commits them, and the small cache adopts the verified KV. The nth token of a round is therefore
drafted n tokens behind the latest refresh, as a decoder that drafts `ROUND` tokens would do it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from bench import needles
from bench.studies import Row
from bench.texts import ContextReader, Texts
from cpu_kv import exact_top_k, head_major
from offload_rt.attention import attend, fold, folded_mask, merge
from offload_rt.caches.base import Verified
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.buffers import BufferPool
from offload_rt.caches.full import FullCache
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.config import load_config
from offload_rt.drafting.compose import Parts, compose
from offload_rt.drafting.head_drafter import Heads
from offload_rt.drafting.verifier import Sampling
from offload_rt.sampling import GeneratorDraws, Sampler

DEPTHS = 5  # of the passages
ROUND = 8
STRIDE = 128
SINKS = 16
NEVER = "stride:1000000000"
"""A refresh policy: what H2O evicts is gone."""
RETRIEVAL = "retrieval"
RETRIEVAL_STRIDE = f"retrieval, stride:{STRIDE}"
MEAN_KEYS = "mean keys (TriForce)"
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
        runs = source.sequence.views(layer, 0, self.verified_length)
        parts = [attend(backend, queries, k.to(source.device), v.to(source.device), scale) for k, v in runs]
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
            keys, values = (torch.cat([*map(head_major, side)], dim=1) for side in zip(*views, strict=True))
            queries = fold(verified.queries[layer], source.layout.kv_heads)
            chosen = exact_top_k(queries, keys.to(queries.device), self.entries, source.scale)
            for side, memory in ((keys, self.keys), (values, self.values)):
                memory[layer, :, : self.entries] = side.take_along_dim(chosen.to(side.device)[..., None], 1)

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


Keys = dict[str, object]
BY_MEANS: Keys = {"retrieval.select": "mean_keys"}
ALONE: Keys = {"retrieval.rest": False}
CONFIGS: dict[str, Keys] = {
    RETRIEVAL: {},
    RETRIEVAL_STRIDE: {"retrieval.refresh": f"stride:{STRIDE}"},
    "retrieval, rest left out": ALONE,
    MEAN_KEYS: BY_MEANS | ALONE,
    "mean keys, rest estimated": BY_MEANS,
    HEAVY_HITTERS: {"retrieval.select": "heavy_hitters", "retrieval.refresh": NEVER} | ALONE,
    STREAMING: {"speculation.levels": ["target:streaming"]},
}
"""Small caches by keys of a configuration; refreshed every round where it does not say otherwise."""
CACHES = (*CONFIGS, TOP_K, TOP_K_FIRST_WHOLE)


def small_cache(reader: ContextReader, kind: str, budget: int) -> BoundedCache:
    """One of `CACHES` with so many entries, kept up from the full cache."""
    full, backend, retrieval = reader.full, reader.backend, reader.config.retrieval
    if kind in CONFIGS:
        keys: Keys = {"retrieval.budget": budget, "retrieval.recent": min(retrieval.recent, budget // 4)}
        keys |= {"retrieval.chunk": retrieval.chunk, "retrieval.refresh": "every"}
        keys |= {"draft.sinks": SINKS, "draft.window": budget - SINKS, "offload.refresh_from": "store"}
        config, pages = load_config("retrieval", keys | CONFIGS[kind]), full.layout.pages(reader.room)
        sampling = Sampling(Sampler(), GeneratorDraws(0, full.device))
        compose(Parts(config, reader.model, None, full, sampling, pages, backend, BufferPool(), Heads()))
    else:
        full.derived.append(ExactTopKCache(full, budget, whole=int(kind == TOP_K_FIRST_WHOLE)))
    full.build_derived()
    return full.derived[-1]


TABLE_1 = {
    TOP_K: (0.9921, 0.9989),
    STREAMING: (0.9156, 0.0519),
    HEAVY_HITTERS: (0.9179, 0.0739),
    MEAN_KEYS: (0.9649, 0.9878),
}
"""The paper's, on PG-19 and on needles, 120K tokens and a budget of 4K."""


@torch.inference_mode()
def acceptance(reader: ContextReader, tokens: Sequence[int], kind: str, budget: int) -> Tensor:
    """Acceptance `[tokens]`, float64, for what follows each of `tokens`, which follow what `reader` has read.

    Their count is a multiple of `ROUND`.
    """
    full = reader.full
    full.rewind()
    full.attended = None
    cache = small_cache(reader, kind, budget)
    if kind == HEAVY_HITTERS:
        assert isinstance(cache, RetrievedCache)
        count_prompt(reader)
        cache.fill(full.last_queries)
    found = [_round(reader, cache, tokens[at : at + ROUND]) for at in range(0, len(tokens), ROUND)]
    full.derived.clear()
    full.attended = None
    return torch.cat(found)


def _round(reader: ContextReader, cache: BoundedCache, block: Sequence[int]) -> Tensor:
    sampler, hindsight = Sampler(temperature=1.0), isinstance(cache, ExactTopKCache)
    drafted = None if hindsight else sampler.probs(reader.logits(cache, block, ROUND))
    true = sampler.probs(reader.logits(reader.full, block, ROUND))
    reader.full.commit(range(ROUND))
    if drafted is None:
        drafted = sampler.probs(reader.logits(cache, block, ROUND))
    return torch.minimum(true, drafted).sum(-1).double().cpu()


def by_distance(values: Tensor, period: int) -> list[float | None]:
    """Means of `[…, tokens]` by eighths of the way from a refresh, one every `period` tokens, to the next."""
    whole = values[..., : values.shape[-1] // period * period].reshape(-1, ROUND, period // ROUND)
    return [float(mean) if len(whole) else None for mean in whole.mean(dim=(0, 2))]


def small_caches(study: Texts) -> list[Row]:
    """What a small cache holds.

    TriForce, table 1. Acceptance of what a cache of a part of the text would draft, teacher forced, T = 1: on
    the books' own text, also by eighths of the way from a refresh, one every 8 tokens where no other is
    named, to the next; and on passages of random tokens that were hidden in it and are asked for again. Exact
    top-k chooses by the very queries that it serves; the demo target's first layer attends evenly, where the
    heaviest entries stand for nothing but themselves, so it is also shown with that layer whole.
    """
    sizes, positions = study.sizes, study.sizes.positions // ROUND * ROUND
    least, generator = 2 * study.config.retrieval.chunk + SINKS, torch.Generator().manual_seed(0)
    rows = []
    for length in (sizes.context // divisor for divisor in sizes.divisors):
        books, passages = (defaultdict[tuple[str, int], list[Tensor]](list) for _ in range(2))
        kinds = list(product(sizes.caches, (max(least, length // share) for share in sizes.shares)))
        for name, tokens in study.books.items():
            with study.reader(f"{name}: acceptance after {length} tokens", length + positions) as reader:
                reader.read(tokens[:length])
                for kind in kinds:
                    books[kind].append(acceptance(reader, tokens[length : length + positions], *kind))
            depths = min(DEPTHS, length // (2 * (needles.PASSAGE + needles.SPACING)))
            planted, hidden = needles.plant(tokens, length, depths, 1, study.alphabet, generator)
            with study.reader(f"{name}: passages in {length} tokens", length + needles.PASSAGE) as reader:
                reader.read(planted)
                # What follows the last token of a passage is no part of it.
                asked = slice(needles.CUE, -1)
                for kind, passage in product(kinds, hidden):
                    passages[kind].append(acceptance(reader, passage, *kind)[asked])
        for kind, budget in kinds:
            values = torch.stack(books[kind, budget])
            period = STRIDE if kind == RETRIEVAL_STRIDE else ROUND
            paper_books, paper_needles = TABLE_1.get(kind, (None, None))
            row: Row = {"cache": kind, "context": length, "entries": budget, "books": float(values.mean())}
            row |= {f"{at}/{ROUND}": mean for at, mean in enumerate(by_distance(values, period), 1)}
            row |= {"needles": float(torch.stack(passages[kind, budget]).mean())}
            rows.append(row | {"paper_books": paper_books, "paper_needles": paper_needles})
    return rows
