"""Figures of the rounds of a continuation, their lower bounds, and a timeline of some rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import cases
from bench.results import Row, pyplot
from cpu_kv.link import CopyRecord
from offload_rt.engine.controller import RoundTimes
from offload_rt.errors import UsageError
from offload_rt.system.timeline import Span

PLAIN = "ours:plain"
NOTHING_AHEAD = "offload.ahead=0"
RATIO = "predicted_over_measured"
BESIDE_A_PASS = 1.3  # time of a draft beside a pass, over its time alone: both work on the same cores
DRAWN_ROUNDS = 4
WARM_UP_ROUNDS = 1  # of a run, not reported: nothing was streamed or drafted ahead of them

Interval = tuple[float, float]
"""Begin and end, in seconds."""


@dataclass(frozen=True)
class Recorded:
    """The rounds of a continuation, and where they were recorded, its spans and copies."""

    rounds: Sequence[RoundTimes]
    spans: Sequence[Span]
    copies: Sequence[CopyRecord]


def figures(run: Recorded) -> dict[str, float]:
    """Figures of the steady rounds, where they exist: times in ms, medians over rounds unless said otherwise.

    - `ms_per_token`: from the begin of the second round to that of the last one.
    - `tokens_per_round`, `acceptance`: means; `drafted`: the most of a round.
    - `draft_token_ms`: a mean, of drafts without a pass beside them.
    - `guessed_round_ms`: of rounds whose whole draft was made during the pass before.
    - `hits`: share of verdicts that were guessed, among those that something was drafted for.
    - `link_use`: see there.
    """
    rounds = steady(run.rounds)
    whole = len(rounds) == len(run.rounds)
    begin, end = interval(run.rounds) if whole else (rounds[0].started, run.rounds[-1].started)
    tokens, proposed = sum(round.accepted + 1 for round in rounds), sum(round.proposed for round in rounds)
    drafted = max(round.proposed for round in rounds)
    late = proposed and not any(round.ahead_ms for round in run.rounds)
    guesses = [round.guessed for round in run.rounds if round.guessed is not None]
    pairs = zip(run.rounds, run.rounds[1:-1], strict=False)
    guessed = [round.ms for before, round in pairs if before.guessed and round.proposed == drafted]
    values = {
        "ms_per_token": 1e3 * (end - begin) / tokens,
        "tokens_per_round": tokens / len(rounds),
        "acceptance": acceptance(run.rounds),
        "drafted": drafted,
        "round_ms": median(round.ms for round in rounds),
        "pass_ms": median(round.pass_ms for round in rounds),
        "draft_ms": median(round.draft_ms for round in rounds),
        "ahead_ms": median(round.ahead_ms for round in rounds),
        "verdict_ms": median(round.verdict_ms for round in rounds),
        "draft_token_ms": sum(round.draft_ms for round in rounds) / proposed if late else None,
        "guessed_round_ms": median(guessed) if guessed else None,
        "hits": sum(guesses) / len(guesses) if guesses else None,
        "link_use": link_use(run),
    }
    return {name: value for name, value in values.items() if value is not None}


def interval(rounds: Sequence[RoundTimes]) -> Interval:
    """From the begin of the first round to the end of the last one."""
    return rounds[0].started, rounds[-1].started + rounds[-1].ms / 1e3


def steady(rounds: Sequence[RoundTimes]) -> Sequence[RoundTimes]:
    """The rounds but the first, and the last one, which the end of the continuation cuts short."""
    return rounds[WARM_UP_ROUNDS:-1] if len(rounds) > WARM_UP_ROUNDS + 1 else rounds


def acceptance(rounds: Sequence[RoundTimes]) -> float | None:
    """Share of drafted tokens that were accepted, among those whose predecessors were; None without drafts.

    This is the planner's acceptance: tokens behind a rejected one are not judged.
    """
    accepted = sum(round.accepted for round in rounds)
    judged = accepted + sum(round.accepted < round.proposed for round in rounds)
    return accepted / judged if judged else None


def busy(copies: Iterable[CopyRecord], *, to_host: bool = False) -> list[Interval]:
    """Intervals, in order and apart from each other, in which a direction of the link carried something."""
    joined: list[Interval] = []
    for start, end in sorted((copy.start, copy.end) for copy in copies if copy.to_host == to_host):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Total seconds of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def on_lane(run: Recorded, lane: str) -> list[Interval]:
    """Intervals in which something ran on a lane of the timeline."""
    return [(span.start, span.end) for span in run.spans if span.lane == lane]


def link_use(run: Recorded) -> float | None:
    """Share of a pass in which the link was busy, the median over passes but the first.

    A pass counts from its first copy to its last, those that begin the next pass's stream included.
    """
    carried = busy(run.copies)
    shares = []
    for start, end in on_lane(run, "pass")[WARM_UP_ROUNDS:]:
        within = [(max(a, start), min(b, end)) for a, b in carried if a < end and b > start]
        if within:
            shares.append(length(within) / (within[-1][1] - start))
    return median(shares) if shares else None


def summarise(rows: Sequence[Row], stream_token_ms: float) -> None:
    """Adds `rounds` to the rows with figures of their rounds: medians over turns, and ratios to bounds.

    `times_plain` and `ahead_speedup` are the speed-ups over plain decoding and over no drafting ahead:
    medians over turns, within which the machine was the same. `round_over_max` is the time of guessed rounds
    over the longer of carrying the KV once and drafting alone.

    Args:
        stream_token_ms: time in which the link carries the KV of a token; 0 without a link.
    """
    rows = [row for row in rows if row.get("figures")]
    for row in rows:
        names = dict.fromkeys(name for turn in row["figures"] for name in turn)
        row["rounds"] = {
            name: median(turn[name] for turn in row["figures"] if name in turn) for name in names
        }
    plain = alike(rows, PLAIN)
    for row in rows:
        rounds, late = row["rounds"], alike(rows, row["system"], late=True)
        if plain is not None:
            rounds["times_plain"] = _times_as_fast(row, plain)
        if late is not None and late is not row:
            rounds["ahead_speedup"] = _times_as_fast(row, late)
        if stream_token_ms:
            stream = rounds["stream_ms"] = rounds["streamed_tokens"] * stream_token_ms
            if late is not None and "guessed_round_ms" in rounds:
                draft = rounds["drafted"] * late["rounds"]["draft_token_ms"]
                rounds["round_over_max"] = rounds["guessed_round_ms"] / max(stream, draft)


def drafting_ms(in_place: Sequence[Row]) -> float:
    """Time of drafting beside a pass, from rows of systems with their KV in place.

    Raises:
        UsageError: none of them drafted.
    """
    for row in in_place:
        if "draft_token_ms" in row.get("rounds", ()):
            drafting: float = row["rounds"]["drafted"] * row["rounds"]["draft_token_ms"]
            return BESIDE_A_PASS * drafting
    raise UsageError("--systems: none of ours drafts, and the time of that tells how fast a link to pace")


def alike(rows: Sequence[Row], system: str, *, late: bool = False) -> Row | None:
    """The first row of the same system, whatever its settings over a link.

    Args:
        late: whether it must have drafted with nothing ahead.
    """
    for row in rows:
        rounds = row.get("rounds", {})
        same = cases.in_place(row["system"]) == cases.in_place(system)
        drafted = NOTHING_AHEAD in row["system"].split("+") and "draft_token_ms" in rounds
        if rounds and same and (drafted or not late):
            return row
    return None


def _times_as_fast(row: Row, reference: Row) -> float:
    turns = zip(row["figures"], reference["figures"], strict=True)
    ratios: list[float] = [turn["ms_per_token"] / turn_of_row["ms_per_token"] for turn_of_row, turn in turns]
    return median(ratios)


def worst(ratios: Sequence[float]) -> float | None:
    """The ratio that is furthest from 1, either way."""
    return max(ratios, key=lambda ratio: max(ratio, 1 / ratio), default=None)


def draw(run: Recorded, title: str, path: Path) -> None:
    """Draws rounds in the middle of a run as PNG, a lane for each resource; a dashed line begins a round."""
    plt, middle = pyplot(), max(0, (len(run.rounds) - DRAWN_ROUNDS) // 2)
    start, end = interval(run.rounds[middle : middle + DRAWN_ROUNDS])
    lanes = {
        "link to device": busy(run.copies),
        "link to host": busy(run.copies, to_host=True),
        "pass (device)": on_lane(run, "pass"),
        "draft (device)": on_lane(run, "draft"),
        "CPU attention": on_lane(run, "cpu"),
    }
    figure, axes = plt.subplots(figsize=(12, 3.6), layout="constrained")
    for place, intervals in enumerate(lanes.values()):
        bars = [(1e3 * (a - start), 1e3 * (b - a)) for a, b in intervals if a < end and b > start]
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=f"C{place}")
    for round in run.rounds:
        axes.axvline(1e3 * (round.started - start), color="black", linestyle="--", linewidth=0.8)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set(xlim=(0, 1e3 * (end - start)), xlabel="ms; dashed: a round begins")
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=120)
    plt.close(figure)
