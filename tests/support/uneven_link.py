"""Links of bad habits: slow at random, failing when told to, or no faster than they are waited for."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from cpu_kv import Event, PacedLink
from cpu_kv.link import Pairs


class UnevenLink(PacedLink):
    """Delays every copy by a random time of up to `delay_s`; fails those that `failing` points out.

    Refuses what would be more than one transfer over CUDA.
    """

    def __init__(self, seed: int = 0, delay_s: float = 0.0) -> None:
        super().__init__(1e9)
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self.failing: Callable[[Pairs], bool] = lambda pairs: False

    def move(self, pairs: Pairs) -> None:
        assert all(side.is_contiguous() for pair in pairs for side in pair)
        time.sleep(self._random.random() * self._delay_s)
        if self.failing(pairs):
            raise RuntimeError("the cable was pulled")
        super().move(pairs)


class LateLink(PacedLink):
    """Makes a copy when somebody waits for it, and not before."""

    def copy(
        self, pairs: Pairs, after: Event | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Event:
        return LateCopy(self, list(pairs))


class LateCopy(Event):
    """A copy that is made when it is waited for."""

    def __init__(self, link: PacedLink, pairs: Pairs) -> None:
        self._link = link
        self._pairs = pairs
        self._done = False

    def synchronize(self) -> None:
        if not self._done:
            with torch.inference_mode():
                self._link.move(self._pairs)
            self._done = True

    def done(self) -> bool:
        return self._done
