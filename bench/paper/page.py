"""The papers' tables as a page and as plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.paper.runs import Measure, Row

Draw = Callable[[Any, Sequence[Row]], None]
"""Draws rows into a place of a figure."""


@dataclass(frozen=True)
class Part:
    """A table: what it shows, in words, what measures it, and its plot, where a picture says more."""

    title: str
    about: str
    measure: Measure
    draw: Draw | None = None


def table(rows: Sequence[Row]) -> str:
    """Rows with the same keys as Markdown; a dash where there is nothing."""
    return report.table(
        [name.replace("_", " ") for name in rows[0]],
        [[_cell(value) for value in row.values()] for row in rows],
    )


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, float):
        return report.number(value, 3 if value is not None and abs(value) < 1 else 2)
    return str(value)


def page(found: Mapping[str, Any], parts: Mapping[str, Part], plotted: Path | None) -> str:
    """The whole result as Markdown."""
    described = found["machine"]
    lines = [
        "# The papers' tables",
        f"`{found['command']}`",
        f"{found['model']}, {', '.join(found['text'])}, {found['context']} tokens; {found['seeds']} texts of "
        f"{found['new_tokens']} tokens a row, T = {found['temperature']:g}; KV behind an emulated link of "
        f"{found['link_gb_s']:g} GB/s, but where it says in place. {described['processor']}, "
        f"{described['threads']} threads, torch {described['torch']}, {found['date'][:10]}. Columns `paper` "
        "are the papers' own figures, of other models on other machines.",
    ]
    if plotted is not None:
        lines.append(f"![plots]({plotted.name})")
    for name, part in parts.items():
        lines += [f"## {part.title}", part.about, table(found[name])]
    return "\n\n".join(lines) + "\n"


def plot(found: Mapping[str, Any], parts: Mapping[str, Part], path: Path) -> None:
    """A plot of each part that has one."""
    plots = report.pyplot()
    drawn = [(part.draw, found[name]) for name, part in parts.items() if part.draw is not None]
    if not drawn:
        return
    figure, axes = plots.subplots(
        -(-len(drawn) // 3), min(3, len(drawn)), squeeze=False, layout="constrained"
    )
    figure.set_size_inches(7 * axes.shape[1], 5 * axes.shape[0])
    for place, (draw, rows) in zip(axes.flat, drawn, strict=False):
        draw(place, rows)
        place.grid(alpha=0.3)
    for place in axes.flat[len(drawn) :]:
        place.set_axis_off()
    figure.savefig(path, dpi=90)
    plots.close(figure)


def bars(title: str, label: str, **columns: str) -> Draw:
    """Horizontal bars, a group for each row.

    Args:
        label: column that names the rows.
        columns: what the legend calls each of the others.
    """

    def draw(place: Any, rows: Sequence[Row]) -> None:
        height = 0.8 / len(columns)
        for number, (column, name) in enumerate(columns.items()):
            at = [-row - number * height for row in range(len(rows))]
            place.barh(at, [row[column] or 0.0 for row in rows], height, label=name)
        place.set_yticks([-row for row in range(len(rows))], [row[label] for row in rows], fontsize="small")
        place.set_title(title)
        place.legend(fontsize="small")

    return draw


def depths(place: Any, rows: Sequence[Row]) -> None:
    """Speed by γ1, and by γ2."""
    half = len(rows) // 2
    for name, part in (("γ1 (γ2 = 6)", rows[:half]), ("γ2 (γ1 = 2)", rows[half:])):
        place.plot(range(1, len(part) + 1), [row["over_plain"] for row in part], "o-", label=name)
        place.plot(range(1, len(part) + 1), [row["paper"] for row in part], "x:", label=f"{name}, paper")
    place.set(title="times as fast as plain, by depth of drafts", xlabel="tokens drafted")
    place.legend(fontsize="small")


def sizes(place: Any, rows: Sequence[Row]) -> None:
    """Tokens a pass by size."""
    labels = [row["variant"].partition(":")[0] for row in rows]
    place.plot(labels, [row["tokens_per_pass"] for row in rows], "o-")
    place.set(title="tokens a pass, by size of the retrieved cache", ylim=(0, None))


def ceiling(place: Any, rows: Sequence[Row]) -> None:
    """Theory and measurement by context."""
    contexts = [report.tokens_name(row["context"]) for row in rows]
    for name in ("ceiling", "expected", "measured"):
        place.plot(contexts, [row[name] for row in rows], "o-", label=name)
    place.set(title="times as fast as plain: theory and measurement", xlabel="context", ylim=(0, None))
    place.legend(fontsize="small")
