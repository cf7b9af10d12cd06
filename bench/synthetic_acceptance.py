"""An acceptance rule that ignores the logits and draws verdicts at a given acceptance rate.

It is for models with random weights, whose own acceptance means nothing. Drafts, passes over the full cache
and commits cost what they always cost; only which drafted tokens are accepted is drawn, and whether drafting
ahead guessed the token after them. Every row of a report that uses it is labelled `synthetic`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from offload_rt.config.draft_shape import DraftShape
from offload_rt.config.priors import RUNNER_UP_HITS
from offload_rt.drafting.base import DraftAhead, Drafter, Outcome, Proposal, Round, TokenView
from offload_rt.drafting.verifier import Verifier
from offload_rt.sampling.rejection import Draft, Verdict
from offload_rt.sampling.sampler import Draws


def hold_acceptance(verifier: Verifier, acceptance: float) -> None:
    """Lets `verifier`, which decodes chains greedily, accept each drafted token at a given rate.

    Args:
        acceptance: probability that a drafted token is accepted if those before it are; the same probability
            holds for the token after a fully accepted draft being the one that drafting ahead guessed. The
            token in the place of a rejected one is the guessed one as often as the planner assumes.
    """
    drafter: Any = NotedProposals(verifier.drafter)
    verifier.drafter, verifier.rule = drafter, SyntheticRule(drafter, acceptance)


class NotedProposals:
    """A drafter that remembers which continuations of the verified sequence it was asked to draft from."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._length: int | None = None  # of the verified sequence
        self._views: list[TokenView] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
        if self._length is None:
            self._length = len(view)
        self._views.append(view)
        return self._drafter.proposal(view, shape)

    def ahead(self, view: TokenView, shapes: Mapping[Outcome, DraftShape]) -> Iterator[DraftAhead]:
        for drafts in self._drafter.ahead(view, shapes):
            self._views += map(view.extended, drafts.proposals())
            yield drafts

    def observe(self, view: TokenView, round: Round) -> None:
        self._length = len(view)
        self._views.clear()
        self._drafter.observe(view, round)

    def guesses(self) -> dict[int, int]:
        """The last token of each outcome that was drafted ahead, by the number of tokens before it."""
        outcomes = [view.part(self._length or 0) for view in self._views]
        return {len(tokens) - 1: tokens[-1] for tokens in outcomes if tokens}


class SyntheticRule:
    """An `AcceptanceRule` that draws verdicts; see `hold_acceptance`."""

    def __init__(self, drafter: NotedProposals, acceptance: float) -> None:
        self._drafter, self._acceptance = drafter, acceptance
        self._generator = torch.Generator().manual_seed(0)

    def __call__(
        self, draft: Draft, logits: Tensor, probs: Tensor | None, draws: Draws
    ) -> tuple[Verdict, Tensor]:
        guesses, vocabulary, count = self._drafter.guesses(), logits.shape[-1], len(draft)
        # Three numbers for every token, whatever becomes of it: a verdict does not shift those after it.
        chances = torch.rand(1 + count, 3, generator=self._generator, dtype=torch.float64).tolist()
        accepted = next((at for at in range(count) if chances[at][0] >= self._acceptance), count)
        agreed, guessed, other = chances[accepted]
        token = logits.new_full((), int(other * (vocabulary - 1)), dtype=torch.long)
        guess = guesses.get(accepted)
        if accepted < count:
            token = (draft.tokens.on(logits.device)[accepted] + 1 + token) % vocabulary  # another one
            use_guess = guessed < RUNNER_UP_HITS
        else:
            use_guess = agreed < self._acceptance
        if guess is not None and use_guess:
            token = torch.full_like(token, guess)
        return Verdict(torch.full_like(token, accepted), token), logits.amax(-1)
