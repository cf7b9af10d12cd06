"""A synthetic verdict that holds acceptance at a given value, for models whose weights are random.

What a round costs is real: drafts, passes over the full cache, commits. Which drafted tokens stand is drawn
by coins, and so is whether drafting ahead had guessed the token after them. Never a measure of any model's
acceptance or of what can be guessed of it: every row of a report that rests on it is labelled `synthetic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from offload_rt.drafting.base import Drafter, LevelStats, Proposal, Text
from offload_rt.drafting.verifier import Pass, Round, Verifier
from offload_rt.planning.prediction import RUNNER_UP_HITS
from offload_rt.verification import Draft


@dataclass(frozen=True)
class Hold:
    """A synthetic verdict.

    Attributes:
        acceptance: chance that a drafted token stands, given that those before it do; the same chance that
            the token after a draft that stands as a whole is the one that drafting ahead guessed.
        runner_up: chance that the token in the place of a rejected one is the one guessed for that place, if
            one was; as the planner assumes.
        seed: of the coins.
    """

    acceptance: float
    runner_up: float = RUNNER_UP_HITS
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
        self._held = held
        self._coins = torch.Generator().manual_seed(held.seed)

    def verdict(self, text: Text, begun: Pass) -> Round:
        return super().verdict(text, replace(begun, logits=self._held_logits(begun)))

    def _held_logits(self, begun: Pass) -> torch.Tensor:
        """Logits whose greedy choice after the text and after each drafted token is what the coins say."""
        drafted, vocabulary = list(begun.draft.tokens), begun.logits.shape[-1]
        guesses = self._guesses.take(drafted)
        chosen = []
        for place, proposed in enumerate((*drafted, guesses.pop(len(drafted), None))):
            stands, guessed = self._chance() < self._held.acceptance, self._chance() < self._held.runner_up
            other = int(self._chance() * (vocabulary - 1))
            if proposed is None:
                chosen.append(other)
            elif stands:
                chosen.append(proposed)
            elif guessed and place in guesses:
                chosen.append(guesses[place])
            else:
                chosen.append((proposed + 1 + other) % vocabulary)
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

    def take(self, drafted: Sequence[int]) -> dict[int, int]:
        """The tokens that were guessed to follow so many of `drafted`; forgets them."""
        outcomes, self._outcomes = self._outcomes, []
        return {len(one) - 1: one[-1] for one in outcomes if one[:-1] == tuple(drafted[: len(one) - 1])}

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
