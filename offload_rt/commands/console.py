"""Progress, notices and the summary of a run, on stderr."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from offload_rt.machine.hardware import GIB

if TYPE_CHECKING:
    from offload_rt.results import GenerationResult


UNKNOWN_WIDTH = 80
LASTING = ("load", "load draft", "prefill", "decode")
"""Phases that report often: shown from the second report on. Others are shown at once."""


def _columns() -> int:
    """Returns the width of the terminal that stderr is connected to."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or UNKNOWN_WIDTH
    except (OSError, ValueError):
        return UNKNOWN_WIDTH


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class Console:
    """Prints lines on stderr and, on a terminal, a progress line that is redrawn in place.

    Attributes:
        tokens: number of tokens by phase; progress of these phases includes tokens/s.
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

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        if not self._quiet:
            self.clear()
            print(line, file=sys.stderr, flush=True)

    def notice(self, text: str) -> None:
        """Prints a notice, once however often it is given."""
        if text not in self._noticed:
            self._noticed.add(text)
            self.say(f"note       {text}")

    def progress(self, phase: str, done: int, total: int) -> None:
        """Shows how much of a phase is done, in any unit; without a terminal, as a line every `LOG_S`."""
        now = time.monotonic()
        share = done / total if total else 1.0
        if phase != self._phase:
            # A rate needs two reports; other phases may report only once.
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
        """Shows on a terminal what is under way, for work that does not report progress."""
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
        """Prints times, rounds, memory and notices of a generation."""
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
