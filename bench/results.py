"""Result files: JSON lines, and beside them a page of tables and a summary."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench import COMMANDS, machine
from bench.arguments import say
from offload_rt.errors import UsageError
from offload_rt.system.files import check_writable, write_json, write_whole
from offload_rt.system.installation import install_extra

Row = dict[str, Any]
"""A row of a table, or a record; the values are JSON."""

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 2
PAGE, PICTURE, SUMMARY = ".md", ".png", ".summary.json"


class Results:
    """A file of JSON lines, one for each part of a command.

    Each part is written, printed and put on the page as soon as it is measured. A part that the file holds
    with the same settings is not measured again, so that an interrupted command continues where it ended.

    Args:
        settings: describe all parts. A part in the file counts only if it has the same ones.
        note: what readers of the tables need to know.
        overview: makes a table of all records, for the top of the page.

    Raises:
        UsageError: the files cannot be written, `--out` names a file of another kind, or matplotlib is
            missing.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        device: torch.device,
        settings: Row,
        note: str,
        overview: Callable[[list[Row]], str] = lambda records: "",
    ) -> None:
        self.command: str = arguments.command
        self._overview, self._described = overview, machine.describe(device)
        self.path = destination(arguments.out, f"{self.command}-{machine.slug(self._described)}.jsonl")
        self._settings = json.loads(json.dumps({"benchmark": self.command, "schema": SCHEMA} | settings))
        self._envelope = envelope(arguments, self._described)
        self._before = read_lines("--out", self.path) if self.path.exists() else []
        title, described = COMMANDS[self.command][1], self._described
        self._head = [f"# {title[0].upper()}{title[1:]}", f"`{self._envelope['command']}`", note]
        stated = (f"{name.replace('_', ' ')} {in_words(value)}" for name, value in settings.items() if value)
        self._head.append(
            f"{described['processor']}, {described['threads']} threads, {described['memory_gib']} GiB, torch "
            f"{described['torch']}, {self._envelope['date'][:10]}. {'; '.join(stated)}."
        )
        self._sections: list[str] = []
        self.records: list[Row] = []

    def earlier(self, key: Row) -> Row | None:
        """The newest part with this `key` and the same settings in the file, unless all its rows failed."""
        fields = (self._settings | key).items()
        for record in reversed(self._before):
            if all(record.get(name) == value for name, value in fields):
                failed = all(isinstance(row.get("error"), str) for row in record["rows"])
                return None if failed else record
        return None

    def record(self, key: Row, measure: Callable[[], Row], section: Callable[[Row], str]) -> Row:
        """Measures the part `key`, unless the file holds it, and writes and prints its `section`."""
        record = self.earlier(key)
        if record is None:
            record = self._envelope | self._settings | key | measure()
            self._before.append(record)
            write_whole(self.path, "".join(json.dumps(part) + "\n" for part in self._before))
        else:
            say(f"{in_words(tuple(key.values()))}: as measured at {record['date']}, in {self.path}")
        self.records.append(record)
        self._sections.append(section(record))
        print(self._sections[-1], end="\n\n", flush=True)
        page = [*self._head, self._overview(self.records), *self._sections]
        write_whole(self.path.with_suffix(PAGE), "\n\n".join(filter(None, page)) + "\n")
        return record

    def finish(self, summary: Row) -> None:
        """Writes the summary and prints it: the last line on stdout."""
        if overview := self._overview(self.records):
            print(overview, end="\n\n")
        write_json("--out", self.path.with_suffix(SUMMARY), summary)
        say(f"results: {self.path}, and the same name with {PAGE} and {SUMMARY}")
        print(json.dumps(summary))


def destination(path: Path | None, name: str) -> Path:
    """Returns where the results go, having checked that they can be written there.

    Args:
        path: as the user gave it; None: a file `name` in `bench/results`.

    Raises:
        UsageError: they cannot.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = path or RESULTS / name
    if path.suffix in (PAGE, PICTURE):
        raise UsageError(f"--out {path}: the page or the picture goes there; name it .jsonl")
    for suffix in (path.suffix, PAGE, PICTURE, SUMMARY):
        check_writable("--out", path.with_suffix(suffix))
    return path


def envelope(arguments: argparse.Namespace, described: Mapping[str, Any]) -> Row:
    """Returns when a result was measured, by which command and where, without paths of the machine."""
    words = [Path(word).name if "/" in word else word for word in arguments.words]
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": now, "command": " ".join(["python -m bench", *words]), "machine": dict(described)}


def read_lines(option: str, path: Path) -> list[Row]:
    """Reads records. A last line that was not written to its end is left out.

    Raises:
        UsageError: there is no such file, or a line is no record; names the `option` that gave the path.
    """
    records = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} {path}: cannot be read ({error})") from None
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            whole = record["schema"] == SCHEMA and isinstance(record["rows"], list)
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise UsageError(f"{option} {path}: line {number} is no benchmark result; use another file")
        records.append(record)
    return records


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Formats rows with the same keys as Markdown: the first column to the left, the others to the right."""
    if not rows:
        return "Nothing here can be measured with these models."
    header = [name.replace("_", " ") for name in rows[0]]
    cells = [header, *([cell(value) for value in row.values()] for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"| {' | '.join(text.rjust(w) if at else text.ljust(w) for at, (text, w) in enumerate(pairs))} |"
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def cell(value: object) -> str:
    """Formats a value for a table; a dash for None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or not isinstance(value, float):
        return "–" if value is None else str(value)
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.{3 if abs(value) < 1 else 2}f}"


def in_words(value: object) -> str:
    """Formats a setting for a sentence."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {item}" for key, item in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(in_words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def spread(values: Sequence[float]) -> Row:
    """Median, extremes and all values of several runs."""
    return {"median": median(values), "min": min(values), "max": max(values), "runs": list(values)}


def pyplot() -> Any:
    """Returns `matplotlib.pyplot`, which draws into files.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UsageError(f"a timeline needs matplotlib: {install_extra('bench')}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
