"""How a study is declared, run and written down: as JSON, as a page of tables, and as plots.

A study has sizes, which are the arguments of its command, and parts. A part is a function that measures rows,
flat dicts with the same keys; the first line of its docstring is the title of its table, and the rest is what
a reader of the table has to know.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from bench import inputs, machine, report
from bench.inputs import PAGE, PICTURE
from offload_rt.files import write_whole

Row = dict[str, Any]


def size(
    whole: Any,
    about: str = "",
    parse: Callable[[str], object] | None = None,
    *flags: str,
    quick: object = None,
    metavar: str = "N",
) -> Any:
    """A field of a study's sizes.

    Args:
        whole, quick: its value, and that with `--quick` where it is another one.
        parse: of the argument that sets it, if there is one.
        flags: other names of the argument.
    """
    given = {"type": parse, "metavar": metavar, "help": f"{about} (default: {_said(whole)})"}
    known = {"quick": whole if quick is None else quick, "flags": flags, "given": given if parse else None}
    return field(default=whole, metadata=known)


@dataclass(frozen=True)
class Bars:
    """A plot: horizontal bars, a group for each row.

    Attributes:
        labels: columns that name a row.
        columns: what the legend calls each of the others.
    """

    title: str
    labels: Sequence[str]
    columns: Mapping[str, str]

    def draw(self, place: Any, rows: Sequence[Row]) -> None:
        height = 0.8 / len(self.columns)
        for number, (column, name) in enumerate(self.columns.items()):
            at = [-row - number * height for row in range(len(rows))]
            place.barh(at, [row[column] or 0.0 for row in rows], height, label=name)
        names = [", ".join(str(row[label]) for label in self.labels) for row in rows]
        place.set_yticks([-row for row in range(len(rows))], names, fontsize="small")
        place.set_title(self.title)
        place.legend(fontsize="small")
        place.grid(alpha=0.3)


@dataclass(frozen=True)
class Part:
    """A table: what measures its rows, and its plot, where a picture says more."""

    measure: Callable[[Any], list[Row]]
    plot: Bars | None = None

    def section(self, rows: Sequence[Row]) -> str:
        """Title, text and table as Markdown."""
        title, _, about = (inspect.getdoc(self.measure) or "").partition("\n")
        return f"## {title.rstrip('.')}\n\n{' '.join(about.split())}\n\n{table(rows)}"


@dataclass(frozen=True)
class Study:
    """A command that measures one part after the other.

    Attributes:
        name: of the command.
        about: what it measures, in a line.
        note: what a reader of all its tables has to know.
        sizes: a dataclass whose fields are declared by `size`.
        add_arguments: adds those arguments that are no sizes, `--out` among them.
        opened: what the parts measure, by arguments and sizes; has a `device`, and `settings` to tell.
    """

    name: str
    about: str
    note: str
    sizes: Callable[..., Any]
    add_arguments: Callable[[argparse.ArgumentParser], object]
    opened: Callable[[argparse.Namespace, Any], Any]
    parts: Mapping[str, Part]

    def add_parser(self, commands: Any) -> None:
        """Declares the command."""
        parser = inputs.command(commands, self.name, self.run, self.about)
        self.add_arguments(parser)
        for one in fields(self.sizes()):
            if given := one.metadata.get("given"):
                parser.add_argument(*one.metadata["flags"], f"--{one.name.replace('_', '-')}", **given)
        every = tuple(self.parts)
        parser.add_argument("--parts", type=inputs.names(every), default=every, metavar="A,B")
        parser.add_argument("--quick", action="store_true", help="less of everything")
        parser.add_argument("--no-plot", action="store_true")

    def run(self, arguments: argparse.Namespace) -> None:
        """Measures, writes JSON, page and plots, and prints the tables."""
        if not arguments.no_plot:
            report.pyplot()  # or refuses
        declared = self.sizes()
        if arguments.quick:
            declared = self.sizes(
                **{one.name: one.metadata["quick"] for one in fields(declared) if one.metadata}
            )
        sizes = inputs.fitted(declared, arguments)
        subject = self.opened(arguments, sizes)
        described = machine.describe(subject.device)
        path = inputs.destination(arguments.out, self.name, described)
        found = report.envelope(self.name, arguments, described) | subject.settings | {"case": asdict(sizes)}
        for name in arguments.parts:
            found[name] = self.parts[name].measure(subject)
            report.write_json(path, found)  # each part as it is done: all of them may take an hour
        sections = [self.parts[name].section(found[name]) for name in arguments.parts]
        page = [f"# {self.about[0].upper()}{self.about[1:]}", f"`{found['command']}`"]
        page += [_what(found, subject.settings | found["case"]), " ".join(self.note.split())]
        plots = [(part.plot, found[name]) for name, part in self.parts.items() if name in found and part.plot]
        if plots and not arguments.no_plot:
            page.append(_draw(plots, path.with_suffix(PICTURE)))
        write_whole(path.with_suffix(PAGE), "\n\n".join([*page, *sections]) + "\n")
        report.finish(path, found, sections, found)


def table(rows: Sequence[Row]) -> str:
    """Rows with the same keys as Markdown; a dash where there is nothing."""
    cells = [[_cell(value) for value in row.values()] for row in rows]
    return report.table([name.replace("_", " ") for name in rows[0]], cells)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or not isinstance(value, float):
        return "–" if value is None else str(value)
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else report.number(value, 3 if abs(value) < 10 else 2)


def _said(value: object) -> str:
    """In a sentence."""
    if isinstance(value, tuple | list):
        return ", ".join(map(_said, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _what(found: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """What was measured, and on what."""
    said = [f"{name.replace('_', ' ')} {_said(value)}" for name, value in settings.items()]
    described = found["machine"]
    where = f"{described['processor']}, {described['threads']} threads, torch {described['torch']}"
    return f"{'; '.join(said)}. {where}, {found['date'][:10]}."


def _draw(plots: Sequence[tuple[Bars, Sequence[Row]]], path: Path) -> str:
    """The plots as one picture; its Markdown."""
    pyplot = report.pyplot()
    across = min(3, len(plots))
    figure, axes = pyplot.subplots(-(-len(plots) // across), across, squeeze=False, layout="constrained")
    figure.set_size_inches(7 * axes.shape[1], 5 * axes.shape[0])
    for place in axes.flat[len(plots) :]:
        place.set_axis_off()
    for place, (bars, rows) in zip(axes.flat, plots, strict=False):
        bars.draw(place, rows)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return f"![plots]({path.name})"
