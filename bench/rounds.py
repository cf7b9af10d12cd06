"""What the rounds of a continuation say of the engine, what they are held against, and a picture of some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import cases, report
from bench.report import Row
from cpu_kv.link import CopyRecord
from offload_rt.engine.controller import RoundTimes
from offload_rt.errors import UsageError
from offload_rt.timeline import Span

PLAIN = "ours:plain"
AHEAD_OF_NOTHING = "offload.ahead=0"
RATIO = "predicted_over_measured"
NEAR_TIE = 1e-3  # of two logits: closer than what rounding may do to them
BESIDE_A_PASS = 1.3  # times what a draft takes alone: the pass works on the same cores
DRAWN_ROUNDS = 4
DRAFTING = "draft (device)"
COLOURS = ("#4878a8", "#78a8c8", "#c85848", "#58a868", "#a878b8")
WARM_UP_ROUNDS = 1  # at the beginning of a run, not reported: nothing was streamed or drafted ahead of it

Interval = tuple[float, float]
"""Begin and end, in seconds."""


@dataclass(frozen=True)
class Recorded:
    """The rounds of a continuation; `spans` and `copies` tell what ran when, where that was recorded."""

    rounds: Sequence[RoundTimes]
    spans: Sequence[Span]
    copies: Sequence[CopyRecord]


def figures(run: Recorded) -> dict[str, float]:
    """Of the steady rounds, what there is: times in ms, medians over rounds where nothing else is said.

    - `ms_per_token`: from the begin of the second round to that of the last one.
    - `tokens_per_round`, `acceptance`: means; `drafted`: the most of a round.
    - `draft_token_ms`: a mean, of drafts that no pass ran beside.
    - `guessed_round_ms`: of rounds whose draft, a whole one, had been made while the pass before ran.
    - `hits`: of the verdicts that something was drafted for, those that were guessed.
    - `link_use`: what the link carried within a pass, over what it could have.
    """
    rounds = steady(run.rounds)
    whole = len(rounds) == len(run.rounds)
    begin, end = interval(run.rounds) if whole else (rounds[0].started, run.rounds[-1].started)
    tokens, proposed = sum(one.accepted + 1 for one in rounds), sum(one.proposed for one in rounds)
    drafted = max(one.proposed for one in rounds)
    late = proposed and not any(one.ahead_ms for one in run.rounds)
    guesses = [one.guessed for one in run.rounds if one.guessed is not None]
    pairs = zip(run.rounds, run.rounds[1:-1], strict=False)
    guessed = [one.ms for before, one in pairs if before.guessed and one.proposed == drafted]
    found = {
        "ms_per_token": 1e3 * (end - begin) / tokens,
        "tokens_per_round": tokens / len(rounds),
        "acceptance": acceptance(run.rounds),
        "drafted": drafted,
        "round_ms": median(one.ms for one in rounds),
        "pass_ms": median(one.pass_ms for one in rounds),
        "draft_ms": median(one.draft_ms for one in rounds),
        "ahead_ms": median(one.ahead_ms for one in rounds),
        "verdict_ms": median(one.verdict_ms for one in rounds),
        "draft_token_ms": sum(one.draft_ms for one in rounds) / proposed if late else None,
        "guessed_round_ms": median(guessed) if guessed else None,
        "hits": sum(guesses) / len(guesses) if guesses else None,
        "link_use": link_use(run),
    }
    return {name: value for name, value in found.items() if value is not None}


def interval(rounds: Sequence[RoundTimes]) -> Interval:
    """From the begin of the first round to the end of the last one."""
    return rounds[0].started, rounds[-1].started + rounds[-1].ms / 1e3


def steady(rounds: Sequence[RoundTimes]) -> Sequence[RoundTimes]:
    """Without the first rounds, and without the last, which is cut short by the end of the text."""
    return rounds[WARM_UP_ROUNDS:-1] if len(rounds) > WARM_UP_ROUNDS + 1 else rounds


def acceptance(rounds: Sequence[RoundTimes]) -> float | None:
    """Share of drafted tokens that stood, of those whose predecessors did; None without drafts.

    That is what the planner means by acceptance: a token behind a rejected one was never judged.
    """
    stood = sum(one.accepted for one in rounds)
    judged = stood + sum(one.accepted < one.proposed for one in rounds)
    return stood / judged if judged else None


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


def on_lane(run: Recorded, lane: str) -> list[Interval]:
    """When something ran on a lane of the timeline."""
    return [(span.start, span.end) for span in run.spans if span.lane == lane]


def link_use(run: Recorded) -> float | None:
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
    return median(shares) if shares else None


def summarise(rows: Sequence[Row], stream_token_ms: float, in_place: Sequence[Row]) -> None:
    """Adds `rounds` to the rows whose rounds were looked into: medians over turns, and over their bounds.

    `times_plain` and `ahead_speedup` are how many times as fast as plain decoding and as without drafting
    ahead: medians over turns, in which the machine was the same. `round_over_max` is of guessed rounds, over
    the longer of carrying the KV once and drafting alone. `pass_over_bound`, over the longer of the stream
    and of the pass with its KV in place, may be below 1: the begin of a stream is carried before its pass.

    Args:
        stream_token_ms: for the link to carry the KV of a token; 0 without a link.
        in_place: rows of the same systems with the KV in place; none where that is not to be had.
    """
    rows = [row for row in rows if row.get("figures")]
    for row in rows:
        names = dict.fromkeys(name for turn in row["figures"] for name in turn)
        row["rounds"] = {
            name: median(turn[name] for turn in row["figures"] if name in turn) for name in names
        }
    for row in rows:
        found, system = row["rounds"], row["system"]
        plain = alike(rows, PLAIN)
        late = alike(rows, system, late=True)
        if plain is not None:
            found["times_plain"] = _times_as_fast(row, plain)
        if late is not None and late is not row:
            found["ahead_speedup"] = _times_as_fast(row, late)
        if stream_token_ms:
            stream = found["stream_ms"] = found["streamed_tokens"] * stream_token_ms
            alone = alike(in_place, system)
            bound = max(stream, alone["rounds"]["pass_ms"] if alone else 0.0)
            found["pass_over_bound"] = found["pass_ms"] / bound if bound else None
            if late is not None and "guessed_round_ms" in found:
                draft = found["drafted"] * late["rounds"]["draft_token_ms"]
                found["round_over_max"] = found["guessed_round_ms"] / max(stream, draft)


def drafting_ms(in_place: Sequence[Row]) -> float:
    """What drafting beside a pass takes, by rows of systems with their KV in place.

    Raises:
        UsageError: none of them drafted.
    """
    for row in in_place:
        if "draft_token_ms" in row.get("rounds", ()):
            drafting: float = row["rounds"]["drafted"] * row["rounds"]["draft_token_ms"]
            return BESIDE_A_PASS * drafting
    raise UsageError("--systems: none has drafted with its KV in place, which tells how fast a link to pace")


def alike(rows: Sequence[Row], system: str | None = None, *, late: bool = False) -> Row | None:
    """The first row of the same system, whatever holds over a link; `late`: that drafted, nothing ahead."""
    for row in rows:
        found = row.get("rounds", {})
        same = system is None or cases.in_place(row["system"]) == cases.in_place(system)
        drafted = AHEAD_OF_NOTHING in row["system"].split("+") and "draft_token_ms" in found
        if found and same and (drafted or not late):
            return row
    return None


def check_tokens(rows: Sequence[Row], in_place: Sequence[Row], where: str) -> None:
    """Holds greedy tokens of ours against those of plain decoding with the KV in place, where it was run.

    Raises:
        UsageError: they are others, and not for two logits that are as good as equal.
    """
    plain = alike(in_place, PLAIN)
    for row in rows:
        if plain is None or "rounds" not in row or "first_difference" not in row:
            continue  # nothing to hold it against; or a peer's, drawn, or held by coins
        both = enumerate(zip(row["tokens"], plain["tokens"], strict=True))
        first = next((at for at, (token, other) in both if token != other), None)
        near = row["first_difference"] == first and row.get("logit_gap", NEAR_TIE) < NEAR_TIE
        if not row["steady"] or (first is not None and not near):
            raise UsageError(
                f"{row['system']}, {where}: its tokens are not those of plain decoding in place: a fault of "
                "the engine, or two logits closer than rounding; try another text"
            )


def _times_as_fast(row: Row, other: Row) -> float:
    turns = zip(row["figures"], other["figures"], strict=True)
    ratios: list[float] = [turn["ms_per_token"] / one["ms_per_token"] for one, turn in turns]
    return median(ratios)


def headline(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the first link: plain decoding, which comes first, and the last system; the worst of all ratios."""
    record = next((one for one in records if one["link_rate_gb_s"]), records[0])
    plain, ours = (record["rows"][at].get("rounds", {}) for at in (0, -1))
    told = [row.get("rounds", {}) for one in records for row in one["rows"]]
    keys = ("round_over_max", "link_use", "ahead_speedup", "ms_per_token")
    return {key: ours.get(key) for key in keys} | {
        "outcome_hit_rate": ours.get("hits"),
        "ratio_over_plain": ours.get("times_plain"),
        "pass_over_bound": plain.get("pass_over_bound"),
        "predicted_over_measured": worst([one[RATIO] for one in told if RATIO in one]),
        "synthetic": record["rows"][-1]["synthetic"],
    }


def worst(ratios: Sequence[float]) -> float | None:
    """The ratio that is furthest from 1, either way."""
    return max(ratios, key=lambda ratio: max(ratio, 1 / ratio), default=None)


def lanes(run: Recorded) -> dict[str, list[Interval]]:
    """When each resource worked."""
    return {
        "link to device": busy(run.copies),
        "link to host": busy(run.copies, to_host=True),
        "pass (device)": on_lane(run, "pass"),
        DRAFTING: on_lane(run, "draft"),
        "CPU attention": on_lane(run, "cpu"),
    }


def window(run: Recorded, count: int = DRAWN_ROUNDS) -> Interval:
    """Of consecutive rounds in the middle of a run: of those that were drafted ahead, if there are."""
    windows = [run.rounds[at : at + count] for at in range(max(1, len(run.rounds) - count + 1))]
    # `max` keeps the first of equals, and the first round was drafted ahead of by nobody.
    return interval(max(windows[1:] or windows, key=lambda rounds: sum(bool(one.guessed) for one in rounds)))


def draw(run: Recorded, title: str, path: Path) -> None:
    """Writes a picture of some consecutive rounds as PNG, a lane for each resource; beginnings are dashed."""
    pyplot = report.pyplot()
    start, end = window(run)
    figure, axes = pyplot.subplots(figsize=(12, 3.6), layout="constrained")
    named = lanes(run)
    for place, (lane, colour) in enumerate(zip(named, COLOURS, strict=True)):
        bars = [(1e3 * (a - start), 1e3 * (b - a)) for a, b in named[lane] if a < end and b > start]
        # Edges part one draft from the next; a short copy would be all edge.
        edge = "white" if lane == DRAFTING else colour
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=colour, edgecolors=edge, linewidth=0.5)
    for one in run.rounds:
        axes.axvline(1e3 * (one.started - start), color="black", linestyle="--", linewidth=0.8)
    axes.set_yticks(range(len(named)), list(named))
    axes.set_ylim(len(named) - 0.5, -0.5)
    axes.set_xlim(0, 1e3 * (end - start))
    axes.set_xlabel("ms; dashed: a round begins")
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
