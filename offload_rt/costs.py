"""What a pass costs by its shapes, at nominal rates of the device.

Not a prediction of this machine's speed: a fixed scale, on which passes can be compared without a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload_rt.model.layer_plan import LayerPlan
from offload_rt.model.runner import CausalModel

Cost = Callable[[int, int], float]
"""ms of a pass at a text of so many tokens, of so many new ones."""


@dataclass(frozen=True)
class Rates:
    """Nominal rates of a device."""

    launch_ms: float  # of one layer's operations, however small
    memory: float  # GB/s at which weights and bounded caches are read
    store: float  # GB/s at which attention reads the full cache (the link, where there is one)
    compute: float  # GFLOP/s of attention and matrix products over a few tokens


NOMINAL = {
    "cpu": Rates(launch_ms=0.5, memory=25.0, store=25.0, compute=150.0),
    "cuda": Rates(launch_ms=0.3, memory=800.0, store=22.0, compute=60_000.0),
}


def pass_cost(
    model: CausalModel, budget: int | None, link_rate: float | None = None, plan: LayerPlan | None = None
) -> Cost:
    """Of one model's passes over one kind of cache.

    Args:
        budget: entries the cache holds at most; None: the whole text.
        link_rate: bytes per second at which the whole text comes, where that is known.
        plan: of its layers, where blocks may be left out; None: none is.
    """
    rates, plan = NOMINAL[model.device.type], plan or LayerPlan.whole(model.layers)
    attending, mlps = (model.layers - len(left_out) for left_out in (plan.no_attention, plan.no_mlp))
    store = rates.store if link_rate is None else link_rate / 1e9
    rate = store if budget is None else rates.memory
    entry_ms = attending * model.kv_layout().layer_token_bytes / rate / 1e6
    query_entry_ms = 4 * attending * model.heads * model.head_dim / rates.compute / 1e6
    dense = _dense(model, (attending + mlps) / 2, model.weight_bytes - model.left_out_bytes(plan))

    def cost(length: int, queries: int) -> float:
        entries = length if budget is None else min(length, budget)
        # Reading and computing overlap; what is slower sets the pace.
        return dense(length, queries) + max(entry_ms, query_entry_ms * queries) * entries

    return cost


def head_cost(target: CausalModel, weight_bytes: int) -> Cost:
    """Of a draft head's passes: its block of so many bytes, and the target's output head."""
    return _dense(target, 1, weight_bytes + target.vocabulary * target.hidden_size * target.dtype.itemsize)


def _dense(model: CausalModel, layers: float, weight_bytes: int) -> Cost:
    """Of reading weights and launching layers, and of the products of each query."""
    rates = NOMINAL[model.device.type]
    fixed_ms = layers * rates.launch_ms + weight_bytes / rates.memory / 1e6
    query_ms = 2 * weight_bytes / model.dtype.itemsize / rates.compute / 1e6
    return lambda length, queries: fixed_ms + query_ms * queries
