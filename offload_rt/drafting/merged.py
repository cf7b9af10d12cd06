"""A model's draft and the finds of a look-up: both in one verification, or a find in place of the draft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.drafting.base import DraftAhead, Drafter, Outcome, Proposal, Round, TokenView
from offload_rt.drafting.sources import Source
from offload_rt.model.work import CopyToHost, LevelStats, Work
from offload_rt.sampling.rejection import Draft
from offload_rt.sampling.tokens import Tokens
from offload_rt.sampling.trees import ROOT, Tree
from offload_rt.system.device_copies import to_device


class LookupDrafter(Drafter):
    """A drafter with a look-up beside it, which indexes what the drafter is shown."""

    def __init__(self, drafter: Drafter, source: Source) -> None:
        self._drafter = drafter
        self._source = source
        self.wants_states = drafter.wants_states

    @property
    def levels(self) -> list[LevelStats]:
        return self._drafter.levels  # a look-up verifies nothing, and takes no time to speak of

    def prefill(self, view: TokenView) -> Work[None]:
        yield from self._source.prefill(view)
        yield from self._drafter.prefill(view)

    def observe(self, view: TokenView, round: Round) -> None:
        self._source.observe(view, round)
        self._drafter.observe(view, round)


class MergedDrafter(LookupDrafter):
    """Proposes the draft of `drafter`, and in the same tree what `source` finds.

    Finds are younger siblings whose probability is 1. That is lossless whatever is found, for a child may
    depend on everything that was drawn before it.
    """

    def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
        return MergedProposal(self._source, self._drafter.proposal(view, shape), view, shape)

    def ahead(self, view: TokenView, shapes: Mapping[Outcome, DraftShape]) -> Iterator[DraftAhead]:
        for drafts in self._drafter.ahead(view, shapes):
            yield MergedAhead(self._source, drafts, view, shapes)


class PreferredDrafter(LookupDrafter):
    """Proposes what `source` finds, and what `drafter` draws where nothing is found.

    Tokens of the sequence alone decide which of them proposes, and a find's probability is 1.

    Args:
        depth: most tokens that `drafter` draws; finds may be longer.
    """

    def __init__(self, drafter: Drafter, source: Source, depth: int) -> None:
        super().__init__(drafter, source)
        self._depth = depth

    def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
        proposal = self._source.proposal(view, CHAIN.deep(shape.depth))
        if len(proposal.draft()):
            return proposal
        return self._drafter.proposal(view, shape.deep(min(shape.depth, self._depth)))


class MergedProposal(Proposal):
    """The model's proposal, which is joined when it is complete."""

    def __init__(self, source: Source, proposal: Proposal, view: TokenView, shape: DraftShape) -> None:
        self._source = source
        self._proposal = proposal
        self._view = view
        self._shape = shape

    def step(self) -> Work[bool]:
        return self._proposal.step()

    def complete(self) -> Work[Draft]:
        draft = yield from self._proposal.complete()
        chain = self._source.proposal(self._view, CHAIN.deep(self._shape.depth)).draft()
        if not len(chain):
            return draft
        # What is there already is not proposed twice, so the host must know it.
        draft.tokens.arrive((yield CopyToHost(draft.tokens.pending(), self._source.stats)))
        return joined(draft, chain.tokens.known)

    def draft(self) -> Draft:
        return self._proposal.draft()

    def outcomes(self, limit: int, acceptance: float) -> Work[list[Outcome]]:
        return self._proposal.outcomes(limit, acceptance)


class MergedAhead(DraftAhead):
    """Drafts made ahead, each of which is joined when it is complete."""

    def __init__(
        self, source: Source, drafts: DraftAhead, view: TokenView, shapes: Mapping[Outcome, DraftShape]
    ) -> None:
        self._source = source
        self._drafts = drafts
        self._view = view
        self._shapes = shapes
        self.depth = 0

    def step(self) -> Work[bool]:
        deepened = yield from self._drafts.step()
        self.depth = self._drafts.depth
        return deepened

    def proposals(self) -> dict[Outcome, Proposal]:
        return {
            outcome: MergedProposal(
                self._source, proposal, self._view.extended(outcome), self._shapes[outcome]
            )
            for outcome, proposal in self._drafts.proposals().items()
        }


def joined(draft: Draft, chain: Sequence[int]) -> Draft:
    """Returns `draft` with a chain of certain tokens below the sequence, but for those that it has."""
    tokens, parents = list(draft.tokens.known), list(draft.tree.parents)
    nodes: dict[tuple[int, int], int] = {}
    for node, place in enumerate(zip(parents, tokens, strict=True)):
        nodes.setdefault(place, node)  # of equal siblings the eldest, which is tried first
    at = ROOT
    for token in chain:
        if (at, token) not in nodes:
            nodes[at, token] = len(tokens)
            tokens.append(token)
            parents.append(at)
        at = nodes[at, token]
    added = tokens[len(draft) :]
    if not added:
        return draft
    probs = draft.probs
    if probs is not None:
        certain = torch.nn.functional.one_hot(to_device(added, probs.device), probs.shape[1])
        probs = torch.cat([probs, certain.to(probs.dtype)])
    return Draft(Tokens(tokens), Tree(tuple(parents)), probs, len(added))
