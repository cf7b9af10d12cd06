"""Studies: commands that measure one table after the other."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch

from bench import arguments as args
from bench.arguments import say
from bench.results import Results, Row, table
from offload_rt.machine.measuring import CPU

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Returns the seconds that `work` takes, and its result."""
    started = perf_counter()
    result = work()
    return perf_counter() - started, result


def elapsed_ms(work: Callable[[], object]) -> float:
    """Returns the milliseconds that `work` takes."""
    return 1e3 * timed(work)[0]


@dataclass(frozen=True)
class Subject:
    """What the parts of a study measure on the CPU.

    Attributes:
        settings: that a result states.
        sizes: of the study.
    """

    settings: Row
    sizes: Any
    device: torch.device = field(default=CPU, kw_only=True)


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
        options: adds arguments of the study's own.
    """

    note: str
    sizes: Any
    quick: Mapping[str, Any]
    minutes: tuple[int, int]
    opened: Callable[[argparse.Namespace, Any], Any]
    parts: Mapping[str, Part]
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None

    def add_arguments(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Adds the arguments of the command."""
        self.options(parser)
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
        results.finish({record["part"]: record["rows"] for record in results.records})

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
