"""How many drafted tokens a text has accepted so far."""

from __future__ import annotations

FORGETTING = 0.95  # of what was accepted, a verification
PRIOR_TOKENS = 10.0  # weight of the usual acceptance against that of the text


class RunningAcceptance:
    """The chance that a drafted token is accepted where those before it were, by what has been seen.

    A verification of a chain rejects one token at most; those behind it were never judged.

    Args:
        usual: before anything has been seen.
    """

    def __init__(self, usual: float) -> None:
        self._accepted = PRIOR_TOKENS * usual
        self._rejected = PRIOR_TOKENS * (1.0 - usual)

    @property
    def rate(self) -> float:
        """In [0, 1]."""
        return self._accepted / (self._accepted + self._rejected)

    def observe(self, proposed: int, accepted: int) -> None:
        """A verification accepted so many of the tokens proposed to it, and rejected the next one."""
        if proposed:
            self._accepted = FORGETTING * self._accepted + accepted
            self._rejected = FORGETTING * self._rejected + (accepted < proposed)
