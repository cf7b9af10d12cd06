"""`python -m bench speedup`: our compositions beside transformers' generation, greedy, in one process.

Every system decodes the same prompts. A prompt is read once by us and once by transformers; then the
systems take turns (A B C A B C …), each from the end of the prompt, so that a machine that slows down slows
all of them. What is timed:

- ours: from the call that decodes to its last token, the first round included; not the prefill, nor filling
  the caches that a composition drafts with, which is reported apart (`fill_ms`);
- transformers: from the tokens of the first round to the last token; not the prefill, nor the assistant's,
  nor what `generate` sets up. That is to transformers' advantage.

A time a token is a median over runs. Its bound is the time to read the weights and the full KV once, at
the rate at which torch reads memory in this very run, over the tokens that such a pass yields.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from transformers.utils import logging as transformers_logging

from bench import cases, inputs, machine, report
from bench.cases import COMPOSITIONS, PEERS, SpeedupCase
from bench.inputs import Models, say
from bench.peers import PeerRun, Peers
from offload_rt.api import LLM
from offload_rt.config import load_config
from offload_rt.errors import UsageError
from offload_rt.results import GenerationResult, SamplingParams
from offload_rt.text import encode

OURS, THEIRS = "ours", "transformers"
REFERENCE = f"{THEIRS} plain"


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "speedup",
        help="our compositions beside transformers' generation",
        description="Measures our compositions beside transformers' generation.",
        allow_abbrev=False,
    )
    inputs.add_arguments(parser, draft=True)
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        metavar="FILE",
        help="UTF-8 text; may be repeated, texts are joined (default: a long text about Python)",
    )
    parser.add_argument(
        "--configs", type=inputs.names(COMPOSITIONS, file=".toml"), default=COMPOSITIONS, metavar="A,B"
    )
    parser.add_argument("--peers", type=inputs.names(PEERS), default=PEERS, metavar="A,B")
    parser.add_argument("--contexts", type=inputs.counts(2), metavar="N,N")
    parser.add_argument("-n", "--new-tokens", type=inputs.count(2), metavar="N")
    parser.add_argument("--peer-tokens", type=inputs.count(2), metavar="N", help="decoded by each peer")
    parser.add_argument("--repeats", type=inputs.count(1), metavar="N")
    parser.add_argument("--quick", action="store_true", help="4K and 8K only, less of everything")
    parser.add_argument(
        "--plot", action=argparse.BooleanOptionalAction, default=True, help="PNG beside the JSON"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures, writes the JSON and the plot, prints the tables."""
    transformers_logging.set_verbosity_error()
    if arguments.plot:
        report.check_plots()
    overrides = dict(arguments.overrides)
    for name in arguments.configs:
        load_config(name, overrides)  # what is cheap to check comes first
    case = _case(arguments)
    texts = inputs.read_texts(arguments.text) if arguments.text else [inputs.demo_text()]
    models = inputs.load(arguments)
    tokens = encode(models.tokenizer, "\n".join(text.text for text in texts))
    if case.contexts[-1] > len(tokens):
        raise UsageError(
            f"--contexts {case.contexts[-1]}: the text has {len(tokens)} tokens; give a longer --text, "
            "or several"
        )
    device = models.target.device
    described = machine.describe(device)
    out = inputs.destination(arguments.out, "speedup", described)
    rate = machine.read_rate(device)
    say(f"memory is read at {rate:.1f} GB/s with {described['threads']} threads")
    measured = []
    for context in case.contexts:
        measured.append(
            _measure(models, tokens[:context], arguments.configs, arguments.peers, overrides, case, rate)
        )
        inputs.free(device)
    result = {
        "benchmark": "speedup",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": described,
        "model": models.names[0],
        "draft": models.names[1],
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "texts": [text.name for text in texts],
        "case": dataclasses.asdict(case),
        "overrides": {key: str(value) for key, value in overrides.items()},
        "timed": " ".join((__doc__ or "").split("What is timed:")[1].split()),
        "read_rate_gb_s": rate,
        "contexts": measured,
        "host_peak_bytes": machine.peak_host_bytes(),
    }
    report.write_json(out, result)
    if arguments.plot:
        report.plot_speedup(result, out.with_suffix(".png"))
    for part in measured:
        print(_tables(part), end="\n\n")
    print(json.dumps(result))


def _case(arguments: argparse.Namespace) -> SpeedupCase:
    case = cases.QUICK if arguments.quick else cases.FULL
    given = {
        key: value
        for key in ("contexts", "new_tokens", "peer_tokens", "repeats")
        if (value := getattr(arguments, key)) is not None
    }
    case = dataclasses.replace(case, **given)
    return dataclasses.replace(case, peer_tokens=min(case.peer_tokens, case.new_tokens))


def _measure(
    models: Models,
    prompt: Sequence[int],
    configs: Sequence[str],
    peer_names: Sequence[str],
    overrides: dict[str, object],
    case: SpeedupCase,
    rate: float,
) -> dict[str, Any]:
    """All systems on one prompt."""
    ours_params = SamplingParams(max_tokens=case.new_tokens, ignore_eos=True)
    wanted = ["plain", *(name for name in peer_names if name != "plain")]  # the others are held against it
    if models.draft is None:
        wanted = [name for name in wanted if name != "assisted"]
    context = report.tokens_name(len(prompt))
    say(f"{context}: transformers reads the prompt")
    peers = Peers(models.target, models.draft, prompt)
    # Reads the prompt so that every composition can go on from it: with chunk summaries and the draft.
    first = "retrieval" if models.draft is None else "triforce"
    with LLM.from_models(models.target, models.draft, config=first, overrides=overrides) as llm:
        say(f"{context}: we read the prompt")
        warm_up = SamplingParams(max_tokens=cases.WARM_UP_TOKENS, ignore_eos=True)
        read = llm.generate(prompt, warm_up).timings.prompt_ms
        ours: dict[str, list[GenerationResult]] = {name: [] for name in configs}
        theirs: dict[str, list[PeerRun]] = {name: [] for name in wanted}
        for turn in range(case.repeats + 1):
            say(f"{context}: run {turn} of {case.repeats}" if turn else f"{context}: untimed run")
            for name, results in ours.items():
                result = llm.rerun(ours_params if turn else warm_up, name, overrides)
                results += [result] if turn else []
            for name, runs in theirs.items():
                peer_run = peers.run(name, case.peer_tokens if turn else cases.WARM_UP_TOKENS)
                runs += [peer_run] if turn else []
        weights = sum(parameter.nbytes for parameter in models.target.parameters())
    kv = peers.kv_bytes
    bound = (kv + weights) / rate / 1e6
    systems = [_ours(results) for results in ours.values()]
    systems += [_theirs(name, runs) for name, runs in theirs.items()]
    reference = theirs["plain"][0].tokens
    plain = next((s for s in systems if s["system"] == f"{OURS} plain"), None)
    base = next(s for s in systems if s["system"] == REFERENCE)
    for system in systems:
        per_token = system["ms_per_token"]["median"]
        system["over_transformers_plain"] = base["ms_per_token"]["median"] / per_token
        system["over_our_plain"] = plain["ms_per_token"]["median"] / per_token if plain else None
        system["bound_ms_per_token"] = bound / system["tokens_per_round"]
        system["share_of_bound"] = system["bound_ms_per_token"] / per_token
        system["agreement"] = agreement(system["tokens"], reference, peers)
        if plain and system["system"].startswith(OURS):
            system["equals_our_plain"] = system["tokens"] == plain["tokens"]
    for system in systems:
        del system["tokens"]
    return {
        "context": len(prompt),
        "kv_bytes": kv,
        "weight_bytes": weights,
        "pass_bound_ms": bound,
        "prefill": {
            "ours_ms": read,
            "transformers_ms": peers.prefill_ms,
            "assistant_ms": peers.assistant_prefill_ms,
            "ours_over_transformers": read / peers.prefill_ms,
        },
        "reference_tokens": reference,
        "systems": systems,
    }


def _ours(results: Sequence[GenerationResult]) -> dict[str, Any]:
    last = results[-1]
    return {
        "system": f"{OURS} {last.config}",
        "ms_per_token": report.spread([r.timings.predicted_ms / r.timings.predicted_n for r in results]),
        "fill_ms": median(r.timings.prompt_ms for r in results),
        "tokens_per_round": median(len(r.tokens) / r.rounds for r in results),
        "levels": [
            {
                "name": level.name,
                "proposed": level.proposed,
                "accepted": level.accepted,
                "acceptance": level.accepted / level.proposed,
                "ms_per_round": level.ms / max(level.rounds, 1),
            }
            for level in last.levels
            if level.proposed
        ],
        "plain_tokens": last.plain_tokens,
        "steady": all(r.tokens == last.tokens for r in results),
        "tokens": last.tokens,
    }


def _theirs(name: str, runs: Sequence[PeerRun]) -> dict[str, Any]:
    last = runs[-1]
    return {
        "system": f"{THEIRS} {name}",
        "ms_per_token": report.spread([run.ms / run.timed for run in runs]),
        "fill_ms": None,
        "tokens_per_round": median(len(run.tokens) / run.rounds for run in runs),
        "levels": [],
        "plain_tokens": 0,
        "steady": all(run.tokens == last.tokens for run in runs),
        "tokens": last.tokens,
    }


def agreement(tokens: Sequence[int], reference: Sequence[int], peers: Peers) -> dict[str, Any]:
    """How `tokens` compare with transformers' plain ones, as far as both go.

    Returns:
        `compared`; `first_difference`, an index, or None; and there `logit_gap`, by how much transformers'
        logit of its own token is above that of the other one.
    """
    both = list(zip(tokens, reference, strict=False))
    difference = next((i for i, (token, other) in enumerate(both) if token != other), None)
    gap = None
    if difference is not None:
        logits = peers.logits_after(reference[:difference])
        gap = float(logits[reference[difference]] - logits[tokens[difference]])
    return {"compared": len(both), "first_difference": difference, "logit_gap": gap}


def _tables(part: dict[str, Any]) -> str:
    """One context as markdown."""
    prefill = part["prefill"]
    assistant = prefill["assistant_ms"]
    head = (
        f"Context {part['context']:,} tokens. Prefill: ours {prefill['ours_ms'] / 1e3:.1f} s, transformers "
        f"{prefill['transformers_ms'] / 1e3:.1f} s"
        + (f", its assistant {assistant / 1e3:.1f} s" if assistant is not None else "")
        + f". A pass reads {(part['kv_bytes'] + part['weight_bytes']) / 1e6:,.0f} MB: at least "
        f"{part['pass_bound_ms']:.1f} ms."
    )
    rows = []
    for system in part["systems"]:
        times, agreed = system["ms_per_token"], system["agreement"]
        first = agreed["first_difference"]
        accepted = ", ".join(f"{level['acceptance']:.0%}" for level in system["levels"])
        rows.append(
            [
                system["system"],
                report.number(times["median"]),
                f"{times['min']:.2f}–{times['max']:.2f}",
                report.number(system["tokens_per_round"]),
                accepted or "–",
                report.number(system["over_transformers_plain"]),
                report.number(system["over_our_plain"]),
                f"{system['share_of_bound']:.0%}",
                f"all {agreed['compared']}" if first is None else f"{first}, gap {agreed['logit_gap']:.1e}",
            ]
        )
    header = [
        "system",
        "ms/token",
        "min–max",
        "tokens/round",
        "accepted",
        "× transformers",
        "× our plain",
        "of bound",
        "tokens agree",
    ]
    return f"{head}\n\n{report.table(header, rows)}"
