"""Remote attention: tiers whose KV the CPU attends in place, or another GPU attends.

Each works in a thread of its own while the device and its link are busy with other tiers. Queries go there;
attention and its log-sum-exp come back, which combine exactly with the other tiers' results.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from cpu_kv import KVPages, LayerStream, TransferEngine
from cpu_kv.mapped import MappedBuffer, PeerCopies, computed_copy, joined_bytes, split_bytes
from cpu_kv.streams import device_streams
from offload_rt.attention.backends import unfold
from offload_rt.attention.mass import summed_mass
from offload_rt.attention.selector import choose_backend, cpu_share_backend
from offload_rt.attention.sums import AttentionSum
from offload_rt.caches.resident import ResidentTier
from offload_rt.caches.sizes import GpuTier
from offload_rt.caches.tiers import OnSegment, Results, Tier
from offload_rt.system.timeline import NO_TIMELINE, Timeline

T = TypeVar("T")


class RemoteAttention(Tier):
    """A tier that attends its range in a thread of its own.

    Args:
        tokens: most tokens per layer.
        name: of the thread.
    """

    remote = True

    def __init__(self, tokens: int, name: str) -> None:
        self.tokens = tokens
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"offload_rt-{name}-attention")

    @abstractmethod
    def start(
        self, layer: int, queries: Tensor, runs: Sequence[KVPages], scale: float, chunk: int | None = None
    ) -> Future[Results]: ...

    @abstractmethod
    def finish(self, future: Future[Results]) -> Results:
        """Waits for what `start` returned; the results are valid for the device's current stream.

        They stay valid until `finish` is called for the layer after the next one.
        """

    def add_to(
        self,
        total: AttentionSum,
        layer: int,
        start: int,
        stop: int,
        future: Future[Results] | None,
        on_segment: OnSegment,
    ) -> None:
        assert future is not None
        total.add(*self.finish(future), start=start)

    def close(self) -> None:
        """Waits for the work that was started, and frees memory and thread. Idempotent."""
        self._thread.shutdown(wait=True)


def attend_runs(total: AttentionSum, heads: int, runs: Iterable[KVPages], tokens: int) -> Results:
    """Attends `runs` of `tokens` tokens in all, each one before the next is asked for."""
    total.track_mass(0, tokens)
    for pages in runs:
        total.attend_tracked(pages)
    assert total.lse is not None
    out, lse = total.result(), unfold(total.lse, heads)
    results = [out, lse.to(torch.promote_types(out.dtype, torch.float32))]  # a CPU's is in float64
    return [*results, summed_mass(total.mass, total.lse, total.sample)] if total.mass else results


class CpuAttention(RemoteAttention):
    """Attention by the CPU over KV in host memory, in place.

    With a GPU, queries and results go through page-locked buffers that its kernels write and read directly,
    so that they wait for no copy engine; the results of a layer come back in one buffer. One buffer for
    queries is enough, as a layer's queries are written after those of the layer before were attended. There
    are two for results: one is read while the next layer's results are written to the other.

    Args:
        device: where the queries come from.
    """

    def __init__(self, tokens: int, device: torch.device, timeline: Timeline = NO_TIMELINE) -> None:
        super().__init__(tokens, "cpu")
        self._backend = cpu_share_backend(device)
        self._device = device
        self._timeline = timeline
        self._query_buffer: MappedBuffer | None = None
        self._result_buffers: deque[MappedBuffer | None] = deque((None, None))

    def start(
        self, layer: int, queries: Tensor, runs: Sequence[KVPages], scale: float, chunk: int | None = None
    ) -> Future[Results]:
        if not queries.is_cuda:
            return self._thread.submit(self._attend, queries, runs, scale, chunk)
        buffer = self._query_buffer = self._with_capacity(self._query_buffer, queries.nbytes)
        (on_device,) = split_bytes(buffer.device, [(queries.shape, queries.dtype)])
        computed_copy(queries, out=on_device)
        buffer.mark_used()
        (on_host,) = split_bytes(buffer.host, [(queries.shape, queries.dtype)])
        return self._thread.submit(self._attend_for_gpu, buffer.last_use, on_host, runs, scale, chunk)

    def finish(self, future: Future[Results]) -> Results:
        return future.result()

    def _with_capacity(self, buffer: MappedBuffer | None, byte_count: int) -> MappedBuffer:
        if buffer is None or buffer.host.numel() < byte_count:
            (buffer,) = MappedBuffer.allocate(2 * byte_count, self._device)
        return buffer

    def _attend_for_gpu(
        self,
        arrived: torch.cuda.Event,
        queries: Tensor,
        runs: Sequence[KVPages],
        scale: float,
        chunk: int | None,
    ) -> Results:
        arrived.synchronize()
        results = self._attend(queries, runs, scale, chunk)
        with torch.inference_mode():
            data = joined_bytes(results)
            buffer = self._with_capacity(self._result_buffers.popleft(), data.numel())
            buffer.host[: data.numel()].copy_(data)
        self._result_buffers.append(buffer)
        return split_bytes(buffer.device, [(result.shape, result.dtype) for result in results])

    @torch.inference_mode()
    def _attend(self, queries: Tensor, runs: Sequence[KVPages], scale: float, chunk: int | None) -> Results:
        total = AttentionSum(self._backend, queries, runs[0].kv_heads, scale, chunk)
        tokens = sum(pages.tokens for pages in runs)
        with self._timeline.span("cpu", "attention"):
            return attend_runs(total, len(queries), runs, tokens)


class GpuAttention(RemoteAttention):
    """Attention by another GPU, which keeps the first tokens of the range; the others cross its own link.

    Args:
        transfer: over that GPU's link; closed with this tier, and used from its thread alone.
        home: the device that the queries come from.
        packed: see `Tiers`.
    """

    def __init__(
        self,
        transfer: TransferEngine,
        tier: GpuTier,
        home: torch.device,
        timeline: Timeline = NO_TIMELINE,
        *,
        packed: bool = True,
    ) -> None:
        device = transfer.link.device
        super().__init__(tier.tokens, f"{device}")
        self.transfer = transfer
        self._timeline = timeline
        layout, backend = transfer.sequence.layout, choose_backend(device)
        self._backend = backend.by_query(layout.dtype, layout.head_dim) or backend
        self._resident = ResidentTier(transfer, tier.resident_tokens, packed=packed)
        self._passes: deque[tuple[int, int, Future[LayerStream]]] = deque()  # resident start, stop; stream
        self._home = home
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # One for all sequences: torch's allocator keeps the memory freed by one of them for the next.
            self._stream = device_streams(device).remote
            self._queries, self._results = PeerCopies(home, device), PeerCopies(device, home)

    def truncate(self, length: int) -> None:
        self._resident.truncate(length)

    def load(self, start: int) -> None:
        self._submit(lambda: self._resident.load(start)).result()

    def open(self, start: int, stop: int) -> None:
        resident = min(self._resident.tokens, stop - start) if start == self._resident.first else 0
        stream = self._submit(lambda: self.transfer.stream(stop, start=start + resident))
        self._passes.append((start, start + resident, stream))

    def start(
        self, layer: int, queries: Tensor, runs: Sequence[KVPages], scale: float, chunk: int | None = None
    ) -> Future[Results]:
        if self._stream is not None:
            queries = self._queries.copy(queries, torch.cuda.current_stream(self._home), self._stream)

        def work() -> Results:
            total = AttentionSum(self._backend, queries, self.transfer.sequence.layout.kv_heads, scale, chunk)
            start, resident_stop, opened = self._passes[0]
            stream = opened.result()
            with self._timeline.span("gpu", "attention"):
                resident = self._resident.segments(layer, start, resident_stop)
                runs = chain(resident, stream.segments(layer))
                results = attend_runs(total, len(queries), runs, stream.end - start)
            if layer == self.transfer.sequence.layout.layers - 1:
                self._passes.popleft()
            return results

        return self._submit(work)

    def finish(self, future: Future[Results]) -> Results:
        results = future.result()
        if self._stream is None:
            return results
        with self._on_stream():
            data = joined_bytes(results)
        data = self._results.copy(data, self._stream, torch.cuda.current_stream(self._home))
        return split_bytes(data, [(result.shape, result.dtype) for result in results])

    def abandon(self) -> None:
        def close() -> None:
            while self._passes:
                # The newest pass first: otherwise it would be sent the room that the older one frees.
                *_, stream = self._passes.pop()
                if stream.exception() is None:
                    stream.result().close()

        if self._passes:
            self._submit(close).result()

    def finish_compute(self) -> None:
        self._submit(self.transfer.finish_compute).result()

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(self.transfer.close)
            closing.callback(self._resident.release)
            closing.callback(super().close)
            with suppress(RuntimeError):  # already closed
                self.finish_compute()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` in the thread, on the GPU's stream."""

        @torch.inference_mode()
        def on_stream() -> T:
            with self._on_stream():
                return work()

        return self._thread.submit(on_stream)
