"""`python -m bench peers | speedup | link`: the declared cases, ours beside other systems.

All systems have the same weights, token ids and machine, and their own best settings. They go on from the end
of the same prompt, in turn, greedily unless a temperature is given, and none stops at an end token. A time a
token is the median over turns. Prefill and decoding are timed apart; prompts are read in chunks of one size.
The first system is the reference: ratios are over it, and tokens are compared with its own; a gap is by how
much its logit of its own token is higher where they first differ. The bound of a plain pass is KV and weights
at the rate at which memory is read, or KV at that of an emulated link; a system's share of it counts the
tokens a pass yields.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import inputs, machine, needles, report
from bench.cases import CASES, Case
from bench.inputs import say
from bench.runner import Job
from bench.runner import run as run_job
from bench.systems import Setup
from offload_rt.config import load_config, parse_override
from offload_rt.devices import cache_folder
from offload_rt.errors import UsageError
from offload_rt.files import check_writable
from offload_rt.loading import choose_device, demo_model, load_tokenizer
from offload_rt.planning.shapes import find_shape
from offload_rt.text import encode

OURS = "ours:"
CHUNK = 2048
QUICK_TOKENS = 32
NEEDLES = 9  # passages, from the beginning of the prompt to its end; the one in the middle is asked for
SCHEMA = 2


def add_parser(commands: Any) -> None:
    """Declares a command for each case."""
    for case in CASES:
        parser = commands.add_parser(
            case.name, help=case.about, description=f"Measures {case.about}.", allow_abbrev=False
        )
        parser.add_argument("--model", type=Path, metavar="FOLDER", help="target (default: the demo pair)")
        parser.add_argument("--draft", type=Path, metavar="FOLDER", help="small model that drafts")
        parser.add_argument(
            "--text", type=Path, action="append", metavar="FILE", help="UTF-8; may be repeated"
        )
        parser.add_argument("--needles", action="store_true", help="ask for a passage in the prompt's middle")
        parser.add_argument(
            "--set",
            type=parse_override,
            action="append",
            dest="overrides",
            default=[],
            metavar="section.key=value",
            help="sets a configuration key of ours",
        )
        parser.add_argument("--systems", default=",".join(case.systems), metavar="A,B", help="adapter:system")
        parser.add_argument("--contexts", type=inputs.counts(2), metavar="N,N")
        parser.add_argument("-n", "--new-tokens", type=inputs.count(2), metavar="N")
        parser.add_argument("--turns", type=inputs.count(1), metavar="N")
        parser.add_argument("--temperature", type=_not_negative, default=0.0, metavar="T")
        parser.add_argument("--link", type=_not_negative, default=case.link_gb_s, metavar="GB/s")
        parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
        parser.add_argument("--device", default="auto", metavar="cpu|cuda")
        parser.add_argument("--quick", action="store_true", help="short prompts, fewer tokens")
        parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines; what it holds is kept")
        parser.add_argument("--plot", action=argparse.BooleanOptionalAction, default=True, help="a PNG")
        parser.set_defaults(run=partial(run, case))


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def run(declared: Case, arguments: argparse.Namespace) -> None:
    """Measures context after context, appends each to the file, and writes the page and the plot."""
    if arguments.plot:
        report.check_plots()
    case = _given(declared, arguments)
    overrides = dict(arguments.overrides)
    options = {name: overrides for name in case.systems if name.startswith(OURS)}
    for name in options:
        load_config(name.removeprefix(OURS), overrides)  # refuses what is wrong before anything is read
    if arguments.out is not None:
        check_writable("--out", arguments.out)
    model = arguments.model or demo_model("target")
    draft = arguments.draft or (None if arguments.model else demo_model("draft"))
    device = choose_device(arguments.device)
    shape = find_shape(model, getattr(torch, arguments.dtype))
    prompts, answers, texts = _prompts(arguments, model, case.contexts)
    described = machine.describe(device)
    setup = Setup(
        str(model),
        None if draft is None else str(draft),
        arguments.dtype,
        str(device),
        torch.get_num_threads(),
        capacity=0,  # that of each context
        chunk=CHUNK,
        work=str(cache_folder() / "bench"),
        temperature=arguments.temperature,
        link_gb_s=arguments.link,
    )
    envelope = {
        "benchmark": case.name,
        "schema": SCHEMA,
        "machine": {key: value for key, value in described.items() if key != "load_average"},
        "model": "demo" if arguments.model is None else model.name,
        "dtype": arguments.dtype,
        "texts": texts,
        "needles": arguments.needles,
        "temperature": arguments.temperature,
        "link_gb_s": arguments.link,
        "new_tokens": case.new_tokens,
        "turns": case.turns,
        "systems": case.systems,
        "overrides": {key: str(value) for key, value in overrides.items()},
    }
    out = arguments.out or inputs.RESULTS / f"{case.name}-{machine.slug(described)}.jsonl"
    held = _held(out, envelope, prompts)
    left = {context: prompt for context, prompt in prompts.items() if context not in held}
    job = Job(setup, case.systems, left, case.new_tokens, case.turns, options, answers, shape.token_bytes)
    for context, rows in run_job(job, say):
        rate = machine.read_rate(device)
        kv_bytes = context * shape.token_bytes
        in_memory = 1e3 * (kv_bytes + shape.weight_bytes) / (1e9 * rate)
        held[context] = envelope | {
            "context": context,
            "prompt": _digest(prompts[context]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "read_rate_gb_s": rate,
            "bound_ms": 1e3 * kv_bytes / (1e9 * arguments.link) if arguments.link else in_memory,
            "rows": rows,
        }
        with out.open("a") as lines:
            lines.write(json.dumps(held[context]) + "\n")
    records = [held[context] for context in case.contexts]
    page = report.page(records)
    measured = " ".join((__doc__ or "").partition("\n\n")[2].split())
    title = f"# {case.about[0].upper()}{case.about[1:]}"
    out.with_suffix(".md").write_text(f"{title}\n\n`python -m bench {case.name}`. {measured}\n\n{page}\n")
    if arguments.plot:
        report.plot(records, out.with_suffix(".png"))
    print(page)
    print(json.dumps(records))


def _given(case: Case, arguments: argparse.Namespace) -> Case:
    """The case with what the command line says."""
    contexts = arguments.contexts or (case.quick_contexts if arguments.quick else case.contexts)
    new_tokens = arguments.new_tokens or (QUICK_TOKENS if arguments.quick else case.new_tokens)
    systems, known = tuple(arguments.systems.split(",")), adapters()
    for name in systems:
        if name.partition(":")[0] not in known or ":" not in name:
            raise UsageError(f"--systems {name}: write adapter:system; adapters are {', '.join(known)}")
    turns = arguments.turns or case.turns
    return dataclasses.replace(case, systems=systems, contexts=contexts, new_tokens=new_tokens, turns=turns)


def adapters() -> list[str]:
    """Their names."""
    return sorted(path.stem for path in (Path(__file__).parent / "systems").glob("[a-z]*.py"))


def _prompts(
    arguments: argparse.Namespace, model: Path, contexts: Sequence[int]
) -> tuple[dict[int, list[int]], dict[int, list[int]], list[str]]:
    """By context, the prompt and what answers it (nothing without needles); and the texts' names."""
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise UsageError(f"--model {model}: has no tokenizer to read a text with")
    texts = inputs.read_texts(arguments.text) if arguments.text else [inputs.demo_text()]
    tokens = encode(tokenizer, "\n".join(text.text for text in texts))
    if contexts[-1] > len(tokens):
        raise UsageError(f"--contexts {contexts[-1]}: the text has {len(tokens)} tokens; use a longer --text")
    names = [text.name for text in texts]
    if not arguments.needles:
        return {context: tokens[:context] for context in contexts}, {}, names
    prompts, answers = {}, {}
    alphabet = sorted(set(tokens))
    for context in contexts:
        generator = torch.Generator().manual_seed(0)
        try:
            planted = needles.plant(tokens, context - needles.CUE, NEEDLES, 1, alphabet, generator)
        except ValueError as error:
            raise UsageError(f"--contexts {context}: {error}; use a longer one") from None
        passage = planted.passages[NEEDLES // 2][0]
        prompts[context] = planted.tokens + passage[: needles.CUE]
        answers[context] = passage[needles.CUE :]
    return prompts, answers, names


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()[:16]


def _held(
    path: Path, envelope: Mapping[str, Any], prompts: Mapping[int, Sequence[int]]
) -> dict[int, dict[str, Any]]:
    """What an earlier run of the same kind has left, by context."""
    held = {}
    for one in report.read_lines("--out", path) if path.exists() else ():
        same = all(one.get(key) == json.loads(json.dumps(value)) for key, value in envelope.items())
        context = int(one["context"])
        if same and context in prompts and one["prompt"] == _digest(prompts[context]):
            held[context] = one
    return held
