"""A picture of some consecutive rounds: one lane a resource, drawn from what was recorded."""

from __future__ import annotations

from pathlib import Path

from bench import report
from bench.offload.measure import Measured
from bench.offload.rows import Interval, busy, on_lane
from bench.offload.text import Run

ROUNDS = 4
DRAFTING = "draft (device)"
COLOURS = ("#4878a8", "#78a8c8", "#c85848", "#58a868", "#a878b8")


def lanes(run: Run) -> dict[str, list[Interval]]:
    """When each resource worked."""
    return {
        "link to device": busy(run.copies),
        "link to host": busy(run.copies, to_host=True),
        "pass (device)": on_lane(run.spans, "pass"),
        DRAFTING: on_lane(run.spans, "draft"),
        "CPU attention": on_lane(run.spans, "cpu"),
    }


def window(run: Run, rounds: int = ROUNDS) -> Interval:
    """From the begin to the end of consecutive rounds in the middle of a run: of those that were drafted
    ahead, if there are."""
    times = run.rounds
    count = min(rounds, len(times))
    best = max(
        range(len(times) - count + 1),
        key=lambda at: (sum(one.guessed is True for one in times[at : at + count]), at > 0, -at),
    )
    last = times[best + count - 1]
    return times[best].started, last.started + last.ms / 1e3


def draw(shown: Measured, model: str, path: Path) -> None:
    """Writes the picture of a system's run of median duration as PNG; beginnings of rounds are dashed."""
    pyplot = report.pyplot()
    run = sorted(shown.runs, key=lambda run: run.ms)[len(shown.runs) // 2]
    start, end = window(run)
    figure, axes = pyplot.subplots(figsize=(12, 3.6), layout="constrained")
    named = lanes(run)
    for place, (lane, colour) in enumerate(zip(named, COLOURS, strict=True)):
        bars = [
            (1e3 * (max(a, start) - start), 1e3 * (min(b, end) - max(a, start)))
            for a, b in named[lane]
            if a < end and b > start
        ]
        # Edges part one draft from the next; a short copy would be all edge.
        edge = "white" if lane == DRAFTING else colour
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=colour, edgecolors=edge, linewidth=0.5)
    for one in run.rounds:
        if start <= one.started <= end:
            axes.axvline(1e3 * (one.started - start), color="black", linestyle="--", linewidth=0.8)
    axes.set_yticks(range(len(named)), list(named))
    axes.set_ylim(len(named) - 0.5, -0.5)
    axes.set_xlim(0, 1e3 * (end - start))
    axes.set_xlabel("ms; dashed: a round begins")
    row = shown.row
    axes.set_title(
        f"{model}, {report.tokens_name(row['context'])} tokens over a link of "
        f"{row['rate_bytes_per_second'] / 1e9:.2f} GB/s, {row['gamma']} drafted a round, {row['system']}, "
        f"{row['resident_tokens']:,} tokens resident, {row['cpu_tokens']:,} attended by the CPU: "
        f"{row['ms_per_token']['median']:.1f} ms a token",
        fontsize="medium",
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
