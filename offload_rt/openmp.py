"""Environment variables that OpenMP and CUDA read once, when torch is loaded: torch is not imported here."""

import os

NVIDIA_DRIVER = "/proc/driver/nvidia/version"
WAIT_POLICY = "OMP_WAIT_POLICY"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def wait_passively(driver: str = NVIDIA_DRIVER) -> None:
    """Sets OMP_WAIT_POLICY=PASSIVE on GPU hosts so that idle threads do not spin, and more CUDA queues."""
    if os.path.exists(driver):
        os.environ.setdefault(WAIT_POLICY, "PASSIVE")
        # With the default of 8 hardware queues, two streams may share one, and a draft would wait for copies.
        os.environ.setdefault(CONNECTIONS, "32")
