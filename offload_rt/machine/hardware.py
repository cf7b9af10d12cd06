"""What a machine can do, in figures: measured by `doctor.py`, or named; the planner predicts from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

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
        queries: (folded) queries a key head.
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
        attention_beside_link: share of that rate left while the link copies at full rate.
        link_beside_attention: share of the link's rate left meanwhile.
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

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Hardware:
        """The inverse of `dataclasses.asdict`."""
        attention = tuple(AttentionRate(**rate) for rate in values["host"]["attention"])
        gpus = tuple(Gpu(**gpu) for gpu in values["gpus"])
        return cls(Host(**values["host"] | {"attention": attention}), gpus, values["measured"])

    @cached_property
    def slowest_gpu(self) -> Gpu:
        """The least of every rate of the GPUs: where they share the work evenly, it sets the pace."""
        rates = ("memory_rate", "compute_rate", "to_device_rate", "to_host_rate")
        slowest = {name: min(getattr(gpu, name) for gpu in self.gpus) for name in rates}
        return replace(self.gpus[0], **slowest, launch_ms=max(gpu.launch_ms for gpu in self.gpus))
