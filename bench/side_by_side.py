"""`python -m bench peers | speedup | batch | link | offload`: the cases, ours beside other systems."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch

from bench import inputs, machine, needles, prediction_accuracy, random_models, report, rounds, runner
from bench.cases import CASES, GPU_MEMORY_GIB, IN_PLACE, Case, Named, Place, declared, in_place
from bench.inputs import PAGE, PICTURE, say
from bench.runner import Job
from bench.systems import Setup
from offload_rt.errors import UsageError
from offload_rt.files import write_whole
from offload_rt.machine.memory import cache_folder
from offload_rt.model.loading import check_same_tokens, choose_device, load_tokenizer
from offload_rt.model.shape import find_shape
from offload_rt.text import encode

ABOUT = """\
All systems have the same weights, token ids and machine, and their own best settings. They go on from the
end of the same prompt, in turn, greedily unless a temperature is given, and none stops at an end token. A
time a token is the median over turns. Prefill and decoding are timed apart; prompts are read in chunks of
one size. Ratios are over transformers with its static cache, the fastest that it has for long texts. Tokens
are compared with the first system's; a gap is by how much its logit of its own token is higher where they
first differ. What a plain pass reads is KV and weights, in memory, or KV over an emulated link; a system's
share of that time counts the tokens that its passes yield. Systems of one program share a process, and with
it the prefill and the peak of memory.
"""

ROUNDS = """\
The engine over a link, against its own plain decoding and its lower bounds. On a CPU the link is paced: it
carries the KV once in the time that drafting beside a pass takes (balanced), twice that time, or half of it,
by what was measured with the KV in place. Torch has one thread: pass, drafting and the link share the cores.
Times are medians, in ms, of the rounds but the first and the last; ratios of two systems are medians of
those within a turn. Pass over bound: over the longer of the stream and of the same pass in place. Round over
max: rounds whose draft had been made while the pass before ran, over the longer of carrying the KV once and
drafting alone. Link use: what the link carried within a pass, over what it could have. Predicted: by the
planner, from what was measured in place and of the rounds that are drafted first and passed then.
"""
CHUNK = 2048
ROOM = 8  # tokens behind the longest continuation
NEEDLES = 9  # passages, from the beginning of the prompt to its end; the one in the middle is asked for


def add_parser(commands: Any) -> None:
    """Declares a command for each case."""
    shapes = f"default: the demo pair; SHAPE, for timing only: {', '.join(random_models.SHAPES)}"
    dtype = "float32, on a GPU bfloat16 for random weights"
    for case in CASES:
        parser = inputs.command(commands, case.name, partial(run, case), case.about)
        inputs.add_arguments(parser, model="FOLDER|random:SHAPE", about=shapes, dtype=dtype)
        inputs.add_sizes(parser, case, without=("batches", "link_gb_s") if case.places[0].name else ())
        parser.add_argument("--needles", action="store_true", help="ask for a passage in the prompt's middle")
        rates = inputs.several(inputs.number(most=1.0))
        held = "coins hold the acceptance of our drafts, which is labelled as synthetic"
        parser.add_argument("--acceptance", type=rates, default=(), metavar="A,B", help=held)
        heat = "of sampling (default: 0, greedy)"
        parser.add_argument("--temperature", type=inputs.number(), default=0.0, metavar="T", help=heat)
        most = f"of a GPU, but for llama.cpp (default: {GPU_MEMORY_GIB:g} for random weights, else all)"
        parser.add_argument("--gpu-memory", type=inputs.number(), metavar="GiB", help=most)
        inputs.add_output(parser, "JSON lines; what it holds is kept")


def run(case: Case, arguments: argparse.Namespace) -> None:
    """Measures point after point, appends each to the file, and writes the page and the plot."""
    if arguments.plot:
        report.pyplot()  # or refuses
    link = getattr(arguments, "link_gb_s", None)
    device = _device(arguments.device, case.link_gb_s if link is None else link)
    if device.type == "cuda":
        case = replace(case, **case.on_cuda)
    case = inputs.fitted(case, case.if_quick, arguments)
    options = {**case.options, **dict(arguments.overrides)}
    draft, paced = inputs.sources(arguments)[1] is not None, any(place.stream for place in case.places)
    systems = declared(case.systems, arguments.acceptance, options, draft=draft, paced=paced)
    if arguments.temperature and any(Named.parse(text).acceptance is not None for text in systems):
        raise UsageError("--temperature: an acceptance is held for greedy decoding alone")
    case = replace(case, systems=systems, options=options)
    with ExitStack() as after:
        if case.threads and device.type == "cpu":
            after.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(case.threads)
        study = _Study(case, arguments, device)
        records = [study.record(*point) for point in study.points]
    page = report.page(records)
    title = f"# {case.about[0].upper()}{case.about[1:]}"
    measured = " ".join((ROUNDS if records[0]["place"] else ABOUT).split())
    text = f"{title}\n\n`python -m bench {case.name}`. {measured}\n\n{page}\n"
    write_whole(study.out.with_suffix(PAGE), text)
    print(page)
    rows = [row for record in records for row in record["rows"]]
    if all("error" in row for row in rows):
        raise UsageError(f"no system ran; {rows[0]['system']}: {rows[0]['error']}")
    if arguments.plot and not records[0]["place"]:
        report.plot(records, study.out.with_suffix(PICTURE))
    print(json.dumps(rounds.headline(records) if records[0]["place"] else records))


class _Study:
    """A case on this machine.

    Attributes:
        out: the file of its records.
        points: contexts, how many texts, and where their KV lies.
    """

    def __init__(self, case: Case, arguments: argparse.Namespace, device: torch.device) -> None:
        self._case, self._arguments, self._described = case, arguments, machine.describe(device)
        self.out = inputs.destination(arguments.out, f"{case.name}-{machine.slug(self._described)}.jsonl")
        random = str(arguments.model).startswith(random_models.PREFIX)
        on_gpu, work = device.type == "cuda", cache_folder() / "bench"
        if random and (arguments.text or arguments.needles):
            raise UsageError(f"--model {arguments.model}: reads no text; leave out --text and --needles")
        if arguments.gpu_memory is not None and not on_gpu:
            raise UsageError(f"--gpu-memory {arguments.gpu_memory:g}: runs on the CPU; leave it out")
        dtype = arguments.dtype
        if dtype in (None, "auto"):
            dtype = "bfloat16" if random and on_gpu else "float32"
        kind, sources = getattr(torch, dtype), inputs.sources(arguments)
        model, draft = _folder(sources[0], kind, work), sources[1] and _folder(sources[1], kind, work)
        if draft:
            check_same_tokens(load_tokenizer(model), str(model), load_tokenizer(draft), str(draft))
        self._shape, self._plain = find_shape(model, kind), Named("ours", "plain").config(case.options)
        texts, self._tokens = self._read_tokens(model)
        self._prompts = {sizes: self._prompt(*sizes) for sizes in product(case.contexts, case.batches)}
        memory = GPU_MEMORY_GIB * random if arguments.gpu_memory is None else arguments.gpu_memory
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
            temperature=arguments.temperature,
            gpu_memory_gib=memory if on_gpu else 0.0,
        )
        self._common: dict[str, Any] = {
            "benchmark": case.name,
            "schema": report.SCHEMA,
            "machine": {key: one for key, one in self._described.items() if key != "load_average"},
            "model": inputs.model_name(sources[0]),
            "draft": sources[1] and inputs.model_name(sources[1]),
            "checkpoints": [_fingerprint(folder) for folder in (model, draft) if folder],
            "texts": list(texts),
            "dtype": dtype,
            "needles": arguments.needles,
            "temperature": arguments.temperature,
            "link_gb_s": case.link_gb_s,
            "gpu_memory_gib": self._setup.gpu_memory_gib,
            "new_tokens": case.new_tokens,
            "turns": case.turns,
            "systems": list(case.systems),
            "overrides": {key: str(one) for key, one in case.options.items()},
        }
        self.points = list(product(case.contexts, case.batches, case.places))
        self._held = self._read()
        if not self._held.keys() >= {(*sizes, place.name) for *sizes, place in self.points}:
            rate = machine.read_rate(device)  # while nothing else is in memory
            self._alone: dict[str, Any] = {"read_rate_gb_s": rate}
            if case.places[0].name:
                small = find_shape(draft, kind) if draft else None
                sizes = case.contexts[-1], self._plain.speculation.gamma2
                self._alone |= prediction_accuracy.measure_alone(device, self._shape, small, *sizes)

    def _read_tokens(self, model: Path) -> tuple[Sequence[str], list[int]]:
        """Where the tokens of all prompts come from, and these.

        Raises:
            UsageError: there is no tokenizer, or not enough of a text.
        """
        case, arguments = self._case, self._arguments
        most = case.batches[-1] * case.contexts[-1]
        if str(arguments.model).startswith(random_models.PREFIX):
            return ("drawn at random",), random_models.random_prompt(self._shape.vocabulary, most)
        tokenizer = load_tokenizer(model)
        if tokenizer is None:
            raise UsageError(f"--model {model}: has no tokenizer to read a text with")
        names, texts = zip(*inputs.read_texts(arguments.text), strict=True)
        tokens = encode(tokenizer, "\n".join(texts))
        if most > len(tokens):
            together = f", --batches {case.batches[-1]}" if case.batches[-1] > 1 else ""
            longest = f"--contexts {case.contexts[-1]}{together}"
            raise UsageError(f"{longest}: the text has {len(tokens)} tokens; use a longer --text")
        return names, tokens

    def _prompt(self, context: int, batch: int) -> tuple[list[list[int]], list[list[int]]]:
        """So many texts, one behind the other in what was read; and what answers each, if that is asked for.

        Raises:
            UsageError: it cannot be asked for in so short a text.
        """
        texts = [self._tokens[at * context : (at + 1) * context] for at in range(batch)]
        if not self._arguments.needles:
            return texts, []
        answers = list[list[int]]()
        alphabet, generator = sorted(set(self._tokens)), torch.Generator().manual_seed(0)
        for text in texts:
            length = context - needles.CUE
            try:
                text[:], passages = needles.plant(text, length, NEEDLES, 1, alphabet, generator)
            except ValueError as error:
                raise UsageError(f"--contexts {context}: {error}; use a longer one") from None
            passage = passages[NEEDLES // 2]
            text += passage[: needles.CUE]
            answers.append(passage[needles.CUE :])
        return texts, answers

    def _read(self) -> dict[tuple[int, int, str], dict[str, Any]]:
        """What an earlier run of the same kind has left, by context, batch and place."""
        held = {}
        for one in report.read_lines("--out", self.out) if self.out.exists() else ():
            sizes = one["context"], report.batch(one)
            prompt, _ = self._prompts.get(sizes, ([], []))
            common = self._common | {"prompt": _digest(chain(*prompt))}
            missed = {row["system"]: row["error"] for row in one["rows"] if "error" in row}
            same = all(one.get(key) == value for key, value in common.items())
            some = len(missed) < len(one["rows"])
            if same and some and not any(runner.there_by_now(*each) for each in missed.items()):
                held[*sizes, one["place"]] = one
        return held

    def record(self, context: int, batch: int, place: Place) -> dict[str, Any]:
        """What was or is now measured of all systems at a context, a batch and a place."""
        case, shape, setup = self._case, self._shape, self._setup
        prompt, answers = self._prompts[context, batch]
        where = ", ".join(filter(None, [report.sizes(context, batch), place.name]))
        if held := self._held.get((context, batch, place.name)):
            say(f"{where}: as measured at {held['date']}, in {self.out}")
            return held
        alone = self._held.get((context, batch, IN_PLACE.name), {"rows": []})["rows"]
        kv_bytes, link = batch * context * shape.token_bytes, case.link_gb_s
        if place.stream:
            link = kv_bytes / 1e6 / (place.stream * rounds.drafting_ms(alone))
            say(f"{where}: a link of {link:.2f} GB/s")
        systems = tuple(dict.fromkeys(map(in_place, case.systems))) if place is IN_PLACE else case.systems
        options = {**case.options, **place.options(context, self._plain.store.page)}
        capacity = context + case.new_tokens + ROOM
        own = replace(
            setup, capacity=capacity, link_gb_s=link, cards=place.cards, options=options, batch=batch
        )
        picture = str(self.out.with_suffix(PICTURE).resolve()) if self._arguments.plot and place.drawn else ""
        job = Job(own, systems, prompt, case.new_tokens, case.turns, answers, picture)
        rows = runner.run(job, lambda text: say(f"{where}: {text}"))
        if "hardware" in self._alone:
            link = self._alone["hardware"]["gpus"][0]["to_device_rate"]
        in_memory = (kv_bytes + shape.step_bytes) / 1e6 / self._alone["read_rate_gb_s"]
        record = report.envelope(case.name, self._arguments, self._described) | self._common | self._alone
        record |= {
            "context": context,
            "batch": batch,
            "place": place.name,
            "cards": place.cards,
            "prompt": _digest(chain(*prompt)),
            "load_average": self._described["load_average"],
            "link_rate_gb_s": link,
            "bound_ms": kv_bytes / 1e6 / link if link else in_memory,
            "options": options,
            "rows": rows,
        }
        if place.name:
            rounds.summarise(rows, shape.token_bytes / 1e6 / link if link else 0.0, alone)
            rounds.check_tokens(rows, rows if place is IN_PLACE else alone, where)
            prediction_accuracy.predict_rows(record, alone)
        _append(self.out, record)
        self._held[context, batch, place.name] = record
        return record


def _folder(source: inputs.Source, dtype: torch.dtype, work: Path) -> Path:
    if str(source).startswith(random_models.PREFIX):
        return random_models.checkpoint(str(source), dtype, work)
    return Path(source).resolve()


def _device(name: str, link_gb_s: float) -> torch.device:
    if not link_gb_s:
        return choose_device(name)
    if name not in ("auto", "cpu"):
        raise UsageError(f"--device {name}: an emulated link is a processor's; give --link 0")
    return torch.device("cpu")


def _fingerprint(folder: Path) -> str:
    """Of a checkpoint, by its config and the sizes of its files."""
    sizes = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
    return _digest([(folder / "config.json").read_text(), sizes])


def _digest(values: Iterable[object]) -> str:
    return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()[:16]


def _append(path: Path, record: Mapping[str, Any]) -> None:
    """A line more; what an earlier run did not write to its end is dropped."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    write_whole(path, f"{text[: text.rfind(chr(10)) + 1]}{json.dumps(record)}\n")
