"""The lengths that a sequence can return to, with what that takes besides the KV in the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offload_rt.caches.local import LocalState
from offload_rt.caches.local_history import LocalHistory
from offload_rt.caches.sizes import MOST_POINTS
from offload_rt.system.memory import available_memory


@dataclass(frozen=True)
class RewindPoint:
    """A length that a sequence can return to.

    Attributes:
        queries: of the last tokens, `[layers, heads, tokens, head_dim]`, where a prefill ended; else None.
        local: what the local layers kept then, in host memory; None: there are no such layers.
    """

    length: int
    queries: Tensor | None
    local: LocalHistory | None = None


class RewindPoints:
    """The points of one sequence, by length: at most `MOST_POINTS`, and fewer where host memory is short.

    A sequence without local layers can return to any length; its points then only have queries.

    Args:
        local: the local layers of the sequence.
        device: keeps the queries.
    """

    def __init__(self, local: LocalState, device: torch.device) -> None:
        self._local = local
        self._device = device
        self._points: list[RewindPoint] = []

    def queries(self, length: int) -> Tensor | None:
        """Returns the queries of the last tokens of that length; None if no prefill ended there."""
        newest = self._points[-1] if self._points else None
        return newest.queries if newest is not None and newest.length == length else None

    def add(self, length: int, queries: Tensor | None) -> None:
        """Adds the present length of the sequence."""
        if self._points and self._points[-1].length == length:
            return
        local = None
        if self._local.layers.kinds.local:
            self._local.compute_states()
            history = self._local.history
            while len(self._points) >= MOST_POINTS or (
                self._points and available_memory() < 2 * history.nbytes
            ):
                lengths = [0, *(point.length for point in self._points)]
                # Whatever is dropped has to be prefilled again from the point before.
                del self._points[min(range(len(self._points)), key=lambda at: lengths[at + 1] - lengths[at])]
            local = history.on(torch.device("cpu"))
        self._points.append(RewindPoint(length, queries, local))

    def up_to(self, length: int) -> list[RewindPoint]:
        """Returns the points up to `length`, in host memory."""
        return _on(torch.device("cpu"), self._points, length)

    def take(self, points: Sequence[RewindPoint], length: int) -> None:
        """Replaces all points by those of another sequence up to `length`."""
        self._points = _on(self._device, points, length)

    def drop_behind(self, length: int) -> None:
        """Forgets the points behind `length`."""
        while self._points and self._points[-1].length > length:
            self._points.pop()

    def return_to(self, length: int) -> int:
        """Returns the local layers to `length`, or to the newest point before it; returns that length.

        The tokens after the point have to be prefilled again.
        """
        if not self._local.layers.kinds.local:
            return length
        point = next(
            (candidate for candidate in reversed(self._points) if candidate.length <= length),
            RewindPoint(0, None),
        )
        self._local.restart(None if point.local is None else point.local.on(self._local.layers.device))
        return point.length


def _on(device: torch.device, points: Sequence[RewindPoint], length: int) -> list[RewindPoint]:
    """Returns the points up to `length`, with their queries on a device."""
    return [
        replace(point, queries=None if point.queries is None else point.queries.to(device))
        for point in points
        if point.length <= length
    ]
