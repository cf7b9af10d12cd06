"""Memory and rates of a machine, as the planner uses them: measured, or of a desktop with a known GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from offload_rt.errors import UsageError

GIB = 2**30
SYSTEM_BYTES = 4 * GIB  # of the RAM, left to the system and other programs

# What kernels reach of a data sheet's figures.
MEMORY_SHARE = 0.9
COMPUTE_SHARE = 0.8

AVX2_SHARES = ((1, 0.7), (8, 0.7), (16, 0.43))
BFLOAT16_SHARES = ((1, 0.7), (8, 0.7), (16, 0.7))
PROCESSORS = {
    "avx2": AVX2_SHARES,
    "zen4": BFLOAT16_SHARES,
    "zen5": BFLOAT16_SHARES,
    "alderlake": AVX2_SHARES,
    "raptorlake": AVX2_SHARES,
}
"""Share of the memory rate that CPU attention reaches by queries a key head, by processor: measured per core
with AVX2 and with AVX512-BF16 instructions, and scaled to five cores of a desktop. Behind the last number of
queries arithmetic binds it, and the rate falls as 1/queries."""
ATTENTION_QUERIES = 16

CONTEXT_BYTES = 700 * 2**20
"""GPU memory that a program cannot have: the driver's context, kernels, and a desktop without windows. An RTX
4090 is left with 23.3 GiB."""
LAUNCH_MS = 0.3
VERDICT_MS = 4.0
"""Time of a round beside pass and draft on a GPU: the verdict and the commit. An H200 took 2 to 7 ms."""
SLOT_RATE = 25.0  # GB/s of page-locked copies over 16 lanes of PCIe 4.0
NO_GPU = "none"
MOST_GPUS = 64
"""More take a plan minutes, and no machine has as many."""


@dataclass(frozen=True)
class Card:
    """Published figures of a GPU."""

    mib: int  # of its memory, as the driver reports it
    memory_rate: int  # GB/s
    compute_rate: int  # TFLOP/s of dense bfloat16 products accumulated in float32
    generation: int  # of PCIe
    lanes: int = 16

    @property
    def link_rate(self) -> float:
        """GB/s of page-locked copies in a slot of PCIe 4.0, which desktops have, or of its own older one."""
        return SLOT_RATE * self.lanes / 16 * 2.0 ** min(0, self.generation - 4)


KNOWN_GPUS = {
    "rtx3060": Card(12_288, 360, 25, 4),
    "rtx3070": Card(8_192, 448, 41, 4),
    "rtx3070ti": Card(8_192, 608, 43, 4),
    "rtx3080": Card(10_240, 760, 60, 4),
    "rtx3080-12": Card(12_288, 912, 61, 4),
    "rtx3080ti": Card(12_288, 912, 68, 4),
    "rtx3090": Card(24_576, 936, 71, 4),
    "rtx3090ti": Card(24_564, 1008, 80, 4),
    "rtx4060": Card(8_188, 272, 30, 4, lanes=8),
    "rtx4060ti-8": Card(8_188, 288, 44, 4, lanes=8),
    "rtx4060ti-16": Card(16_380, 288, 44, 4, lanes=8),
    "rtx4070": Card(12_282, 504, 58, 4),
    "rtx4070super": Card(12_282, 504, 71, 4),
    "rtx4070ti": Card(12_282, 504, 80, 4),
    "rtx4070tisuper": Card(16_376, 672, 88, 4),
    "rtx4080": Card(16_376, 717, 97, 4),
    "rtx4080super": Card(16_376, 736, 104, 4),
    "rtx4090": Card(24_564, 1008, 165, 4),
    "rtx5060": Card(8_151, 448, 38, 5, lanes=8),
    "rtx5060ti-8": Card(8_151, 448, 47, 5, lanes=8),
    "rtx5060ti-16": Card(16_311, 448, 47, 5, lanes=8),
    "rtx5070": Card(12_227, 672, 62, 5),
    "rtx5070ti": Card(16_303, 896, 88, 5),
    "rtx5080": Card(16_303, 960, 113, 5),
    "rtx5090": Card(32_607, 1792, 209, 5),
    "rtxa5000": Card(24_564, 768, 111, 4),
    "rtxa6000": Card(49_140, 768, 155, 4),
    "rtx6000ada": Card(49_140, 960, 364, 4),
    "rtxpro6000": Card(97_887, 1792, 504, 5),
    "a10": Card(23_028, 600, 125, 4),
    "l4": Card(23_034, 300, 121, 4),
    "l40": Card(46_068, 864, 181, 4),
    "l40s": Card(46_068, 864, 362, 4),
    "a100-40": Card(40_960, 1555, 312, 4),
    "a100-80": Card(81_920, 2039, 312, 4),
    "h100": Card(81_559, 3350, 989, 5),
    "h200": Card(143_771, 4800, 989, 5),
}
"""GPUs by name, with figures of NVIDIA's data sheets and of its architecture papers for GA102, AD102 and
Blackwell. GeForce cards accumulate in float32 at half the rate of other cards: two operations for each of
their float32 operations."""
_ADDED = re.compile("nvidia|geforce|quadro|tesla|blackwell|workstation|edition|generation|gb|[^a-z0-9]")
"""Parts of a card's name that a name of `KNOWN_GPUS` leaves out."""


@dataclass(frozen=True)
class ProductRate:
    """Rate of products of some rows with quantised weights, in billions of weights a second."""

    quantization: str  # its name, e.g. nf4
    rows: int
    rate: float


@dataclass(frozen=True)
class Gpu:
    """A GPU and its own link to host memory."""

    name: str
    memory_bytes: int  # usable: what was free when it was inspected
    memory_rate: float  # GB/s at which kernels read its memory
    compute_rate: float  # TFLOP/s of dense bfloat16 matrix products
    to_device_rate: float  # GB/s of page-locked copies, in this direction alone
    to_host_rate: float
    launch_ms: float  # to launch one decoder layer's operations over a few tokens one by one
    products: tuple[ProductRate, ...] = ()  # with quantised weights; none where they were not measured
    triton: bool = True  # the Triton kernels run on it
    verdict_ms: float = VERDICT_MS  # of a round, beside pass and draft

    def read_ms(self, size: float) -> float:
        """Returns the time to read `size` bytes of its memory."""
        return size / self.memory_rate / 1e6

    def compute_ms(self, flops: float) -> float:
        """Returns the time of `flops` floating-point operations."""
        return flops / self.compute_rate / 1e9


@dataclass(frozen=True)
class AttentionRate:
    """Rate of CPU attention, in GB/s of KV, at a number of (folded) queries a key head."""

    queries: int
    rate: float


@dataclass(frozen=True)
class Host:
    """The processor and its memory."""

    memory_bytes: int  # usable: what was available when it was inspected
    lockable_bytes: int  # how much of it may be page-locked
    memory_rate: float  # GB/s at which all threads together read memory
    compute_rate: float  # GFLOP/s of float32 matrix products with many rows
    attention: tuple[AttentionRate, ...]  # by rising numbers of queries, bfloat16 KV, on an idle machine
    attention_beside_link: float  # share of that rate that is left while the link copies at its full rate
    link_beside_attention: float  # share of the link's rate left meanwhile; both are 1 without a link
    launch_ms: float  # for one decoder layer's operations over a few tokens
    products: tuple[ProductRate, ...] = ()  # with quantised weights; none where they were not measured

    def read_ms(self, size: float) -> float:
        """Returns the time to read `size` bytes of memory."""
        return size / self.memory_rate / 1e6

    def compute_ms(self, flops: float) -> float:
        """Returns the time of `flops` floating-point operations."""
        return flops / self.compute_rate / 1e6


@dataclass(frozen=True)
class Hardware:
    """A machine. Without GPUs the CPU computes, and KV is attended in place."""

    host: Host
    gpus: tuple[Gpu, ...]
    measured: bool  # on this machine; False: named figures and data sheets

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Hardware:
        """Restores what `dataclasses.asdict` gave."""
        attention = tuple(AttentionRate(**rate) for rate in values["host"]["attention"])

        def products(described: dict[str, Any]) -> dict[str, Any]:
            return described | {"products": tuple(ProductRate(**rate) for rate in described["products"])}

        gpus = tuple(Gpu(**products(gpu)) for gpu in values["gpus"])
        host = Host(**products(values["host"]) | {"attention": attention})
        return cls(host, gpus, values["measured"])


def named_hardware(
    gpu: str,
    gpus: int = 1,
    *,
    link: float | None = None,
    dram: float = 70.0,
    ram: float = 96.0,
    cpu: str = "avx2",
    cpu_attention: float | None = None,
    vram: float | None = None,
) -> Hardware:
    """Returns a desktop with `gpus` GPUs of a known kind in PCIe 4.0 ×16 slots and two channels of DDR5.

    Args:
        gpu: a name from `KNOWN_GPUS`, in any usual spelling ("4090", "RTX 4090"), or "none".
        link: GB/s of page-locked copies between the host and each GPU, in each direction; None: 25, or as
            few as the card's lanes allow.
        dram: GB/s at which the CPU reads its memory.
        ram: GiB of host memory.
        cpu: a name from `PROCESSORS`.
        cpu_attention: GB/s of KV that the CPU attends at up to 16 queries a key head; None: as `cpu` says.
        vram: usable GiB of each GPU; None: all of its memory but for the driver's context.

    Raises:
        UsageError: an unknown GPU, or a figure that is not positive.
    """
    figures = {"--link": link, "--dram": dram, "--ram": ram, "--cpu-attention": cpu_attention, "--vram": vram}
    for flag, figure in figures.items():
        if figure is not None and not 0 < figure < float("inf"):
            raise UsageError(f"{flag} {figure:g}: must be a finite number above 0")
    if gpus > MOST_GPUS:
        raise UsageError(f"--gpus {gpus}: must be at most {MOST_GPUS}")
    if gpus < 1:
        raise UsageError(f"--gpus {gpus}: must be at least 1; for a machine without a GPU use --gpu {NO_GPU}")
    if cpu not in PROCESSORS:
        raise UsageError(f"--cpu {cpu}: is not known; use one of {', '.join(PROCESSORS)}")
    shares: tuple[tuple[int, float], ...] = PROCESSORS[cpu]
    if cpu_attention is not None:
        shares = ((1, cpu_attention / dram), (ATTENTION_QUERIES, cpu_attention / dram))
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
    devices = () if gpu == NO_GPU else (_named_gpu(gpu, link, vram),) * gpus
    return Hardware(host, devices, measured=False)


def _named_gpu(gpu: str, link: float | None, vram: float | None) -> Gpu:
    """Returns a known GPU by its name; see `named_hardware`."""
    written = _ADDED.sub("", gpu.lower())
    spellings = {name.replace("-", ""): name for name in KNOWN_GPUS}
    spellings |= {
        f"{spelling}{round(KNOWN_GPUS[name].mib / 1024)}": name for spelling, name in spellings.items()
    }
    name = spellings.get(written) or spellings.get(f"rtx{written}")
    sizes = [spelling for spelling in KNOWN_GPUS if spelling.startswith((f"rtx{written}-", f"{written}-"))]
    if name is None and sizes:
        raise UsageError(f"--gpu {gpu}: there are cards of several sizes; use {' or '.join(sizes)}")
    if name is None:
        raise UsageError(f"--gpu {gpu}: is not known; use one of {', '.join(KNOWN_GPUS)} or {NO_GPU}")
    card = KNOWN_GPUS[name]
    rate = card.link_rate if link is None else link
    return Gpu(
        name=name,
        memory_bytes=int(vram * GIB) if vram is not None else card.mib * 2**20 - CONTEXT_BYTES,
        memory_rate=MEMORY_SHARE * card.memory_rate,
        compute_rate=COMPUTE_SHARE * card.compute_rate,
        to_device_rate=rate,
        to_host_rate=rate,
        launch_ms=LAUNCH_MS,
    )


@lru_cache
def behind_a_link(rate: float | None, other_processors: int = 0) -> Hardware:
    """Returns the hardware that an emulated link stands for: the host's processor at its end, as a GPU.

    Args:
        rate: GB/s of the link; None: not known.
        other_processors: number of further such processors, each with its link.
    """
    host = named_hardware(NO_GPU).host
    link = rate or SLOT_RATE
    processor = Gpu(
        name="the processor behind a link",
        memory_bytes=host.memory_bytes,
        memory_rate=host.attention[0].rate / 2,  # a pass and the drafts beside it share the cores
        compute_rate=host.compute_rate / 2e3,
        to_device_rate=link,
        to_host_rate=link,
        launch_ms=host.launch_ms,
        verdict_ms=0.0,
    )
    return Hardware(host, (processor,) * (1 + other_processors), measured=False)
