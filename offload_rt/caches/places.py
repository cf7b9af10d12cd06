"""Where the KV of a text is attended: on the device, over the link, or by the CPU where it lies.

Each layer's first tokens are resident on the device, the next ones are attended by the CPU, the rest is
streamed; a tail of the newest tokens is on the device too, until a stream covers it. The same numbers hold
for every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv import KeysValues, KVLayout
from offload_rt.attention import AttentionBackend, attend, attend_weighed, cpu_share_backend, merge
from offload_rt.caches.base import NewTokens
from offload_rt.caches.bounded import Frame
from offload_rt.caches.buffers import KVBuffer
from offload_rt.host import Arriving, to_device
from offload_rt.timeline import NO_TIMELINE, Timeline
from offload_rt.weighing import attended_mass


@dataclass(frozen=True)
class Shares:
    """How many of a layer's first tokens are not streamed; multiples of the store's page.

    Attributes:
        resident_tokens: kept on the device.
        cpu_tokens: attended by the CPU, after the resident ones.
    """

    resident_tokens: int = 0
    cpu_tokens: int = 0


EVERYTHING_STREAMED = Shares()


class ResidentShare:
    """The first `capacity` tokens of each layer on the device, taken there during the prefill."""

    def __init__(self, layout: KVLayout, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.tokens = 0  # present in every layer
        self._layout = layout
        self._device = device
        self._memory = torch.empty(0)  # made when a text is read: what others gave up is free by then

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Takes what there is room for of a layer's KV from its beginning, `[kv_heads, tokens, head_dim]`."""
        if layer == 0:
            layout = self._layout
            shape = (layout.layers, 2, layout.kv_heads, self.capacity, layout.head_dim)
            self._memory = torch.empty(shape, dtype=layout.dtype, device=self._device)
        self.tokens = min(self.capacity, keys.shape[1])
        self._memory[layer, 0, :, : self.tokens] = keys[:, : self.tokens]
        self._memory[layer, 1, :, : self.tokens] = values[:, : self.tokens]

    def truncate(self, length: int) -> None:
        """Forgets the tokens from `length` on."""
        self.tokens = min(self.tokens, length)

    def release(self) -> None:
        """Lets its memory go."""
        self.tokens, self._memory = 0, torch.empty(0)

    def views(self, layer: int, tokens: int) -> KeysValues:
        """The first `tokens` tokens, as one page."""
        return self._memory[layer, :1, :, :tokens], self._memory[layer, 1:, :, :tokens]


class Tail:
    """The newest tokens of the text on the device, and the pending ones of a pass behind them.

    Attributes:
        start: the first token's place in the text.
        tokens: how many committed ones there are, the first entries of `buffer`.
    """

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self.start = 0
        self.tokens = 0
        # A page at most waits to be covered, and a round's tokens come behind it.
        shape = (layout.layers, 2, layout.kv_heads, layout.page_size + 64, layout.head_dim)
        with torch.inference_mode(False):  # a text may be read in that mode, and decoded again outside of it
            self.buffer = KVBuffer(torch.empty(shape, dtype=layout.dtype, device=device))

    @property
    def end(self) -> int:
        """Length of the text."""
        return self.start + self.tokens

    def frame(self, new: NewTokens, backend: AttentionBackend) -> Frame:
        """For the pending tokens of a pass, behind the committed ones."""
        self.buffer = self.buffer.with_room(self.tokens + new.count)
        return Frame.behind(self.buffer, backend, new, self.tokens)

    def committed(self, layer: int) -> KeysValues:
        """A view of the committed tokens of a layer, as one page."""
        pages = self.buffer.kv[layer, :, None, :, : self.tokens]
        return pages[0], pages[1]

    def restart(self, start: int, kv: Tensor) -> None:
        """Begins at another place, with the committed tokens `[layers, 2, kv_heads, n, head_dim]`."""
        self.start, self.tokens = start, kv.shape[3]
        self.buffer = self.buffer.with_room(self.tokens)
        self.buffer.kv[:, :, :, : self.tokens] = kv

    def drop(self, start: int) -> None:
        """Forgets the tokens before `start`."""
        gone = start - self.start
        if gone > 0:
            # Cloned where they overlap: what stays moves to the front.
            self.restart(start, self.buffer.kv[:, :, :, gone : self.tokens].clone())

    def commit(self, path: Sequence[int]) -> Tensor:
        """Keeps these pending tokens, in this order; returns a copy `[layers, 2, kv_heads, n, head_dim]`."""
        chosen = to_device([self.tokens + place for place in path], self.buffer.memory.device)
        kv = self.buffer.kv.index_select(3, chosen)
        stop = self.tokens + len(path)
        self.buffer.kv[:, :, :, self.tokens : stop] = kv
        self.tokens = stop
        return kv

    def release(self) -> None:
        """Lets its memory go."""
        self.buffer = KVBuffer(torch.empty(0))


class CpuShare:
    """Attends KV in host memory on a thread of its own, beside what the device and the link do.

    For a GPU queries and results go through page-locked buffers that are kept. One of each is enough: a
    layer's queries arrive only after the results of the layer before are on the device.
    """

    def __init__(self, device: torch.device, timeline: Timeline = NO_TIMELINE) -> None:
        self._backend = cpu_share_backend(device)
        self._device = device
        self._timeline = timeline
        self._buffers: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload_rt-cpu-attention")

    def start(
        self, queries: Tensor, runs: Sequence[KeysValues], scale: float, chunk: int | None = None
    ) -> Future[list[Tensor]]:
        """Attention of the device's queries `[heads, n, head_dim]` over runs in host memory.

        Args:
            chunk: tokens of the chunks whose share is wanted too.
        """
        arriving = Arriving(queries, self._buffer("queries", queries) if queries.is_cuda else None)
        return self._thread.submit(self._attend, arriving, runs, scale, chunk)

    def finish(self, started: Future[list[Tensor]]) -> list[Tensor]:
        """What `start` began, on the device: out, lse, and `[kv_heads, 1, chunks]` where it is wanted."""
        names = ("out", "lse", "chunks")
        return [self._send(name, result) for name, result in zip(names, started.result(), strict=False)]

    def close(self) -> None:
        """Waits for what was started and lets the thread go. Idempotent."""
        self._thread.shutdown(wait=True)

    def _send(self, name: str, result: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return result
        return self._buffer(name, result).copy_(result).to(self._device, non_blocking=True)

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        if name not in self._buffers or self._buffers[name].shape != like.shape:
            self._buffers[name] = torch.empty_like(like, device="cpu", pin_memory=True)
        return self._buffers[name]

    @torch.inference_mode()
    def _attend(
        self, arriving: Arriving, runs: Sequence[KeysValues], scale: float, chunk: int | None
    ) -> list[Tensor]:
        queries = arriving.wait()
        with self._timeline.span("cpu", "attention"):
            if chunk is None:
                return [*merge([attend(self._backend, queries, *run, scale) for run in runs])]
            weighed = [attend_weighed(self._backend, queries, *run, scale, chunk) for run in runs]
            out, lse = merge([(out, lse) for out, lse, _ in weighed])
            shares = [attended_mass(units, part_lse, lse) for _, part_lse, units in weighed]
            return [out, lse, torch.cat(shares, dim=1)[:, None]]
