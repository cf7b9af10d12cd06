"""`python -m bench compare OLD NEW`: two results of one side-by-side case, told apart from noise.

The same prompts, places, settings and models are compared; at a paced place the links, too, have to be the
same, each of which was paced by what its run measured. A ratio is new over old, of the medians of ms a token.
It counts as a change where the runs of the two do not overlap: the slowest of the faster one is faster than
the fastest of the slower one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import inputs, report
from offload_rt.errors import UsageError


def add_parser(commands: Any) -> None:
    """Declares the command."""
    about = "two results of one side-by-side case, with noise taken into account"
    parser = inputs.command(commands, "compare", run, about)
    parser.add_argument("old", type=Path, metavar="OLD", help="JSON lines of a side-by-side run")
    parser.add_argument("new", type=Path, metavar="NEW")


def run(arguments: argparse.Namespace) -> None:
    """Prints the table, and as the last line its rows."""
    old, new = (_times(path) for path in (arguments.old, arguments.new))
    rows = [_compared(key, old[key], new[key]) for key in old if key in new]
    if not rows:
        said = "have no system in common at the same prompt, with the same settings"
        raise UsageError(f"{arguments.old} and {arguments.new} {said}")
    cells = [
        [row["system"], report.sizes(row["context"], row["batch"]), row["place"], *figures, row["verdict"]]
        for row in rows
        for figures in [[report.number(row[key]) for key in ("old_ms", "new_ms", "ratio")]]
    ]
    header = ["system", "prompt", "place", "old ms", "new ms", "new / old", ""]
    print(report.table(header, cells), end="\n\n")
    print(json.dumps(rows))


def _times(path: Path) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """ms a token by settings, place, sizes and system; the last of several."""
    return {
        (*_settings(record), *_point(record), row["system"]): row["ms_per_token"]
        for record in report.read_lines("result", path)
        for row in record["rows"]
        if "error" not in row
    }


def _settings(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What has to be equal. Records of earlier versions know neither places nor a limit of GPU memory."""
    paced = record.get("link_rate_gb_s") if "processor" in record else None  # a GPU's link is its machine's
    return (*map(record.get, report.SETTINGS), record.get("gpu_memory_gib", 0.0), paced)


def _point(record: Mapping[str, Any]) -> tuple[str, int, int]:
    return record.get("place", ""), report.batch(record), record["context"]


def _compared(key: Sequence[Any], old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Two spreads of ms a token."""
    found = dict(zip(("place", "batch", "context", "system"), key[-4:], strict=True))
    found |= {"old_ms": old["median"], "new_ms": new["median"]}
    verdict = "faster" if new["max"] < old["min"] else "slower" if new["min"] > old["max"] else "within noise"
    return found | {"ratio": new["median"] / old["median"], "verdict": verdict}
