"""What all sequences of an engine share: models, their heads, the store, links and memory of caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cpu_kv import Link, PagedKVStore
from offload_rt.attention.backends import AttentionBackend
from offload_rt.caches.buffers import BufferPool
from offload_rt.drafting.head_model import Heads
from offload_rt.model.runner import CausalModel
from offload_rt.system.second_device import SecondDevice
from offload_rt.system.timeline import NO_TIMELINE, Timeline


@dataclass(frozen=True)
class SharedResources:
    """Resources that all sequences of an engine share.

    Attributes:
        draft: the small model; None where no level needs it.
        link: to the device where the target is.
        other_links: to other GPUs, which keep and attend a share of the KV.
        timeline: records what runs when.
        pool: memory of bounded caches.
        heads: draft heads.
        second: the first of the other GPUs, which may run attention blocks of layers in groups; None: there
            is one device.
    """

    target: CausalModel
    draft: CausalModel | None
    store: PagedKVStore
    link: Link
    backend: AttentionBackend
    other_links: Sequence[Link] = ()
    timeline: Timeline = NO_TIMELINE
    pool: BufferPool = field(default_factory=BufferPool)
    heads: Heads = field(default_factory=Heads)
    second: SecondDevice | None = None

    @property
    def models(self) -> list[CausalModel]:
        """The target, and the small model where there is one."""
        return [self.target] if self.draft is None else [self.target, self.draft]
