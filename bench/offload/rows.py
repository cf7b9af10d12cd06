"""From runs to the rows of `bench offload`: medians over rounds, and what they are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench import report
from bench.offload.engine import Run
from bench.offload.overlap import link_use, on_lane, overlap
from offload_rt.pace import RoundTimes

WARM_UP_ROUNDS = 1  # at the beginning of each run, not reported: nothing was streamed or drafted ahead of it


@dataclass(frozen=True)
class Limits:
    """What a round cannot be faster than, in ms.

    Attributes:
        streams: to carry the streamed share over the link once, in each run.
        compute: a pass over KV that is where it is needed; None where that was not measured.
        draft_token: to draft a token while nothing else goes on; None for plain decoding.
    """

    streams: Sequence[float]
    compute: float | None
    draft_token: float | None

    @property
    def stream(self) -> float:
        """Median over runs."""
        return median(self.streams)


def middle(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return median(values) if values else None


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


def row(runs: Sequence[Run], limits: Limits) -> dict[str, Any]:
    """What several runs of one system say; times in ms, medians over rounds where nothing else is said.

    `hit_round_ms` is of rounds whose draft had been made while the pass before ran, `miss_round_ms` of those
    that had to draft anew; `lost_ms_per_round` is what the latter took longer, spread over all rounds.
    `round_over_max` is of the former, over the longer of stream and of drafting alone;
    `round_over_max_as_run` over the longer of stream and of drafting as long as it took beside the pass.
    `pass_over_bound` may be below 1: a part of its stream may have been carried before the pass began.
    `ms_per_token` and `tokens_per_round` are of the steady rounds: without the first, which nothing was
    streamed or drafted ahead of, and the last, which the end of the text cuts; `whole_ms_per_token` is of
    all.
    """
    rounds = [one for run in runs for one in steady(run.rounds)]
    hits = _after(runs, guessed=True)
    misses = _after(runs, guessed=False)
    hit_ms, miss_ms = middle([one.ms for one in hits]), middle([one.ms for one in misses])
    lost = sum(one.ms - hit_ms for one in misses) if hit_ms is not None else 0.0
    guesses = [one for run in runs for one in run.rounds if one.guessed is not None]
    uses = [link_use(on_lane(run.spans, "pass")[WARM_UP_ROUNDS:], run.copies) for run in runs]
    drafted = [run for run in runs if any(one.proposed for one in run.rounds)]
    overlaps = [overlap(run.spans, run.copies) for run in drafted]
    full = max((one.proposed for one in rounds), default=0)
    whole = [
        (one, stream)
        for run, stream in zip(runs, limits.streams, strict=True)
        for one in _after([run], guessed=True)
        if one.proposed == full
    ]
    draft = full * (limits.draft_token or 0.0)
    pass_ms = median(one.pass_ms for one in rounds)
    return {
        "ms_per_token": report.spread([steady_ms_per_token(run) for run in runs]),
        "whole_ms_per_token": report.spread([run.ms / len(run.tokens) for run in runs]),
        "tokens_per_round": sum(one.accepted + 1 for one in rounds) / len(rounds),
        "acceptance": acceptance([one for run in runs for one in run.rounds]),
        "rounds": sum(len(run.rounds) for run in runs),
        "guesses": len(guesses),
        "outcome_hit_rate": sum(one.guessed is True for one in guesses) / len(guesses) if guesses else None,
        "round_ms": median(one.ms for one in rounds),
        "pass_ms": pass_ms,
        "draft_ms": median(one.draft_ms for one in rounds),
        "ahead_ms": median(one.ahead_ms for one in rounds),
        "verdict_ms": median(one.verdict_ms for one in rounds),
        "hit_round_ms": hit_ms,
        "miss_round_ms": miss_ms,
        "lost_ms_per_round": lost / len(rounds) if misses and hit_ms is not None else None,
        "stream_ms": limits.stream,
        "compute_ms": limits.compute,
        "draft_alone_ms": None if limits.draft_token is None else draft,
        "link_use": middle([use for use in uses if use is not None]),
        "overlap": middle([share for share in overlaps if share is not None]),
        "pass_over_bound": middle(
            [
                one.pass_ms / bound
                for run, stream in zip(runs, limits.streams, strict=True)
                for one in steady(run.rounds)
                if (bound := max(stream, limits.compute or 0.0))
            ]
        ),
        "round_over_max": middle([one.ms / max(stream, draft) for one, stream in whole]),
        "round_over_max_as_run": middle(
            [one.ms / max(stream, one.draft_ms + one.ahead_ms) for one, stream in whole]
        ),
        "wait_ms_per_round": sum(run.wait_ms for run in runs) / sum(len(run.rounds) for run in runs),
        "bytes_to_device_per_round": sum(run.bytes_to_device for run in runs)
        / sum(len(run.rounds) for run in runs),
    }


def steady_ms_per_token(run: Run) -> float:
    """From the begin of the second round to that of the last one."""
    if len(run.rounds) <= WARM_UP_ROUNDS + 1:
        return run.ms / len(run.tokens)
    rounds = steady(run.rounds)
    tokens = sum(one.accepted + 1 for one in rounds)
    return 1e3 * (run.rounds[-1].started - rounds[0].started) / tokens


def steady(rounds: Sequence[RoundTimes]) -> Sequence[RoundTimes]:
    """Without the first rounds, and without the last, which is cut short by the end of the text."""
    return rounds[WARM_UP_ROUNDS:-1] if len(rounds) > WARM_UP_ROUNDS + 1 else rounds[-1:]


def _after(runs: Sequence[Run], *, guessed: bool) -> list[RoundTimes]:
    """Rounds whose predecessor's verdict had (not) been drafted for; the last of a run is left out."""
    return [
        one
        for run in runs
        for before, one in zip(run.rounds, run.rounds[1:-1], strict=False)
        if before.guessed is guessed
    ]


def times_as_fast(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """How many times as fast as another row: the median over turns, in which the machine was the same."""
    pairs = zip(one["ms_per_token"]["runs"], other["ms_per_token"]["runs"], strict=True)
    return float(median(other_ms / ms for ms, other_ms in pairs))
