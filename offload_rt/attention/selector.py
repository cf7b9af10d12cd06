"""Which backend attends, on a device and on its behalf."""

from __future__ import annotations

import torch

from offload_rt.attention.backends import AttentionBackend, NativeCpuBackend, TorchCpuBackend
from offload_rt.attention.cuda_backends import cuda_backend
from offload_rt.kernels.native import load_kernel

RESERVED_CORES = 3  # for the threads that run a pass, draft and choose chunks while the CPU attends


def choose_backend(device: torch.device, threads: int | None = None) -> AttentionBackend:
    """Returns the fastest backend for `device`: flash-attn or our CPU kernel where faster, else torch's.

    Args:
        threads: CPU threads per call (default: torch's number).
    """
    if device.type == "cpu":
        kernel = load_kernel()
        return TorchCpuBackend(threads) if kernel is None else NativeCpuBackend(kernel, threads)
    return cuda_backend(device)


def cpu_share_backend(device: torch.device) -> AttentionBackend:
    """Returns the CPU backend for a range of KV that the CPU attends on behalf of `device`."""
    threads = None if device.type == "cpu" else max(1, torch.get_num_threads() - RESERVED_CORES)
    return choose_backend(torch.device("cpu"), threads)
