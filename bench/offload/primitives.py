"""What the processor does alone, in a run's own shapes: what `prediction-accuracy` predicts from."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from time import perf_counter
from typing import Any

import torch

from offload_rt.attention import attend, choose_backend
from offload_rt.config import StoreConfig
from offload_rt.machine.hardware import AttentionRate
from offload_rt.machine.measuring import CPU, compute_rate, memory_rate
from offload_rt.model import CausalModel

REPEATS = 7
READ_BYTES = 2**28


@torch.inference_mode()
def attention_rates(model: CausalModel, context: int, gamma: int) -> list[dict[str, float]]:
    """GB/s at which KV of `context` tokens is attended by 1 query, by a draft of `gamma` tokens, and between.

    Layers take turns, as in a pass, so that no cache holds them. Values of `AttentionRate`, by the queries
    that a key head has.
    """
    queries = (1, 1 + gamma // 2, 1 + gamma)
    backend, group = choose_backend(model.device), model.heads // model.kv_heads
    layout = model.kv_layout(StoreConfig.page)
    shape = (model.layers, *layout.pages_shape(layout.pages(context)))
    pages = torch.randn(shape, dtype=model.dtype)
    spent: dict[int, list[float]] = {count: [] for count in queries}
    for turn in range(REPEATS + 1):
        for count, times in spent.items():
            asked = torch.randn(model.heads, count, model.head_dim, dtype=model.dtype)
            started = perf_counter()
            for layer in range(model.layers):
                attend(backend, asked, pages[layer, :, 0], pages[layer, :, 1], model.head_dim**-0.5)
            times += [perf_counter() - started] if turn else []
    return [
        asdict(AttentionRate(count * group, pages.nbytes / median(times) / 1e9))
        for count, times in spent.items()
    ]


def processor(attention: list[dict[str, float]]) -> dict[str, Any]:
    """A processor's rates with one thread, as JSON values."""
    return {
        "attention": attention,
        "memory_rate": memory_rate(CPU, READ_BYTES),
        "compute_rate": compute_rate(CPU, torch.float32, 128, 1024),
    }
