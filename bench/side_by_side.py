"""`python -m bench peers | speedup | link`: the declared cases, ours beside other systems.

All systems have the same weights, token ids and machine, and their own best settings. They go on from the
end of the same prompt, in turn, greedily unless a temperature is given, and none stops at an end token. A
time a token is the median over turns. Prefill and decoding are timed apart; prompts are read in chunks of
one size. Ratios are over transformers with its static cache, the fastest that it has for long texts. Tokens
are compared with the first system's; a gap is by how much its logit of its own token is higher where they
first differ. What a plain pass reads is KV and weights, in memory, or KV over an emulated link; a system's
share of that time counts the tokens that its passes yield. Systems of one program share a process, and with
it the prefill and the peak of memory.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from offload_rt.commands.generate import add_overrides
from offload_rt.config import config_names, load_config
from offload_rt.devices import cache_folder
from offload_rt.errors import UsageError
from offload_rt.files import check_writable, write_whole
from offload_rt.loading import check_same_tokens, choose_device, load_tokenizer
from offload_rt.planning.shapes import find_shape

CHUNK = 2048
QUICK_TOKENS = 32
NEEDLES = 9  # passages, from the beginning of the prompt to its end; the one in the middle is asked for
PAGE, PICTURE = ".md", ".png"


def add_parser(commands: Any) -> None:
    """Declares a command for each case."""
    for case in CASES:
        parser = inputs.command(commands, case.name, partial(run, case), case.about)
        parser.add_argument("--model", metavar="FOLDER", help="target (default: the demo pair)")
        parser.add_argument("--draft", metavar="FOLDER|none", help="small model that drafts")
        parser.add_argument(
            "--text", type=Path, action="append", metavar="FILE", help="UTF-8; may be repeated"
        )
        parser.add_argument("--needles", action="store_true", help="ask for a passage in the prompt's middle")
        add_overrides(parser, "sets a configuration key of ours")
        parser.add_argument("--systems", type=inputs.several(_system), metavar="A,B", help="adapter:system")
        parser.add_argument("--contexts", type=inputs.counts(2), metavar="N,N")
        parser.add_argument("-n", "--new-tokens", type=inputs.count(2), metavar="N")
        parser.add_argument("--turns", type=inputs.count(1), metavar="N")
        parser.add_argument("--temperature", type=inputs.number(), default=0.0, metavar="T")
        parser.add_argument("--link", type=inputs.number(), dest="link_gb_s", metavar="GB/s")
        parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
        parser.add_argument("--device", default="auto", metavar="cpu|cuda")
        parser.add_argument("--quick", action="store_true", help="short prompts, fewer tokens")
        parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines; what it holds is kept")
        parser.add_argument("--plot", action=argparse.BooleanOptionalAction, default=True, help="a PNG")


def _system(text: str) -> str:
    known = adapters()
    if text.partition(":")[0] not in known or ":" not in text:
        raise argparse.ArgumentTypeError(f"{text}: write adapter:system; adapters are {', '.join(known)}")
    return text


def run(declared: Case, arguments: argparse.Namespace) -> None:
    """Measures context after context, appends each to the file, and writes the page and the plot."""
    if arguments.plot:
        report.pyplot()  # or refuses
    if arguments.quick:
        declared = dataclasses.replace(declared, contexts=declared.quick_contexts, new_tokens=QUICK_TOKENS)
    case = inputs.fitted(declared, arguments)
    overrides = dict(arguments.overrides)
    _check_configs(case.systems, overrides)
    model, draft = _folders(arguments)
    device = _device(arguments.device, case.link_gb_s)
    prompts, answers, texts = _prompts(arguments, model, case.contexts)
    described = machine.describe(device)
    out = _destination(arguments.out or inputs.RESULTS / f"{case.name}-{machine.slug(described)}.jsonl")
    settings = _settings(case, arguments, described, texts)
    held = _held(out, settings, prompts)
    for context, one in held.items():
        say(f"{context} tokens: as measured at {one['date']}, in {out}")
    left = {context: prompt for context, prompt in prompts.items() if context not in held}
    shape = find_shape(model, getattr(torch, arguments.dtype))
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
        link_gb_s=case.link_gb_s,
        options=overrides,
    )
    sizes = shape.token_bytes, shape.weight_bytes
    job = Job(setup, case.systems, left, case.new_tokens, case.turns, answers, *sizes)
    rate = machine.read_rate(device) if left else 0.0  # while nothing else is in memory
    for context, rows in run_job(job, say):
        kv_bytes = context * shape.token_bytes
        in_memory = 1e3 * (kv_bytes + shape.step_bytes) / (1e9 * rate)
        held[context] = report.envelope(case.name, arguments, described) | settings
        held[context] |= {
            "context": context,
            "prompt": _digest(prompts[context]),
            "load_average": described["load_average"],
            "read_rate_gb_s": rate,
            "bound_ms": 1e3 * kv_bytes / (1e9 * case.link_gb_s) if case.link_gb_s else in_memory,
            "rows": rows,
        }
        _append(out, held[context])
    records = [held[context] for context in case.contexts]
    page = report.page(records)
    measured = " ".join((__doc__ or "").partition("\n\n")[2].split())
    title = f"# {case.about[0].upper()}{case.about[1:]}"
    text = f"{title}\n\n`python -m bench {case.name}`. {measured}\n\n{page}\n"
    write_whole(out.with_suffix(PAGE), text)
    if arguments.plot:
        report.plot(records, out.with_suffix(PICTURE))
    print(page)
    print(json.dumps(records))


def _settings(
    case: Case, arguments: argparse.Namespace, described: Mapping[str, Any], texts: Sequence[str]
) -> dict[str, Any]:
    """What figures of one kind have in common."""
    sources = inputs.sources(arguments)
    model, draft = (None if one is None else inputs.model_name(one) for one in sources)
    return {
        "benchmark": case.name,
        "schema": report.SCHEMA,
        "machine": {key: value for key, value in described.items() if key != "load_average"},
        "model": model,
        "draft": draft,
        "checkpoints": [_fingerprint(Path(one)) for one in sources if one is not None],
        "texts": texts,
        "dtype": arguments.dtype,
        "needles": arguments.needles,
        "temperature": arguments.temperature,
        "link_gb_s": case.link_gb_s,
        "new_tokens": case.new_tokens,
        "turns": case.turns,
        "systems": case.systems,
        "overrides": {key: str(value) for key, value in arguments.overrides},
    }


def _destination(out: Path) -> Path:
    if out.suffix in (PAGE, PICTURE):
        raise UsageError(f"--out {out}: is where the page or the plot goes; name it .jsonl")
    for suffix in (out.suffix, PAGE, PICTURE):
        check_writable("--out", out.with_suffix(suffix))
    return out


def _check_configs(systems: Sequence[str], overrides: Mapping[str, object]) -> None:
    """Refuses what is wrong with systems of ours before anything is read."""
    for name in systems:
        adapter, _, config = name.partition(":")
        if adapter == "ours":
            if config not in config_names():
                raise UsageError(f"--systems {name}: no such config; there are {', '.join(config_names())}")
            load_config(config, overrides)


def _folders(arguments: argparse.Namespace) -> tuple[Path, Path | None]:
    """Of target and draft, which have to be there and to have the same tokens."""
    model, draft = (None if one is None else Path(one).resolve() for one in inputs.sources(arguments))
    assert model is not None
    if draft is not None:
        check_same_tokens(load_tokenizer(model), str(model), load_tokenizer(draft), str(draft))
    return model, draft


def _device(name: str, link_gb_s: float) -> torch.device:
    if not link_gb_s:
        return choose_device(name)
    if name not in ("auto", "cpu"):
        raise UsageError(f"--device {name}: an emulated link is a processor's; leave out --link")
    return torch.device("cpu")


def _fingerprint(folder: Path) -> str:
    """Of a checkpoint, by its config and the sizes of its files."""
    sizes = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
    return _digest([(folder / "config.json").read_text(), sizes])


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
    names, tokens = inputs.read_tokens(arguments.text, tokenizer)
    if contexts[-1] > len(tokens):
        raise UsageError(f"--contexts {contexts[-1]}: the text has {len(tokens)} tokens; use a longer --text")
    if not arguments.needles:
        return {context: tokens[:context] for context in contexts}, {}, names
    prompts, answers = {}, {}
    alphabet = sorted(set(tokens))
    for context in contexts:
        generator = torch.Generator().manual_seed(0)
        try:
            prompt, passages = needles.plant(tokens, context - needles.CUE, NEEDLES, 1, alphabet, generator)
        except ValueError as error:
            raise UsageError(f"--contexts {context}: {error}; use a longer one") from None
        passage = passages[NEEDLES // 2]
        prompts[context] = prompt + passage[: needles.CUE]
        answers[context] = passage[needles.CUE :]
    return prompts, answers, names


def _digest(values: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()[:16]


def _append(path: Path, record: Mapping[str, Any]) -> None:
    """A line more; what an earlier run did not write to its end is dropped."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    write_whole(path, f"{text[: text.rfind(chr(10)) + 1]}{json.dumps(record)}\n")


def _held(
    path: Path, settings: Mapping[str, Any], prompts: Mapping[int, Sequence[int]]
) -> dict[int, dict[str, Any]]:
    """What an earlier run of the same kind has left, by context."""
    held = {}
    for one in report.read_lines("--out", path) if path.exists() else ():
        same = all(one.get(key) == json.loads(json.dumps(value)) for key, value in settings.items())
        context = one["context"]
        if same and context in prompts and one["prompt"] == _digest(prompts[context]):
            held[context] = one
    return held
