"""A model that drafts for a more expensive one: by itself, or with a cheaper drafter below it.

A verifier is a drafter for a more expensive one. A small model that draws a chain of γ tokens is the classic
draft model; a target over a retrieved cache that verifies what the small model drafts, round by round until
enough tokens stand, is TriForce's middle level (arXiv 2404.11912, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload_rt.caches.bounded import MAX_RECORDED_SPECULATION
from offload_rt.caches.streaming import StreamingCache
from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.drafting.base import DraftAhead, Drafter, Outcome, Proposal, Round, TokenView
from offload_rt.drafting.growth import BestFirst, LevelGrowth, OutcomeForest
from offload_rt.drafting.outcomes import likely_outcomes
from offload_rt.drafting.verifier import Verifier
from offload_rt.model.work import CopyToHost, Work
from offload_rt.sampling.rejection import Draft
from offload_rt.sampling.tokens import Tokens
from offload_rt.sampling.trees import forest


@dataclass(eq=False)
class ModelDrafter(Verifier, Drafter):
    """A model over a bounded cache that proposes to a more expensive verifier.

    What it reports is its own distribution as a verifier: its tokens have it, however they were drafted. How
    many are proposed depends only on tokens already proposed, which leaves each one's distribution as
    reported (a stopping time).

    Attributes:
        shape_below: shape of the drafts that the level below proposes to each of its rounds; of depth 0
            where there is no such level.
    """

    shape_below: DraftShape = CHAIN

    def prefill(self, view: TokenView) -> Work[None]:
        yield from self.drafter.prefill(view)

    def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
        if not shape.depth:
            return Proposal()
        if self.shape_below.depth:
            return Rounds(self, view, shape)
        kind = BestFirst if shape.kind == "grown" else LevelGrowth
        return kind(self, view, shape)

    def ahead(self, view: TokenView, shapes: Mapping[Outcome, DraftShape]) -> Iterator[DraftAhead]:
        together = dict[Outcome, DraftShape]()
        if not self.shape_below.depth and all(shape.kind == "chain" for shape in shapes.values()):
            room = MAX_RECORDED_SPECULATION - (len(view) - self.cache.verified_length)
            for outcome, shape in shapes.items():
                if OutcomeForest.nodes(together | {outcome: shape}) > room:
                    break
                together[outcome] = shape
        if len(together) > 1:
            yield OutcomeForest(self, view, together)
            shapes = {outcome: shape for outcome, shape in shapes.items() if outcome not in together}
        yield from super().ahead(view, shapes)

    def observe(self, view: TokenView, round: Round) -> None:
        # A cache derived from the full one has adopted the verified KV already, and may hold what was
        # drafted ahead behind it.
        self.drafter.observe(view, round)


class SmallModelDrafter(ModelDrafter):
    """A model of its own over a streaming cache: it reads the prompt itself.

    Only what its cache will hold, and `LEAD` windows before that, so that the window's hidden states have
    seen what they would have seen: a draft may be any approximation.
    """

    LEAD = 2
    cache: StreamingCache

    def __post_init__(self) -> None:
        super().__post_init__()
        self._verified_length = 0  # length of the sequence when it was verified last

    def observe(self, view: TokenView, round: Round) -> None:
        super().observe(view, round)
        self.roll_back(view)
        # What follows the sequence that was known then was drafted in another order of layers: it is
        # forgotten.
        final = len(view) if self.first_order is None else self._verified_length
        self.cache.keep(range(min(len(self.cache.speculative), final - self.cache.verified_length)))
        self.cache.settle()
        self._verified_length = len(view)

    def prefill(self, view: TokenView) -> Work[None]:
        yield from super().prefill(view)
        cache, self._verified_length = self.cache, len(view)
        cache.reset()
        end = len(view) - 1
        start = min(cache.sinks, end)
        if start:
            yield from self._prefill_part(view.part(0, start))
        recent = max(start, end - (1 + self.LEAD) * cache.window)
        if recent > start:
            cache.skip(recent - start)
        for at in range(recent, end, cache.window):
            yield from self._prefill_part(view.part(at, min(at + cache.window, end)))

    def _prefill_part(self, tokens: Sequence[int]) -> Work[None]:
        """Takes tokens of the sequence into the cache, for good, without sampling."""
        forward = self.forward(TokenView([]), range(-1, len(tokens) - 1), tokens, rows=1, first=True)
        output = yield forward
        (nan,) = yield CopyToHost([output.logits.isnan().any()], self.stats)
        if nan:
            self.model.raise_nan(forward.input)
        self.cache.commit(range(len(tokens)))
        self.cache.settle()


class Rounds(Proposal):
    """A draft from rounds of a verifier that has a drafter of its own: a chain, or several side by side."""

    def __init__(self, verifier: ModelDrafter, view: TokenView, shape: DraftShape) -> None:
        self._verifier = verifier
        self._view = view
        self._newest = view  # with the chain that is under way
        self._depth = shape.depth
        self._side_by_side = shape.width(0)
        self._chains: list[list[int]] = [[]]
        self._probs: list[Tensor] = []
        self._logits: list[Tensor] = []

    def step(self) -> Work[bool]:
        chain, stop_tokens = self._chains[-1], self._verifier.sampling.stop_tokens
        ends = any(token in stop_tokens for token in chain)
        if len(chain) >= self._depth or ends:
            if len(self._chains) == self._side_by_side:
                return False
            chain, self._newest = [], self._view
            self._chains.append(chain)
        below = self._verifier.shape_below
        depth = min(below.depth, self._depth - len(chain) - 1)
        round = yield from self._verifier.round(self._newest, below.deep(depth))
        chain += round.tokens
        self._newest = self._newest.extended(round.tokens, round.states)
        self._logits.append(round.processed)
        if round.probs is not None:
            self._probs.append(round.probs)
        return True

    def draft(self) -> Draft:
        tokens = Tokens([token for chain in self._chains for token in chain])
        probs = torch.cat(self._probs) if self._probs else None
        return Draft(tokens, forest([len(chain) for chain in self._chains]), probs)

    def outcomes(self, limit: int, acceptance: float) -> Work[list[Outcome]]:
        tokens = self._chains[0]
        if not tokens or len(self._chains) > 1:
            return []
        last = LevelGrowth(self._verifier, self._view.extended(tokens), CHAIN)
        logits = torch.cat([*self._logits, (yield from last.foresee())])
        tree = forest([len(tokens)])
        return (yield from likely_outcomes(self._verifier, tokens, tree, logits, limit, acceptance))
