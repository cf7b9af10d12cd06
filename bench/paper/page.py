"""The papers' tables as a page and as plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.paper.runs import Row


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


def page(found: Mapping[str, Any], sections: Mapping[str, tuple[str, str]], plot: Path | None) -> str:
    """The whole result as Markdown.

    Args:
        sections: title and explanation of each part, by its name.
    """
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
    if plot is not None:
        lines.append(f"![plots]({plot.name})")
    for name, (title, about) in sections.items():
        lines += [f"## {title}", about, table(found[name])]
    return "\n\n".join(lines) + "\n"


def plot(found: Mapping[str, Any], path: Path) -> None:
    """A plot of each part that a picture says more of than a table."""
    plots = report.pyplot()
    drawn = [(name, draw) for name, draw in _DRAWN.items() if name in found]
    if not drawn:
        return
    figure, axes = plots.subplots(
        -(-len(drawn) // 3), min(3, len(drawn)), squeeze=False, layout="constrained"
    )
    figure.set_size_inches(7 * axes.shape[1], 5 * axes.shape[0])
    for place, (name, draw) in zip(axes.flat, drawn, strict=False):
        draw(place, found[name])
        place.grid(alpha=0.3)
    for place in axes.flat[len(drawn) :]:
        place.set_axis_off()
    figure.savefig(path, dpi=90)
    plots.close(figure)


def _bars(place: Any, rows: Sequence[Row], label: str, values: Mapping[str, str], title: str) -> None:
    """Horizontal bars, a group for each row.

    Args:
        values: columns, by what the legend calls them.
    """
    height = 0.8 / len(values)
    for number, (name, column) in enumerate(values.items()):
        at = [-row + number * -height for row in range(len(rows))]
        place.barh(at, [row[column] or 0.0 for row in rows], height, label=name)
    place.set_yticks([-row for row in range(len(rows))], [row[label] for row in rows], fontsize="small")
    place.set_title(title)
    place.legend(fontsize="small")


def _policies(place: Any, rows: Sequence[Row]) -> None:
    _bars(place, rows, "cache", {"books": "books", "needles": "needles"}, "acceptance by what a cache holds")


def _temperatures(place: Any, rows: Sequence[Row]) -> None:
    named = {"measured, over the link": "over_plain", "paper, on chip": "paper"}
    _bars(place, rows, "variant", named, "times as fast as plain decoding")


def _gammas(place: Any, rows: Sequence[Row]) -> None:
    half = len(rows) // 2
    for name, part in (("γ1 (γ2 = 6)", rows[:half]), ("γ2 (γ1 = 2)", rows[half:])):
        place.plot(range(1, len(part) + 1), [row["over_plain"] for row in part], "o-", label=name)
        place.plot(range(1, len(part) + 1), [row["paper"] for row in part], "x:", label=f"{name}, paper")
    place.set(title="times as fast as plain, by depth of drafts", xlabel="tokens drafted")
    place.legend(fontsize="small")


def _budgets(place: Any, rows: Sequence[Row]) -> None:
    labels = [row["variant"].partition(":")[0] for row in rows]
    place.plot(labels, [row["tokens_per_pass"] for row in rows], "o-")
    place.set(title="tokens a pass, by size of the retrieved cache", ylim=(0, None))


def _sources(place: Any, rows: Sequence[Row]) -> None:
    named = {"tokens a pass": "tokens_per_pass", "times plain, over the link": "over_plain"}
    _bars(place, rows, "variant", named, "by who drafts")


def _shapes(place: Any, rows: Sequence[Row]) -> None:
    named = {"measured": "tokens_per_pass", "expected": "expected"}
    _bars(place, rows, "draft", named, "tokens a pass, by shape of the draft")


def _ceiling(place: Any, rows: Sequence[Row]) -> None:
    contexts = [report.tokens_name(row["context"]) for row in rows]
    for name in ("ceiling", "expected", "measured"):
        place.plot(contexts, [row[name] for row in rows], "o-", label=name)
    place.set(title="times as fast as plain: theory and measurement", xlabel="context", ylim=(0, None))
    place.legend(fontsize="small")


_DRAWN = {
    "policies": _policies,
    "temperatures": _temperatures,
    "gammas": _gammas,
    "budgets": _budgets,
    "sources": _sources,
    "shapes": _shapes,
    "ceiling": _ceiling,
}
