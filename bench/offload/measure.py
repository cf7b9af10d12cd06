"""Runs the systems of `bench offload` in turns over the same prompt, and makes rows of what they did."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from bench.inputs import say
from bench.offload.cases import STREAMED, Sizes, System
from bench.offload.engine import EngineText, Run
from bench.offload.references import References, Subject, Turn, read, room, warm_up
from bench.offload.rows import Limits, draft_token_ms, row, times_as_fast
from cpu_kv import Link
from offload_rt.caches.places import Shares


@dataclass(frozen=True)
class Measured:
    """A system's runs, and the row of a report that they make."""

    system: System
    runs: list[Run]
    row: dict[str, Any]


def measure(
    subject: Subject,
    sizes: Sizes,
    systems: Sequence[System],
    link: Callable[[], Link],
    rate: float,
    references: References | None = None,
    placements: Mapping[str, Shares] = {},
) -> list[Measured]:
    """What the systems do, in their order.

    Every placement has a text and a link of its own; the systems take turns (A B C A B C …), so that a
    machine that slows down slows all of them.

    Args:
        link: opens a link.
        rate: bytes a second that it carries to the device.
        references: hold the prompt already; take their turn before each placement's, and pace its link.
        placements: shares by name, beside those of `SHARES`.
    """
    names = list(dict.fromkeys(system.placement for system in systems))
    shares = {name: placements.get(name) or sizes.placement(name) for name in names}
    first = next((system.composition for system in systems if not system.plain), "plain")
    runs: list[list[Run]] = [[] for _ in systems]
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    with ExitStack() as opened:
        texts: dict[str, EngineText] = {}
        prefills: dict[str, tuple[float, int]] = {}
        for name in names:
            text = EngineText(
                subject.target,
                subject.draft,
                link(),
                sizes.config(first),
                subject.prompt,
                room(sizes),
                shares[name],
            )
            opened.callback(text.close)
            if references is None:
                prefills[name] = read(text, subject)
            else:
                references.give(text)
                prefills[name] = references.prefill
            texts[name] = text
        for turn in range(sizes.repeats + 1):
            say(f"run {turn} of {sizes.repeats}" if turn else "untimed run")
            for name, group in itertools.groupby(
                zip(systems, runs, strict=True), key=lambda one: one[0].placement
            ):
                if references is not None and turn:
                    turns[name].append(references.turn(texts[name].link))
                for system, done in group:
                    config = sizes.config(system.composition, **system.offload)
                    count = sizes.plain_tokens if system.plain else sizes.new_tokens
                    run = texts[name].run(config, count if turn else min(count, warm_up(sizes)), system.held)
                    done += [run] if turn else []
        token_bytes = texts[names[0]].token_bytes
    alone = {
        (system.placement, system.held): draft_token_ms(done)
        for system, done in zip(systems, runs, strict=True)
        if system.offload.get("ahead") == 0
    }
    measured = []
    for system, done in zip(systems, runs, strict=True):
        place, page = shares[system.placement], sizes.config(first).store.page
        streamed = max(0, (len(subject.prompt) - 1) // page * page - place.resident_tokens - place.cpu_tokens)
        draft = alone.get((system.placement, system.held), alone.get((STREAMED, system.held)))
        before, compute = turns[system.placement], None
        if before:
            compute = median(one.plain_pass_ms if system.plain else one.pass_ms for one in before)
        rates = [one.rate_bytes_per_second for one in before] or [rate for _ in done]
        streams = [1e3 * streamed * token_bytes / one for one in rates]
        limits = Limits(streams, compute, None if system.plain else draft)
        one = _described(system, sizes, place, streamed) | row(done, limits)
        one["prefill_ms"], one["prefill_bytes"] = prefills[system.placement]
        one["rate_bytes_per_second"] = median(rates)
        one["turns"] = [asdict(turn) for turn in before]
        measured.append(Measured(system, done, one))
    _hold_against_plain([one.row for one in measured])
    return measured


def _described(system: System, sizes: Sizes, place: Shares, streamed: int) -> dict[str, Any]:
    config = sizes.config(system.composition, **system.offload)
    return {
        "system": system.name,
        "composition": system.composition,
        "synthetic": None if system.held is None else system.held.acceptance,
        "placement": system.placement,
        "context": sizes.context,
        "gamma": 0 if system.plain else sizes.gamma,
        "ahead": None if system.plain else config.offload.ahead,
        "refresh_from": None if system.plain else config.offload.refresh_from,
        "resident_tokens": place.resident_tokens,
        "cpu_tokens": place.cpu_tokens,
        "streamed_tokens": streamed,
    }


def _hold_against_plain(rows: list[dict[str, Any]]) -> None:
    """Each row over our plain decoding with the same shares, in the same turns."""
    plain = {one["placement"]: one for one in rows if one["system"] == "plain"}
    for one in rows:
        one["ratio_over_plain"] = times_as_fast(one, plain[one["placement"]])


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch for each thread of ours: pass, drafting and a paced link share the processor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
