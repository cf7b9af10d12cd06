"""What a run may use of this machine now."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from offload_rt.devices import available_memory
from offload_rt.machine.hardware import GIB, NO_GPU, SYSTEM_BYTES, Hardware, named_hardware

if TYPE_CHECKING:
    from offload_rt.machine.measuring import Progress


def usable_hardware(
    device: torch.device, loaded_bytes: int = 0, on_progress: Progress | None = None
) -> Hardware:
    """The host and, where it is a GPU, the device, with the memory that is free or already taken for the run.

    Args:
        loaded_bytes: what the run already holds of the device's memory, or of the host's without one.
        on_progress: told what is measured of the machine, where it has not been before.
    """
    if device.type != "cuda":
        # Attended in place there is nothing to place: only memory counts, and that needs no measurement.
        return named_hardware(NO_GPU, ram=(available_memory() + loaded_bytes + SYSTEM_BYTES) / GIB)
    from offload_rt.machine.doctor import inspect

    measured = inspect(on_progress=on_progress).hardware
    index = torch.cuda.current_device() if device.index is None else device.index
    free, _ = torch.cuda.mem_get_info(index)
    # What torch has reserved and not handed out is free to us as well.
    spare = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    card = replace(measured.gpus[index], memory_bytes=free + spare + loaded_bytes)
    return replace(measured, gpus=(card,))
