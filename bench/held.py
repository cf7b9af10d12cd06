"""A synthetic verdict that holds acceptance at a given value, for models whose weights are random.

What a round costs is real: drafts, passes over the full cache, commits. Which drafted tokens stand is drawn
by coins, and so is whether drafting ahead had guessed the token after them. Never a measure of any model's
acceptance: every row of a report that rests on it is labelled `synthetic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from offload_rt.drafting.base import Drafter, LevelStats, Proposal, Text
from offload_rt.drafting.verifier import Pass, Round, Verifier
from offload_rt.verification import Draft


@dataclass(frozen=True)
class Hold:
    """A synthetic verdict.

    Attributes:
        acceptance: chance that a drafted token stands, given that those before it do; the same chance that
            the token after a draft that stands as a whole is the one that drafting ahead guessed.
        seed: of the coins.
    """

    acceptance: float
    seed: int = 0


class HeldVerifier(Verifier):
    """Runs the passes of the verifier it is made from, and lets coins decide in the place of their logits.

    For greedy decoding of chains.
    """

    def __init__(self, over: Verifier, held: Hold) -> None:
        self._guesses = _NotedGuesses(over.drafter)
        super().__init__(
            over.stats.name, over.model, over.cache, self._guesses, over.sampling, over._pass_cost
        )
        self._acceptance = held.acceptance
        self._coins = torch.Generator().manual_seed(held.seed)

    def verdict(self, text: Text, begun: Pass) -> Round:
        return super().verdict(text, replace(begun, logits=self._held_logits(begun)))

    def _held_logits(self, begun: Pass) -> torch.Tensor:
        """Logits whose greedy choice after the text and after each drafted token is what the coins say."""
        drafted, vocabulary = list(begun.draft.tokens), begun.logits.shape[-1]
        guess = self._guesses.after_all(drafted)
        chosen = []
        for proposed in (*drafted, guess):
            stands, other = self._chance() < self._acceptance, int(self._chance() * (vocabulary - 1))
            if proposed is None:
                chosen.append(other)
            else:
                chosen.append(proposed if stands else (proposed + 1 + other) % vocabulary)
        forced = torch.zeros_like(begun.logits)
        rows = torch.arange(len(chosen), device=forced.device)
        forced[rows, torch.tensor(chosen, device=forced.device)] = 1.0
        return forced

    def _chance(self) -> float:
        return float(torch.rand((), generator=self._coins, dtype=torch.float64))


class _NotedGuesses:
    """A drafter that remembers which outcomes were last drafted for."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._outcomes: list[tuple[int, ...]] = []

    def after_all(self, drafted: Sequence[int]) -> int | None:
        """The token that was guessed to follow all of `drafted`; None where nothing was."""
        guesses = [one[-1] for one in self._outcomes if one[:-1] == tuple(drafted)]
        self._outcomes = []
        return guesses[0] if guesses else None

    @property
    def levels(self) -> list[LevelStats]:
        return self._drafter.levels

    @property
    def expected_acceptance(self) -> float:
        return self._drafter.expected_acceptance

    def prefill(self, text: Text) -> None:
        self._drafter.prefill(text)

    def propose(self, text: Text, count: int) -> Draft:
        return self._drafter.propose(text, count)

    def proposal(self, text: Text, count: int) -> Proposal:
        return self._drafter.proposal(text, count)

    def outcomes(self, text: Text, draft: Draft, most: int, acceptance: float) -> list[tuple[int, ...]]:
        self._outcomes = self._drafter.outcomes(text, draft, most, acceptance)
        return self._outcomes

    def settle(self, text: Text) -> None:
        self._drafter.settle(text)

    def expected_ms(self, length: int, count: int) -> float:
        return self._drafter.expected_ms(length, count)
