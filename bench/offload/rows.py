"""From runs to the rows of `bench offload`: medians over rounds, and what they are held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from bench import report
from bench.offload.text import Interval, Run, interval
from cpu_kv.link import CopyRecord
from offload_rt.pace import RoundTimes

WARM_UP_ROUNDS = 1  # at the beginning of each run, not reported: nothing was streamed or drafted ahead of it


def row(
    runs: Sequence[Run], streams: Sequence[float], compute: float | None, draft_token: float | None
) -> dict[str, Any]:
    """What several runs of one system say; times in ms, medians over rounds where nothing else is said.

    All is of the steady rounds. `round_over_max` is of rounds whose draft had been made while the pass before
    ran, over the longer of stream and of drafting alone. `pass_over_bound` may be below 1: a part of its
    stream may have been carried before the pass began.

    Args:
        streams: to carry the streamed share over the link once, in each run.
        compute: a pass over KV that is where it is needed; None where that was not measured.
        draft_token: to draft a token while nothing else goes on; None for plain decoding.
    """
    rounds = [one for run in runs for one in steady(run.rounds)]
    every = [one for run in runs for one in run.rounds]
    guesses = [one.guessed for one in every if one.guessed is not None]
    full = max((one.proposed for one in rounds), default=0)
    draft = full * (draft_token or 0.0)
    passes, guessed = list[float](), list[float]()  # over their bounds
    for run, stream in zip(runs, streams, strict=True):
        bound = max(stream, compute or 0.0)
        passes += [one.pass_ms / bound for one in steady(run.rounds) if bound]
        pairs = zip(run.rounds, run.rounds[1:-1], strict=False)
        whole = [one for before, one in pairs if before.guessed and one.proposed == full]
        guessed += [one.ms / max(stream, draft) for one in whole]
    return {
        "ms_per_token": report.spread([ms_per_token(run) for run in runs]),
        "tokens_per_round": sum(one.accepted + 1 for one in rounds) / len(rounds),
        "acceptance": acceptance(every),
        "rounds": len(every),
        "outcome_hit_rate": sum(guesses) / len(guesses) if guesses else None,
        "round_ms": median(one.ms for one in rounds),
        "pass_ms": median(one.pass_ms for one in rounds),
        "draft_ms": median(one.draft_ms for one in rounds),
        "ahead_ms": median(one.ahead_ms for one in rounds),
        "stream_ms": median(streams),
        "compute_ms": compute,
        "draft_alone_ms": None if draft_token is None else draft,
        "link_use": middle([use for run in runs if (use := link_use(run)) is not None]),
        "pass_over_bound": middle(passes),
        "round_over_max": middle(guessed),
    }


def middle(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return median(values) if values else None


def steady(rounds: Sequence[RoundTimes]) -> Sequence[RoundTimes]:
    """Without the first rounds, and without the last, which is cut short by the end of the text."""
    return rounds[WARM_UP_ROUNDS:-1] if len(rounds) > WARM_UP_ROUNDS + 1 else rounds[-1:]


def ms_per_token(run: Run) -> float:
    """From the begin of the second round to that of the last one; of all rounds, where there are too few."""
    if len(run.rounds) <= WARM_UP_ROUNDS + 1:
        return 1e3 * length([interval(run.rounds)]) / len(run.tokens)
    rounds = steady(run.rounds)
    tokens = sum(one.accepted + 1 for one in rounds)
    return 1e3 * (run.rounds[-1].started - rounds[0].started) / tokens


def acceptance(rounds: Sequence[RoundTimes]) -> float | None:
    """Share of drafted tokens that stood, of those whose predecessors did; None without drafts.

    That is what the planner means by acceptance: a token behind a rejected one was never judged.
    """
    stood = sum(one.accepted for one in rounds)
    judged = stood + sum(one.accepted < one.proposed for one in rounds)
    return stood / judged if judged else None


def draft_token_ms(runs: Sequence[Run]) -> float:
    """Median over rounds of runs that draft ahead of nothing: ms to draft one token."""
    return median(one.draft_ms / one.proposed for run in runs for one in steady(run.rounds) if one.proposed)


def times_as_fast(ms: Sequence[float], other_ms: Sequence[float]) -> float:
    """How many times as fast as others: the median over turns, in which the machine was the same."""
    return median(other / one for one, other in zip(ms, other_ms, strict=True))


def busy(copies: Iterable[CopyRecord], *, to_host: bool = False) -> list[Interval]:
    """When a direction of the link was carrying something: intervals that do not touch, in their order."""
    joined: list[Interval] = []
    for start, end in sorted((copy.start, copy.end) for copy in copies if copy.to_host == to_host):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Seconds in all, for intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def on_lane(run: Run, lane: str) -> list[Interval]:
    """When something ran on a lane of the timeline."""
    return [(span.start, span.end) for span in run.spans if span.lane == lane]


def link_use(run: Run) -> float | None:
    """Median over passes but the first: bytes that the link carried in a pass, over what it could have.

    A pass counts from its first copy to its last, the beginning of the next pass's stream among them: that
    is, from its begin where the link goes on at once, and to its end where it does not run dry before.
    """
    carried = busy(run.copies)
    shares = []
    for start, end in on_lane(run, "pass")[WARM_UP_ROUNDS:]:
        within = [(max(a, start), min(b, end)) for a, b in carried if a < end and b > start]
        if within:
            shares.append(length(within) / (within[-1][1] - start))
    return middle(shares)
