"""When a retrieved cache chooses its entries anew."""

from __future__ import annotations

from collections import deque

from offload_rt.config import RefreshPolicy


class Refresh:
    """A policy, and what it looks at.

    Attributes:
        policy: every verification, every N tokens, or below an acceptance rate.
        count: refreshes so far.
    """

    ROUNDS = 8
    """How many of the newest the acceptance rate is of."""

    def __init__(self, policy: RefreshPolicy) -> None:
        self.count = 0
        self.policy = policy
        self._tokens = 0
        self._rounds: deque[tuple[int, int]] = deque(maxlen=self.ROUNDS)

    def done(self) -> None:
        """The entries have been chosen anew."""
        self.count += 1
        self._tokens = 0
        self._rounds.clear()

    def observe(self, tokens: int, proposed: int) -> None:
        """A verification of `proposed` tokens has yielded so many."""
        self._tokens += tokens
        self._rounds.append((tokens - 1, proposed))

    @property
    def due(self) -> bool:
        """Whether it is time."""
        if self.policy.kind == "every":
            return True
        if self.policy.kind == "stride":
            return self._tokens >= self.policy.value
        accepted, proposed = (sum(column) for column in zip(*self._rounds, strict=True))
        full = len(self._rounds) == self.ROUNDS
        return full and proposed > 0 and accepted / proposed < self.policy.value
