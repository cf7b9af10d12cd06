"""Runs the systems of `bench offload` in turns over the same prompt, and makes rows of what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from bench import inputs
from bench.inputs import say
from bench.offload.cases import LINK_CASES, PLAIN, Sizes, System, Systems
from bench.offload.references import References, Turn, processor
from bench.offload.rows import draft_token_ms, middle, ms_per_token, row, times_as_fast
from bench.offload.text import Run, Subject, Text
from cpu_kv import Link, PacedLink
from offload_rt.caches.places import Shares
from offload_rt.errors import UsageError
from offload_rt.model import CausalModel
from offload_rt.planning.shapes import ModelShape, from_config

Measured = tuple[dict[str, Any], list[list[Run]]]
"""A case as JSON values, and the runs of each of its rows."""


def shape_of(model: CausalModel) -> ModelShape:
    """Sizes of a loaded model."""
    return from_config(model.module.config, model.dtype, model.name)


def measure(
    name: str,
    subject: Subject,
    sizes: Sizes,
    placements: Mapping[str, tuple[Shares, Sequence[System]]],
    link: Callable[[], Link],
    rate: float,
    references: References | None = None,
) -> Measured:
    """Measures a case.

    The systems of a placement take turns (A B C A B C …), so that a machine that slows down slows all.

    Args:
        placements: shares and systems by name; plain decoding is the first system.
        link: opens a link, which carries `rate` bytes a second to the device.
        references: take their turn before each of the systems', and pace the link.

    Raises:
        UsageError: tokens are not those of the references.
    """
    target, shape = subject.target, shape_of(subject.target)
    rows, all_runs = list[dict[str, Any]](), list[list[Run]]()
    for placement, (shares, systems) in placements.items():
        say(f"{target.name}, {sizes.context:,} tokens, {name}, {placement}")
        with closing(Text(subject, link(), sizes.config(systems[-1]), sizes.room, shares)) as text:
            prefill_ms = text.read()
            runs, turns = take_turns(text, sizes, systems, references)
        inputs.free(target.device)
        for system, done in runs.items():
            if references is not None and not subject.synthetic:
                _check_tokens(f"{system.name} ({placement})", done, references.tokens)
            one = _described(system, sizes, placement, shares) | {"prefill_ms": prefill_ms}
            streamed_bytes = one["streamed_tokens"] * shape.token_bytes
            rows.append(one | _timed(system, runs, turns, streamed_bytes, rate))
            all_runs.append(done)
    case = {
        "case": name,
        "model": target.name,
        "draft": None if subject.draft is None else subject.draft.name,
        "device": target.device.type,
        "shape": _values(shape),
        "draft_shape": None if subject.draft is None else _values(shape_of(subject.draft)),
        "drafting": sizes.composition,
        "settings": sizes.keys,
        "rows": rows,
    }
    return case, all_runs


def take_turns(
    text: Text, sizes: Sizes, systems: Sequence[System], references: References | None
) -> tuple[dict[System, list[Run]], list[Turn]]:
    """Runs of every system, after one that is not reported, and what was measured before each of them."""
    runs: dict[System, list[Run]] = {system: [] for system in systems}
    turns = []
    for turn in range(sizes.repeats + 1):
        say(f"run {turn} of {sizes.repeats}" if turn else "untimed run")
        if references is not None and turn:
            turns.append(references.turn(text.link))
        for system, done in runs.items():
            count = sizes.plain_tokens if system.plain else sizes.new_tokens
            run = text.run(sizes.config(system), count if turn else min(count, sizes.warm_up), system.held)
            done += [run] if turn else []
    return runs, turns


def _described(system: System, sizes: Sizes, placement: str, shares: Shares) -> dict[str, Any]:
    config = sizes.config(system)
    full = (sizes.context - 1) // config.store.page * config.store.page
    return {
        "system": system.name,
        "composition": config.name,
        "synthetic": system.held,
        "placement": placement,
        "context": sizes.context,
        "gamma": 0 if system.plain else sizes.gamma,
        "ahead": system.ahead,
        "refresh_from": None if system.plain else config.offload.refresh_from,
        **asdict(shares),
        "streamed_tokens": max(0, full - shares.resident_tokens - shares.cpu_tokens),
    }


def _timed(
    system: System,
    runs: Mapping[System, list[Run]],
    turns: Sequence[Turn],
    streamed_bytes: int,
    rate: float,
) -> dict[str, Any]:
    done = runs[system]
    rates = [turn["rate_bytes_per_second"] for turn in turns] or [rate for _ in done]
    compute = middle([turn["plain_pass_ms" if system.plain else "pass_ms"] for turn in turns])
    alone = None if system.plain else draft_token_ms(runs[replace(system, ahead=0, gathered=False)])
    one = row(done, [1e3 * streamed_bytes / each for each in rates], compute, alone)
    plain = [ms_per_token(run) for run in runs[PLAIN]]  # in the same turns, with the same shares
    return one | {
        "rate_bytes_per_second": median(rates),
        "turns": turns,
        "ratio_over_plain": times_as_fast(one["ms_per_token"]["runs"], plain),
    }


def _values(shape: ModelShape) -> dict[str, Any]:
    return asdict(shape) | {"dtype": str(shape.dtype).removeprefix("torch.")}


def _check_tokens(name: str, runs: Sequence[Run], expected: list[int]) -> None:
    if any(run.tokens[: len(expected)] != expected[: len(run.tokens)] for run in runs):
        raise UsageError(
            f"{name}: its tokens are not those of plain decoding; this is a fault of the engine, or two "
            "logits closer than rounding: try another one"
        )


def paced_cases(subject: Subject, sizes: Sizes, cases: Mapping[str, Systems]) -> Iterator[Measured]:
    """What a subject does over the links of `cases.LINK_CASES`; systems by the names of some of them."""
    shape = shape_of(subject.target)
    with ExitStack() as opened:
        # Of torch, for each thread of ours: pass, drafting and a paced link share the processor.
        opened.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        alone = processor(shape, sizes)
        references = References(subject, shape, sizes, opened)
        for name, systems in cases.items():
            references.begin(LINK_CASES[name])
            rate = references.rate
            say(f"{name}: a link of {rate / 1e9:.2f} GB/s, paced anew in every turn")
            placements = {place: (sizes.shares(place), those) for place, those in systems.items()}
            link = partial(PacedLink, rate)
            case, runs = measure(name, subject, sizes, placements, link, rate, references)
            yield case | {"processor": alone}, runs
