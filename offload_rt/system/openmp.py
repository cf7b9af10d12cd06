"""Environment variables that OpenMP and CUDA read once, when torch is loaded: torch is not imported here."""

import os
from collections.abc import Sequence

NVIDIA_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
"""Where NVIDIA's driver is seen: on most machines, in gVisor, and under WSL2, which lack what comes first."""
WAIT_POLICY = "OMP_WAIT_POLICY"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def has_nvidia_driver(drivers: Sequence[str] = NVIDIA_DRIVERS) -> bool:
    """Returns whether the machine has a driver for NVIDIA GPUs, without asking it."""
    return any(map(os.path.exists, drivers))


def wait_passively(drivers: Sequence[str] = NVIDIA_DRIVERS) -> None:
    """Sets OMP_WAIT_POLICY=PASSIVE on GPU hosts so that idle threads do not spin, and more CUDA queues."""
    if has_nvidia_driver(drivers):
        os.environ.setdefault(WAIT_POLICY, "PASSIVE")
        # With the default of 8 hardware queues, two streams may share one, and a draft would wait for copies.
        os.environ.setdefault(CONNECTIONS, "32")
