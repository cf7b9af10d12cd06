"""The element type that a model runs in, decided without torch where it is named or a GPU computes."""

from __future__ import annotations

from cpu_kv import ElementType
from offload_rt.config.settings import AUTO_DTYPE, DTYPES
from offload_rt.errors import UsageError


def choose_element(name: str, on_gpu: bool, own: ElementType | None) -> ElementType | None:
    """Returns the element type of that name; None means the checkpoint's own (`auto` on a GPU).

    `auto` on a CPU is bfloat16 for a checkpoint in bfloat16 where the processor has its dot products, else
    float32: few CPUs multiply 16-bit numbers faster, and bfloat16 would round the weights of others.

    Args:
        own: the checkpoint's, by its config; None: it names none.
    """
    if name != AUTO_DTYPE:
        if name not in DTYPES:
            raise UsageError(f"dtype {name!r} is unknown: use {', '.join(DTYPES)}")
        return ElementType(name)
    if on_gpu:
        return None
    if own is not ElementType.BFLOAT16:
        return ElementType.FLOAT32
    from offload_rt.kernels.native import load_kernel  # with torch, which takes seconds to import

    kernel = load_kernel()
    return ElementType.BFLOAT16 if kernel is not None and kernel.bfloat16_dots else ElementType.FLOAT32
