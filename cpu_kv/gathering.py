"""Gathers chosen KV from the store on a device, ahead of the bulk copies of its link."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cpu_kv.link import Event, Link, Pairs, pair_bytes
from cpu_kv.sizes import READ_TOKENS
from cpu_kv.staging import HostBuffers
from cpu_kv.store import SequenceKV
from cpu_kv.views import cut_alike


@dataclass
class TransferCounters:
    """Bytes and copies that crossed the link, and how long the host waited for them.

    Attributes:
        bytes_abandoned: the part of `bytes_to_device` that was prefetched for streams but never read.
        copies: number of copies, each of contiguous memory.
        wait_ms: near 0 with CUDA, where the compute waits instead of the host.
    """

    bytes_to_device: int = 0
    bytes_to_host: int = 0
    bytes_abandoned: int = 0
    copies: int = 0
    wait_ms: float = 0.0


@dataclass(frozen=True)
class PendingCopy:
    """A pending copy to the device.

    Attributes:
        destination: memory of the device.
        arrived: the event at the end of the copy.
    """

    destination: Tensor
    arrived: Event


class Gatherer(ABC):
    """Brings tokens of some layers, and what the host puts together, to the device of a link.

    Must be used from one thread.

    Args:
        layers: numbers of the layers that `read` returns.
    """

    READ_TOKENS = READ_TOKENS

    def __init__(self, sequence: SequenceKV, link: Link, layers: Sequence[int]) -> None:
        self.sequence = sequence
        self.link = link
        self.layers = layers
        self.counters = TransferCounters()
        self._outgoing = HostBuffers(link, sequence.layout.dtype)
        self._closed = False

    @abstractmethod
    def flush(self) -> None:
        """Waits for all write-backs and commits them. Raises CopyFailed if one failed."""

    def read(self, start: int, end: int) -> Tensor:
        """Returns the tokens `start` .. `end` of its layers on the link's device; see `fetch`.

        Their shape is `[layers, 2, kv_heads, end - start, head_dim]`.
        """
        layout = self.sequence.layout
        shape = (len(self.layers), 2, layout.kv_heads, end - start, layout.head_dim)
        out = torch.empty(shape, dtype=layout.dtype, device=self.link.device)
        portion = end - start if self.link.in_place else self.READ_TOKENS
        for part in out.split(portion, dim=3) if start < end else ():
            part.copy_(self.fetch(part.shape, partial(self._put_together, start)))
            start += part.shape[3]
        return out

    def _put_together(self, start: int, out: Tensor) -> None:
        for layer, (keys, values) in zip(self.layers, out, strict=True):
            parts = self.sequence.views(layer, start, start + keys.shape[1])
            for part, *places in cut_alike(parts, keys, values):
                part.copy_to(*places)

    def fetch(self, shape: Sequence[int], fill: Callable[[Tensor], object]) -> Tensor:
        """Returns a tensor on the link's device with the content that `fill` writes to a host tensor.

        Waits for write-backs. Compute that is enqueued later may read the tensor. Raises CopyFailed.
        """
        self._check_open()
        self.flush()
        if not self.link.in_place:
            return self.await_copy(self.send(shape, fill))
        fetched = torch.empty(tuple(shape), dtype=self.sequence.layout.dtype)
        fill(fetched)
        return fetched

    def send(self, shape: Sequence[int], fill: Callable[[Tensor], object]) -> PendingCopy:
        """Starts copying what `fill` writes to a host tensor of this shape and the layout's dtype.

        The copy is urgent: it overtakes prefetches.
        """
        staged = self._outgoing.take(shape)
        fill(staged)
        destination = torch.empty_like(staged, device=self.link.device)
        # Compute that was enqueued earlier may still use the memory of the destination.
        arrived = self._copy([(destination, staged)], after=self.link.record_event(), urgent=True)
        self._outgoing.hold(arrived)
        return PendingCopy(destination, arrived)

    def await_copy(self, copy: PendingCopy) -> Tensor:
        """Returns the destination of a copy, for compute that is enqueued later. Raises CopyFailed."""
        self._wait(copy.arrived)
        return copy.destination

    def close(self) -> None:
        """Waits for copies. Idempotent."""
        self._closed = True
        self._outgoing.drain()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the transfer engine is closed")

    def _copy(
        self, pairs: Pairs, after: Event | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Event:
        self.counters.copies += len(pairs)
        if to_host:
            self.counters.bytes_to_host += pair_bytes(pairs)
        else:
            self.counters.bytes_to_device += pair_bytes(pairs)
        return self.link.copy(pairs, after, to_host=to_host, urgent=urgent)

    def _wait(self, event: Event) -> None:
        start = time.perf_counter()
        event.wait()
        self.counters.wait_ms += 1e3 * (time.perf_counter() - start)


class LayerGatherer(Gatherer):
    """Gathers some layers of a sequence to which another transfer writes, over a link of its own."""

    def __init__(self, writer: Gatherer, link: Link, layers: Sequence[int]) -> None:
        super().__init__(writer.sequence, link, layers)
        self._writer = writer

    def flush(self) -> None:
        self._writer.flush()
