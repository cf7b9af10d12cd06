"""Placement of KV and weights in the memories of a machine, in bytes.

All KV lies in host memory. With a GPU the first tokens of every layer are kept there as well (resident), the
CPU attends the next ones where they lie, and the rest is streamed through the staging ring for every pass:
the same ranges of tokens in all layers. The first GPU computes; others keep KV, stream KV over links of their
own, and attend it.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload_rt.caches.sizes import GpuTier
from offload_rt.model.shape import ModelShape


@dataclass(frozen=True)
class Placement:
    """Number of context tokens by where they are attended; the same in every layer."""

    resident_tokens: int  # the first ones, kept on the first GPU
    cpu_tokens: int  # the next ones, attended by the CPU
    streamed_tokens: int  # the last ones, which cross the first GPU's link for every pass
    shape: ModelShape
    gpus: tuple[GpuTier, ...] = ()  # of the other GPUs in turn, between the CPU's and the last ones
    packed: bool = False  # what is kept on GPUs is

    @property
    def resident_bytes(self) -> int:
        """Bytes kept on all GPUs together."""
        others = sum(gpu.resident_tokens for gpu in self.gpus)
        return (self.resident_tokens + others) * self.shape.token_bytes

    @property
    def cpu_attended_bytes(self) -> int:
        return self.cpu_tokens * self.shape.token_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes that cross all links together for every pass."""
        others = sum(gpu.streamed_tokens for gpu in self.gpus)
        return (self.streamed_tokens + others) * self.shape.token_bytes
