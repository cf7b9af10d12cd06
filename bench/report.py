"""How results are written and read: JSON, markdown tables, plots."""

from __future__ import annotations

import argparse
import datetime
import json
import resource
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from offload_rt import files
from offload_rt.errors import UsageError

Row = dict[str, Any]
"""Of a table, or of a result; the values are JSON."""


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Writes the file as a whole or not at all."""
    files.write_json("--out", path, report, indent=1)


def envelope(benchmark: str, arguments: argparse.Namespace, described: Mapping[str, Any]) -> dict[str, Any]:
    """What every result begins with: what was run, when and on which machine, without paths of it."""
    words = [Path(word).name if "/" in word else word for word in arguments.words]
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m bench", *words]),
        "machine": described,
    }


def finish(path: Path, result: dict[str, Any], tables: Iterable[str], last: object) -> None:
    """Writes a result, prints its tables and, as the last line, what programs read."""
    result["host_peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write_json(path, result)
    for one in tables:
        print(one, end="\n\n")
    print(json.dumps(last))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [
        [cell.rjust(w) if at else cell.ljust(w) for at, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in cells
    ]
    lines = [f"| {' | '.join(row)} |" for row in aligned]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Of several runs of one thing."""
    return {"median": median(values), "min": min(values), "max": max(values), "runs": list(values)}


def tokens_name(tokens: int) -> str:
    """4096 as 4K."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


REFERENCES = "transformers:static", "ours:plain"
"""Whose time a token is the measure: the fastest that transformers has for long texts, and our own."""


def number(value: float | None, digits: int = 2) -> str:
    """A cell; a dash where there is nothing."""
    return "–" if value is None else f"{value:.{digits}f}"


def pyplot() -> Any:
    """What draws plots into files.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UsageError("plots need matplotlib: pip install 'offload-rt[bench]', or use --no-plot") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


SCHEMA = 2
SETTINGS = "benchmark", "model", "draft", "dtype", "temperature", "link_gb_s", "new_tokens", "prompt"
"""What is equal in records that measured the same."""


def read_lines(option: str, path: Path) -> list[dict[str, Any]]:
    """Records of side-by-side runs, one a line. A last line that was not written to its end is left out.

    Raises:
        UsageError: there is no such file, or a line is none.
    """
    records = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} {path}: cannot be read ({error})") from None
    for number, line in enumerate(lines[:-1], 1):
        try:
            one = json.loads(line)
            kinds = one["schema"], type(one["context"]), type(one["prompt"])
            whole = kinds == (SCHEMA, int, str)
            whole &= all("error" in row or "ms_per_token" in row for row in one["rows"])
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            said = f"line {number} is no result of a side-by-side run; use another file"
            raise UsageError(f"{option} {path}: {said}")
        records.append(one)
    return records


def batch(record: Mapping[str, Any]) -> int:
    """Texts that were continued together; records of earlier versions know of one only."""
    count: int = record.get("batch", 1)
    return count


def sizes(context: int, batch: int) -> str:
    """Of a prompt."""
    each = f"{tokens_name(context)} tokens"
    return f"{batch} texts of {each}" if batch > 1 else each


def page(records: Sequence[dict[str, Any]]) -> str:
    """Records of one case as markdown: what was run on, and a table for each context and place."""
    first = records[0]
    described = first["machine"]
    told = [f"{first['model']}, {first['dtype']}", f"{first['new_tokens']} tokens a run"]
    told += [f"{first['turns']} turns", f"text: {', '.join(first['texts'])}"]
    told += [f"temperature {first['temperature']:g}"] if first["temperature"] else []
    told += [f"KV behind an emulated link of {first['link_gb_s']:g} GB/s"] if first["link_gb_s"] else []
    told += [f"{first['gpu_memory_gib']:g} GiB of the GPU"] if first["gpu_memory_gib"] else []
    told += ["random weights: for timing only"] if first["model"].startswith("random:") else []
    head = (
        f"{described['processor']}, {described['threads']} threads, {described['memory_gib']} GiB, torch "
        f"{described['torch']}, transformers {described['transformers']}. {'; '.join(told)}."
    )
    return "\n\n".join([head, *_best(records), *(_point(record) for record in records)])


def _best(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table for each context at which there are several batches."""
    for context in dict.fromkeys(record["context"] for record in records):
        times = defaultdict[str, dict[int, float]](dict)  # ms a token by system and batch
        for record in (one for one in records if one["context"] == context):
            for row in (one for one in record["rows"] if "error" not in one):
                times[row["system"]][batch(record)] = row["ms_per_token"]["median"]
        least = {system: min(found.values()) for system, found in times.items()}
        references = [least.get(system) for system in REFERENCES]
        cells = [
            [system, min(found, key=found.__getitem__), number(ms), number(found.get(1) and found[1] / ms)]
            + [number(other and other / ms) for other in references]
            for ms, system, found in sorted((least[system], system, found) for system, found in times.items())
        ]
        if any(len(found) > 1 for found in times.values()):
            header = ["system", "its best batch", "ms a token", "× alone", "× StaticCache", "× our plain"]
            said = "References at their own best batch; ms a token of all texts together."
            yield f"## Texts of {tokens_name(context)} tokens\n\n{said}\n\n{table(header, cells)}"


def _point(record: dict[str, Any]) -> str:
    """One context at one place: the fastest system first, or in their order where rounds are looked into."""
    rows = [row for row in record["rows"] if "error" not in row]
    if not record["place"]:
        rows.sort(key=lambda row: row["ms_per_token"]["median"])
    cells = [_rounds(row, record) if record["place"] else _times(row, record) for row in rows]
    absent = "\n".join(f"- {row['system']}: {row['error']}" for row in record["rows"] if "error" in row)
    title = ", ".join(filter(None, [sizes(record["context"], batch(record)), record["place"]]))
    what, rate = "What a plain pass reads", f"{record['read_rate_gb_s']:.0f} GB/s of memory"
    if record["link_rate_gb_s"]:
        rate = f"{record['link_rate_gb_s']:.3g} GB/s of the link"
        what = "Carrying all KV once" if record["place"] else what  # a share of it may lie elsewhere
    bound = f"{what} takes {record['bound_ms']:.1f} ms at the {rate}."
    of_rows = table(list(cells[0]), [list(row.values()) for row in cells]) if cells else ""
    return "\n\n".join(filter(None, [f"## {title}", bound, of_rows, absent]))


def _times(row: dict[str, Any], record: dict[str, Any]) -> dict[str, str]:
    """Cells of a system beside others."""
    times = {one["system"]: one["ms_per_token"]["median"] for one in record["rows"] if "error" not in one}
    spread, yielded, slow, plain = row["ms_per_token"], row["tokens_per_round"], *map(times.get, REFERENCES)
    taken = spread["median"]
    cells = {
        "system": "; ".join([row["label"], *row["notes"]]),
        "× StaticCache": number(slow and slow / taken),
        "× our plain": number(plain and plain / taken),
        "ms a token": number(taken),
        "least": number(spread["min"]),
        "most": number(spread["max"]),
        "tokens a pass": number(yielded),
        "accepted": ", ".join(f"{share:.0%}" for share in row["accepted"].values()) or "–",
        "of bound": f"{record['bound_ms'] / yielded / taken:.0%}" if yielded and taken else "–",
        "prefill s": number(row["prefill_ms"] / 1e3, 1),
        "tokens": _agreement(row, batch(record)),
        "peak GiB": number(row["peak_bytes"] / 2**30, 1),
    }
    return cells | ({"answered": f"{row['answered']:.0%}"} if record["needles"] else {})


def _rounds(row: dict[str, Any], record: dict[str, Any]) -> dict[str, str]:
    """Cells of a system whose rounds were looked into."""
    found = {"ms_per_token": row["ms_per_token"]["median"]} | row.get("rounds", {})  # none of a peer
    told = {name: number(found.get(key), digits) for name, (key, digits) in ROUNDS.items()}
    tokens = _agreement(row, batch(record))
    return {"system": "; ".join([row["label"], *row["notes"]])} | told | {"tokens": tokens}


ROUNDS = {
    "ms a token": ("ms_per_token", 2),
    "tokens a round": ("tokens_per_round", 2),
    "pass": ("pass_ms", 1),
    "draft": ("draft_ms", 1),
    "ahead": ("ahead_ms", 1),
    "round": ("round_ms", 1),
    "hits": ("hits", 2),
    "link use": ("link_use", 2),
    "pass/bound": ("pass_over_bound", 2),
    "round/max": ("round_over_max", 2),
    "× plain": ("times_plain", 2),
    "predicted/measured": ("predicted_over_measured", 2),
}
"""Columns: keys of the `rounds` of a row, and digits."""


def _agreement(row: dict[str, Any], texts: int) -> str:
    if row["synthetic"] is not None:
        return "held"
    if "first_difference" not in row:
        return "drawn"
    if not row["steady"]:
        return "vary from run to run"
    if row["first_difference"] is None:
        return "equal"
    gap = f", gap {row['logit_gap']:.1e}" if "logit_gap" in row else ""
    if texts == 1:
        return f"differ at {row['first_difference']}{gap}"
    text, at = divmod(row["first_difference"], len(row["tokens"]) // texts)
    return f"text {text + 1} differs at {at}"


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a second over context or batch, ms a token by system at the last one, and what ours goes to."""
    plots = pyplot()
    by_batch = len({record["context"] for record in records}) == 1 and any(batch(one) > 1 for one in records)
    places = [batch(record) if by_batch else record["context"] for record in records]
    figure, (rates, times, parts) = plots.subplots(1, 3, figsize=(22, 6), layout="constrained")
    names = list(dict.fromkeys(row["system"] for record in records for row in record["rows"]))
    rates.set_prop_cycle(color=[plots.get_cmap("tab20")(number) for number in range(20)])
    for name in names:
        found = [
            (place, 1e3 / row["ms_per_token"]["median"])
            for place, record in zip(places, records, strict=True)
            for row in record["rows"]
            if row["system"] == name and "error" not in row
        ]
        if found:
            rates.plot(*zip(*found, strict=True), "o-" if name.startswith("ours") else "s--", label=name)
    over = "texts together" if by_batch else "context, tokens"
    rates.set(xscale="log", yscale="log", xlabel=over, ylabel="tokens a second (median)")
    rates.set_xticks(places, [str(n) if by_batch else tokens_name(n) for n in places])
    rates.minorticks_off()
    rates.grid(alpha=0.3)
    rates.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    last = [row for row in records[-1]["rows"] if "error" not in row]
    last.sort(key=lambda row: -row["ms_per_token"]["median"])
    medians = [row["ms_per_token"]["median"] for row in last]
    colours = ["tab:green" if row["system"].startswith("ours") else "tab:gray" for row in last]
    bars = times.barh([row["system"] for row in last], medians, color=colours)
    times.bar_label(bars, [f"{value:.1f}" for value in medians], padding=3)
    bound = records[-1]["bound_ms"] / batch(records[-1])
    times.axvline(bound, linestyle=":", color="black", label="bound of a plain pass")
    at = sizes(records[-1]["context"], batch(records[-1]))
    times.set(xscale="log", xlabel=f"ms a token at {at}")
    times.margins(x=0.15)
    times.legend(fontsize="small", loc="lower right")
    ours = [row for row in last if row["parts_ms"]]
    done = [0.0] * len(ours)
    for part in dict.fromkeys(part for row in ours for part in row["parts_ms"]):
        widths = [row["parts_ms"].get(part, 0.0) for row in ours]
        parts.barh([row["system"] for row in ours], widths, left=done, label=part)
        done = [start + width for start, width in zip(done, widths, strict=True)]
    parts.set(xlabel="ms a token, by level (levels run beside each other over a link)")
    if ours:
        parts.legend(fontsize="small")
    described = records[0]["machine"]
    title = f"{records[0]['model']}, {records[0]['dtype']}, {described['processor']}"
    figure.suptitle(f"{title}, {described['threads']} threads")
    figure.savefig(path, dpi=110)
    plots.close(figure)
