"""The drafter interface: proposes tokens together with the probabilities that they were drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from offload_rt.config.draft_shape import DraftShape
from offload_rt.model.work import LevelStats, Work
from offload_rt.sampling.rejection import Draft

Outcome = tuple[int, ...]
"""Tokens that a verification may yield behind the sequence."""


class TokenView:
    """All tokens so far, the prompt included: a long base that is shared, and a short tail.

    A drafter extends a view by speculation without copying its base, which may be 128K tokens long.

    Attributes:
        states: of the level that drafts the tail, `[n, state_size]`, each with the position of the token
            after which the first one is; the newest come last.
    """

    states: tuple[tuple[int, Tensor], ...] = ()

    def __init__(self, base: list[int], tail: Sequence[int] = ()) -> None:
        self._base = base
        self._length = len(base)  # the base may grow later; this view does not
        self._tail = list(tail)

    def __len__(self) -> int:
        return self._length + len(self._tail)

    def extended(self, tokens: Sequence[int], states: Tensor | None = None) -> TokenView:
        """Returns this view with `tokens` behind it.

        Args:
            states: `[tokens, state_size]`, before each of them, where they are known.
        """
        longer = TokenView(self._base)
        longer._length = self._length
        longer._tail = [*self._tail, *tokens]
        longer.states = self.states if states is None else (*self.states, (len(self) - 1, states))
        return longer

    def part(self, start: int, end: int | None = None) -> list[int]:
        """Returns the tokens `start` to `end` (default: to the end), both counted from the beginning."""
        end = len(self) if end is None else min(end, len(self))
        if start >= self._length:
            return self._tail[start - self._length : end - self._length]
        return self._base[start : min(end, self._length)] + self._tail[: max(0, end - self._length)]


@dataclass(frozen=True)
class Round:
    """Tokens that have the output distribution of their verifier.

    Attributes:
        tokens: accepted draft tokens, then one of the verifier's own.
        accepted, proposed: draft tokens.
        tries: number of siblings that were accepted and rejected on the way, by sibling rank.
        probs: `[tokens, vocabulary]`, the distribution of each token; None for greedy decoding.
        logits: `[tokens, vocabulary]`, the verifier's before each token.
        processed: `[tokens, vocabulary]`, the same with penalties and the grammar's mask.
        states: `[tokens, state_size]`, the verifier's before each token, where a head wants them.
    """

    tokens: list[int]
    accepted: int
    proposed: int
    tries: Sequence[tuple[int, int]]
    probs: Tensor | None
    logits: Tensor
    processed: Tensor
    states: Tensor | None = None


class Proposal:
    """A draft that is drawn step by step. The base class holds one that was made at once."""

    def __init__(self, draft: Draft | None = None) -> None:
        # An empty one is its own: on a device, tokens are remembered there.
        self._draft = Draft() if draft is None else draft

    def step(self) -> Work[bool]:
        """Draws some more tokens and brings them to the host; returns False once the draft is complete."""
        yield from ()
        return False

    def complete(self) -> Work[Draft]:
        """Draws the rest; its tokens may stay on the device."""
        while (yield from self.step()):
            pass
        return self.draft()

    def draft(self) -> Draft:
        """Returns the tokens that have been drawn so far."""
        return self._draft

    def outcomes(self, limit: int, acceptance: float) -> Work[list[Outcome]]:
        """Returns outcomes that a verification of the draft may yield, the likeliest first.

        The draft's tokens are on the host by now. The base class returns none: a draft that was made at once
        took no time that could be hidden.

        Args:
            limit: number of outcomes at most.
            acceptance: chance that the verifier accepts a drafted token, by what has been seen of the
                sequence.
        """
        yield from ()
        return []


class DraftAhead:
    """The draft for one outcome of a verification, made before the verdict.

    A subclass makes those for several outcomes together.

    Attributes:
        depth: levels that have been drawn.
    """

    def __init__(self, outcome: Outcome, proposal: Proposal) -> None:
        self._outcome = outcome
        self._proposal = proposal
        self.depth = 0

    def step(self) -> Work[bool]:
        """Draws another level and brings its tokens to the host; returns False once all is drawn."""
        deepened = yield from self._proposal.step()
        self.depth += deepened
        return deepened

    def proposals(self) -> dict[Outcome, Proposal]:
        """Returns what has been drawn, by outcome; the rest may be drawn later."""
        return {self._outcome: self._proposal}


class Drafter:
    """Proposes continuations of a sequence. The base proposes nothing: its verifier decodes plainly.

    `observe` tells what the full cache has verified; a sequence given to `proposal` may reach beyond that
    with tokens that are speculation themselves (the middle of a hierarchy).

    Attributes:
        wants_states: rounds that verify its drafts should carry states.
    """

    wants_states = False

    @property
    def levels(self) -> list[LevelStats]:
        """Statistics of the drafter's levels, the cheapest first."""
        return []

    def prefill(self, view: TokenView) -> Work[None]:
        """Prefills the drafter. Derived caches are already built."""
        yield from ()

    def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
        """Begins a draft below the last token of `view`. Others may be drawn between its steps."""
        return Proposal()

    def ahead(self, view: TokenView, shapes: Mapping[Outcome, DraftShape]) -> Iterator[DraftAhead]:
        """Begins drafts below outcomes of a verification behind `view`, as they are asked for.

        Args:
            shapes: of the drafts, by outcome, the likeliest first.
        """
        for outcome, shape in shapes.items():
            yield DraftAhead(outcome, self.proposal(view.extended(outcome), shape))

    def observe(self, view: TokenView, round: Round) -> None:
        """Called after each verified round. The full cache lacks only the last token of `view`."""
