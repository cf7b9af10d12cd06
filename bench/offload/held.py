"""A synthetic verdict that holds acceptance at a given value, for models whose weights are random.

What a round costs is real: drafts, passes over the full cache, commits. Which drafted tokens stand is drawn
by coins, and so is whether drafting ahead had guessed the token after them. Never a measure of any model's
acceptance or of what can be guessed of it: every row of a report that rests on it is labelled `synthetic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from offload_rt.drafting.base import Outcome, Round, TokenView
from offload_rt.drafting.shapes import DraftShape
from offload_rt.drafting.verifier import Verification, Verifier
from offload_rt.parts import Output
from offload_rt.passes import Read, Work
from offload_rt.planning.prediction import RUNNER_UP_HITS


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
    """The verifier it is made from, except that coins decide in the place of its logits.

    For greedy decoding of chains.
    """

    def __init__(self, over: Verifier, held: Hold) -> None:
        vars(self).update(vars(over))
        self._held = held
        self._coins = torch.Generator().manual_seed(held.seed)
        self._outcomes: list[Outcome] = []  # that were last drafted for

        def proposal(view: TokenView, shape: DraftShape) -> Any:
            made = over.drafter.proposal(view, shape)

            def outcomes(most: int, acceptance: float) -> Work[list[Outcome]]:
                self._outcomes = yield from made.outcomes(most, acceptance)
                return self._outcomes

            return _Replaced(made, outcomes=outcomes)

        drafter: Any = _Replaced(over.drafter, proposal=proposal)
        self.drafter = drafter

    def verdict(self, verification: Verification, output: Output) -> Work[Round]:
        drafted = verification.draft.tokens
        drafted.arrive((yield Read(drafted.pending(), self.stats)))
        held = replace(output, logits=self._held_logits(drafted.known, output.logits))
        return (yield from super().verdict(verification, held))

    def _held_logits(self, drafted: Sequence[int], logits: Tensor) -> Tensor:
        """Logits whose greedy choice after the text and after each drafted token is what the coins say."""
        outcomes, self._outcomes = self._outcomes, []
        guesses = {len(one) - 1: one[-1] for one in outcomes if one[:-1] == tuple(drafted[: len(one) - 1])}
        chosen = []
        for place, proposed in enumerate((*drafted, guesses.pop(len(drafted), None))):
            stands, guessed = self._chance() < self._held.acceptance, self._chance() < self._held.runner_up
            other = int(self._chance() * (logits.shape[-1] - 1))
            if proposed is None:
                chosen.append(other)
            elif stands:
                chosen.append(proposed)
            elif guessed and place in guesses:
                chosen.append(guesses[place])
            else:
                chosen.append((proposed + 1 + other) % logits.shape[-1])
        rows = torch.tensor(chosen, device=logits.device)
        return torch.zeros_like(logits).scatter_(1, rows[:, None], 1.0)

    def _chance(self) -> float:
        return float(torch.rand((), generator=self._coins, dtype=torch.float64))


class _Replaced:
    """What `of` is, but for some of its methods."""

    def __init__(self, of: object, **methods: object) -> None:
        self._of = of
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)
