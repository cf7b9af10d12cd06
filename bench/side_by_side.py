"""`python -m bench peers | speedup | batch | link | offload`: systems that continue the same prompts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench import arguments as args
from bench import machine, prediction_accuracy, random_models, rounds, runner
from bench.arguments import say
from bench.cases import (
    CASES,
    GPU_MEMORY_GIB,
    IN_PLACE,
    Case,
    Named,
    Place,
    in_place,
    system,
    with_acceptances,
)
from bench.results import PICTURE, Results, Row, cell, in_words, table
from bench.runner import Job
from bench.systems import Setup
from cpu_kv import ElementType
from offload_rt.errors import UsageError
from offload_rt.machine.devices import choose_device
from offload_rt.model.loading import check_same_tokens, load_tokenizer
from offload_rt.model.named_shapes import find_shape
from offload_rt.system.memory import cache_folder
from offload_rt.text.tokenize import encode

ABOUT = """\
All systems have the same weights, token IDs and machine, and their own best settings. They continue the same
prompt in turn, greedily, and no end token stops them. A time per token is the median over turns, without
prefill. Tokens are compared with the first system's; a gap is how much higher its logit of its own token is
where they first differ. Ratios are over transformers with its static cache, the fastest that it has for long
prompts, and over our plain decoding. A plain pass reads KV and weights in memory, or KV over an emulated
link; `of bound` counts the tokens that a pass yields. Systems of one program share a process, and with it the
prefill and the peak of memory.
"""
ROUNDS = """\
The engine over a link, against its own plain decoding and its lower bounds. On a CPU the link is paced: it
carries the KV once in the time that drafting beside a pass takes (balanced), twice that time, or half of it,
as measured with the KV in place. Torch has one thread: pass, drafting and the link share the cores. Times are
medians in ms over the rounds but the first and the last; ratios of two systems are medians over turns.
`round/max`: rounds whose draft was made during the pass before, over the longer of carrying the KV once and
drafting alone. `link use`: what the link carried during a pass, over what it could have. `predicted`: by the
planner, from what was measured in place and from rounds that draft first and pass then.
"""
CHUNK = 2048  # tokens of a prefill that are computed at a time
ROOM = 8  # tokens behind the longest continuation
REFERENCES = {"× StaticCache": "transformers:static", "× our plain": "ours:plain"}
ROUND_COLUMNS = {
    "tokens per round": "tokens_per_round",
    "pass": "pass_ms",
    "draft": "draft_ms",
    "ahead": "ahead_ms",
    "round": "round_ms",
    "hits": "hits",
    "link use": "link_use",
    "round/max": "round_over_max",
    "× plain": "times_plain",
    "predicted/measured": "predicted_over_measured",
}


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the arguments of the case `name`."""
    case, add = CASES[name], parser.add_argument
    whole, rate = partial(args.number, int), args.number(float, 0, 1)
    args.add_models(parser, shapes=", ".join(random_models.SHAPES))
    about = "adapter:system; ours may have keys of their own: ours:retrieval+retrieval.budget=512"
    about += f" (default: {args.shown(case.systems)})"
    add("--systems", type=args.listed(system), metavar="A,B", help=about)
    about = f"prompt lengths in tokens (default: {args.shown(case.contexts)})"
    add("--contexts", type=args.listed(whole(2)), metavar="N,N", help=about)
    if not case.places[0].name:
        about = f"sequences continued together (default: {args.shown(case.batches)})"
        add("--batches", type=args.listed(whole(1)), metavar="N,N", help=about)
        about = f"bandwidth of an emulated link; 0: none (default: {case.link_gb_s:g})"
        add("--link", dest="link_gb_s", type=args.number(float, 0), metavar="GB/s", help=about)
    about = f"tokens of a run (default: {case.new_tokens})"
    add("-n", "--new-tokens", type=whole(2), metavar="N", help=about)
    about = f"runs of every system in turn, after one that is not timed (default: {case.turns})"
    add("--turns", type=whole(1), metavar="N", help=about)
    about = "rates at which the acceptance of our drafts is held; such rows are labelled synthetic"
    add("--acceptance", type=args.listed(rate), default=(), metavar="A,B", help=about)
    args.add_output(parser, case.quick)


def run(arguments: argparse.Namespace) -> None:
    """Measures a case point by point."""
    case: Case = CASES[arguments.command]
    link = getattr(arguments, "link_gb_s", None)
    device = _device(arguments.device, case.link_gb_s if link is None else link)
    if device.type == "cuda":
        case = replace(case, **case.on_cuda)
    case = replace(case, **args.fitted(arguments, case, case.quick))
    options = {**case.options, **dict(arguments.overrides)}
    systems = with_acceptances(case.systems, arguments.acceptance, options)
    case = replace(case, systems=systems, options=options)
    with ExitStack() as after:
        if case.threads and device.type == "cpu":
            after.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(case.threads)
        _Points(case, arguments, device).measure()


class _Points:
    """The points of a case, on this machine: prompt lengths, batch sizes, and places of the KV."""

    def __init__(self, case: Case, arguments: argparse.Namespace, device: torch.device) -> None:
        self._case, self._device = case, device
        self._random = str(arguments.model).startswith(random_models.PREFIX)
        on_gpu, work = device.type == "cuda", cache_folder() / "bench"
        if self._random and arguments.text:
            raise UsageError(f"--model {arguments.model}: reads no text; leave out --text")
        dtype = arguments.dtype
        if dtype in (None, "auto"):
            dtype = "bfloat16" if self._random and on_gpu else "float32"
        kind, sources = getattr(torch, dtype), args.sources(arguments)
        model, draft = _folder(sources[0], kind, work), sources[1] and _folder(sources[1], kind, work)
        if draft:
            check_same_tokens(load_tokenizer(model), str(model), load_tokenizer(draft), str(draft))
        self._shape = find_shape(model, ElementType(dtype))
        self._draft_shape = find_shape(draft, ElementType(dtype)) if draft else None
        self._plain = Named("ours", "plain").config(case.options)
        texts, self._tokens = self._read_tokens(model, arguments)
        self._setup = Setup(
            str(model),
            str(draft) if draft else None,
            dtype,
            str(device),
            torch.get_num_threads(),
            capacity=0,  # that of each point
            chunk=CHUNK,
            work=str(work),
            kv_token_bytes=self._shape.token_bytes,
            weight_bytes=self._shape.weight_bytes,
            gpu_memory_gib=GPU_MEMORY_GIB if self._random and on_gpu else 0.0,
        )
        settings = {
            "model": args.recorded_name(sources[0]),
            "draft": sources[1] and args.recorded_name(sources[1]),
            "dtype": dtype,
            "texts": texts,
            "new_tokens": case.new_tokens,
            "turns": case.turns,
            "link_gb_s": case.link_gb_s,
            "gpu_memory_gib": self._setup.gpu_memory_gib,
            "systems": list(case.systems),
            "overrides": {key: str(value) for key, value in case.options.items()},
        }
        note = "Random weights: for timing only. " if self._random else ""
        note += " ".join((ROUNDS if case.places[0].name else ABOUT).split())
        self._results = Results(arguments, device, settings, note, _overview)
        self._alone: Row = {}

    def measure(self) -> None:
        """Measures all points, and reports them."""
        case, results = self._case, self._results
        points = list(product(sorted(case.contexts), sorted(case.batches), case.places))
        for context, batch, place in points:
            key = {"context": context, "batch": batch, "place": place.name}
            record = results.record(key, partial(self._measured, context, batch, place), _section)
            if all("error" in row for row in record["rows"]):
                row = record["rows"][0]
                say(f"no system ran at this point; {row['system']}: {row['error']}")
        records = results.records
        if all("error" in row for record in records for row in record["rows"]):
            raise UsageError(f"no system ran; {records[0]['rows'][0]['error']}")
        results.finish({"ms_per_token": _times(records)})

    def _read_tokens(self, model: Path, arguments: argparse.Namespace) -> tuple[list[str], list[int]]:
        """Reads the tokens of all prompts; returns where they come from too.

        Raises:
            UsageError: there is no tokenizer, or the text is too short.
        """
        case, count = self._case, max(self._case.batches) * max(self._case.contexts)
        if self._random:
            return ["random tokens"], random_models.random_prompt(self._shape.vocabulary, count)
        tokenizer = load_tokenizer(model)
        if tokenizer is None:
            raise UsageError(f"--model {model}: has no tokenizer to read a text with")
        texts = args.read_texts(arguments.text)
        tokens = encode(tokenizer, "\n".join(texts.values()))
        if count > len(tokens):
            together = f", --batches {max(case.batches)}" if max(case.batches) > 1 else ""
            longest = f"--contexts {max(case.contexts)}{together}"
            raise UsageError(f"{longest}: the text has {len(tokens)} tokens; use a longer --text")
        return list(texts), tokens

    def _measured(self, context: int, batch: int, place: Place) -> Row:
        """Measures all systems at one point."""
        case, shape = self._case, self._shape
        if not self._alone:  # while nothing else is in memory
            self._alone = {"read_rate_gb_s": machine.read_rate(self._device)}
            if place.name:
                sizes = max(case.contexts), self._plain.speculation.gamma2
                self._alone |= prediction_accuracy.measure_alone(
                    self._device, shape, self._draft_shape, *sizes
                )
        name = _name(context, batch, place.name)
        earlier = self._results.earlier({"context": context, "batch": batch, "place": IN_PLACE.name})
        rows_in_place: list[Row] = earlier["rows"] if earlier else []
        kv_bytes, link = batch * context * shape.token_bytes, case.link_gb_s
        if place.stream:
            link = kv_bytes / 1e6 / (place.stream * rounds.drafting_ms(rows_in_place))
            say(f"{name}: a link of {link:.2f} GB/s")
        options = {**case.options, **place.options(context, self._plain.store.page)}
        rows = runner.run(
            self._job(context, batch, place, link, options), lambda text: say(f"{name}: {text}")
        )
        if "hardware" in self._alone:
            link = self._alone["hardware"]["gpus"][0]["to_device_rate"]
        in_memory = (kv_bytes + shape.step_bytes) / 1e6 / self._alone["read_rate_gb_s"]
        record = self._alone | {
            "context": context,
            "place": place.name,
            "gpus": place.gpus,
            "link_rate_gb_s": link,
            "bound_ms": kv_bytes / 1e6 / link if link else in_memory,
            "options": options,
            "rows": rows,
        }
        if place.name:
            rounds.summarise(rows, shape.token_bytes / 1e6 / link if link else 0.0)
            prediction_accuracy.predict_rows(record, rows_in_place)
        return record

    def _job(self, context: int, batch: int, place: Place, link: float, options: Mapping[str, Any]) -> Job:
        """The job of a point. Its sequences are successive parts of the text."""
        case = self._case
        systems = tuple(dict.fromkeys(map(in_place, case.systems))) if place is IN_PLACE else case.systems
        capacity = context + case.new_tokens + ROOM
        setup = replace(
            self._setup,
            capacity=capacity,
            link_gb_s=link,
            gpus=place.gpus,
            options=dict(options),
            batch=batch,
        )
        prompt = [self._tokens[at * context : (at + 1) * context] for at in range(batch)]
        picture = str(self._results.path.with_suffix(PICTURE).resolve()) if place.timeline else ""
        return Job(setup, systems, prompt, case.new_tokens, case.turns, picture)


def _folder(source: args.Source, dtype: torch.dtype, work: Path) -> Path:
    if str(source).startswith(random_models.PREFIX):
        return random_models.checkpoint(str(source), dtype, work)
    return Path(source).resolve()


def _device(name: str, link_gb_s: float) -> torch.device:
    if not link_gb_s:
        return choose_device(name)
    if name not in ("auto", "cpu"):
        raise UsageError(f"--device {name}: a link is emulated on the CPU only; give --link 0")
    return torch.device("cpu")


def _name(context: int, batch: int, place: str) -> str:
    """A point in words."""
    tokens = f"{context // 1024}K" if context % 1024 == 0 else str(context)
    lengths = f"{batch} × {tokens} tokens" if batch > 1 else f"{tokens} tokens"
    return ", ".join(filter(None, [lengths, place]))


def _name_of(record: Row) -> str:
    return _name(record["context"], record["batch"], record["place"])


def _times(records: Sequence[Row]) -> dict[str, dict[str, float]]:
    """ms per token by system and point."""
    times: dict[str, dict[str, float]] = {}
    for record in records:
        for row in (result for result in record["rows"] if "error" not in result):
            times.setdefault(row["system"], {})[_name_of(record)] = row["ms_per_token"]["median"]
    return times


def _overview(records: Sequence[Row]) -> str:
    """A table of ms per token by system and point, where there are several points."""
    points = [_name_of(record) for record in records]
    if len(points) < 2:
        return ""
    rows = [
        {"system": name} | {point: of.get(point) for point in points} for name, of in _times(records).items()
    ]
    return f"## Milliseconds per token, of all sequences together\n\n{table(rows)}"


def _section(record: Row) -> str:
    """A point: the fastest system first, or in their order where rounds are looked into."""
    rows = [row for row in record["rows"] if "error" not in row]
    if not record["place"]:
        rows.sort(key=lambda row: row["ms_per_token"]["median"])
    cells = [_round_cells(row, record) if record["place"] else _cells(row, record, rows) for row in rows]
    noun, rate = "What a plain pass reads", f"{record['read_rate_gb_s']:.0f} GB/s of memory"
    if record["link_rate_gb_s"]:
        rate = f"{record['link_rate_gb_s']:.3g} GB/s of the link"
        noun = "Carrying all KV once" if record["place"] else noun  # a share of it may lie elsewhere
    sentence = f"{noun} takes {record['bound_ms']:.1f} ms at the {rate}."
    failed = "\n".join(f"- {row['system']}: {row['error']}" for row in record["rows"] if "error" in row)
    of_rows = table(cells) if cells else ""
    return "\n\n".join(filter(None, [f"## {_name_of(record)}", sentence, of_rows, failed]))


def _cells(row: Row, record: Row, rows: Sequence[Row]) -> Row:
    """A system beside others."""
    times = {other["system"]: other["ms_per_token"]["median"] for other in rows}
    spread, yielded = row["ms_per_token"], row["tokens_per_round"]
    ms = spread["median"]
    ratios = {name: (of in times and times[of] / ms) or None for name, of in REFERENCES.items()}
    share = record["bound_ms"] / yielded / ms if yielded and ms else None
    return {
        "system": in_words([row["label"], *row["notes"]]),
        "ms per token": ms,
        "least": spread["min"],
        "most": spread["max"],
        **ratios,
        "tokens per pass": yielded,
        "accepted": ", ".join(f"{share:.0%}" for share in row["accepted"].values()) or None,
        "of bound": share and f"{share:.0%}",
        "prefill s": row["prefill_ms"] / 1e3,
        "tokens": _agreement(row, record["batch"]),
        "peak GiB": row["peak_bytes"] / 2**30,
    }


def _round_cells(row: Row, record: Row) -> Row:
    """A system whose rounds were looked into; a peer has none."""
    rounds = row.get("rounds", {})
    times = {"ms per token": rounds.get("ms_per_token", row["ms_per_token"]["median"])}
    values = {name: rounds.get(key) for name, key in ROUND_COLUMNS.items()}
    system = in_words([row["label"], *row["notes"]])
    return {"system": system} | times | values | {"tokens": _agreement(row, record["batch"])}


def _agreement(row: Row, batch: int) -> str:
    """Describes how the tokens of a system compare with the reference's."""
    if row["synthetic"] is not None:
        return "held"
    if not row["steady"]:
        return "vary from run to run"
    if row["first_difference"] is None:
        return "equal"
    gap = f", gap {cell(row['logit_gap'])}" if "logit_gap" in row else ""
    sequence, at = divmod(row["first_difference"], len(row["tokens"]) // batch)
    return f"differ at {at}{f' of sequence {sequence + 1}' if batch > 1 else ''}{gap}"
