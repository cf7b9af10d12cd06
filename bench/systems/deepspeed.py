"""DeepSpeed-ZeRO-Inference: transformers' generation over a model whose weights ZeRO stage 3 holds.

ZeRO stage 3 gathers a module's weights when its forward pass begins. Here all of them stay on the device, or
in CPU memory and cross the link in every pass. The KV cache is transformers' `StaticCache`, which is faster
than the dynamic one, whose layers are copied whenever they grow.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.systems import Opener, Setup
from bench.systems._passes import Continued, Text, load

EVERY_WEIGHT = 10**12
"""More elements than a model has."""


class ZeroInference(Continued):
    """DeepSpeed without its launcher; once in a process.

    Args:
        offloaded: whether the weights stay in CPU memory.
    """

    def __init__(self, setup: Setup, *, offloaded: bool) -> None:
        device = torch.device(setup.device)
        deepspeed = _deepspeed(setup, device)
        model = load(setup.model, replace(setup, device="cpu"))  # ZeRO places the weights
        config = _config(setup, offloaded, device)
        self._engine: Any = deepspeed.initialize(model=model, config=config)[0]
        weights = f"weights {'offloaded' if offloaded else 'resident'}"
        label = f"DeepSpeed-ZeRO-Inference {deepspeed.__version__}, {weights}, static cache, generate"
        # ZeRO gathers weights in hooks, which a compiled pass would not call.
        text = Text(self._engine.module, setup.chunk)
        super().__init__(label, setup, text, static=True, disable_compile=True)
        if offloaded and device.type == "cpu":
            self.notes = ("on a CPU its weights move within the same memory",)

    def close(self) -> None:
        self._engine.destroy()
        super().close()
        torch.distributed.destroy_process_group()


def _deepspeed(setup: Setup, device: torch.device) -> Any:
    """Imports the package, in a process group of this process alone."""
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["TORCH_EXTENSIONS_DIR"] = str((setup.folder / "torch_extensions").resolve())
    # ninja, which compiles them, is installed next to Python.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(device.index or 0)}
    import deepspeed

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # it needs no port
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    return deepspeed


def _config(setup: Setup, offloaded: bool, device: torch.device) -> dict[str, Any]:
    kept_on_device = ("stage3_param_persistence_threshold", "stage3_model_persistence_threshold")
    offload = {"offload_param": {"device": "cpu", "pin_memory": device.type == "cuda"}}
    return {
        "train_micro_batch_size_per_gpu": 1,  # required, unused
        "bf16": {"enabled": setup.dtype == "bfloat16"},
        "zero_optimization": {"stage": 3}
        | (offload if offloaded else dict.fromkeys(kept_on_device, EVERY_WEIGHT)),
    }


SYSTEMS: dict[str, Opener] = {
    "resident": partial(ZeroInference, offloaded=False),
    "offloaded": partial(ZeroInference, offloaded=True),
}
