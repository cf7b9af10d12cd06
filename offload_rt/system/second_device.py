"""A second device that computes beside the first one: another GPU, or another thread of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import cached_property

import torch
from torch import Tensor

from cpu_kv import Link
from cpu_kv.mapped import PeerCopies, joined_bytes, split_bytes
from cpu_kv.streams import follower


class SecondDevice:
    """A device that computes beside the one of a model: another GPU, or another thread of the CPU.

    A GPU works on one stream, which follows the one that drafts are made in. All that it keeps is written and
    read there, so that the order of the stream is enough. Where the device is a CPU, nothing is copied.

    Args:
        home: the device of the models.
        link: to the second one.
        threads: number of CPU threads that it computes with; None: torch's number.

    Attributes:
        exchanges: number of times that it was sent hidden states.
    """

    def __init__(self, home: torch.device, link: Link, threads: int | None = None) -> None:
        self.home, self.link, self.device = home, link, link.device
        self.exchanges = 0
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=f"offload_rt-{self.device}-blocks",
            initializer=None if threads is None else lambda: torch.set_num_threads(threads),
        )

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return follower(torch.cuda.default_stream(self.home), self.device)

    @cached_property
    def _copies(self) -> tuple[PeerCopies, PeerCopies]:
        """There and back."""
        return PeerCopies(self.home, self.device), PeerCopies(self.device, self.home)

    def on_stream(self) -> AbstractContextManager[object]:
        """Returns a context in which work for the device is enqueued."""
        return torch.cuda.stream(self._stream) if self.device.type == "cuda" else nullcontext()

    def send(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Returns copies there, for work that is enqueued in `on_stream`, made by one copy.

        The host does not wait.
        """
        if self.device.type != "cuda":
            return tensors
        data = joined_bytes(tensors) if len(tensors) > 1 else tensors[0]
        copied = self._copies[0].copy(data, torch.cuda.current_stream(self.home), self._stream)
        return (
            split_bytes(copied, [(tensor.shape, tensor.dtype) for tensor in tensors])
            if len(tensors) > 1
            else [copied]
        )

    def start(self, work: Callable[[], Tensor]) -> Future[Tensor]:
        """Starts work in the device's thread, and on its stream."""

        @torch.inference_mode()
        def on_stream() -> Tensor:
            with self.on_stream():
                return work()

        self.exchanges += 1
        # With the context variables of the caller: which planes of weights are read is one.
        return self._thread.submit(copy_context().run, on_stream)

    def finish(self, future: Future[Tensor]) -> Tensor:
        """Waits until what `start` returned is enqueued; returns its result on the home device."""
        result = future.result()
        if self.device.type != "cuda":
            return result
        return self._copies[1].copy(result, self._stream, torch.cuda.current_stream(self.home))

    def close(self) -> None:
        """Waits for the work that was started, and ends the thread. Idempotent."""
        self._thread.shutdown(wait=True)
