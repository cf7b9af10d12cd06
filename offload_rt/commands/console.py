"""What a command writes to stderr."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from offload_rt.machine.hardware import GIB

if TYPE_CHECKING:
    from offload_rt.results import GenerationResult


class Console:
    """Lines on stderr and, on a terminal, a progress line that is redrawn in place.

    Attributes:
        tokens: number of tokens by phase, where known; adds tokens/s to its progress.
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
        self._began = self._last = time.monotonic()
        self._noticed: set[str] = set()

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        if not self._quiet:
            self.clear()
            print(line, file=sys.stderr, flush=True)

    def notice(self, text: str) -> None:
        """Prints a note, once however often it is given."""
        if text not in self._noticed:
            self._noticed.add(text)
            self.say(f"note       {text}")

    def progress(self, phase: str, done: int, total: int) -> None:
        """Shows how far a phase is, in units of its own; without a terminal, a line every `LOG_S`."""
        now = time.monotonic()
        if phase != self._phase:
            # A rate needs two reports; a phase without one may report only once, so show it at once.
            self._phase, self._began = phase, now
            self._last = now if phase in self.tokens else float("-inf")
        if self._quiet or now - self._last < (self.REDRAW_S if self._live else self.LOG_S):
            return
        self._last = now
        share = done / total if total else 1.0
        line = f"{phase:10} {share:4.0%}"
        if phase in self.tokens:
            line += f"  {share * self.tokens[phase] / (now - self._began):,.0f} tokens/s"
        if not self._live:
            print(line, file=sys.stderr, flush=True)
            return
        full = round(share * self.BAR)
        print(f"\r\x1b[K{line}  {'█' * full}{'░' * (self.BAR - full)}", end="", file=sys.stderr, flush=True)
        self._drawn = True

    def clear(self) -> None:
        """Removes the progress line."""
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._drawn = False

    def summary(self, result: GenerationResult) -> None:
        """Prints what a generation did: times, rounds, memory, notices."""
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
