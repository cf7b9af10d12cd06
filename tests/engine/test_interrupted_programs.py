"""Random programs over a context, interrupted at random moments: what it holds afterwards is whole.

An interrupt comes before a line of our own code (`line`, the same in every run) or when a timer ends, several
times and in the midst of what tidies up (`timer`). `OFFLOAD_RT_TEST_PROGRAMS` sets the number of programs.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Condition
from types import FrameType
from typing import Any

import pytest
from support.small_engine import engine_overrides
from support.tiny_models import byte_ids, noisy_copy, tiny_target
from support.uneven_link import UnevenLink

import cpu_kv
import offload_rt
from cpu_kv import Link, PacedLink
from offload_rt import LLM, Context, SamplingParams

PROGRAMS = int(os.environ.get("OFFLOAD_RT_TEST_PROGRAMS", "24"))
OURS = (*cpu_kv.__path__, *offload_rt.__path__)
CONFIGS = ("plain", "lookup", "retrieval", "triforce", "trees")
LINKS: dict[str, Callable[[], Link | None]] = {
    "in place": lambda: None,
    "paced": lambda: PacedLink(2e9),
    "uneven": UnevenLink,
}
NEXT = SamplingParams(max_tokens=5)


class Interrupts:
    """Raises KeyboardInterrupt in the main thread while `armed`."""

    def __init__(self, source: random.Random, kind: str) -> None:
        self._source, self._kind = source, kind
        self._left, self._first = 0, True
        self.count = 0

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self.count += 1
                raise KeyboardInterrupt
        return self._line

    def _alarm(self, _: int, frame: FrameType | None) -> None:
        """In a line of our code, or first while it waits for another thread.

        Between two instructions of their own, Python's locks, events and pools bear no interrupt.
        """
        assert frame is not None
        waits = frame.f_code is Condition.wait.__code__ and frame.f_locals.get("gotit") is False
        waits = waits and frame.f_back is not None and frame.f_back.f_code is Future.result.__code__
        if self._left and ((waits and self._first) or frame.f_code.co_filename.startswith(OURS)):
            self._first = False
            self._left -= 1
            self.count += 1
            raise KeyboardInterrupt

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Interrupts the block, or not, if it ends before; the exception ends here."""
        before, source = signal.signal(signal.SIGALRM, self._alarm), self._source
        with suppress(KeyboardInterrupt):
            try:
                if self._kind == "line":
                    self._left = int(10 ** source.uniform(1, 4.5))
                    sys.settrace(self._line)
                else:
                    self._left, self._first = source.randint(1, 3), True
                    signal.setitimer(
                        signal.ITIMER_REAL, 10 ** source.uniform(-4, -1), 10 ** source.uniform(-4, -3)
                    )
                yield
            finally:
                sys.settrace(None)
                self._left = 0
                signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@cache
def plain() -> Callable[[tuple[int, ...]], list[int]]:
    """What follows tokens, decoded plainly and in place by an LLM that nothing interrupts."""
    llm = LLM.from_models(tiny_target("llama-gqa"), config="plain", overrides=engine_overrides(ahead=0))
    return cache(lambda tokens: llm.generate(list(tokens), NEXT).tokens)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("kind", ["line", "timer"])
def test_a_context_that_was_interrupted_is_whole(kind: str, link: str, tmp_path: Path) -> None:
    target = tiny_target("llama-gqa")
    draft, interrupted = noisy_copy(target), 0
    for number in range(-(-PROGRAMS // (2 * len(LINKS)))):
        source = random.Random(f"{kind} {link} {number}")
        overrides = engine_overrides(ahead=source.choice((0, 2)), cpu_tokens=source.choice((0, 32)))
        overrides["offload.resident_tokens"] = source.choice((0, 16))
        config = source.choice(CONFIGS)
        with LLM.from_models(target, draft, config=config, overrides=overrides, link=LINKS[link]()) as llm:
            interrupts = Interrupts(source, kind)
            run_program(llm, source, interrupts, tmp_path / "saved")
        interrupted += interrupts.count
    assert interrupted


def run_program(llm: LLM, source: random.Random, interrupts: Interrupts, path: Path) -> None:
    """Reads, and then some steps, each of which may be interrupted; checks after each what there is."""
    context: Context | None = None
    while context is None:
        with interrupts.armed():
            context = llm.read(byte_ids(source.randint(1, 150), start=source.randint(0, 50)))
    for _ in range(source.randint(1, 6)):
        before = list(context.tokens)
        context, expected = step(llm, context, source, interrupts, path)
        found = list(context.tokens)
        assert any(found[: len(one)] == one[: len(found)] for one in expected), "of other texts"
        assert len(found) >= min(len(one) for one in expected), f"{len(before)} tokens before"
        if source.random() < 0.6:
            check(llm, context, source)
    check(llm, context, source)
    context.close()


def check(llm: LLM, context: Context, source: random.Random) -> None:
    tokens = tuple(context.tokens)
    if tokens:
        assert context.generate((), NEXT).tokens == plain()(tokens)
        if source.random() < 0.5:
            context.rewind(len(tokens))


def step(
    llm: LLM, context: Context, source: random.Random, interrupts: Interrupts, path: Path
) -> tuple[Context, Sequence[list[int]]]:
    """Does one thing; returns the context, and texts that it holds a beginning of, or goes on with."""
    before = list(context.tokens)
    kind = source.choice(("generate", "generate", "append", "rewind", "fork", "save"))
    if kind == "generate":
        with interrupts.armed():
            context.generate((), SamplingParams(max_tokens=source.randint(1, 30)))
        return context, [before]
    if kind == "append":
        more = byte_ids(source.randint(1, 60), start=source.randint(0, 900))
        with interrupts.armed():
            context.append(more)
        return context, [before]
    if kind == "rewind":
        length = source.randint(1, len(before)) if before else 0
        with interrupts.armed():
            context.rewind(length)
        return context, [before[:length]]
    if kind == "fork":
        fork: Context | None = None
        with interrupts.armed():
            fork = context.fork()
        if fork is None:
            return context, [before]
        context.close()
        return fork, [before]
    with interrupts.armed():
        context.save(path)
    if path.exists():
        with llm.load(path) as loaded:
            check(llm, loaded, source)
        path.unlink()
    return context, [before]
