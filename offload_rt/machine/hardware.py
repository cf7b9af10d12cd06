"""What a machine can do, in figures: measured by `doctor.py`, or named; `planner.py` predicts from them."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One graphics card and its own link to host memory.

    Attributes:
        name: as the driver or a data sheet calls it.
        memory_bytes: what may be used of it: free memory where it was measured.
        memory_rate: GB/s at which kernels read its memory.
        compute_rate: TFLOP/s of dense bf16 matrix products.
        to_device_rate, to_host_rate: GB/s of pinned copies, each direction alone.
        launch_ms: of one decoder layer's operations over a few tokens, launched one by one.
    """

    name: str
    memory_bytes: int
    memory_rate: float
    compute_rate: float
    to_device_rate: float
    to_host_rate: float
    launch_ms: float


@dataclass(frozen=True)
class AttentionRate:
    """How fast the CPU attends KV where it lies.

    Attributes:
        queries: how many (folded) queries a key head has.
        rate: GB/s of KV read.
    """

    queries: int
    rate: float


@dataclass(frozen=True)
class Host:
    """The processor and its memory.

    Attributes:
        memory_bytes: what may be used: available memory where it was measured.
        lockable_bytes: how much of it may be page-locked.
        memory_rate: GB/s at which all its threads read memory.
        compute_rate: GFLOP/s of float32 matrix products of many rows.
        attention: measured at rising numbers of queries, bf16 KV, nothing else going on.
        attention_beside_link: share of that rate which is left while the link copies at full rate.
        link_beside_attention: share of the link's rate which is left meanwhile.
        launch_ms: of one decoder layer's operations over a few tokens.
        threads: that compute.
    """

    memory_bytes: int
    lockable_bytes: int
    memory_rate: float
    compute_rate: float
    attention: tuple[AttentionRate, ...]
    attention_beside_link: float
    link_beside_attention: float
    launch_ms: float
    threads: int


@dataclass(frozen=True)
class Hardware:
    """A machine.

    Attributes:
        host: processor and memory.
        gpus: may be none: then the CPU computes, and KV is attended where it lies.
        measured: by doctor on this machine; False: named, or from data sheets.
    """

    host: Host
    gpus: tuple[Gpu, ...]
    measured: bool
