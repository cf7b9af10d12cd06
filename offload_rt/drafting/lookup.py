"""Prompt look-up: the continuation of an earlier occurrence of the text's last n-gram, if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from offload_rt.drafting.base import Complete, Proposal, Round, TokenView
from offload_rt.drafting.shapes import DraftShape
from offload_rt.expectations import LOOKUP_ACCEPTANCE
from offload_rt.passes import LevelStats, Work
from offload_rt.verification import Draft


class LookupDrafter:
    """Proposes what followed the newest earlier occurrence of the longest matching n-gram.

    Keeps, for each n, where each n-gram of the verified text last ended, so that a look-up costs the same
    at any length. A deterministic draft: it reports no probabilities.
    """

    wants_hidden = False
    expected_acceptance = LOOKUP_ACCEPTANCE

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> index behind its newest occurrence
        self._indexed = 0
        self._stats = LevelStats("lookup")

    @property
    def levels(self) -> list[LevelStats]:
        return [self._stats]

    def prefill(self, view: TokenView) -> Work[None]:
        yield from ()
        self._ends.clear()
        self._indexed = 0
        self._index(view)

    def observe(self, view: TokenView, round: Round) -> None:
        self._index(view)

    def _index(self, view: TokenView) -> None:
        # Occurrences are indexed once their following token exists, so the last n-gram never finds itself.
        started = perf_counter()
        first = max(0, self._indexed - max(self._sizes))
        tokens = view.part(first)
        for end in range(max(self._indexed, 1) - first, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(tokens[end - size : end])] = first + end
        self._indexed = len(view)
        self._stats.ms += 1e3 * (perf_counter() - started)

    def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
        if not shape.depth:
            return Complete()
        started = perf_counter()
        tokens: Sequence[int] = ()
        for size in self._sizes:
            end = self._ends.get(tuple(view.part(len(view) - size))) if size <= len(view) else None
            if end is not None:
                tokens = view.part(end, end + shape.depth)
                break
        self._stats.passes += 1
        self._stats.ms += 1e3 * (perf_counter() - started)
        return Complete(Draft.chain(tokens))

    def nominal_ms(self, length: int, shape: DraftShape) -> float:
        return 0.0
