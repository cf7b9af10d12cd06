"""Runs the systems of `bench offload` in turns over the same prompt, and makes rows of what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from bench import inputs
from bench.inputs import say
from bench.offload.cases import PLAIN, Sizes, System
from bench.offload.references import References, Turn
from bench.offload.rows import draft_token_ms, ms_per_token, row, times_as_fast
from bench.offload.text import Run, Subject, Text
from cpu_kv import Link, PacedLink
from offload_rt.caches.places import Shares
from offload_rt.errors import UsageError
from offload_rt.model import CausalModel
from offload_rt.planning.shapes import from_config


@dataclass(frozen=True)
class Measured:
    """A system's runs at a placement, and the row of a report that they make."""

    system: System
    runs: list[Run]
    row: dict[str, Any]


def measure(
    name: str,
    subject: Subject,
    sizes: Sizes,
    placements: Mapping[str, tuple[Shares, Sequence[System]]],
    link: Callable[[], Link],
    rate: float,
    references: References | None = None,
) -> tuple[dict[str, Any], list[Measured]]:
    """A case as JSON values, and what was measured of it.

    The systems of a placement take turns (A B C A B C …), so that a machine that slows down slows all.

    Args:
        placements: shares and systems by name; plain decoding is the first system.
        link: opens a link, which carries `rate` bytes a second to the device.
        references: take their turn before each of the systems', and pace the link.

    Raises:
        UsageError: tokens are not those of the references.
    """
    measured: list[Measured] = []
    for placement, (shares, systems) in placements.items():
        say(f"{subject.target.name}, {sizes.context:,} tokens, {name}, {placement}")
        with closing(Text(subject, link(), sizes.config(systems[-1]), sizes.room, shares)) as text:
            prefill_ms = text.read()
            runs, turns = take_turns(text, sizes, systems, references)
        inputs.free(subject.target.device)
        for system, done in runs.items():
            if references is not None and not subject.random_kv:
                _check_tokens(f"{system.name} ({placement})", done, references.tokens)
            one = _described(system, sizes, placement, shares) | {"prefill_ms": prefill_ms}
            one |= _row(subject, system, runs, turns, one["streamed_tokens"], rate)
            measured.append(Measured(system, done, one))
    shapes = [None if one is None else _shape_values(one) for one in (subject.target, subject.draft)]
    case = {
        "case": name,
        "model": subject.target.name,
        "draft": None if subject.draft is None else subject.draft.name,
        "device": subject.target.device.type,
        "shape": shapes[0],
        "draft_shape": shapes[1],
        "drafting": sizes.composition,
        "settings": sizes.keys,
        "rows": [one.row for one in measured],
    }
    return case, measured


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
            count = count if turn else min(count, sizes.warm_up)
            run = text.run(sizes.config(system), count, system.held)
            done += [run] if turn else []
    return runs, turns


def _row(
    subject: Subject,
    system: System,
    runs: Mapping[System, list[Run]],
    turns: Sequence[Turn],
    streamed_tokens: int,
    rate: float,
) -> dict[str, Any]:
    done = runs[system]
    rates = [one.rate_bytes_per_second for one in turns] or [rate for _ in done]
    streamed_bytes = streamed_tokens * subject.target.kv_layout().token_bytes
    compute = median(one.plain_pass_ms if system.plain else one.pass_ms for one in turns) if turns else None
    alone = None if system.plain else draft_token_ms(runs[replace(system, ahead=0, refresh_from=None)])
    one = row(done, [1e3 * streamed_bytes / one for one in rates], compute, alone)
    one |= {"rate_bytes_per_second": median(rates), "turns": [asdict(turn) for turn in turns]}
    plain = [ms_per_token(run) for run in runs[PLAIN]]  # in the same turns, with the same shares
    return one | {"ratio_over_plain": times_as_fast(one["ms_per_token"]["runs"], plain)}


def _described(system: System, sizes: Sizes, placement: str, shares: Shares) -> dict[str, Any]:
    config = sizes.config(system)
    full = (sizes.context - 1) // config.store.page * config.store.page
    return {
        "system": system.name,
        "composition": config.name,
        "synthetic": None if system.held is None else system.held.acceptance,
        "placement": placement,
        "context": sizes.context,
        "gamma": 0 if system.plain else sizes.gamma,
        "ahead": system.ahead,
        "refresh_from": None if system.plain else config.offload.refresh_from,
        "resident_tokens": shares.resident_tokens,
        "cpu_tokens": shares.cpu_tokens,
        "streamed_tokens": max(0, full - shares.resident_tokens - shares.cpu_tokens),
    }


def _shape_values(model: CausalModel) -> dict[str, Any]:
    shape = from_config(model.module.config, model.dtype, model.name)
    return asdict(shape) | {"dtype": str(model.dtype).removeprefix("torch.")}


def _check_tokens(name: str, runs: Sequence[Run], expected: Sequence[int]) -> None:
    for run in runs:
        if any(token != other for token, other in zip(run.tokens, expected, strict=False)):
            raise UsageError(
                f"{name}: its tokens are not those of plain decoding; this is a fault of the engine, or two "
                "logits closer than rounding: try another one"
            )


def paced_cases(
    subject: Subject, sizes: Sizes, cases: Mapping[str, tuple[float, Mapping[str, Sequence[System]]]]
) -> Iterator[tuple[dict[str, Any], list[Measured]]]:
    """What a subject does over links on which a stream takes so many times as long as a draft.

    Args:
        cases: by name, that ratio, and systems by placement.
    """
    with one_thread(), closing(References(subject, sizes)) as references:
        for name, (ratio, systems) in cases.items():
            references.begin(ratio)
            rate = references.rate
            say(f"{name}: a link of {rate / 1e9:.2f} GB/s, paced anew in every turn")
            placements = {place: (sizes.shares(place), those) for place, those in systems.items()}
            link = partial(PacedLink, rate)
            case, measured = measure(name, subject, sizes, placements, link, rate, references)
            yield case | {"processor": references.processor()}, measured


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch for each thread of ours: pass, drafting and a paced link share the processor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
