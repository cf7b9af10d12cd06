"""Thoughts before an answer that must fit a grammar."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy
import torch
from torch import Tensor

from offload_rt.drafting.logits import Grammar
from offload_rt.text.thoughts import CHANNEL, FINAL, MESSAGE, ThoughtMarks


def thoughts_first(
    marks: ThoughtMarks,
    grammar: Grammar,
    prompt: Sequence[int],
    budget: int,
    ends: Collection[int],
    vocabulary: int,
) -> Grammar:
    """Returns a grammar that begins behind the thoughts that must come first after a prompt, if any must.

    Thoughts that the prompt has opened are closed at once where their end is no token of its own.

    Args:
        budget: most tokens of thoughts.
        ends: tokens that end the text.
    """
    opened, form = marks.ends_with(prompt, marks.format.opening_mark), marks.format
    if not (opened or marks.come_first(prompt)):
        return grammar
    closing = marks.encoded(form.closing)
    gate, until, opening = closing, None, None
    if form.channels:
        gate, until = marks.encoded(CHANNEL + FINAL), marks.token(MESSAGE)
        opening = None if opened else marks.token(CHANNEL)
    elif not marks.come_first(prompt):
        budget = 0
    elif form.answer:
        gate = marks.encoded(form.answer[0])
    return ThoughtsFirst(grammar, closing, gate, until, budget, ends, vocabulary, opening)


class ThoughtsFirst:
    """Any thoughts, and behind them the texts of a grammar (a `drafting.logits.Grammar`).

    Args:
        closing: tokens that are forced where thoughts reach their budget.
        gate: tokens that begin the answer.
        until: the token behind them with which their header ends; None: they have no header.
        budget: most tokens of thoughts.
        ends: tokens that end the text; not allowed among thoughts.
        opening: the token that they begin with; None: they have begun, or begin with any.
    """

    def __init__(
        self,
        grammar: Grammar,
        closing: list[int],
        gate: list[int],
        until: int | None,
        budget: int,
        ends: Collection[int],
        vocabulary: int,
        opening: int | None = None,
    ) -> None:
        self._grammar = grammar
        self._closing, self._gate, self._until, self._budget = closing, gate, until, budget
        self._vocabulary = vocabulary
        self._opening = opening
        self._thinking_mask = self._mask(set(range(vocabulary)) - set(ends))

    def allowed(self, tokens: Sequence[int]) -> Tensor | None:
        if (start := self._answer(tokens)) is not None:
            return self._grammar.allowed(tokens[start:])
        forced = list(tokens[self._budget :])
        if len(tokens) < self._budget:
            return self._thinking_mask if tokens or self._opening is None else self._mask({self._opening})
        if forced != self._closing[: len(forced)]:
            return None
        return self._mask({self._closing[len(forced)]})

    def complete(self, tokens: Sequence[int]) -> bool:
        start = self._answer(tokens)
        return start is not None and self._grammar.complete(tokens[start:])

    def _answer(self, tokens: Sequence[int]) -> int | None:
        """Returns where the answer begins; None: it has not begun."""
        at, size = -1, len(self._gate)
        with suppress(ValueError):  # of `index`, where there is none
            while True:
                at = tokens.index(self._gate[0], at + 1)
                if list(tokens[at : at + size]) == self._gate:
                    at += size
                    return at if self._until is None else tokens.index(self._until, at) + 1
        return None

    def _mask(self, tokens: Collection[int]) -> Tensor:
        bits = torch.zeros(-(-self._vocabulary // 64) * 64, dtype=torch.bool)
        bits[[token for token in tokens if token < self._vocabulary]] = True
        words = numpy.packbits(bits.numpy(), bitorder="little")
        return torch.from_numpy(words).view(torch.long)
