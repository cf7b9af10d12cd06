"""Explains why torch finds no CUDA device, in torch's own words, with the remedy."""

from __future__ import annotations

import os

import torch

from offload_rt.errors import first_line
from offload_rt.machine.inventory import driver_gpus, read_versions
from offload_rt.system.installation import pip_install

MINIMUM_DRIVERS = {12: 525, 13: 580}
"""Oldest NVIDIA driver that runs builds of torch for a major version of CUDA."""
DRIVERS = {12: "525 or newer, 550 or newer from CUDA 12.4 on", 13: "580 or newer"}
INDEXES = {12: "https://download.pytorch.org/whl/cu126", 13: "https://download.pytorch.org/whl/cu130"}


def no_cuda_device() -> str | None:
    """Returns the reason why torch finds no CUDA device and the remedy, in one line; None if it finds one."""
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
        reason = f"it counts {torch.cuda.device_count()} devices"
    except Exception as error:  # AssertionError of a build without CUDA, else RuntimeError
        reason = first_line(error)
    cuda, driver = torch.version.cuda, read_versions()["driver"]
    listed = f" and lists {', '.join(names)}" if (names := driver_gpus()) else ""
    installed = f"NVIDIA driver {driver} is installed{listed}" if driver else "no NVIDIA driver was found"
    number = int(driver.partition(".")[0]) if driver else MINIMUM_DRIVERS[13]
    newest = 13 if number >= MINIMUM_DRIVERS[13] else 12
    install = f"{pip_install()} --force-reinstall --index-url {INDEXES[newest]} torch"
    cause = f'torch {torch.__version__} finds no CUDA device ("{reason}"); torch.version.cuda is {cuda}'
    if cuda is None or "+cpu" in torch.__version__:
        # pip prefers 2.13.0+cpu to 2.13.0, and 2.13.0+cu130 to both.
        return (
            f"{cause}: this is a build for CPUs only, which pip prefers where an index with +cpu builds is"
            f" configured, and {installed}; install a build for CUDA {newest} (driver {DRIVERS[newest]}):"
            f" {install}"
        )
    built = int(cuda.partition(".")[0])
    driver_version = DRIVERS.get(built, "as CUDA's release notes say")
    cause += f", which needs an NVIDIA driver {driver_version}, and {installed}"
    if driver and number < MINIMUM_DRIVERS.get(built, 0):
        return f"{cause}; update the driver, or install a build for CUDA {newest}: {install}"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if hidden is None else f" (it is {hidden!r})"
    remedy = "check that nvidia-smi lists the GPU, and" if driver else "install the driver, and check"
    return f"{cause}; {remedy} that CUDA_VISIBLE_DEVICES does not hide the GPU{shown}"
