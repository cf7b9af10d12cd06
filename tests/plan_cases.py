"""A desktop with a card, requests to plan for it, and how a refusal is read."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from offload_rt.config import load_config
from offload_rt.machine.hardware import GIB, AttentionRate, Gpu, Hardware, Host
from offload_rt.planning.placement import PlanRequest
from offload_rt.planning.shapes import find_shape

BF16 = torch.bfloat16
LLAMA = find_shape("llama2-7b", None)
JF68M = find_shape("jf68m", None)
CONTEXT = 131_072

HOST = Host(
    memory_bytes=92 * GIB,
    lockable_bytes=92 * GIB,
    memory_rate=70.0,
    compute_rate=800.0,
    attention=(AttentionRate(1, 50.0), AttentionRate(16, 40.0), AttentionRate(32, 30.0)),
    attention_beside_link=0.8,
    link_beside_attention=0.9,
    launch_ms=0.5,
    threads=8,
)
CARD = Gpu("card", 24 * GIB, 1000.0, 160.0, 25.0, 20.0, 0.3)
DESKTOP = Hardware(HOST, (CARD,), measured=True)


def request(**changes: Any) -> PlanRequest:
    """Llama2-7B with a small draft at 128K on a desktop, unless `changes` say otherwise."""
    given: dict[str, Any] = {
        "target": LLAMA,
        "draft": JF68M,
        "config": load_config("triforce"),
        "context": CONTEXT,
        "new_tokens": 256,
        "hardware": DESKTOP,
    }
    return PlanRequest(**given | changes)


def gpu(number: int = 1, **changes: Any) -> Hardware:
    """The desktop with `number` cards and other figures of the card."""
    return Hardware(HOST, (replace(CARD, **changes),) * number, measured=True)


def host(gpus: int = 1, **changes: Any) -> Hardware:
    """The desktop with so many cards and other figures of the host."""
    return Hardware(replace(HOST, **changes), (CARD,) * gpus, measured=True)


def nearest_context(said: str) -> int:
    found = re.search(r"a context of (\d+) tokens", said)
    assert found is not None
    return int(found[1])
