"""What a machine can do, in figures: measured by `doctor.py`, or of a desktop with a known card."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from offload_rt.errors import UsageError

GIB = 2**30
SYSTEM_BYTES = 4 * GIB  # of the RAM, left to the system and other programs

# What kernels reach of a data sheet's figures.
MEMORY_SHARE = 0.9
COMPUTE_SHARE = 0.8

# Share of the memory's rate that CPU attention reaches by queries a key head, on a desktop processor without
# bfloat16 products (AVX2): measured per core and scaled to five cores of a desktop. Arithmetic binds it from
# 16 queries on, and its rate falls as one over their number.
ATTENTION_SHARES = ((1, 0.7), (8, 0.7), (16, 0.43))
ATTENTION_QUERIES = 16

LAUNCH_MS = 0.3
NO_GPU = "none"

CARDS = {  # memory in MiB as the driver reports it, its rate in GB/s, dense bf16 TFLOP/s
    "rtx4090": (24_564, 1008, 165),
    "rtx3090": (24_576, 936, 71),
    "l40": (46_068, 864, 181),
    "a100-40": (40_960, 1555, 312),
    "a100-80": (81_920, 2039, 312),
    "h100": (81_559, 3350, 989),
    "h200": (143_771, 4800, 989),
}
"""Known cards, as their data sheets have them."""


@dataclass(frozen=True)
class Gpu:
    """One graphics card and its own link to host memory."""

    name: str
    memory_bytes: int  # what may be used: free memory where it was measured
    memory_rate: float  # GB/s at which kernels read its memory
    compute_rate: float  # TFLOP/s of dense bf16 matrix products
    to_device_rate: float  # GB/s of pinned copies, this direction alone
    to_host_rate: float
    launch_ms: float  # of one decoder layer's operations over a few tokens, launched one by one

    def read_ms(self, size: float) -> float:
        """Of reading so many bytes of its memory."""
        return size / self.memory_rate / 1e6

    def compute_ms(self, flops: float) -> float:
        """Of so many floating-point operations."""
        return flops / self.compute_rate / 1e9


@dataclass(frozen=True)
class AttentionRate:
    """GB/s of KV that the CPU attends where it lies, at so many (folded) queries a key head."""

    queries: int
    rate: float


@dataclass(frozen=True)
class Host:
    """The processor and its memory."""

    memory_bytes: int  # what may be used: available memory where it was measured
    lockable_bytes: int  # how much of it may be page-locked
    memory_rate: float  # GB/s at which all its threads read memory
    compute_rate: float  # GFLOP/s of float32 matrix products of many rows
    attention: tuple[AttentionRate, ...]  # at rising numbers of queries, bf16 KV, nothing else going on
    attention_beside_link: float  # share of that rate left while the link copies at full rate
    link_beside_attention: float  # of the link's rate, meanwhile; both are measured as 1 without a link
    launch_ms: float  # of one decoder layer's operations over a few tokens

    def read_ms(self, size: float) -> float:
        """Of reading so many bytes of memory."""
        return size / self.memory_rate / 1e6

    def compute_ms(self, flops: float) -> float:
        """Of so many floating-point operations."""
        return flops / self.compute_rate / 1e6


@dataclass(frozen=True)
class Hardware:
    """A machine; without `gpus` the CPU computes, and KV is attended where it lies."""

    host: Host
    gpus: tuple[Gpu, ...]
    measured: bool  # by doctor on this machine; False: named, or from data sheets

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Hardware:
        """The inverse of `dataclasses.asdict`."""
        attention = tuple(AttentionRate(**rate) for rate in values["host"]["attention"])
        gpus = tuple(Gpu(**gpu) for gpu in values["gpus"])
        return cls(Host(**values["host"] | {"attention": attention}), gpus, values["measured"])


def named_hardware(
    gpu: str,
    gpus: int = 1,
    *,
    link: float = 25.0,
    dram: float = 70.0,
    ram: float = 96.0,
    cpu_attention: float | None = None,
    vram: float | None = None,
) -> Hardware:
    """A desktop with `gpus` cards of a known kind in PCIe 4.0 slots of 16 lanes, and two channels of DDR5.

    Args:
        gpu: a name from `CARDS`, written in any usual way ("4090", "RTX 4090"), or "none".
        link: GB/s of pinned copies between host and each card, each way.
        dram: GB/s at which the CPU reads its memory.
        ram: GiB of it.
        cpu_attention: GB/s of KV that the CPU attends at up to 16 queries a key head; None: 0.7 of `dram` at
            up to 8, 0.43 at 16.
        vram: GiB of a card that may be used; None: the card's.

    Raises:
        UsageError: an unknown card, or a figure that is not positive.
    """
    figures = {"--link": link, "--dram": dram, "--ram": ram, "--cpu-attention": cpu_attention, "--vram": vram}
    for flag, figure in figures.items():
        if figure is not None and not 0 < figure < float("inf"):
            raise UsageError(f"{flag} {figure:g}: must be more than 0")
    if gpus < 1:
        raise UsageError(f"--gpus {gpus}: must be at least 1; --gpu {NO_GPU} is a machine without one")
    shares = (
        ATTENTION_SHARES if cpu_attention is None else ((1, cpu_attention / dram), (16, cpu_attention / dram))
    )
    attention = tuple(AttentionRate(queries, dram * min(1.0, share)) for queries, share in shares)
    memory = max(0, int(ram * GIB) - SYSTEM_BYTES)
    host = Host(
        memory_bytes=memory,
        lockable_bytes=memory,
        memory_rate=dram,
        compute_rate=attention[-1].rate * ATTENTION_QUERIES,  # attention is one operation a byte and query
        attention=attention,
        attention_beside_link=0.85,
        link_beside_attention=0.95,
        launch_ms=LAUNCH_MS,
    )
    if gpu == NO_GPU:
        return Hardware(host, (), measured=False)
    written = re.sub("nvidia|geforce|tesla|[^a-z0-9]", "", gpu.lower())
    card = next((name for name in CARDS if name.replace("-", "") in (written, f"rtx{written}")), None)
    if card is None:
        raise UsageError(f"--gpu {gpu}: is not known; there are {', '.join(CARDS)} and {NO_GPU}")
    mib, memory_rate, compute_rate = CARDS[card]
    one = Gpu(
        name=card,
        memory_bytes=int(vram * GIB) if vram is not None else mib * 2**20,
        memory_rate=MEMORY_SHARE * memory_rate,
        compute_rate=COMPUTE_SHARE * compute_rate,
        to_device_rate=link,
        to_host_rate=link,
        launch_ms=LAUNCH_MS,
    )
    return Hardware(host, (one,) * gpus, measured=False)
