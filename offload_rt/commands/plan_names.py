"""Models and GPUs that `offload-rt plan` knows by name."""

from __future__ import annotations

from collections.abc import Iterator

from offload_rt.model.named_shapes import SHAPES
from offload_rt.system.hardware import GIB, KNOWN_GPUS


def known_names() -> Iterator[str]:
    """Yields the lines of `plan --list`: all models, then all cards, with the sizes that decide."""
    kv = "KV per 1,024 tokens, GiB"
    yield f"{'model':<22} {'parameters':>10} {'weights, GiB':>13} {kv:>25} {'positions':>10}"
    for name, shape in SHAPES.items():
        yield (
            f"{name:<22} {shape.parameters / 1e9:>8.2f} B {shape.weight_bytes / GIB:>13.1f}"
            f" {1024 * shape.token_bytes / GIB:>25.3f} {shape.max_positions:>10,}"
        )
    yield ""
    yield f"{'card':<22} {'memory, GiB':>11} {'GB/s':>6} {'TFLOP/s':>8}  {'PCIe':>7}"
    for name, card in KNOWN_GPUS.items():
        yield (
            f"{name:<22} {card.mib / 1024:>11.1f} {card.memory_rate:>6,} {card.compute_rate:>8,}"
            f"  {card.generation}.0 ×{card.lanes}"
        )
