"""Runs the systems of `bench offload` in turns over the same prompt, and makes rows of what they did."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch

from bench.inputs import say
from bench.offload.cases import STREAMED, Sizes, System
from bench.offload.engine import EngineText, Run
from bench.offload.held import Hold
from bench.offload.rows import Limits, draft_token_ms, row, steady
from cpu_kv import CpuLink, Link, PacedLink
from offload_rt.caches.places import Shares
from offload_rt.config import Config
from offload_rt.model import CausalModel
from offload_rt.schedule import RoundTimes
from offload_rt.session import kv_layout

WARM_UP_TOKENS = 3  # times what a round drafts
STREAM_FOR_DRAFTING = 2.0  # times what a draft takes alone


@dataclass(frozen=True)
class Subject:
    """What is decoded.

    Attributes:
        prompt: tokens.
        random_kv: its KV is drawn at random in the place of a prefill.
    """

    target: CausalModel
    draft: CausalModel | None
    prompt: Sequence[int]
    random_kv: bool = False


@dataclass(frozen=True)
class InPlace:
    """What the same models do with their KV in place, one thing after another; medians in ms.

    Attributes:
        draft_token: to draft one token.
        verification: a pass over the last token and a draft.
        plain_pass: a pass over the last token.
        verdict: from a pass's logits to the committed tokens.
        tokens: what greedy decoding yields.
    """

    draft_token: float
    verification: float
    plain_pass: float
    verdict: float
    tokens: list[int]


class InPlaceText:
    """The subject with its KV in place, on a CPU: what drafting and passes cost without a link.

    It takes turns with the systems that are measured, so that what slows the machine slows both.
    """

    def __init__(self, subject: Subject, sizes: Sizes, composition: str) -> None:
        self._sizes = sizes
        self._configs = sizes.config("plain"), sizes.config(composition)
        self._plain: list[Run]
        self._drafting: list[Run]
        self.forget()
        self._text = EngineText(
            subject.target, subject.draft, CpuLink(), self._configs[1], subject.prompt, _room(sizes)
        )
        _read(self._text, subject)
        self.turn()
        self.forget()

    def turn(self) -> None:
        """Runs plain decoding and the composition once."""
        plain, drafting = self._configs
        self._plain.append(self._text.run(plain, self._sizes.plain_tokens))
        self._drafting.append(self._text.run(drafting, self._sizes.new_tokens))

    def forget(self) -> None:
        """Begins anew."""
        self._plain, self._drafting = [], []

    def result(self) -> InPlace:
        """Medians over all turns."""
        rounds = [one for run in self._drafting for one in run.rounds[1:-1] or run.rounds]
        return InPlace(
            draft_token=draft_token_ms(self._drafting),
            verification=median(one.pass_ms for one in rounds),
            plain_pass=median(one.pass_ms for run in self._plain for one in run.rounds[1:]),
            verdict=median(one.verdict_ms for one in rounds),
            tokens=max((run.tokens for run in (*self._plain, *self._drafting)), key=len),
        )

    def close(self) -> None:
        """Gives its memory back."""
        self._text.close()


@dataclass(frozen=True)
class Beside:
    """What shares a processor takes longer beside something else; in ms, medians over runs of their means.

    Attributes:
        drafting: for one outcome, on a link on which a pass takes as long as that.
        draft_token: to draft a token while no pass runs; the processor has waited for that link before.
        verification: a pass over the last token and a draft while drafts are made, on a link without limit.
    """

    drafting: float
    draft_token: float
    verification: float


class BesideText:
    """The subject over links of two bandwidths, drafting ahead for one outcome or none.

    It takes turns with the systems that are measured.
    """

    BALANCING_TURNS = 3
    NO_LIMIT = 1e12  # bytes a second

    def __init__(self, subject: Subject, sizes: Sizes, composition: str, draft_token_ms: float) -> None:
        self._sizes = sizes
        self._ahead, self._late = (sizes.config(composition, ahead=outcomes) for outcomes in (1, 0))
        # Random weights agree with nobody, and what was not guessed right is not drafted to its end.
        self._held = Hold(1.0) if subject.random_kv else None
        self.forget()
        self._kv_bytes = sizes.context * kv_layout(subject.target, 1).token_bytes
        self._stream_ms = STREAM_FOR_DRAFTING * sizes.gamma * draft_token_ms
        self._link = PacedLink(self.NO_LIMIT)
        self._text = EngineText(
            subject.target, subject.draft, self._link, self._ahead, subject.prompt, _room(sizes)
        )
        _read(self._text, subject)
        self._turn_balanced()

    def balance(self) -> float:
        """Finds the link on which a pass takes as long as drafting beside it; its bytes a second."""
        # A shorter stream leaves less time beside it, in which a draft takes longer: until both are alike.
        for _ in range(self.BALANCING_TURNS):
            self._stream_ms = self._drafting_ms()
            self.forget()
            self._turn_balanced()
        # Once again, for a median: single turns differ.
        for _ in range(self.BALANCING_TURNS):
            self._turn_balanced()
        return 1e3 * self._kv_bytes / self._drafting_ms()

    def _run(self, config: Config) -> Run:
        return self._text.run(config, self._sizes.new_tokens, self._held)

    def _turn_balanced(self) -> None:
        self._link.bytes_per_second = 1e3 * self._kv_bytes / self._stream_ms
        self._balanced.append(self._run(self._ahead))

    def turn(self) -> None:
        """Runs the composition once in every way."""
        self._turn_balanced()
        self._without.append(self._run(self._late))
        self._link.bytes_per_second = self.NO_LIMIT
        self._unlimited.append(self._run(self._ahead))

    def forget(self) -> None:
        """Begins anew."""
        self._balanced: list[Run] = []
        self._without: list[Run] = []
        self._unlimited: list[Run] = []

    def result(self) -> Beside:
        """Over all turns."""
        token = median(
            sum(one.draft_ms for one in steady(run.rounds)) / sum(one.proposed for one in steady(run.rounds))
            for run in self._without
        )
        passes = median(
            mean(one.pass_ms for one in run.rounds[1:-2] or run.rounds) for run in self._unlimited
        )
        return Beside(self._drafting_ms(), token, passes)

    def _drafting_ms(self) -> float:
        return median(_drafting_ms(run.rounds) for run in self._balanced)

    def close(self) -> None:
        """Gives its memory back."""
        self._text.close()


def _drafting_ms(rounds: Sequence[RoundTimes]) -> float:
    """Mean of what a draft took that was begun beside a pass, where its outcome came true."""
    # The last rounds draft less: the text ends. What was left of a draft is finished in the next round.
    pairs = itertools.pairwise(rounds[1:-1])
    guessed = [before.ahead_ms + one.draft_ms for before, one in pairs if before.guessed]
    return mean(guessed or [one.ahead_ms for one in rounds])


def _room(sizes: Sizes) -> int:
    return max(sizes.new_tokens, sizes.plain_tokens, _warm_up(sizes))


def _warm_up(sizes: Sizes) -> int:
    return WARM_UP_TOKENS * (sizes.gamma + 1)


def _read(text: EngineText, subject: Subject) -> tuple[float, int]:
    if subject.random_kv:
        text.fill()
        return 0.0, 0
    return text.read_prompt()


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
    in_place: InPlaceText | None = None,
    beside: BesideText | None = None,
    placements: Mapping[str, Shares] = {},
) -> list[Measured]:
    """What the systems do, in their order.

    Every placement has a text and a link of its own; the systems take turns (A B C A B C …), so that a
    machine that slows down slows all of them.

    Args:
        link: opens a link.
        rate: bytes a second that it carries to the device.
        in_place, beside: take their turns too.
        placements: shares by name, beside those of `SHARES`.
    """
    names = list(dict.fromkeys(system.placement for system in systems))
    shares = {name: placements.get(name) or sizes.placement(name) for name in names}
    first = next((system.composition for system in systems if not system.plain), "plain")
    runs: list[list[Run]] = [[] for _ in systems]
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
                _room(sizes),
                shares[name],
            )
            opened.callback(text.close)
            texts[name], prefills[name] = text, _read(text, subject)
        for turn in range(sizes.repeats + 1):
            say(f"run {turn} of {sizes.repeats}" if turn else "untimed run")
            for system, done in zip(systems, runs, strict=True):
                config = sizes.config(system.composition, **system.offload)
                count = sizes.plain_tokens if system.plain else sizes.new_tokens
                run = texts[system.placement].run(
                    config, count if turn else min(count, _warm_up(sizes)), system.held
                )
                done += [run] if turn else []
            for other in (in_place, beside):
                if other is not None and turn:
                    other.turn()
        token_bytes = texts[names[0]].token_bytes
    alone = {
        (system.placement, system.held): draft_token_ms(done)
        for system, done in zip(systems, runs, strict=True)
        if system.offload.get("ahead") == 0
    }
    alone_in_place = None if in_place is None else in_place.result()
    measured = []
    for system, done in zip(systems, runs, strict=True):
        place, page = shares[system.placement], sizes.config(first).store.page
        streamed = max(0, (len(subject.prompt) - 1) // page * page - place.resident_tokens - place.cpu_tokens)
        draft = alone.get((system.placement, system.held), alone.get((STREAMED, system.held)))
        compute = None
        if alone_in_place is not None:
            compute = alone_in_place.plain_pass if system.plain else alone_in_place.verification
        stream = 1e3 * streamed * token_bytes / rate
        limits = Limits(stream, compute, None if system.plain else draft)
        one = _described(system, sizes, place, streamed) | row(done, limits)
        one["prefill_ms"], one["prefill_bytes"] = prefills[system.placement]
        one["rate_bytes_per_second"] = rate
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
        "refresh_from_stream": None if system.plain else config.offload.refresh_from_stream,
        "resident_tokens": place.resident_tokens,
        "cpu_tokens": place.cpu_tokens,
        "streamed_tokens": streamed,
    }


def _hold_against_plain(rows: list[dict[str, Any]]) -> None:
    """Each row over our plain decoding with the same shares."""
    plain = {one["placement"]: one["ms_per_token"]["median"] for one in rows if one["system"] == "plain"}
    for one in rows:
        one["ratio_over_plain"] = plain[one["placement"]] / one["ms_per_token"]["median"]


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch for each thread of ours: pass, drafting and a paced link share the processor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
