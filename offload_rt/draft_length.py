"""How many tokens to draft for a verification: as many as yield the most tokens per second.

A verification costs hardly more for many tokens than for one, but the chance that the last of them is
accepted falls with each. The choice follows what passes and drafts cost and how many tokens were accepted;
costs are measured, or those of the shapes (`costs.py`) where no clock may decide.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

CHOICES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32)
MEMORY = 32  # rounds that costs are fitted to
RIDGE = 0.01  # towards one ratio of measured to expected cost for a pass's plain part and its queries


class Costs(Protocol):
    """What a composition costs by its shapes, and how it fares (see `drafting.verifier.Verifier`)."""

    def expected_pass_ms(self, length: int, count: int) -> float:
        """Of a verification of `count` drafted tokens."""

    def expected_draft_ms(self, length: int, count: int) -> float:
        """Of drafting them."""

    @property
    def acceptance(self) -> float:
        """Chance that a drafted token is accepted, by what has been seen of the text."""


class DraftLength:
    """Chooses a draft's length, round by round.

    Args:
        costs: of passes and drafts by their shapes.
        clock: whether measured times count, or those of the shapes alone.
        ahead: drafts are made while the pass before runs, where its outcome is guessed.
    """

    def __init__(self, costs: Costs, *, clock: bool, ahead: bool = False) -> None:
        self._costs = costs
        self._clock = clock
        self._ahead = ahead and clock
        self._passes: deque[tuple[float, float]] = deque(maxlen=MEMORY)  # by shape, measured
        self._drafts: deque[tuple[float, float]] = deque(maxlen=MEMORY)

    def choose(self, length: int) -> int:
        """Tokens to draft at a text of `length` tokens."""
        return max(CHOICES, key=lambda count: self._rate(length, count))

    def observe_pass(self, length: int, count: int, ms: float) -> None:
        """A verification of `count` drafted tokens took `ms`."""
        self._passes.append((self._costs.expected_pass_ms(length, count), ms))

    def observe_draft(self, length: int, count: int, ms: float) -> None:
        """Drafting `count` tokens took `ms`."""
        expected = self._costs.expected_draft_ms(length, count)
        if expected > 0.0:  # looking up costs nothing by its shapes: nothing to compare with
            self._drafts.append((expected, ms))

    def _rate(self, length: int, count: int) -> float:
        pass_ms = self._costs.expected_pass_ms(length, count)
        draft_ms = self._costs.expected_draft_ms(length, count)
        if self._clock:
            plain_ms = self._costs.expected_pass_ms(length, 0)
            pass_ms = _fitted(self._passes, pass_ms, plain_ms)
            # A draft is steps of one cost each: its time is proportional to its length.
            draft_ms *= _ratio(self._drafts)
        acceptance = self._costs.acceptance
        tokens = sum(acceptance**i for i in range(count + 1))
        round_ms = pass_ms + draft_ms
        if self._ahead:
            guessed = acceptance ** (count + 1)
            round_ms = guessed * max(pass_ms, draft_ms) + (1.0 - guessed) * round_ms
        return tokens / round_ms


def _ratio(observed: deque[tuple[float, float]]) -> float:
    """Measured over expected."""
    expected = sum(expected for expected, _ in observed)
    return sum(ms for _, ms in observed) / expected if expected else 1.0


def _fitted(observed: deque[tuple[float, float]], expected: float, plain: float) -> float:
    """What a pass of an `expected` cost takes: its plain part and what its queries add, fitted apart.

    Least squares of measured times over (plain, expected - plain), drawn towards one ratio for both where
    the rounds say little about one of them.
    """
    if not observed:
        return expected
    ratio = _ratio(observed)
    a = b = c = u = v = 0.0
    for shape, ms in observed:
        added, rest = shape - plain, ms - ratio * shape
        a += plain * plain
        b += plain * added
        c += added * added
        u += plain * rest
        v += added * rest
    a, c = (1.0 + RIDGE) * a, (1.0 + RIDGE) * c
    determinant = a * c - b * b
    if determinant == 0.0:
        return ratio * expected
    fixed, per_query = (c * u - b * v) / determinant, (a * v - b * u) / determinant
    fitted = (ratio + fixed) * plain + (ratio + per_query) * (expected - plain)
    return max(fitted, 0.1 * ratio * expected)
