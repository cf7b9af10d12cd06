"""A timeline of decode steps: named spans on lanes, recorded by the code that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from offload_rt.system import clock


@dataclass(frozen=True)
class Span:
    """A named interval; `start` and `end` are in seconds of `clock.now`."""

    lane: str
    name: str
    start: float
    end: float


class Timeline:
    """Records spans of any thread.

    Attributes:
        spans: finished spans, in the order in which they ended.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Records how long the block takes on the host; GPU work is only enqueued in it."""
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
