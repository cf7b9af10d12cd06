"""The embedding of a model on a GPU, in page-locked host memory.

A pass reads one row for each of its tokens, so the embedding need not take GPU memory: kernels gather the
rows over the link. Where the output head has the same weights, every pass reads all of them, and they stay on
the GPU.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from cpu_kv import SlabAllocator
from cpu_kv.mapped import device_view, kernels_use_host_pointers
from offload_rt.model.architecture import embedding

_MEMORY = "offload_rt_host_memory"
"""Attribute of an embedding that keeps its memory alive."""


def move_to_host(model: PreTrainedModel, device: torch.device) -> None:
    """Puts the weights of the embedding into page-locked memory that kernels of a GPU read.

    The weights stay a parameter of that device. Nothing is moved where the output head shares them, where the
    embedding computes something else than rows, and where so much memory cannot be page-locked.
    """
    module = embedding(model.model)
    head = model.get_output_embeddings()
    if (
        device.type != "cuda"
        or type(module) is not torch.nn.Embedding
        or not kernels_use_host_pointers(device)
    ):
        return
    if head is None or head.weight is module.weight or model.config.get_text_config().tie_word_embeddings:
        return
    slabs = SlabAllocator(pin=True, on_warning=lambda text: None)
    try:
        memory = slabs.allocate(module.weight.shape, module.weight.dtype).result()
    except MemoryError:
        memory = None
    if memory is None or not slabs.is_locked(memory):
        slabs.close()
        return
    memory.copy_(module.weight.detach())
    module.weight = torch.nn.Parameter(device_view(memory, device), requires_grad=False)
    setattr(module, _MEMORY, (memory, slabs))


def host_bytes(model: PreTrainedModel) -> int:
    """Returns the bytes of weights of a model on a GPU that are in host memory."""
    memory = getattr(embedding(model.model), _MEMORY, None)
    return 0 if memory is None else int(memory[0].nbytes)
