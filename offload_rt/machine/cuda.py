"""Why torch finds no CUDA device, in its own words, and what to do about it."""

from __future__ import annotations

import os

import torch

from offload_rt.errors import first_line
from offload_rt.machine.inventory import read_versions

DRIVERS = {12: "525 or newer, 550 or newer from CUDA 12.4 on", 13: "580 or newer"}
"""NVIDIA drivers that builds of torch for a major version of CUDA need."""
LEAST_DRIVERS = {12: 525, 13: 580}
INDEX = "https://download.pytorch.org/whl"
INDICES = {12: f"{INDEX}/cu126", 13: f"{INDEX}/cu130"}


def no_cuda_device() -> str | None:
    """Returns why torch finds no CUDA device and the remedy, in a line; None where it finds one."""
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
        reason = f"it counts {torch.cuda.device_count()} devices"
    except Exception as error:  # AssertionError of a build without CUDA, else RuntimeError
        reason = first_line(error)
    cuda, driver = torch.version.cuda, read_versions()["driver"]
    installed = f"NVIDIA driver {driver} is installed" if driver else "no NVIDIA driver was found"
    said = f'torch {torch.__version__} finds no CUDA device ("{reason}"); '
    number = int(driver.partition(".")[0]) if driver else LEAST_DRIVERS[13]
    major = 13 if number >= LEAST_DRIVERS[13] else 12
    if cuda is None or "+cpu" in torch.__version__:
        # pip takes 2.13.0+cpu for newer than 2.13.0, and 2.13.0+cu130 for newer still.
        return (
            f"{said}torch.version.cuda is {cuda}: this is a build for CPUs alone, which pip prefers where an"
            f" index with +cpu builds is configured, and {installed}; install a build for CUDA {major}"
            f" (driver {DRIVERS[major]}): pip install --force-reinstall --index-url {INDICES[major]} torch"
        )
    built = int(cuda.partition(".")[0])
    needed = DRIVERS.get(built, "as CUDA's release notes say")
    said += f"it is built for CUDA {cuda}, which needs an NVIDIA driver {needed}, and {installed}"
    if driver and number < LEAST_DRIVERS.get(built, 0):
        return (
            f"{said}; update the driver, or install a build for CUDA {major}:"
            f" pip install --force-reinstall --index-url {INDICES[major]} torch"
        )
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if hidden is None else f" (it is {hidden!r})"
    remedy = "see whether nvidia-smi lists the GPU" if driver else "install the driver"
    return f"{said}; {remedy}, and that CUDA_VISIBLE_DEVICES does not hide the GPU{shown}"
