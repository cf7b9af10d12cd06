"""How results are written: JSON, a markdown table, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from offload_rt import files
from offload_rt.errors import UsageError


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Writes the file as a whole or not at all."""
    files.write_json("--out", path, report, indent=1)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    lines = [
        "| "
        + " | ".join(
            c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Of several runs of one thing."""
    return {"median": median(values), "min": min(values), "max": max(values), "runs": list(values)}


def tokens_name(tokens: int) -> str:
    """4096 as 4K."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def number(value: float | None, digits: int = 2) -> str:
    """A cell; a dash where there is nothing."""
    return "–" if value is None else f"{value:.{digits}f}"


def check_plots() -> None:
    """Raises UsageError where plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("plots need matplotlib: pip install 'offload-rt[bench]', or use --no-plot") from None


def plot_speedup(report: dict[str, Any], path: Path) -> None:
    """Time a token and ratio over transformers' plain decoding, by context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = report["contexts"]
    contexts = [case["context"] for case in cases]
    names = [system["system"] for system in cases[0]["systems"]]
    figure, (times, ratios) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for index, name in enumerate(names):
        systems = [case["systems"][index] for case in cases]
        style = "o-" if name.startswith("ours") else "s--"
        times.plot(contexts, [s["ms_per_token"]["median"] for s in systems], style, label=name)
        ratios.plot(contexts, [s["over_transformers_plain"] for s in systems], style, label=name)
    bounds = [case["pass_bound_ms"] for case in cases]
    times.plot(contexts, bounds, "k:", label="bound of a plain step: its bytes at the read rate")
    times.set_ylabel("decode, ms a token (median)")
    ratios.set_ylabel("times as fast as transformers plain")
    for axes in (times, ratios):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(contexts, [tokens_name(n) for n in contexts])
        axes.set_xlabel("context, tokens")
        axes.grid(alpha=0.3)
    times.legend(fontsize="small")
    machine = report["machine"]
    figure.suptitle(
        f"{report['model']}, {report['dtype']}, {machine['processor']}, {machine['threads']} threads"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
