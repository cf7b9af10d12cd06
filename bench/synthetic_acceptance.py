"""A synthetic verdict that holds acceptance at a given value, for models whose weights are random.

What a round costs is real: drafts, passes over the full cache, commits. Which drafted tokens stand is drawn
by coins, and so is whether drafting ahead had guessed the token after them: never a measure of any model's
acceptance. Every row of a report that rests on it is labelled `synthetic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from offload_rt.drafting.base import Proposal, Round, TokenView
from offload_rt.drafting.shapes import DraftShape
from offload_rt.drafting.verifier import Verifier
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.model.scheduler import Forward, Read, Work
from offload_rt.planning.prediction import RUNNER_UP_HITS
from offload_rt.rejection_sampling import Draft


class HeldVerifier(Verifier):
    """The verifier it is made from, except that coins decide in the place of its logits.

    For greedy decoding of chains. The token in the place of a rejected one is the one guessed for that place,
    if one was, as often as the planner assumes.

    Args:
        acceptance: chance that a drafted token stands, given that those before it do; the same chance that
            the token after a draft that stands as a whole is the one that drafting ahead guessed.
    """

    def __init__(self, over: Verifier, acceptance: float) -> None:
        vars(self).update(vars(over))
        self._acceptance = acceptance
        self._coins = torch.Generator().manual_seed(0)
        self._begun: list[TokenView] = []  # texts that were drafted below while the pass ran
        begin = self.drafter.proposal

        def proposal(view: TokenView, shape: DraftShape) -> Proposal:
            self._begun.append(view)
            return begin(view, shape)

        vars(self.drafter)["proposal"] = proposal

    def verification(self, view: TokenView, draft: Draft) -> Forward:
        self._length = len(view)
        self._begun.clear()
        return super().verification(view, draft)

    def verdict(self, draft: Draft, part: PassInput, output: PassOutput) -> Work[Round]:
        drafted = draft.tokens
        drafted.arrive((yield Read(drafted.pending(), self.stats)))
        outcomes = [begun.part(self._length) for begun in self._begun]
        guesses = {len(tokens) - 1: tokens[-1] for tokens in outcomes}
        logits = self._held_logits(drafted.known, guesses, output.logits)
        return (yield from super().verdict(draft, part, replace(output, logits=logits)))

    def _held_logits(self, drafted: Sequence[int], guesses: dict[int, int], logits: Tensor) -> Tensor:
        """Logits whose greedy choice after the text and after each drafted token is what the coins say."""
        chosen = []
        for place, proposed in enumerate((*drafted, guesses.pop(len(drafted), None))):
            stands, guessed = self._chance() < self._acceptance, self._chance() < RUNNER_UP_HITS
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
