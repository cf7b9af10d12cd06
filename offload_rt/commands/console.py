"""Progress, notices and summaries that a command writes to stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from offload_rt.machine.hardware import GIB

if TYPE_CHECKING:
    from offload_rt.results import GenerationResult


UNKNOWN_WIDTH = 80
LASTING = ("load", "load draft", "prefill", "decode")
"""Phases that report often: they get a line only after a while, other phases at once."""
BUSY = 1.5
"""Load average per core from which other work slows a run down."""
FAR_FROM_PLAN = 2.0
"""Ratio of measured and predicted time, or its inverse, from which a run is far from its plan."""
COMPARABLE_TOKENS = 8
"""Fewest tokens whose time is compared with the plan."""


def _columns() -> int:
    """Returns the width of the terminal behind stderr."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or UNKNOWN_WIDTH
    except (OSError, ValueError):
        return UNKNOWN_WIDTH


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class Console:
    """Writes lines to stderr and, on a terminal, a progress line that is redrawn in place.

    Attributes:
        tokens: number of tokens by phase, where known; adds tokens/s to the progress of the phase.
    """

    BAR = 30
    REDRAW_S = 0.1
    LOG_S = 10.0

    def __init__(self, quiet: bool) -> None:
        self.tokens: dict[str, int] = {}
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._drawn = False
        self._phase = ""
        self._first = 0.0
        self._began = self._last = time.monotonic()
        self._noticed: set[str] = set()
        self._held: list[str] | None = None  # lines to print after the text
        self._load = os.getloadavg()[0]  # before this program adds to it

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        if self._held is not None:
            self._held.append(line)
        elif not self._quiet:
            self.clear()
            print(line, file=sys.stderr, flush=True)

    @contextmanager
    def writing_text(self) -> Iterator[None]:
        """Keeps stderr out of the text that is written to stdout, where both show in one place."""
        if not _shown_together(sys.stdout, sys.stderr):
            yield
            return
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            for line in held:
                self.say(line)

    def notice(self, text: str) -> None:
        """Prints a note once, however often it is given."""
        if text not in self._noticed:
            self._noticed.add(text)
            self.say(f"note       {text}")

    def progress(self, phase: str, done: int, total: int) -> None:
        """Shows how much of a phase is done, in its own units; without a terminal, a line every `LOG_S`."""
        if self._held is not None:
            return
        now = time.monotonic()
        share = done / total if total else 1.0
        if phase != self._phase:
            # A rate needs two reports; other phases than `LASTING` may report once, so show them at once.
            self._phase, self._began, self._first = phase, now, share
            self._last = now if phase in LASTING else float("-inf")
        if self._quiet or now - self._last < (self.REDRAW_S if self._live else self.LOG_S):
            return
        self._last = now
        line = f"{phase:10} {share:4.0%}"
        rate = (share - self._first) / (now - self._began) if now > self._began else 0.0
        if rate and phase in self.tokens:
            line += f"  {rate * self.tokens[phase]:,.0f} tokens/s"
        if rate and share < 1:
            line += f"  {_duration((1 - share) / rate)} left"
        self._show(line, share)

    def working(self, phase: str, what: str) -> None:
        """Shows on a terminal what is under way, for work that reports no progress."""
        if self._live and not self._quiet:
            self._show(f"{phase:10} {what}")

    def _show(self, line: str, share: float | None = None) -> None:
        if not self._live:
            print(line, file=sys.stderr, flush=True)
            return
        room = _columns() - 1  # a full row would wrap
        bar = min(self.BAR, room - len(line) - 2)
        if share is not None and bar > 0:
            full = round(share * bar)
            line += f"  {'█' * full}{'░' * (bar - full)}"
        print(f"\r\x1b[K{line[:room]}", end="", file=sys.stderr, flush=True)
        self._drawn = True

    def clear(self) -> None:
        """Removes the progress line."""
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._drawn = False

    def summary(self, result: GenerationResult) -> None:
        """Prints the statistics of a generation: times, rounds, memory, notices."""
        timings, memory = result.timings, result.memory
        prompt_s = timings.prompt_ms / 1e3
        rate = f" ({timings.prompt_n / prompt_s:,.0f} tokens/s)" if prompt_s else ""
        self.say(f"prompt     {result.prompt_tokens:,} tokens, prefill {prompt_s:.1f} s{rate}")
        speed = ""
        if timings.predicted_n:
            per_token = timings.predicted_ms / timings.predicted_n
            speed = f", {per_token:.1f} ms/token, {timings.predicted_per_second:.1f} tokens/s"
        self.say(
            f"generated  {len(result.tokens)} tokens{speed}; finish: {result.finish_reason};"
            f" seed {result.seed}"
        )
        if result.rounds:
            parts = [f"{result.rounds}, {len(result.tokens) / result.rounds:.2f} tokens a round"]
            parts += [
                f"{level.name} accepted {level.accepted / level.proposed:.0%} of {level.proposed}"
                for level in result.levels
                if level.proposed
            ]
            self.say(f"rounds     {'; '.join(parts)}")
        device = f", on the device {memory.device_peak_bytes / GIB:.2f}" if memory.device_peak_bytes else ""
        self.say(
            f"memory     KV {memory.kv_bytes / GIB:.2f} GiB; peak on the host"
            f" {memory.host_peak_bytes / GIB:.2f} GiB{device}"
        )
        for text in result.notices:
            self.notice(text)

    def compare_with_plan(self, result: GenerationResult, predicted_ms: float | None) -> None:
        """Says where decoding took far more or less time than predicted, and names a busy machine."""
        tokens = result.timings.predicted_n
        if not predicted_ms or tokens < COMPARABLE_TOKENS:
            return
        measured = result.timings.predicted_ms / tokens
        ratio = measured / predicted_ms
        if 1 / FAR_FROM_PLAN <= ratio <= FAR_FROM_PLAN:
            return
        text = f"decoding took {measured:.1f} ms/token, {ratio:.2g} times the {predicted_ms:.1f} of the plan"
        cause = self.busy() if ratio > 1 else None
        self.notice(f"{text}; {cause or 'offload-rt doctor --refresh measures this machine again'}")

    def busy(self) -> str | None:
        """Returns a note on other work on this machine before the program began; None for little."""
        cores = len(os.sched_getaffinity(0))
        if self._load <= BUSY * cores:
            return None
        return f"other work slows it down: the load average was {self._load:.1f} on {cores} cores before it"


def _shown_together(one: TextIO | None, other: TextIO | None) -> bool:
    """Returns whether two streams are one file, pipe or terminal, as with 2>&1."""
    try:
        first, second = (os.fstat(stream.fileno()) for stream in (one, other) if stream is not None)
    except (OSError, ValueError):
        return False
    return os.path.samestat(first, second)
