"""DeepSpeed-ZeRO-Inference: transformers' generation over a model whose weights ZeRO stage 3 holds.

ZeRO stage 3 gathers a module's weights when its forward pass begins. Here all of them stay on the device, or
all of them stay in CPU memory and cross the link in every pass. The KV cache is transformers' `StaticCache`,
which is faster than the dynamic one, whose layers are copied whenever they grow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from bench.systems import Opener, Run, Setup, refuse_link
from bench.systems._passes import generate, load, read, rewind, static_copy

EVERY_WEIGHT = 10**12
"""More elements than a model has."""


class ZeroInference:
    """DeepSpeed without its launcher, once in a process.

    Args:
        offloaded: whether the weights stay in CPU memory.
    """

    def __init__(self, setup: Setup, *, offloaded: bool) -> None:
        refuse_link(setup)
        self._setup = setup
        self._device = torch.device(setup.device)
        deepspeed = _deepspeed(setup, self._device)
        model = load(setup.model, replace(setup, device="cpu"))  # ZeRO places the weights
        config = _config(setup, offloaded, self._device)
        self._engine: Any = deepspeed.initialize(model=model, config=config)[0]
        self._model: Any = self._engine.module
        self._cache: Any = None
        weights = f"weights {'offloaded' if offloaded else 'resident'}"
        self.label = f"DeepSpeed-ZeRO-Inference {deepspeed.__version__}, {weights}, static cache, generate"
        self.notes: tuple[str, ...] = ()
        if offloaded and self._device.type == "cpu":
            self.notes = ("on a CPU its weights move within the same memory",)

    @torch.no_grad()
    def prepare(self, prompt: Sequence[int]) -> float:
        self._cache = None  # frees its memory before the next one is filled
        filled = DynamicCache(config=self._model.config)
        self._prompt, read_ms = read(self._model, prompt, filled, self._setup.chunk)
        self._cache, copy_ms = static_copy(filled, self._model, self._setup.capacity)
        return read_ms + copy_ms

    def run(self, new_tokens: int) -> Run:
        rewind(self._cache, self._prompt.shape[1] - 1)
        # ZeRO gathers weights in hooks, which a compiled pass would not call.
        options = {"disable_compile": True}
        return generate(self._setup, self._model, self._prompt, self._cache, new_tokens, **options)

    def close(self) -> None:
        self._cache = self._model = None
        self._engine.destroy()
        self._engine = None
        torch.distributed.destroy_process_group()


def _deepspeed(setup: Setup, device: torch.device) -> Any:
    """The package, in a group of this process alone."""
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["TORCH_EXTENSIONS_DIR"] = str((setup.folder / "torch_extensions").resolve())
    # ninja, which compiles them, is installed next to Python.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(device.index or 0)}
    import deepspeed

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # needs no port
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    return deepspeed


def _config(setup: Setup, offloaded: bool, device: torch.device) -> dict[str, Any]:
    kept = ("stage3_param_persistence_threshold", "stage3_model_persistence_threshold")
    placed = {"offload_param": {"device": "cpu", "pin_memory": device.type == "cuda"}}
    return {
        "train_micro_batch_size_per_gpu": 1,  # required, unused
        "bf16": {"enabled": setup.dtype == "bfloat16"},
        "zero_optimization": {"stage": 3} | (placed if offloaded else dict.fromkeys(kept, EVERY_WEIGHT)),
    }


SYSTEMS: dict[str, Opener] = {
    "resident": partial(ZeroInference, offloaded=False),
    "offloaded": partial(ZeroInference, offloaded=True),
}
