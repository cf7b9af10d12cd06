"""Whether speculation pays, round by round.

Speculation that yields fewer tokens per second than plain decoding steps down to it for a while, then
tries again, with longer breaks each time it fails. Where the usual acceptance would not make it pay (a
short text), decoding begins with such a break. What a round costs is measured, or fixed by the shapes
of its passes (`costs.py`). Fixed costs leave nothing to the clock, so that a seed repeats its tokens:
which random numbers are drawn depends on how much is drafted.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Protocol

from offload_rt.draft_length import DraftLength

WINDOW = 6  # rounds that are judged together
CLEAR_WINDOW = 3  # rounds after which a clear loss is enough
CLEAR_MARGIN = 1.25  # what a clear loss is
FIRST_BREAK = 64  # tokens of plain decoding after the first verdict against speculation
FORESEEN_BREAK = 256  # where it was not expected to pay at all
LONGEST_BREAK = 1024
MARGIN = 1.03  # how much dearer speculation must be before it stops: noise is no reason


class Forecast(Protocol):
    """What rounds cost by their shapes and usually yield (see `drafting.verifier.Verifier`)."""

    def expected_ms(self, length: int, count: int) -> float: ...

    def expected_tokens(self, count: int) -> float: ...


class Governor:
    """Says how many tokens to draft in the next round.

    Args:
        draft_count: tokens to draft a round while speculation pays, or what chooses them; 0: always plain.
        step_down: False keeps drafting whatever it costs.
        forecast: of rounds by (text length, tokens drafted); 0 drafted is a plain round.
        clock: whether rounds are judged by measured time, or by their fixed costs.
    """

    def __init__(
        self,
        draft_count: int | DraftLength,
        *,
        step_down: bool,
        forecast: Forecast,
        clock: bool,
    ) -> None:
        self._draft = draft_count
        self._length = 0
        self._watches = step_down and draft_count != 0
        self._forecast = forecast
        self._clock = clock
        self._plain_ms: deque[float] = deque(maxlen=WINDOW)
        self._judged: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._rounds = 0
        self._break = FIRST_BREAK
        self._break_left = 0
        self.steps_down = 0
        self.plain_tokens = 0  # decoded plainly because speculation did not pay

    def begin(self, length: int) -> None:
        """A text of `length` tokens is about to be continued."""
        self._length = length
        count = self._wanted()
        expected = self._forecast.expected_ms(length, count) / self._forecast.expected_tokens(count)
        if self._watches and expected > self._forecast.expected_ms(length, 0):
            self._break = FORESEEN_BREAK
            self._step_down()

    def _step_down(self) -> None:
        self.steps_down += 1
        self._break_left = self._break
        self._break = min(2 * self._break, LONGEST_BREAK)
        self._judged.clear()

    def _wanted(self) -> int:
        return self._draft.choose(self._length) if isinstance(self._draft, DraftLength) else self._draft

    def draft_count(self) -> int:
        """Tokens to draft in the next round; 0 for a plain one."""
        # Where the clock decides, the second round is plain, to know its cost; the first one warms up.
        # It may have been drafted ahead of, and what has been drafted is used: then it is the third.
        probing = self._watches and self._clock and self._rounds > 0 and not self._plain_ms
        return 0 if probing or self._break_left > 0 else self._wanted()

    def observe(self, count: int, tokens: int, length: int, ms: float, fixed_ms: float) -> None:
        """A round is over.

        Args:
            count: what `draft_count` said for it.
            tokens: how many it yielded.
            length: of the text before it.
            ms: how long it took.
            fixed_ms: what its passes cost by their shapes.
        """
        self._rounds += 1
        self._length = length
        if not self._watches:
            return
        if count == 0:
            self._plain_ms.append(ms)
            if self._break_left > 0:
                self._break_left = max(0, self._break_left - tokens)
                self.plain_tokens += tokens
            return
        if self._rounds > 1:  # the first round pays for memory that is touched for the first time
            self._judged.append((tokens, ms if self._clock else fixed_ms))
        if len(self._judged) < CLEAR_WINDOW:
            return
        plain = median(self._plain_ms) if self._clock else self._forecast.expected_ms(length, 0)
        yielded = sum(tokens for tokens, _ in self._judged)
        loss = sum(ms for _, ms in self._judged) / (plain * yielded)
        whole = len(self._judged) == WINDOW
        if loss > (MARGIN if whole else CLEAR_MARGIN):
            self._step_down()
        elif whole:
            self._break = FIRST_BREAK
