"""What a run's recorded spans and copies say about its link: how busy it was, and beside what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from cpu_kv.link import CopyRecord
from offload_rt.timeline import Span

Interval = tuple[float, float]
"""Begin and end, in seconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that do not touch, in their order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Seconds in all, for intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def common(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds that are both in `some` and in `others`."""
    some, others = union(some), union(others)
    return length(
        (max(a[0], b[0]), min(a[1], b[1])) for a in some for b in others if a[0] < b[1] and b[0] < a[1]
    )


def busy(copies: Iterable[CopyRecord], *, to_host: bool = False) -> list[Interval]:
    """When a direction of the link was carrying something."""
    return union((copy.start, copy.end) for copy in copies if copy.to_host == to_host)


def on_lane(spans: Iterable[Span], lane: str) -> list[Interval]:
    """When something ran on a lane of a timeline."""
    return [(span.start, span.end) for span in spans if span.lane == lane]


def link_use(passes: Sequence[Interval], copies: Sequence[CopyRecord]) -> float | None:
    """Median over passes: bytes that the link carried to the device in a pass, over what it could have.

    A pass counts from its first copy to its last, the beginning of the next pass's stream among them: that
    is, from its begin where the link goes on at once, and to its end where it does not run dry before.
    """
    carried = busy(copies)
    shares = []
    for start, end in passes:
        within = [(max(a, start), min(b, end)) for a, b in carried if a < end and b > start]
        if within:
            shares.append(length(within) / (within[-1][1] - start))
    return median(shares) if shares else None


def overlap(spans: Sequence[Span], copies: Sequence[CopyRecord]) -> float | None:
    """Share of the drafting that was done while the link carried KV to the device."""
    drafting = union(on_lane(spans, "draft"))
    return common(drafting, busy(copies)) / length(drafting) if drafting else None
