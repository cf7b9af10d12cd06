"""From a config to a composition: which level drafts for which."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.buffers import BufferPool, mean_slots_for
from offload_rt.caches.full import FullCache
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.caches.selection import DECAY, AttentionScores, MeanKeyScores, Selection
from offload_rt.caches.shared import SharedCache
from offload_rt.caches.streaming import StreamingCache
from offload_rt.config import DATASTORE, DRAFT_STREAMING, HEAD, SOURCES, SUFFIX, Config, LevelConfig
from offload_rt.costs import head_cost, pass_cost
from offload_rt.drafting.base import Drafter
from offload_rt.drafting.datastore import Datastore
from offload_rt.drafting.head_drafter import HeadDrafter, Heads
from offload_rt.drafting.merged import MergedDrafter
from offload_rt.drafting.model_drafter import ModelDrafter, SmallModelDrafter
from offload_rt.drafting.shapes import CHAIN, DraftShape
from offload_rt.drafting.sources import NGrams, Source, SuffixAutomaton
from offload_rt.drafting.verifier import Order, Sampling, Verifier
from offload_rt.model.layer_plan import LayerPlan
from offload_rt.model.runner import CausalModel

TARGET_FULL = "target:full"


@dataclass(frozen=True)
class Parts:
    """What a composition is made of.

    Attributes:
        draft: the small model; None where the config has no level for it.
        full: the target's full cache; derived caches are added to it.
        pages: of the full cache that the text may come to.
        pool: where the memory of bounded caches comes from.
        heads: where heads come from.
        caches: the bounded ones; added here.
    """

    config: Config
    target: CausalModel
    draft: CausalModel | None
    full: FullCache
    sampling: Sampling
    pages: int
    pool: BufferPool
    heads: Heads
    caches: list[BoundedCache] = field(default_factory=list)


def compose(parts: Parts) -> Verifier:
    """The target over its full cache, with the config's levels below it."""
    drafter = Drafter()
    below, speculation = CHAIN, parts.config.speculation
    for level, own in zip(speculation.levels, speculation.shapes, strict=True):
        drafter = _level(level, drafter, below, own, parts)
        if level.merge:
            drafter = MergedDrafter(drafter, _source(level.merge, parts.config))
        below = own
    order = Order(None, pass_cost(parts.target, None, parts.full.engine.link.bytes_per_second))
    return Verifier(TARGET_FULL, parts.target, parts.full, drafter, parts.sampling, order)


def _source(name: str, config: Config) -> Source:
    if name == DATASTORE:
        return open_datastore(config)
    if name == SUFFIX:
        return SuffixAutomaton(config.lookup.min_ngram)
    return NGrams(config.lookup.max_ngram, config.lookup.min_ngram)


def _selection(parts: Parts) -> Selection:
    retrieval, full = parts.config.retrieval, parts.full
    if retrieval.select == "mean_keys":
        return MeanKeyScores(full.layout, full.sequence.summaries)
    decay = DECAY if retrieval.select == "attention" else 1.0
    return AttentionScores(full.layout, full.device, retrieval.chunk, decay, parts.pages)


def open_datastore(config: Config) -> Datastore:
    """The one that the config names."""
    stored = config.datastore
    return Datastore(Path(stored.path), stored.longest, stored.occurrences)


def _level(level: LevelConfig, below: Drafter, shape: DraftShape, own: DraftShape, parts: Parts) -> Drafter:
    """A level over the one below it.

    Args:
        shape: of what the one below proposes to it.
        own: of what it proposes; of no depth where that is chosen as it runs.
    """
    config = parts.config
    if level.name in SOURCES:
        return _source(level.name, config)
    if level.name == HEAD:
        model_of_head = parts.heads.of(config.head, parts.target)
        cost = head_cost(parts.target, model_of_head.head.weight_bytes)
        return HeadDrafter(model_of_head, parts.sampling, cost)
    small = level.name == DRAFT_STREAMING
    model = parts.target
    if small:
        assert parts.draft is not None  # levels without a model were left out (`Engine.available`)
        model = parts.draft.for_length(config.draft.sinks + config.draft.window, 0)  # it sees no more
    cache = _cache(level, model, parts)
    parts.caches.append(cache)
    if not small:
        parts.full.derived.append(cache)
    plan = model.layer_plan(level.layers)
    plans = [plan, LayerPlan.whole(model.layers)] if plan is not None and level.calibrate else [plan]
    # Of the text the last token is missing, and where all was accepted perhaps the one before it.
    recurring = range(1, shape.size + 3) if shape.depth else sorted({1, 2, own.per_pass} - {0})
    for each in plans:
        model.prepare(cache, recurring, each)
    entries = None if isinstance(cache, SharedCache) else cache.budget + cache.buffer.mean_slots
    orders = [Order(each, pass_cost(model, entries, plan=each)) for each in plans]
    first = orders[1] if len(orders) > 1 else None
    kind = SmallModelDrafter if small else ModelDrafter
    return kind(level.name, model, cache, below, parts.sampling, orders[0], first, shape)


def _cache(
    level: LevelConfig, model: CausalModel, parts: Parts
) -> StreamingCache | RetrievedCache | SharedCache:
    """What a level's model attends to."""
    config = parts.config
    if level.cache == "shared":
        return SharedCache(parts.full, parts.pool)
    if level.cache == "streaming":
        return StreamingCache(
            model.kv_layout(),
            model.rotary_frequencies,
            sinks=config.draft.sinks,
            window=config.draft.window,
            backend=parts.full.backend,
            source=None if level.name == DRAFT_STREAMING else parts.full,
            pool=parts.pool,
        )
    return RetrievedCache(
        parts.full,
        budget=config.retrieval.budget,
        chunk=config.retrieval.chunk,
        recent=config.retrieval.recent,
        refresh=config.retrieval.refresh,
        selection=_selection(parts),
        mean_slots=mean_slots_for(parts.pages) if config.retrieval.rest else 0,
        from_stream=config.offload.refreshes_from_stream and not parts.full.engine.link.in_place,
        pool=parts.pool,
    )
