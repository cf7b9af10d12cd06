"""What OpenMP and CUDA read from the environment, once, when torch is loaded: so this imports nothing."""

import os

NVIDIA_DRIVER = "/proc/driver/nvidia/version"
WAIT_POLICY = "OMP_WAIT_POLICY"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def wait_passively(driver: str = NVIDIA_DRIVER) -> None:
    """Where there is a GPU, lets idle threads sleep: spinning, they take the cores of those that feed it."""
    if os.path.exists(driver):
        os.environ.setdefault(WAIT_POLICY, "PASSIVE")
        # Of 8 hardware queues, as there are by default, streams may share one: a draft would wait for copies.
        os.environ.setdefault(CONNECTIONS, "32")
