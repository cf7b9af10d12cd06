"""What ran when, for a picture of a round: spans on lanes, recorded where they happen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from offload_rt import clock


@dataclass(frozen=True)
class Span:
    """From `start` to `end`, in seconds of `clock.now`."""

    lane: str
    name: str
    start: float
    end: float


class Timeline:
    """Spans of any thread.

    Attributes:
        spans: those that have ended, in the order of their ends.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Records how long the block takes; on a GPU, how long it takes to enqueue it."""
        start = clock.now()
        try:
            yield
        finally:
            self.spans.append(Span(lane, name, start, clock.now()))


class _NoTimeline(Timeline):
    """Records nothing."""

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        yield


NO_TIMELINE: Timeline = _NoTimeline()
