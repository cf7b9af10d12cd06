"""Where the KV of a text is attended: on the device, over the link, by the CPU where it lies, on other cards.

Each layer's first tokens are resident on the device, the next ones are attended by the CPU and by other
cards, which keep some of theirs and stream the others over links of their own; the rest is streamed to the
device. A tail of the newest tokens is on the device too, until a stream covers it. The same numbers hold for
every layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from cpu_kv import KeysValues, KVLayout, LayerStream, TransferEngine
from offload_rt.attention import (
    AttentionBackend,
    attend,
    attend_weighed,
    choose_backend,
    cpu_share_backend,
    merge,
)
from offload_rt.caches.base import NewTokens
from offload_rt.caches.bounded import Frame
from offload_rt.caches.buffers import KVBuffer
from offload_rt.cards import in_step, sent
from offload_rt.host import Arriving, to_device
from offload_rt.timeline import NO_TIMELINE, Timeline
from offload_rt.weighing import attended_mass

T = TypeVar("T")


@dataclass(frozen=True)
class CardTokens:
    """How many tokens of a layer another card attends.

    Attributes:
        resident_tokens: the first ones, kept there.
        streamed_tokens: the next ones, which cross its link for every pass.
    """

    resident_tokens: int = 0
    streamed_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.resident_tokens + self.streamed_tokens


@dataclass(frozen=True)
class Shares:
    """How many of a layer's first tokens are not streamed to the device; all multiples of the store's page.

    Attributes:
        resident_tokens: kept on the device.
        cpu_tokens: attended by the CPU, after the resident ones.
        cards: what other cards attend, one after the other, after those.
    """

    resident_tokens: int = 0
    cpu_tokens: int = 0
    cards: tuple[CardTokens, ...] = ()


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
        # Head by head: from one card to another, torch would pack what has gaps first.
        for there, here in zip(self._memory[layer].flatten(0, 1), (*keys, *values), strict=True):
            there[: self.tokens].copy_(here[: self.tokens], non_blocking=True)

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


class OtherPlace:
    """Attends a range of each layer's tokens on a thread of its own, beside what the device and its link do.

    Args:
        tokens: of a layer, at most.
    """

    def __init__(self, tokens: int, name: str) -> None:
        self.tokens = tokens
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"offload_rt-{name}-attention")

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Takes what stays here of its range of a layer's prompt, `[kv_heads, tokens, head_dim]`."""

    def open(self, start: int, stop: int) -> None:
        """A pass is going to ask for these tokens, whole pages; those opened before it come first."""

    def start(
        self, layer: int, queries: Tensor, runs: Sequence[KeysValues], scale: float, chunk: int | None = None
    ) -> Future[list[Tensor]]:
        """Attention of the device's queries `[heads, n, head_dim]` over the range.

        Args:
            runs: the range in host memory.
            chunk: tokens of the chunks whose share is wanted too.
        """
        raise NotImplementedError

    def finish(self, started: Future[list[Tensor]]) -> list[Tensor]:
        """What `start` began, on the device: out, lse, and `[kv_heads, 1, chunks]` where it is wanted."""
        raise NotImplementedError

    def finish_compute(self) -> None:
        """Lets the host wait for what was launched; see `TransferEngine.finish_compute`."""

    def abandon(self) -> None:
        """Forgets what was opened; no pass goes on."""

    def close(self) -> None:
        """Waits for what was started and lets memory and thread go. Idempotent."""
        self._thread.shutdown(wait=True)


def attended_over(
    backend: AttentionBackend, queries: Tensor, runs: Iterable[KeysValues], scale: float, chunk: int | None
) -> list[Tensor]:
    """Attention over runs of one range, each read before the next one is asked for; see `finish`."""
    if chunk is None:
        return [*merge([attend(backend, queries, *run, scale) for run in runs])]
    weighed = [attend_weighed(backend, queries, *run, scale, chunk) for run in runs]
    out, lse = merge([(out, lse) for out, lse, _ in weighed])
    shares = [attended_mass(units, part_lse, lse) for _, part_lse, units in weighed]
    return [out, lse, torch.cat(shares, dim=1)[:, None]]


class CpuShare(OtherPlace):
    """Attends KV in host memory, where it lies.

    For a GPU queries and results go through page-locked buffers that are kept. One of each is enough: a
    layer's queries arrive only after the results of the layer before are on the device.
    """

    def __init__(self, tokens: int, device: torch.device, timeline: Timeline = NO_TIMELINE) -> None:
        super().__init__(tokens, "cpu")
        self._backend = cpu_share_backend(device)
        self._device = device
        self._timeline = timeline
        self._buffers: dict[str, Tensor] = {}

    def start(
        self, layer: int, queries: Tensor, runs: Sequence[KeysValues], scale: float, chunk: int | None = None
    ) -> Future[list[Tensor]]:
        arriving = Arriving(queries, self._buffer("queries", queries) if queries.is_cuda else None)
        return self._thread.submit(self._attend, arriving, runs, scale, chunk)

    def finish(self, started: Future[list[Tensor]]) -> list[Tensor]:
        names = ("out", "lse", "chunks")
        return [self._send(name, result) for name, result in zip(names, started.result(), strict=False)]

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
            return attended_over(self._backend, queries, runs, scale, chunk)


class CardShare(OtherPlace):
    """Attends KV on another card, which keeps the first tokens of the range; the others cross its own link.

    Queries go from card to card, and results come back; without peer access the driver leads them through
    host memory.

    Args:
        engine: over the card's link; closed with this place, and used from its thread alone.
        stream: where the card works on it; None on a CPU.
        home: the device that asks.
    """

    def __init__(
        self,
        engine: TransferEngine,
        share: CardTokens,
        home: torch.device,
        stream: torch.cuda.Stream | None,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        device = engine.link.device
        super().__init__(share.tokens, f"{device}")
        self.engine = engine
        self._home = home
        self._timeline = timeline
        self._backend = choose_backend(device)
        self._resident = ResidentShare(engine.sequence.layout, share.resident_tokens, device)
        self._stream = stream
        self._passes: deque[tuple[int, Future[LayerStream]]] = deque()  # resident tokens, and the stream

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        with nullcontext() if self._stream is None else in_step(self._stream, self._home):
            self._resident.keep(layer, keys, values)

    def open(self, start: int, stop: int) -> None:
        resident = min(self._resident.tokens, stop - start)
        stream = self._submit(lambda: self.engine.stream(stop, start=start + resident))
        self._passes.append((resident, stream))

    def start(
        self, layer: int, queries: Tensor, runs: Sequence[KeysValues], scale: float, chunk: int | None = None
    ) -> Future[list[Tensor]]:
        (there,) = self._sent([queries], self.engine.link.device)

        def work() -> list[Tensor]:
            with self._timeline.span("card", "attention"):
                return attended_over(self._backend, there, self._runs(layer), scale, chunk)

        return self._submit(work)

    def _runs(self, layer: int) -> Iterator[KeysValues]:
        resident, stream = self._passes[0]
        if resident:
            yield self._resident.views(layer, resident)
        yield from stream.result().segments(layer)
        if layer == self.engine.sequence.layout.layers - 1:
            self._passes.popleft()

    def finish(self, started: Future[list[Tensor]]) -> list[Tensor]:
        return self._sent(started.result(), self._home)

    def abandon(self) -> None:
        def close() -> None:
            while self._passes:
                # The next one's first: else it would be sent what this one's frees.
                _, stream = self._passes.pop()
                if stream.exception() is None:
                    stream.result().close()

        if self._passes:
            self._submit(close).result()

    def finish_compute(self) -> None:
        self._submit(self.engine.finish_compute).result()

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(self.engine.close)
            closing.callback(self._resident.release)
            closing.callback(super().close)
            with suppress(RuntimeError):  # stalled, which the engine says; or closed before
                self.finish_compute()

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Work for the place's thread; what it launches goes to the place's own stream."""

        @torch.inference_mode()
        def there() -> T:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                return work()

        return self._thread.submit(there)

    def _sent(self, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
        """Tensors on their way from card to card; on a CPU, where nothing is far away, themselves."""
        if self._stream is None:
            return tensors
        with in_step(self._stream, self._home):
            return [sent(tensor, device) for tensor in tensors]
