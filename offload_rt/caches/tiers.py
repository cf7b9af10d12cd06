"""The tiers of a sequence's KV: how many tokens of each layer lie where, and attention over each range.

The first tokens of a layer are resident on the device (`resident.py`), the next ones are attended by the CPU
in place and by other GPUs (`remote.py`), and the others are streamed to the device. A tail of the newest
tokens stays on the device until a stream covers it. The ranges are the same in every layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from cpu_kv import KVLayout, KVPages, LayerStream, PlainPages, TransferEngine
from offload_rt.attention.backends import AttentionBackend
from offload_rt.attention.sums import AttentionSum
from offload_rt.caches.bounded import BufferAttention
from offload_rt.caches.buffers import KVBuffer
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.kernels.tail import TailView
from offload_rt.system.device_copies import to_device

Results = list[Tensor]
"""Output `[heads, n, head_dim]`, log-sum-exp `[heads, n]`, and if asked mass `[kv_heads, 1, chunks]`."""

OnSegment = Callable[[int, int, Sequence[KVPages]], object]
"""Called with a layer, the position of a segment, and its pages."""


class Tier(ABC):
    """A range of each layer's tokens, and attention over it.

    For each pass the range is announced by `open`. In each layer `start` hands over the queries, and
    `add_to` adds the attention of the range.

    Attributes:
        tokens: number of tokens per layer that a pass may attend here.
        remote: its KV is attended elsewhere and never comes to the device.
    """

    tokens: int
    remote = False

    def load(self, start: int) -> None:  # noqa: B027
        """Loads what the tier keeps of the range from position `start` on, and lacks. Raises CopyFailed.

        Comes after a prefill, and takes the memory that only it needs.
        """

    def truncate(self, length: int) -> None:  # noqa: B027
        """Forgets the tokens from position `length` on. No pass may be running."""

    def open(self, start: int, stop: int) -> None:  # noqa: B027
        """Announces that a pass will attend these tokens, whole pages. Passes run in this order."""

    def start(
        self, layer: int, queries: Tensor, runs: Sequence[KVPages], scale: float, chunk: int | None = None
    ) -> Future[Results] | None:
        """Starts attention over the range, if it runs elsewhere.

        Args:
            queries: on the device, `[heads, n, head_dim]`.
            runs: the range in host memory.
            chunk: tokens per chunk for attention mass; None: no mass is taken.
        """
        return None

    @abstractmethod
    def add_to(
        self,
        total: AttentionSum,
        layer: int,
        start: int,
        stop: int,
        started: Future[Results] | None,
        on_segment: OnSegment,
    ) -> None:
        """Adds attention over the tokens `start` .. `stop` to `total`.

        Args:
            started: from `start`.
            on_segment: called for each segment that is on the device meanwhile.
        """

    def finish_compute(self) -> None:  # noqa: B027
        """Blocks the host until all launched work is done."""

    def abandon(self) -> None:  # noqa: B027
        """Forgets the announced passes. No pass may be running."""


class TierRange(NamedTuple):
    """The tokens `start` .. `stop` of each layer, which a pass attends in a tier."""

    tier: Tier
    start: int
    stop: int


class DeviceTier(Tier):
    """A tier whose segments are attended on the device, in order."""

    @abstractmethod
    def segments(self, layer: int, start: int, stop: int) -> Iterator[KVPages]:
        """Yields the segments of the tokens `start` .. `stop`; each is valid until the next."""

    def add_to(
        self,
        total: AttentionSum,
        layer: int,
        start: int,
        stop: int,
        started: Future[Results] | None,
        on_segment: OnSegment,
    ) -> None:
        total.track_mass(start, stop)
        at = start
        for pages in self.segments(layer, start, stop):
            total.attend_tracked(pages)
            on_segment(layer, at, [pages])
            at += pages.tokens


class StreamedTier(DeviceTier):
    """Tokens of each layer that cross the link in every pass, through the staging ring."""

    def __init__(self, transfer: TransferEngine) -> None:
        self._transfer = transfer
        self._passes: deque[LayerStream] = deque()

    def open(self, start: int, stop: int) -> None:
        self._passes.append(self._transfer.stream(stop, start=start))

    def segments(self, layer: int, start: int, stop: int) -> Iterator[KVPages]:
        yield from self._passes[0].segments(layer)
        if layer == self._transfer.sequence.layout.layers - 1:
            self._passes.popleft()

    def finish_compute(self) -> None:
        self._transfer.finish_compute()

    def abandon(self) -> None:
        self._passes.clear()
        self._transfer.abandon()


class Tail:
    """The newest tokens of the sequence on the device, and behind them the pending ones of a pass."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self._page, self.device = layout.page_size, device
        self._range = 0, 0  # position of the first token, and number of tokens: one assignment
        # Less than two pages wait for a stream to cover them, and the tokens of a pass follow.
        shape = (layout.layers, 2, layout.kv_heads, layout.page_size + 64, layout.head_dim)
        with torch.inference_mode(False):  # it may be made in that mode and used outside of it
            self.buffer = KVBuffer(torch.empty(shape, dtype=layout.dtype, device=device))

    @property
    def start(self) -> int:
        """Position of the first token in the sequence."""
        return self._range[0]

    @property
    def tokens(self) -> int:
        """Number of committed tokens, the first entries of `buffer`."""
        return self._range[1]

    @property
    def end(self) -> int:
        """Length of the sequence."""
        return self.start + self.tokens

    def attention(self, new: NewTokens, backend: AttentionBackend) -> BufferAttention:
        """Returns the attention of a pass over the tail, with room for its pending tokens."""
        self.buffer = self.buffer.with_capacity(self.tokens + new.count)
        return BufferAttention.behind(self.buffer, backend, new, self.tokens)

    def view(self, new: NewTokens) -> TailView:
        """Returns how the tokens of a pass see the tail."""
        return new.view(self._page, self.tokens, self.device)

    def committed(self, layer: int) -> PlainPages:
        """Returns a view of the committed tokens of a layer, as one page."""
        return PlainPages.one(*self.buffer.kv[layer, :, :, : self.tokens])

    def restart(self, start: int, kv: Tensor) -> None:
        """Moves to position `start`, with the committed tokens `[layers, 2, kv_heads, n, head_dim]`."""
        count = kv.shape[3]
        self._range = start, 0  # an interrupt leaves no tokens rather than others
        self.buffer = self.buffer.with_capacity(count)
        self.buffer.kv[:, :, :, :count] = kv
        self._range = start, count

    def drop(self, start: int) -> None:
        """Forgets the tokens before position `start`."""
        dropped = start - self.start
        if dropped > 0:
            # Cloned because source and destination may overlap.
            self.restart(start, self.buffer.kv[:, :, :, dropped : self.tokens].clone())

    def commit(self, kept: Sequence[int]) -> Tensor:
        """Commits these pending tokens in this order; returns a copy `[layers, 2, kv_heads, n, head_dim]`."""
        pending = self.buffer.kv[:, :, :, self.tokens :]
        committed = pending[:, :, :, : len(kept)]
        if list(kept) != list(range(len(kept))):
            committed.copy_(pending.index_select(3, to_device(kept, pending.device)))
        self._range = self.start, self.tokens + len(kept)
        return committed.clone()

    def release(self) -> None:
        """Frees the memory."""
        self.buffer = KVBuffer(torch.empty(0))
