"""Thoughts before an answer: how many tokens they may take, and the grammar of what follows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from offload_rt.drafting.logits import Grammar
from offload_rt.errors import UsageError
from offload_rt.text.thoughts import CHANNEL, FINAL, MESSAGE, START, ThoughtMarks


@dataclass(frozen=True)
class ThoughtTokens:
    """The tokens of thoughts behind a prompt.

    Attributes:
        opening: begin thoughts.
        closing: end them.
        gate: what must stand between thoughts and the text of a grammar.
        opened: the prompt has begun thoughts.
        may_open: the model may begin them, at the beginning of its text.
        repeated: there may be thoughts again behind others, each a message of its own.
    """

    opening: list[int]
    closing: list[int]
    gate: list[int]
    opened: bool
    may_open: bool
    repeated: bool = False


def thoughts_first(
    marks: ThoughtMarks,
    grammar: Grammar | None,
    prompt: Sequence[int],
    budget: int,
    ends: Collection[int],
    vocabulary: int,
    *,
    may_open: bool,
    gated: bool = True,
) -> Grammar | None:
    """Returns a grammar of thoughts, where a prompt has opened them or the model may, and of what follows.

    Thoughts that the prompt has opened are closed at once where their end is no token of its own.

    Args:
        grammar: what follows thoughts; None: any text.
        budget: most tokens of thoughts.
        ends: tokens that end the text.
        may_open: the model may begin thoughts. Those of channels it may always.
        gated: the answer to a grammar begins with the marks that the model writes before an answer.

    Raises:
        UsageError: the budget is neither 0 nor can it be kept, as the end of thoughts is no token.
    """
    form, opened = marks.format, marks.opened(prompt)
    opening, has_end = marks.encoded(form.opening_mark), marks.token(form.closing_mark) is not None
    if form.channels:
        may_open = not opened and has_end and marks.ends_with(prompt, f"{START}assistant")
        closing, gate = marks.encoded(f"{form.closing_mark}{START}assistant"), CHANNEL + FINAL + MESSAGE
    else:
        may_open &= not opened and has_end and opening[0] in marks.control
        may_open &= not marks.ends_with(prompt, form.closing_mark)
        closing, gate = marks.encoded(form.closing_mark), "".join(form.answer[:1])
    if not opened and not may_open:
        return grammar
    if opened and not has_end:
        if grammar is None and budget:
            remedy = "use 0 to close thoughts at once, or leave it out"
            raise UsageError(f"thinking-budget: {form.closing_mark} is no token of this model; {remedy}")
        budget = 0
    tokens = ThoughtTokens(
        opening, closing, marks.encoded(gate) if gated and gate else [], opened, may_open, form.channels
    )
    return ThoughtsFirst(tokens, grammar, budget, ends, vocabulary, marks.is_blank)


class ThoughtsFirst:
    """Thoughts of a limited number of tokens, and what follows them (a `drafting.logits.Grammar`).

    Thoughts that reach the budget are closed. What follows are the texts of a grammar, or any text.

    Args:
        grammar: None: any text.
        budget: most tokens of thoughts, without marks.
        ends: tokens that end the text; not allowed among thoughts before a grammar.
        is_blank: returns whether the text of tokens is white space, which may come before thoughts.
    """

    def __init__(
        self,
        thoughts: ThoughtTokens,
        grammar: Grammar | None,
        budget: int,
        ends: Collection[int],
        vocabulary: int,
        is_blank: Callable[[Sequence[int]], bool] = lambda tokens: False,
    ) -> None:
        self._thoughts = thoughts
        self._grammar = grammar
        self._budget = budget
        self._vocabulary = vocabulary
        self._is_blank = is_blank
        self._any = self._mask(range(vocabulary))
        self._going_on = self._any if grammar is None else self._mask(set(range(vocabulary)) - set(ends))

    def allowed(self, tokens: Sequence[int]) -> Tensor | None:
        thinking, start, used = self._place(tokens)
        if not thinking:
            opening = self._opening(tokens, start)
            return self._allowed_behind(tokens[start:], opening, exhausted=used >= self._budget)
        closing = self._thoughts.closing
        begun = _overlap(tokens[start:], closing)
        exhausted = used + len(tokens) - start - begun >= self._budget
        if exhausted or (begun and self._grammar is not None):
            return self._mask({closing[begun]})
        return self._going_on

    def complete(self, tokens: Sequence[int]) -> bool:
        if self._grammar is None:
            return False
        thinking, start, _ = self._place(tokens)
        if thinking:
            return False
        rest, gate = list(tokens[start:]), self._thoughts.gate
        if self._opening(tokens, start) is not None or len(rest) < len(gate):
            return False
        return self._grammar.complete(rest[len(gate) :])

    def _allowed_behind(self, rest: Sequence[int], opening: int | None, exhausted: bool) -> Tensor | None:
        """Returns what may follow tokens that come after thoughts, or in their place.

        Args:
            opening: the token with which thoughts may begin or go on to begin.
            exhausted: the budget allows no more thoughts, of those that are messages of their own.
        """
        allowed = self._inner(rest)
        if opening is None:
            return allowed
        own = self._mask({opening})
        if self._thoughts.repeated and exhausted and len(rest) == 1:  # the header of some message has begun
            return None if allowed is None else allowed & ~own
        return own if allowed is None else own | allowed

    def _inner(self, rest: Sequence[int]) -> Tensor | None:
        if self._grammar is None:
            return self._any
        gate = self._thoughts.gate
        if len(rest) < len(gate):
            return self._mask({gate[len(rest)]}) if list(rest) == gate[: len(rest)] else None
        return self._grammar.allowed(rest[len(gate) :]) if list(rest[: len(gate)]) == gate else None

    def _opening(self, tokens: Sequence[int], start: int) -> int | None:
        """Returns the token with which thoughts go on to begin, where only they have begun at `start`."""
        opening, begun = self._thoughts.opening, len(tokens) - start
        part = begun < len(opening) and list(tokens[start:]) == opening[:begun]
        return opening[begun] if part and self._may_begin(start) else None

    def _may_begin(self, start: int) -> bool:
        """Returns whether thoughts may begin in a text whose thoughts so far end at `start`."""
        return self._thoughts.repeated or (self._thoughts.may_open and start == 0)

    def _place(self, tokens: Sequence[int]) -> tuple[bool, int, int]:
        """Returns whether tokens end within thoughts, where these or what follows them begin, and the number
        of tokens of the thoughts before that."""
        thoughts, at, used, thinking = self._thoughts, 0, 0, self._thoughts.opened
        while True:
            if not thinking:
                if (begin := self._begin(tokens, at)) is None:
                    return False, at, used
                at = begin + len(thoughts.opening)
            if (end := _find(tokens, thoughts.closing, at)) is None:
                return True, at, used
            used += end - at
            at, thinking = end + len(thoughts.closing), False

    def _begin(self, tokens: Sequence[int], start: int) -> int | None:
        """Returns where thoughts begin, in a text whose thoughts so far end at `start`."""
        if not self._may_begin(start) or (begin := _find(tokens, self._thoughts.opening, start)) is None:
            return None
        leads = begin == 0 or self._thoughts.repeated or self._is_blank(tokens[:begin])
        return begin if leads else None

    def _mask(self, tokens: Collection[int]) -> Tensor:
        bits = torch.zeros(-(-self._vocabulary // 64) * 64, dtype=torch.bool)
        bits[[token for token in tokens if token < self._vocabulary]] = True
        words = numpy.packbits(bits.numpy(), bitorder="little")
        return torch.from_numpy(words).view(torch.long)


def _find(tokens: Sequence[int], mark: Sequence[int], start: int) -> int | None:
    """Returns where a mark begins in tokens, at `start` or later; None: nowhere."""
    at = start - 1
    with suppress(ValueError):  # of `index`, where there is none
        while True:
            at = tokens.index(mark[0], at + 1)
            if list(tokens[at : at + len(mark)]) == list(mark):
                return at
    return None


def _overlap(tokens: Sequence[int], mark: Sequence[int]) -> int:
    """Returns the number of tokens of a mark with which tokens end, less than all of it."""
    longest = min(len(tokens), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if list(tokens[-n:]) == list(mark[:n])), 0)
