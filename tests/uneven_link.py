"""A link that is slow at random, and fails when it is told to."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from cpu_kv import PacedLink
from cpu_kv.link import Pairs


class UnevenLink(PacedLink):
    """Delays every copy by a random time of up to `delay_s`; fails those that `failing` points out."""

    def __init__(self, seed: int = 0, delay_s: float = 0.0) -> None:
        super().__init__(1e9, timeout=30.0)
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self.failing: Callable[[Pairs], bool] = lambda pairs: False

    def move(self, pairs: Pairs) -> None:
        time.sleep(self._random.random() * self._delay_s)
        if self.failing(pairs):
            raise RuntimeError("the cable was pulled")
        super().move(pairs)
