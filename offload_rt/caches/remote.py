"""Attention over KV that is not on the device: by the CPU where it lies, and by other GPUs.

Each works in a thread of its own, beside what the device and its link do. Queries go there, and attention
with its log-sum-exp comes back, which combines exactly with the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from cpu_kv import KeysValues, LayerStream, TransferEngine
from cpu_kv.mapped import MappedBuffer, PeerCopies, computed_copy, packed, unpacked
from cpu_kv.streams import device_streams
from offload_rt.attention.backends import choose_backend, cpu_share_backend, unfold
from offload_rt.attention.mass import summed_mass
from offload_rt.attention.sums import AttentionSum
from offload_rt.caches.tiers import GpuTier, ResidentTier
from offload_rt.timeline import NO_TIMELINE, Timeline

T = TypeVar("T")
Results = list[Tensor]
"""Output `[heads, n, head_dim]`, log-sum-exp `[heads, n]`, and if asked mass `[kv_heads, 1, chunks]`."""


class RemoteAttention(ABC):
    """Attends a range of each layer's tokens on a thread of its own.

    Args:
        tokens: of a layer, at most.
    """

    def __init__(self, tokens: int, name: str) -> None:
        self.tokens = tokens
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"offload_rt-{name}-attention")

    def keep(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:  # noqa: B027
        """Takes what it keeps of its range of a layer's prompt, `[kv_heads, tokens, head_dim]`.

        Args:
            start: position of the range in the text.
        """

    def truncate(self, length: int) -> None:  # noqa: B027
        """Forgets the tokens from position `length` on. No pass may be running."""

    def load(self, start: int) -> None:  # noqa: B027
        """Takes what it keeps of the range from position `start` on, and lacks, from the store."""

    def open(self, start: int, stop: int) -> None:  # noqa: B027
        """Announces that a pass will ask for these tokens, whole pages; those opened before it come first."""

    @abstractmethod
    def start(
        self, layer: int, queries: Tensor, runs: Sequence[KeysValues], scale: float, chunk: int | None = None
    ) -> Future[Results]:
        """Starts attention of the device's queries `[heads, n, head_dim]` over the range.

        Args:
            runs: the range in host memory.
            chunk: tokens of the chunks whose attention mass is wanted too.
        """

    @abstractmethod
    def finish(self, started: Future[Results]) -> Results:
        """Waits for what `start` returned; the results are there for the device's current stream.

        They stand until `finish` is called for the layer after the next one.
        """

    def finish_compute(self) -> None:  # noqa: B027
        """Blocks the host until what was launched is done."""

    def abandon(self) -> None:  # noqa: B027
        """Forgets what was opened. No pass may be running."""

    def close(self) -> None:
        """Waits for what was started, and gives memory and thread back. Idempotent."""
        self._thread.shutdown(wait=True)


def attend_runs(total: AttentionSum, heads: int, runs: Iterable[KeysValues], tokens: int) -> Results:
    """Attention over the runs of a range of so many tokens, each read before the next one is asked for."""
    total.track_mass(0, tokens)
    for keys, values in runs:
        total.attend_tracked(keys, values)
    assert total.lse is not None
    results = [total.result(), unfold(total.lse, heads)]
    return [*results, summed_mass(total.mass, total.lse, total.sample)] if total.mass else results


class CpuAttention(RemoteAttention):
    """Attends KV in host memory, where it lies.

    For a GPU, queries and results go through page-locked buffers that its kernels write and read directly, so
    that they wait for no copy engine; what comes back of a layer is one buffer. One buffer for queries is
    enough: a layer's queries are written when those of the layer before have been attended. There are two for
    results: those of a layer are read while the next one's may be written.
    """

    def __init__(self, tokens: int, device: torch.device, timeline: Timeline = NO_TIMELINE) -> None:
        super().__init__(tokens, "cpu")
        self._backend = cpu_share_backend(device)
        self._device = device
        self._timeline = timeline
        self._asked: MappedBuffer | None = None
        self._answers: deque[MappedBuffer | None] = deque((None, None))

    def start(
        self, layer: int, queries: Tensor, runs: Sequence[KeysValues], scale: float, chunk: int | None = None
    ) -> Future[Results]:
        if not queries.is_cuda:
            return self._thread.submit(self._attend, queries, runs, scale, chunk)
        asked = self._asked = self._with_room(self._asked, queries.nbytes)
        (there,) = unpacked(asked.device, [(queries.shape, queries.dtype)])
        computed_copy(queries, out=there)
        asked.mark_used()
        (here,) = unpacked(asked.host, [(queries.shape, queries.dtype)])
        return self._thread.submit(self._answer, asked.used, here, runs, scale, chunk)

    def finish(self, started: Future[Results]) -> Results:
        return started.result()

    def _with_room(self, buffer: MappedBuffer | None, byte_count: int) -> MappedBuffer:
        if buffer is None or buffer.host.numel() < byte_count:
            (buffer,) = MappedBuffer.allocate(2 * byte_count, self._device)
        return buffer

    def _answer(
        self,
        arrived: torch.cuda.Event,
        queries: Tensor,
        runs: Sequence[KeysValues],
        scale: float,
        chunk: int | None,
    ) -> Results:
        arrived.synchronize()
        results = self._attend(queries, runs, scale, chunk)
        with torch.inference_mode():
            data = packed(results)
            answer = self._with_room(self._answers.popleft(), data.numel())
            answer.host[: data.numel()].copy_(data)
        self._answers.append(answer)
        return unpacked(answer.device, [(result.shape, result.dtype) for result in results])

    @torch.inference_mode()
    def _attend(
        self, queries: Tensor, runs: Sequence[KeysValues], scale: float, chunk: int | None
    ) -> Results:
        total = AttentionSum(self._backend, queries, runs[0][0].shape[1], scale, chunk)
        tokens = sum(len(keys) * keys.shape[2] for keys, _ in runs)
        with self._timeline.span("cpu", "attention"):
            return attend_runs(total, len(queries), runs, tokens)


class GpuAttention(RemoteAttention):
    """Attends KV on another GPU, which keeps the first tokens of the range; the others cross its own link.

    Args:
        engine: over that GPU's link; closed with this, and used from its thread alone.
        home: the device that asks.
    """

    def __init__(
        self, engine: TransferEngine, tier: GpuTier, home: torch.device, timeline: Timeline = NO_TIMELINE
    ) -> None:
        device = engine.link.device
        super().__init__(tier.tokens, f"{device}")
        self.engine = engine
        self._timeline = timeline
        self._backend = choose_backend(device)
        self._resident = ResidentTier(engine.sequence.layout, tier.resident_tokens, device)
        self._first = 0  # position of the first resident token in the text
        self._passes: deque[tuple[int, Future[LayerStream]]] = deque()  # resident tokens, and the stream
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # One for all texts: torch's allocator keeps what one of them gave back for the next.
            self._stream = device_streams(device).remote
            self._queries, self._results = PeerCopies(home, device), PeerCopies(device, home)

    def keep(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        self._first = start
        with self._on_stream():
            self._resident.keep(layer, keys, values)

    def truncate(self, length: int) -> None:
        self._resident.truncate(length - self._first)

    def load(self, start: int) -> None:
        def load() -> None:
            if start != self._first:
                self._resident.truncate(0)
            self._first = start
            self._resident.load(self.engine, start)

        self._submit(load).result()

    def open(self, start: int, stop: int) -> None:
        resident = min(self._resident.tokens, stop - start) if start == self._first else 0
        stream = self._submit(lambda: self.engine.stream(stop, start=start + resident))
        self._passes.append((resident, stream))

    def start(
        self, layer: int, queries: Tensor, runs: Sequence[KeysValues], scale: float, chunk: int | None = None
    ) -> Future[Results]:
        if self._stream is not None:
            with self._on_stream():
                queries = self._queries.copy(queries)

        def work() -> Results:
            total = AttentionSum(self._backend, queries, self.engine.sequence.layout.kv_heads, scale, chunk)
            resident, opened = self._passes[0]
            stream = opened.result()
            with self._timeline.span("gpu", "attention"):
                runs = chain(self._resident.views(layer, resident), stream.segments(layer))
                results = attend_runs(total, len(queries), runs, resident + stream.end - stream.start)
            if layer == self.engine.sequence.layout.layers - 1:
                self._passes.popleft()
            return results

        return self._submit(work)

    def finish(self, started: Future[Results]) -> Results:
        results = started.result()
        if self._stream is None:
            return results
        with self._on_stream():
            data = self._results.copy(packed(results))
        return unpacked(data, [(result.shape, result.dtype) for result in results])

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
            with suppress(RuntimeError):  # closed before
                self.finish_compute()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs work in the thread; what it launches goes to the GPU's stream."""

        @torch.inference_mode()
        def there() -> T:
            with self._on_stream():
                return work()

        return self._thread.submit(there)
