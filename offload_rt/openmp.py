"""How OpenMP's threads wait for work. Read once, when torch is loaded: so this imports nothing."""

import os

NVIDIA_DRIVER = "/proc/driver/nvidia/version"
WAIT_POLICY = "OMP_WAIT_POLICY"


def wait_passively(driver: str = NVIDIA_DRIVER) -> None:
    """Where there is a GPU, lets idle threads sleep: spinning, they take the cores of those that feed it."""
    if os.path.exists(driver):
        os.environ.setdefault(WAIT_POLICY, "PASSIVE")
