"""From a config to a composition: which level drafts for which."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from offload_rt.attention import AttentionBackend
from offload_rt.caches.full import FullCache
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.caches.streaming import StreamingCache
from offload_rt.config import DRAFT_STREAMING, LOOKUP, TARGET_STREAMING, Config
from offload_rt.costs import PassCost
from offload_rt.drafting.base import Drafter, NoDrafter
from offload_rt.drafting.hierarchical import SmallModelDrafter, VerifierDrafter
from offload_rt.drafting.lookup import LookupDrafter
from offload_rt.drafting.verifier import Sampling, Verifier
from offload_rt.model import CausalModel

TARGET_FULL = "target:full"


@dataclass(frozen=True)
class Parts:
    """What a composition is made of.

    Attributes:
        draft: the small model; None where the config has no level for it.
        full: the target's full cache; derived caches are added to it.
        stop_tokens: no use to draft beyond one of these.
    """

    config: Config
    target: CausalModel
    draft: CausalModel | None
    full: FullCache
    sampling: Sampling
    stop_tokens: Collection[int]
    backend: AttentionBackend


def compose(parts: Parts) -> Verifier:
    """The target over its full cache, with the config's levels below it."""
    drafter: Drafter = NoDrafter()
    for index, level in enumerate(parts.config.speculation.levels):
        below = parts.config.speculation.gamma1 if index > 0 else 0
        drafter = _level(level, drafter, below, parts)
    return Verifier(
        TARGET_FULL,
        parts.target,
        parts.full,
        drafter,
        parts.sampling,
        PassCost(parts.target, None),
    )


def _level(level: str, drafter: Drafter, below: int, parts: Parts) -> Drafter:
    config = parts.config
    if level == LOOKUP:
        return LookupDrafter(config.lookup.max_ngram, config.lookup.min_ngram)
    if level == DRAFT_STREAMING:
        if parts.draft is None:
            raise ValueError(f"level {level} needs a draft model")
        own = _streaming(parts, parts.draft, None)
        verifier = Verifier(
            level, parts.draft, own, drafter, parts.sampling, PassCost(parts.draft, own.budget)
        )
        return SmallModelDrafter(verifier, own)
    derived: StreamingCache | RetrievedCache
    if level == TARGET_STREAMING:
        derived = _streaming(parts, parts.target, parts.full)
    else:
        derived = RetrievedCache(
            parts.full,
            budget=config.retrieval.budget,
            chunk=config.retrieval.chunk,
            recent=config.retrieval.recent,
            refresh=config.retrieval.refresh,
            backend=parts.backend,
            from_stream=config.offload.refresh_from_stream and not parts.full.engine.link.in_place,
        )
    parts.full.derived.append(derived)
    verifier = Verifier(
        level, parts.target, derived, drafter, parts.sampling, PassCost(parts.target, derived.budget)
    )
    return VerifierDrafter(verifier, below, parts.stop_tokens)


def _streaming(parts: Parts, model: CausalModel, source: FullCache | None) -> StreamingCache:
    return StreamingCache(
        model.layers,
        model.kv_heads,
        model.head_dim,
        model.dtype,
        model.device,
        sinks=parts.config.draft.sinks,
        window=parts.config.draft.window,
        inverse_frequencies=model.rotary_frequencies,
        backend=parts.backend,
        source=source,
    )
