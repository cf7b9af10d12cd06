"""A picture of some consecutive rounds: one lane a resource, drawn from what was recorded."""

from __future__ import annotations

from pathlib import Path

from bench import report
from bench.rounds import Interval, Recorded, busy, interval, on_lane

ROUNDS = 4
DRAFTING = "draft (device)"
COLOURS = ("#4878a8", "#78a8c8", "#c85848", "#58a868", "#a878b8")


def lanes(run: Recorded) -> dict[str, list[Interval]]:
    """When each resource worked."""
    return {
        "link to device": busy(run.copies),
        "link to host": busy(run.copies, to_host=True),
        "pass (device)": on_lane(run, "pass"),
        DRAFTING: on_lane(run, "draft"),
        "CPU attention": on_lane(run, "cpu"),
    }


def window(run: Recorded, count: int = ROUNDS) -> Interval:
    """Of consecutive rounds in the middle of a run: of those that were drafted ahead, if there are."""
    windows = [run.rounds[at : at + count] for at in range(max(1, len(run.rounds) - count + 1))]
    # `max` keeps the first of equals, and the first round was drafted ahead of by nobody.
    return interval(max(windows[1:] or windows, key=lambda rounds: sum(bool(one.guessed) for one in rounds)))


def draw(run: Recorded, title: str, path: Path) -> None:
    """Writes the picture as PNG; beginnings of rounds are dashed."""
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
