"""Studies: commands that measure one table after the other."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from bench import arguments as args
from bench.arguments import say
from bench.results import Results, Row, table


def elapsed_ms(work: Callable[[], object]) -> float:
    """Returns the time that `work` takes."""
    started = perf_counter()
    work()
    return 1e3 * (perf_counter() - started)


@dataclass(frozen=True)
class Part:
    """A table of a study.

    Attributes:
        measure: yields rows with the same keys, given what the study opened. The first line of its docstring
            is the title of the table, and the rest is printed below it.
    """

    measure: Callable[[Any], Iterable[Row]]

    @property
    def title(self) -> str:
        return (inspect.getdoc(self.measure) or "").partition("\n")[0].rstrip(".")

    def section(self, record: Row) -> str:
        about = (inspect.getdoc(self.measure) or "").partition("\n")[2].split()
        return "\n\n".join(filter(None, [f"## {self.title}", " ".join(about), table(record["rows"])]))


@dataclass(frozen=True)
class Study:
    """A command that measures one part after the other.

    Attributes:
        note: what readers of all tables need to know.
        sizes: a dataclass; arguments of the same names replace its values.
        quick: values of it with `--quick`.
        minutes: that the study takes on two cores, at full size and with `--quick`.
        opened: opens what the parts measure, given arguments and sizes; the result has a `device` and
            `settings`.
        parts: by name.
    """

    note: str
    sizes: Any
    quick: Mapping[str, Any]
    minutes: tuple[int, int]
    opened: Callable[[argparse.Namespace, Any], Any]
    parts: Mapping[str, Part]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds `--parts` and the arguments for output."""
        names = tuple(self.parts)
        about = f"of {', '.join(names)} (default: all)"
        kind = args.listed(args.one_of(names))
        parser.add_argument("--parts", type=kind, default=names, metavar="A,B", help=about)
        args.add_output(parser, self.quick)

    def run(self, arguments: argparse.Namespace) -> None:
        """Measures all parts that are asked for."""
        sizes = replace(self.sizes, **args.fitted(arguments, self.sizes, self.quick))
        subject = self.opened(arguments, sizes)
        settings, note = subject.settings | vars(sizes), " ".join(self.note.split())
        results = Results(arguments, subject.device, settings, note)
        minutes = self.minutes[arguments.quick]
        say(f"all parts take about {minutes} min on 2 cores; what is done when you end this early is kept")
        started, parts = perf_counter(), {name: self.parts[name] for name in arguments.parts}
        for number, (name, part) in enumerate(parts.items(), 1):
            say(f"part {number} of {len(parts)}: {name}; {(perf_counter() - started) / 60:.1f} min so far")
            results.record({"part": name}, partial(self._measured, part, subject), part.section)
        results.finish({one["part"]: one["rows"] for one in results.records})

    def _measured(self, part: Part, subject: Any) -> Row:
        """All rows of a part; an interrupt prints those that there are."""
        rows: list[Row] = []
        try:
            for row in part.measure(subject):
                rows.append(row)
        except KeyboardInterrupt:
            if rows:
                print(f"{part.section({'rows': rows})}\n\n(interrupted; these rows are not kept)", flush=True)
            raise
        return {"rows": rows}
