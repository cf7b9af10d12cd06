"""What a pass costs by its shapes, at nominal rates of the device.

Not a prediction of this machine's speed: a fixed scale, on which passes can be compared without a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload_rt.model import CausalModel


@dataclass(frozen=True)
class Rates:
    """Nominal rates of a device.

    Attributes:
        launch_ms: of one layer's operations, however small.
        memory: GB/s at which weights and bounded caches are read.
        store: GB/s at which attention reads the full cache (the link, where there is one).
        compute: GFLOP/s of attention and matrix products over a few tokens.
    """

    launch_ms: float
    memory: float
    store: float
    compute: float


NOMINAL = {
    "cpu": Rates(launch_ms=0.5, memory=25.0, store=25.0, compute=150.0),
    "cuda": Rates(launch_ms=0.3, memory=800.0, store=22.0, compute=60_000.0),
}


class PassCost:
    """Nominal cost of one model's passes over one kind of cache.

    Args:
        budget: entries the cache holds at most; None: the whole text.
        link_rate: bytes per second at which the whole text comes, where that is known.
    """

    def __init__(self, model: CausalModel, budget: int | None, link_rate: float | None = None) -> None:
        rates = NOMINAL.get(model.device.type, NOMINAL["cpu"])
        self._budget = budget
        self._fixed_ms = model.layers * rates.launch_ms + model.weight_bytes / rates.memory / 1e6
        store = rates.store if link_rate is None else link_rate / 1e9
        rate = store if budget is None else rates.memory
        self._entry_ms = model.kv_layout().token_bytes / rate / 1e6
        self._query_entry_ms = 4 * model.layers * model.heads * model.head_dim / rates.compute / 1e6
        self._query_ms = 2 * model.weight_bytes / model.dtype.itemsize / rates.compute / 1e6

    def __call__(self, length: int, queries: int) -> float:
        """ms of a pass of `queries` tokens at a text of `length` tokens."""
        entries = length if self._budget is None else min(length, self._budget)
        # Reading and computing overlap; what is slower sets the pace.
        attention = max(self._entry_ms, self._query_entry_ms * queries) * entries
        return self._fixed_ms + attention + self._query_ms * queries


class HeadCost:
    """Nominal cost of passes of a draft head: its block, and the target's output head.

    Args:
        weight_bytes: of the block.
    """

    def __init__(self, target: CausalModel, weight_bytes: int) -> None:
        rates, itemsize = NOMINAL.get(target.device.type, NOMINAL["cpu"]), target.dtype.itemsize
        weight_bytes += target.vocabulary * target.hidden_size * itemsize
        self._fixed_ms = rates.launch_ms + weight_bytes / rates.memory / 1e6
        self._query_ms = 2 * weight_bytes / itemsize / rates.compute / 1e6

    def __call__(self, length: int, queries: int) -> float:
        """ms of a pass of `queries` tokens, at any `length`."""
        return self._fixed_ms + self._query_ms * queries
