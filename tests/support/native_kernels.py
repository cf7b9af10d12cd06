"""Processors for which the native kernel is built."""

from __future__ import annotations

from pathlib import Path

PROCESSORS = {
    "native": (),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "x86-64-v3": ("avx2", "fma"),
    "x86-64": (),
    "cooperlake": ("avx512_bf16", "avx512_vnni"),
}
"""By the compiler's names, with what the machine must have to run them. The first and the last can have the
dot products of bfloat16, the first its tiles."""
ATTENTION = [processor for processor in PROCESSORS if processor != "cooperlake"]
"""Those whose attention differs."""


def runs(processor: str) -> bool:
    """Returns whether this machine can play a processor, in another way than those before it."""
    flags = processor_flags()
    if processor == "cooperlake" and "avx512_bf16" in flags and "amx_bf16" not in flags:
        return False  # which the machine itself is
    return processor == "native" or (bool(flags) and flags.issuperset(PROCESSORS[processor]))


def processor_flags() -> set[str]:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())
