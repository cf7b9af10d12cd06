"""Chooses the devices and the data type that a model runs in."""

from __future__ import annotations

import re

import torch

from cpu_kv import ElementType
from offload_rt.errors import UsageError
from offload_rt.machine.cuda import no_cuda_device
from offload_rt.model.dtypes import choose_element

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


DEVICES = ("auto", "cpu", "cuda")


_CUDA_DEVICE = re.compile(r"cuda:(\d+)")


def choose_device(name: str) -> torch.device:
    """Returns the device `auto`, `cpu`, `cuda` or `cuda:N`; a GPU with its index, which some functions need.

    Raises:
        UsageError: another name, or a GPU that is not there.
    """
    gpu = _CUDA_DEVICE.fullmatch(name)
    if name not in DEVICES and gpu is None:
        raise UsageError(f"device {name!r} is unknown: use one of {', '.join(DEVICES)}, cuda:N")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if reason := no_cuda_device():
        raise UsageError(f"device {name}: {reason}; or use --device cpu")
    number, count = int(gpu[1]) if gpu else torch.cuda.current_device(), torch.cuda.device_count()
    if number >= count:
        raise UsageError(f"device {name}: this torch sees {count} CUDA devices, counted from 0")
    return torch.device("cuda", number)


def choose_devices(names: str) -> tuple[torch.device, ...]:
    """Returns the device that computes, and further GPUs that hold KV and attend to it: `cuda:0,cuda:1`.

    Raises:
        UsageError: see `choose_device`; or the devices cannot be combined.
    """
    first, *others = devices = tuple(map(choose_device, names.split(",")))
    if others and any(device.type == "cpu" for device in devices):
        raise UsageError(f"device {names}: only GPUs can be combined; write cuda:0,cuda:1")
    if len(set(devices)) < len(devices):
        raise UsageError(f"device {names}: names a GPU twice; leave one out")
    if first.type == "cuda" and first.index != torch.cuda.current_device():
        raise UsageError(
            f"device {names}: models run on cuda:{torch.cuda.current_device()}; name that one first, and "
            "choose the GPU with CUDA_VISIBLE_DEVICES"
        )
    return devices


def choose_dtype(name: str, device: torch.device, own: object) -> torch.dtype | None:
    """Returns the torch dtype that `choose_element` decides on; None means the checkpoint's own.

    Args:
        own: the checkpoint's, by its config; of any other type: it names none.
    """
    own_element = ElementType.of(own) if own in DTYPES.values() else None
    element = choose_element(name, device.type != "cpu", own_element)
    return None if element is None else DTYPES[str(element)]
