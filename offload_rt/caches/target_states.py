"""The states of a target's newest verified tokens, from which the KV of a draft head is computed.

They are what passes of the target leave beside its KV: a prefill, and the verifications behind it. As a draft
head attends to the first and the newest tokens of a sequence, no others are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SavedStates:
    """States of a sequence, never changed, in host memory.

    Attributes:
        head: what they are states of, see `StateTap.name`.
        sinks: after the first tokens, `[n, state_size]`.
        newest: after tokens from position `start` on, `[n, state_size]`.
    """

    head: str
    sinks: Tensor
    start: int
    newest: Tensor


class TargetStates:
    """States after the first `sinks` tokens and after the newest ones, at least `window` of them.

    Args:
        head: what they are states of, see `StateTap.name`.

    Attributes:
        end: number of tokens that the sequence has up to the newest state.
    """

    def __init__(
        self,
        head: str,
        sinks: int,
        window: int,
        state_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._head = head
        self._window = window
        self._sinks = torch.empty(sinks, state_size, dtype=dtype, device=device)
        self._known_sinks = 0
        self._memory = self._sinks.new_empty(2 * window, state_size)
        self._start = self._count = 0

    @property
    def end(self) -> int:
        return self._start + self._count

    def wanted(self, start: int, count: int, end: int) -> list[slice]:
        """Returns which of `count` tokens from position `start` on are kept in a sequence of `end` tokens."""
        sinks, recent = len(self._sinks), max(end - self._window, 0)
        pieces = [(start, min(sinks, start + count)), (max(start, recent, sinks), start + count)]
        if recent <= sinks:
            pieces = [(start, start + count)]
        return [slice(first - start, stop - start) for first, stop in pieces if first < stop]

    def append(self, position: int, states: Tensor) -> None:
        """Takes the states `[n, state_size]` after tokens from `position` on.

        Behind a gap the earlier ones are forgotten, but for the first tokens.
        """
        known = self._known_sinks
        if position <= known < len(self._sinks):
            taken = states[known - position : len(self._sinks) - position]
            self._sinks[known : known + len(taken)] = taken
            self._known_sinks += len(taken)
        if position != self.end:
            self._start, self._count = position, 0
        skipped = max(0, len(states) - self._window)
        if skipped:
            self._start, self._count = position + skipped, 0
        states = states[skipped:]
        if self._count + len(states) > len(self._memory):
            kept = self._window - len(states)
            self._memory[:kept] = self._memory[self._count - kept : self._count].clone()
            self._start, self._count = self.end - kept, kept
        self._memory[self._count : self._count + len(states)] = states
        self._count += len(states)

    def truncate(self, length: int) -> None:
        """Forgets the states after tokens from position `length` on."""
        self._known_sinks = min(self._known_sinks, length)
        if length <= self._start:
            self._start, self._count = length, 0
        self._count = min(self._count, length - self._start)

    def rows(self, start: int, stop: int) -> Tensor | None:
        """Returns the states after tokens `start` to `stop`, `[stop - start, state_size]`, if it has them."""
        if not self._start <= start <= stop <= self.end:
            return None
        return self._memory[start - self._start : stop - self._start]

    def parts(self, end: int) -> list[tuple[int, Tensor]]:
        """Returns the states of the first and of the newest tokens before position `end`.

        Each part with the position of its first token; those of the newest tokens come last.
        """
        if not self._start < end <= self.end:
            return []
        start = max(self._start, end - self._window)
        newest = self._memory[start - self._start : end - self._start]
        sinks = self._sinks[: min(self._known_sinks, start)]
        whole = len(sinks) == min(len(self._sinks), start)
        return [(0, sinks), (start, newest)] if len(sinks) and whole else [(start, newest)]

    def saved(self, length: int) -> SavedStates | None:
        """Returns a copy in host memory of the states of the first `length` tokens; None: there are none."""
        sinks = self._sinks[: min(self._known_sinks, length)]
        start, newest = length, self._memory[:0]  # as where reading a prompt was ended early
        if self._start < length <= self.end:
            start = max(self._start, length - self._window)
            newest = self._memory[start - self._start : length - self._start]
        elif not len(sinks):
            return None
        return SavedStates(self._head, sinks.to("cpu", copy=True), start, newest.to("cpu", copy=True))

    def take(self, saved: SavedStates, length: int) -> None:
        """Replaces all states by those of another sequence, up to `length` tokens; ignores another head's."""
        if saved.head != self._head or saved.newest.shape[1:] != self._memory.shape[1:]:
            return
        self._known_sinks = min(len(saved.sinks), len(self._sinks))
        self._sinks[: self._known_sinks] = saved.sinks[: self._known_sinks]
        self._start, self._count = saved.start, 0
        self.append(saved.start, saved.newest.to(self._memory.device))
        self.truncate(length)
