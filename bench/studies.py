"""How a study is declared, run and written down: as JSON, as a page of tables, and as plots.

A study has sizes, which are the arguments of its command, and parts. A part is a function that measures rows,
flat dicts with the same keys; the first line of its docstring is the title of its table, and the rest is what
a reader of the table has to know.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import inputs, machine, report
from bench.inputs import PAGE, PICTURE
from bench.report import Row
from offload_rt.files import write_whole


@dataclass(frozen=True)
class Part:
    """A table, and its plot, where a picture says more.

    Attributes:
        measure: what yields its rows.
        labels: columns that name a row in the plot.
        plotted: columns that are drawn.
    """

    measure: Callable[[Any], list[Row]]
    labels: Sequence[str] = ()
    plotted: Sequence[str] = ()

    @property
    def title(self) -> str:
        return (inspect.getdoc(self.measure) or "").partition("\n")[0].rstrip(".")

    def section(self, rows: Sequence[Row]) -> str:
        """Title, text and table as Markdown."""
        about = (inspect.getdoc(self.measure) or "").partition("\n")[2].split()
        return f"## {self.title}\n\n{' '.join(about)}\n\n{table(rows)}"

    def draw(self, place: Any, rows: Sequence[Row]) -> None:
        """Horizontal bars, a group for each row."""
        height = 0.8 / len(self.plotted)
        for number, column in enumerate(self.plotted):
            at = [-row - number * height for row in range(len(rows))]
            place.barh(at, [row[column] or 0.0 for row in rows], height, label=column.replace("_", " "))
        names = [", ".join(str(row[label]) for label in self.labels) for row in rows]
        place.set_yticks([-row for row in range(len(rows))], names, fontsize="small")
        place.set_title(self.title)
        place.legend(fontsize="small")
        place.grid(alpha=0.3)


@dataclass(frozen=True)
class Study:
    """A command that measures one part after the other.

    Attributes:
        name: of the command.
        about: what it measures, in a line.
        note: what a reader of all its tables has to know.
        sizes: a dataclass; those of its fields that `inputs.size` declares are arguments.
        if_quick: fields of it that are others with `--quick`.
        opened: what the parts measure, by arguments and sizes; has a `device`, and `settings` to tell.
        add_arguments: adds those that say what is measured.
    """

    name: str
    about: str
    note: str
    sizes: Any
    if_quick: Mapping[str, Any]
    opened: Callable[[argparse.Namespace, Any], Any]
    parts: Mapping[str, Part]
    add_arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None

    def add_parser(self, commands: Any) -> None:
        """Declares the command."""
        parser = inputs.command(commands, self.name, self.run, self.about)
        self.add_arguments(parser)
        inputs.add_sizes(parser, self.sizes)
        every = tuple(self.parts)
        of = f"of {', '.join(every)} (default: all)"
        parser.add_argument("--parts", type=inputs.names(every), default=every, metavar="A,B", help=of)
        inputs.add_output(parser, "JSON")

    def run(self, arguments: argparse.Namespace) -> None:
        """Measures, writes JSON, page and plots, and prints the tables."""
        if arguments.plot:
            report.pyplot()  # or refuses
        sizes = inputs.fitted(self.sizes, self.if_quick, arguments)
        subject = self.opened(arguments, sizes)
        described = machine.describe(subject.device)
        today = datetime.date.today().isoformat()
        path = inputs.destination(arguments.out, f"{self.name}-{machine.slug(described)}-{today}.json")
        found = report.envelope(self.name, arguments, described) | subject.settings | {"case": asdict(sizes)}
        parts = {name: self.parts[name] for name in arguments.parts}
        for name, part in parts.items():
            found[name] = part.measure(subject)
            report.write_json(path, found)  # each part as it is done: all of them may take an hour
        sections = [part.section(found[name]) for name, part in parts.items()]
        page = [f"# {self.about[0].upper()}{self.about[1:]}", f"`{found['command']}`"]
        page += [_what(found, subject.settings | found["case"]), " ".join(self.note.split())]
        plots = [(part, found[name]) for name, part in parts.items() if part.plotted and found[name]]
        if plots and arguments.plot:
            page.append(_draw(plots, path.with_suffix(PICTURE)))
        write_whole(path.with_suffix(PAGE), "\n\n".join([*page, *sections]) + "\n")
        report.finish(path, found, sections, found)


def table(rows: Sequence[Row]) -> str:
    """Rows with the same keys as Markdown; a dash where there is nothing."""
    if not rows:
        return "Nothing here can be measured with these models."
    cells = [[_cell(value) for value in row.values()] for row in rows]
    return report.table([name.replace("_", " ") for name in rows[0]], cells)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or not isinstance(value, float):
        return "–" if value is None else str(value)
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else report.number(value, 3 if abs(value) < 10 else 2)


def _what(found: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """What was measured, and on what."""
    told = {name.replace("_", " "): value for name, value in settings.items() if not isinstance(value, tuple)}
    said = [f"{name} {inputs.said(value)}" for name, value in told.items()]
    described = found["machine"]
    where = f"{described['processor']}, {described['threads']} threads, torch {described['torch']}"
    return f"{'; '.join(said)}. {where}, {found['date'][:10]}."


def _draw(plots: Sequence[tuple[Part, Sequence[Row]]], path: Path) -> str:
    """The plots as one picture; its Markdown."""
    pyplot = report.pyplot()
    across = min(3, len(plots))
    figure, axes = pyplot.subplots(-(-len(plots) // across), across, squeeze=False, layout="constrained")
    figure.set_size_inches(7 * axes.shape[1], 5 * axes.shape[0])
    for place in axes.flat[len(plots) :]:
        place.set_axis_off()
    for place, (part, rows) in zip(axes.flat, plots, strict=False):
        part.draw(place, rows)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return f"![plots]({path.name})"
