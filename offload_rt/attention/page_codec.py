"""The codecs of packed pages for this machine, and whether a store packs its pages."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from cpu_kv.packed import PackedShape, PageCodec
from offload_rt.attention.cuda_backends import use_triton
from offload_rt.kernels.native import Kernel, load_kernel


class MachineCodec(PageCodec):
    """Packs and unpacks by our own kernels where there are some for the device, else by plain torch."""

    def __init__(self, kernel: Kernel | None) -> None:
        self._kernel = kernel

    def encode(self, shape: PackedShape, pages: Tensor) -> Tensor:
        if pages.is_cuda and use_triton() is None:
            from offload_rt.kernels import triton_packing  # Triton is not in every installation

            with torch.cuda.device(pages.device):
                return triton_packing.encode(shape, pages)
        if self._kernel is None or pages.device.type != "cpu":
            return super().encode(shape, pages)
        packed = pages.new_empty(len(pages), shape.nbytes, dtype=torch.uint8)
        self._kernel.pack(shape, pages.contiguous(), packed)
        return packed

    def decode(self, shape: PackedShape, packed: Tensor, out: Tensor, first_side: int = 0) -> None:
        if packed.is_cuda and packed.is_contiguous() and out.is_contiguous() and use_triton() is None:
            from offload_rt.kernels import triton_packing  # Triton is not in every installation

            with torch.cuda.device(packed.device):
                triton_packing.decode(shape, packed, out, first_side)
            return None
        if self._kernel is None or packed.device.type != "cpu" or not out.is_contiguous():
            return super().decode(shape, packed, out, first_side)
        sides = out.shape[1] * shape.kv_heads
        heads = torch.arange(sides) + first_side * shape.kv_heads
        pages = torch.arange(len(packed)).repeat_interleave(sides)
        first = torch.zeros_like(pages)
        self._kernel.unpack(shape, packed, pages, heads.repeat(len(packed)), first, out.flatten(0, 2))
        return None

    def take(
        self,
        shape: PackedShape,
        packed: Tensor,
        side: int,
        page: Tensor,
        head: Tensor,
        token: Tensor,
        out: Tensor,
    ) -> None:
        if packed.is_cuda and packed.is_contiguous() and out.is_contiguous() and use_triton() is None:
            from offload_rt.kernels import triton_packing  # Triton is not in every installation

            with torch.cuda.device(packed.device):
                triton_packing.take(shape, packed, side, page, head, token, out)
            return None
        if self._kernel is None or out.device.type != "cpu":
            return super().take(shape, packed, side, page, head, token, out)
        self._kernel.unpack(shape, packed, page, head + side * shape.kv_heads, token, out)
        return None


@cache
def machine_codec() -> PageCodec:
    """Returns the fastest codec."""
    return MachineCodec(load_kernel())
