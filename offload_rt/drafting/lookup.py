"""Prompt look-up: the continuation of an earlier occurrence of the text's last n-gram, if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from offload_rt.drafting.base import Complete, LevelStats, Proposal, Text
from offload_rt.verification import Draft


class LookupDrafter:
    """Proposes what followed the newest earlier occurrence of the longest matching n-gram.

    Keeps, for each n, where each n-gram of the verified text last ended, so that a look-up costs the same
    at any length. A deterministic draft: it reports no laws.
    """

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> index behind its newest occurrence
        self._indexed = 0
        self._stats = LevelStats("lookup")

    @property
    def levels(self) -> list[LevelStats]:
        return [self._stats]

    def prefill(self, text: Text) -> None:
        self._ends.clear()
        self._indexed = 0
        self.settle(text)

    def settle(self, text: Text) -> None:
        # Occurrences are indexed once their following token exists, so the last n-gram never finds itself.
        started = perf_counter()
        first = max(0, self._indexed - max(self._sizes))
        tokens = text.part(first)
        for end in range(max(self._indexed, 1) - first, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = first + end
        self._indexed = len(text)
        self._stats.ms += 1e3 * (perf_counter() - started)

    def propose(self, text: Text, count: int) -> Draft:
        started = perf_counter()
        tokens: Sequence[int] = ()
        for size in self._sizes:
            end = self._ends.get(tuple(text.part(len(text) - size))) if size <= len(text) else None
            if end is not None:
                tokens = text.part(end, end + count)
                break
        self._stats.rounds += 1
        self._stats.ms += 1e3 * (perf_counter() - started)
        return Draft.chain(tokens)

    def proposal(self, text: Text, count: int) -> Proposal:
        return Complete(self.propose(text, count))

    def outcomes(self, text: Text, draft: Draft, most: int, acceptance: float) -> list[tuple[int, ...]]:
        """None: a look-up takes no time that could be hidden."""
        return []

    @property
    def expected_acceptance(self) -> float:
        return 0.3

    def expected_ms(self, length: int, count: int) -> float:
        return 0.0
