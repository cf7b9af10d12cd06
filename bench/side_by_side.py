"""`python -m bench peers`: ours beside other systems, on the same weights, token ids and machine.

All decode greedily from the end of the same prompt, in turn, and none stops at an end token. A time a token
is the median over turns. Prefill and decoding are timed apart; prompts are read in chunks of one size, where
a system lets one choose. The first system is the reference: ratios are over it, and tokens are compared with
its own.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import inputs, machine, report
from bench.inputs import say
from bench.runner import Case, Row
from bench.runner import run as run_case
from bench.systems import Setup
from offload_rt.devices import cache_folder
from offload_rt.errors import UsageError
from offload_rt.loading import choose_device, demo_model, load_tokenizer
from offload_rt.text import encode

SYSTEMS = (
    "transformers:dynamic",
    "transformers:static",
    "transformers:lookup",
    "transformers:assisted",
    "deepspeed:resident",
    "deepspeed:offloaded",
    "zero_style:rebuilt",
    "llamacpp:f32",
    "llamacpp:f16",
    "llamacpp:f16-flash",
    "ours:plain",
    "ours:retrieval",
    "ours:triforce",
    "ours:lookup",
)
"""What runs unless the command line says otherwise; the first one is the reference."""

QUICK = (4096,)
FULL = (4096, 32768, 131072 - 256)


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "peers",
        help="ours beside transformers, DeepSpeed-ZeRO-Inference, llama.cpp",
        description="Runs ours and other systems side by side, in turn.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="target (default: the demo pair)")
    parser.add_argument("--draft", type=Path, metavar="FOLDER", help="small model that drafts")
    parser.add_argument("--text", type=Path, action="append", metavar="FILE", help="UTF-8; may be repeated")
    parser.add_argument("--systems", default=",".join(SYSTEMS), metavar="A,B", help="adapter:system")
    parser.add_argument("--contexts", type=inputs.counts(2), metavar="N,N")
    parser.add_argument("-n", "--new-tokens", type=inputs.count(2), default=64, metavar="N")
    parser.add_argument("--turns", type=inputs.count(1), default=3, metavar="N")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="auto", metavar="cpu|cuda")
    parser.add_argument("--quick", action="store_true", help="4K only, fewer tokens")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines; what it holds is not run again")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures context after context, appends each to the file, and writes the page."""
    contexts: tuple[int, ...] = arguments.contexts or (QUICK if arguments.quick else FULL)
    new_tokens = min(arguments.new_tokens, 32) if arguments.quick else arguments.new_tokens
    systems = _systems(arguments.systems)
    model = arguments.model or demo_model("target")
    draft = arguments.draft or (None if arguments.model else demo_model("draft"))
    texts = inputs.read_texts(arguments.text) if arguments.text else [inputs.demo_text()]
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise UsageError(f"--model {model}: has no tokenizer to read a text with")
    tokens = encode(tokenizer, "\n".join(text.text for text in texts))
    if contexts[-1] > len(tokens):
        raise UsageError(f"--contexts {contexts[-1]}: the text has {len(tokens)} tokens; use a longer --text")
    device = choose_device(arguments.device)
    described = machine.describe(device)
    setup = Setup(
        str(model),
        None if draft is None else str(draft),
        arguments.dtype,
        str(device),
        torch.get_num_threads(),
        capacity=0,  # that of each context
        chunk=2048,
        work=str(cache_folder() / "bench"),
    )
    envelope = {
        "benchmark": "peers",
        "machine": {key: value for key, value in described.items() if key != "load_average"},
        "model": "demo" if arguments.model is None else model.name,
        "dtype": arguments.dtype,
        "texts": [text.name for text in texts],
        "new_tokens": new_tokens,
        "turns": arguments.turns,
        "systems": systems,
    }
    out = arguments.out or inputs.RESULTS / f"peers-{machine.slug(described)}.jsonl"
    held = _held(out, envelope, tokens)
    left = tuple(context for context in contexts if context not in held)
    case = Case(setup, systems, tokens, left, new_tokens, arguments.turns, {})
    for context, rows in zip(left, run_case(case, say), strict=True) if left else ():
        held[context] = {
            **envelope,
            "context": context,
            "prompt": _digest(tokens[:context]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "read_rate_gb_s": machine.read_rate(device),
            "rows": rows,
        }
        with out.open("a") as lines:
            lines.write(json.dumps(held[context]) + "\n")
    page = "\n\n".join(_table(held[context]["rows"], context) for context in contexts)
    out.with_suffix(".md").write_text(f"{_head(envelope)}\n\n{page}\n")
    print(page)
    print(json.dumps([held[context] for context in contexts]))


def _systems(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    folder = Path(__file__).parent / "systems"
    known = sorted(path.stem for path in folder.glob("[a-z]*.py"))
    for name in names:
        if name.partition(":")[0] not in known or ":" not in name:
            raise UsageError(f"--systems {name}: write adapter:system; adapters are {', '.join(known)}")
    return names


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:16]


def _held(path: Path, envelope: dict[str, Any], tokens: Sequence[int]) -> dict[int, dict[str, Any]]:
    """What an earlier run of the same kind has left, by context."""
    held = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
        try:
            one = json.loads(line)
            same = all(one[key] == json.loads(json.dumps(value)) for key, value in envelope.items())
            same = same and one["prompt"] == _digest(tokens[: one["context"]])
        except (ValueError, KeyError, TypeError):
            said = f"line {number} is no result of bench peers; use another file"
            raise UsageError(f"--out {path}: {said}") from None
        if same:
            held[int(one["context"])] = one
    return held


def _head(envelope: dict[str, Any]) -> str:
    described = envelope["machine"]
    return (
        f"# Side by side: {envelope['model']}, {envelope['dtype']}\n\n{' '.join((__doc__ or '').split())}\n\n"
        f"{described['processor']}, {described['threads']} threads, torch {described['torch']}, transformers "
        f"{described['transformers']}; {envelope['new_tokens']} tokens a run, {envelope['turns']} turns."
    )


def _table(rows: Sequence[Row], context: int) -> str:
    """One context as markdown, the fastest system first."""
    reference = next((row["ms_per_token"]["median"] for row in rows if "error" not in row), None)
    header = ["system", "× reference", "ms a token", "least", "most", "prefill s", "tokens", "peak GiB"]
    done = sorted((row for row in rows if "error" not in row), key=lambda row: row["ms_per_token"]["median"])
    cells = []
    for row in done:
        spread, differs = row["ms_per_token"], row["first_difference"]
        cells.append(
            [
                "; ".join([row["label"], *row["notes"]]),
                report.number(reference / spread["median"] if reference else None),
                *(report.number(spread[key]) for key in ("median", "min", "max")),
                report.number(row["prefill_ms"] / 1e3, 1),
                "equal" if differs is None else f"differ at {differs}",
                report.number(row["peak_bytes"] / 2**30, 1),
            ]
        )
    absent = [f"- {row['system']}: {row['error']}" for row in rows if "error" in row]
    title = f"## {report.tokens_name(context)} tokens"
    return "\n\n".join([title, report.table(header, cells), *(["\n".join(absent)] if absent else [])])
