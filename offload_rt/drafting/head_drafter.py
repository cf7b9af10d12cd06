"""Drafts by a head on a target's states: it takes the place of a small model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from offload_rt.caches.head import HeadCache
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.target_states import TargetStates
from offload_rt.config.draft_shape import DraftShape
from offload_rt.drafting.base import Drafter, Proposal, Round, TokenView
from offload_rt.drafting.head_model import HeadModel
from offload_rt.drafting.model_drafter import ModelDrafter
from offload_rt.drafting.verifier import Sampling
from offload_rt.model.passes import PassInput
from offload_rt.model.work import Forward, Work
from offload_rt.sampling.tokens import Tokens

PREFILL_CHUNK = 512
"""Tokens of a pass that fills the cache of a head."""


class HeadDrafter(ModelDrafter):
    """A head that drafts for a level of its target, or for the target over its full cache.

    Entries of its cache that a draft has computed from the head's own states are computed anew, from the
    states that the level above it, or the target, has left, as soon as these are known.

    Args:
        states: of the target after verified tokens.
    """

    cache: HeadCache

    def __init__(self, model: HeadModel, cache: HeadCache, states: TargetStates, sampling: Sampling) -> None:
        super().__init__("head", model, cache, Drafter(), sampling)
        self.wants_states = True
        self._states = states
        self._view = TokenView([])  # the verified sequence
        self._verified = 0  # tokens of it that could have entries from the target's states

    def prefill(self, view: TokenView) -> Work[None]:
        cache, self._view, self._verified = self.cache, view, len(view) - 1
        parts = self._states.parts(len(view) - 2) if len(view) > 2 else []
        if not parts:
            cache.reset(max(1, len(view) - 1))
            return
        cache.reset(1 + parts[0][0])
        for first, states in parts:
            if 1 + first > cache.verified_length:
                cache.skip(1 + first - cache.verified_length)
            for start in range(0, len(states), PREFILL_CHUNK):
                before = states[start : start + PREFILL_CHUNK]
                tokens = view.part(1 + first + start, 1 + first + start + len(before))
                new = NewTokens.below(cache.speculative, range(-1, len(before) - 1), tokens)
                self.stats.passes += 1
                yield Forward(self.model, PassInput(cache, new, 0, before=before), None, self.stats)
                cache.commit(range(len(before)))
                cache.settle()

    def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
        if not shape.depth or not self._aligned(view):
            return Proposal()
        return super().proposal(view, shape)

    def _aligned(self, view: TokenView) -> bool:
        """Forgets entries whose states are known better by now; returns whether a draft can begin."""
        cache = self.cache
        tokens = view.part(cache.verified_length, len(view) - 1)
        matched = cache.speculative.match(tokens)
        known = self._before(view, cache.verified_length, len(view))
        right = 0
        while right < len(matched) and (cache.given[matched[right]] or right >= len(known)):
            right += 1
        if right < len(matched):
            cache.keep(matched[:right])
        if cache.entries or len(cache.speculative) or len(known):
            return True
        # No state is known from which it could go on. The newest may be, behind a gap.
        newest = len(self._before(view, len(view) - 1, len(view)))
        if newest:
            cache.reset(len(view) - 1)
        return newest > 0

    def _before(self, view: TokenView, start: int, stop: int) -> Tensor:
        """Returns the states before tokens `start` to `stop`, or as many of the first as are known."""
        pieces, at = [self.cache.states[:0]], start - 1
        while at < stop - 1:
            end = min(stop - 1, self._states.end)
            piece = self._states.rows(at, end) if at < end else None
            if piece is None:
                piece = next(
                    (
                        rows[at - first : stop - 1 - first]
                        for first, rows in reversed(view.states)
                        if first <= at < first + len(rows)
                    ),
                    None,
                )
            if piece is None:
                break
            pieces.append(piece)
            at += len(piece)
        return torch.cat(pieces)

    def forward(
        self,
        view: TokenView,
        parents: Sequence[int],
        ids: Sequence[int],
        draft: Tokens | None = None,
        *,
        rows: int,
        states: bool = False,
        first: bool = False,
    ) -> Forward:
        request = super().forward(view, parents, ids, draft, rows=rows)
        positions = request.input.positions[: len(ids)]
        sequence = sum(position < len(view) for position in positions)
        before = self._before(view, positions[0], positions[0] + sequence) if sequence else None
        return replace(request, input=replace(request.input, before=before))

    def observe(self, view: TokenView, round: Round) -> None:
        cache, self._view, self._verified = self.cache, view, len(view) - 1
        tokens = view.part(cache.verified_length, len(view) - 1)
        path = cache.speculative.match(tokens)
        right = next((at for at, entry in enumerate(path) if not cache.given[entry]), len(path))
        if right:
            cache.settle_path(path[:right], tokens[:right])

    def catch_up(self) -> Work[None]:
        cache = self.cache
        missing = self._verified - cache.verified_length
        if missing <= 0 or not len(cache.speculative):
            return
        tokens = self._view.part(cache.verified_length, self._verified)
        if len(cache.speculative.match(tokens)) < missing:
            return  # a draft of another outcome: it is forgotten soon
        held = len(cache.speculative)
        parents = [-1, *range(held, held + missing - 1)]
        request = self.forward(self._view, parents, tokens, rows=0)
        if request.input.before is None or len(request.input.before) < missing:
            return
        yield request
        cache.replace(tokens)
