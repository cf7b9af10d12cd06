"""The link to a CUDA device, whose copies run on dedicated streams."""

from __future__ import annotations

import time
from contextlib import suppress

import torch

from cpu_kv.link import CopyFailed, CopyRecord, Event, Pairs, PastEvent, describe, failure, pair_bytes
from cpu_kv.streams import device_streams

PIECE_BYTES = 16 * 2**20
"""Bulk copies to the device are split into pieces of this many bytes, with a tiny kernel after each.

A copy engine ignores stream priorities: it takes whatever is ready, and runs consecutive copies of one stream
as one block. A small copy on another stream would wait for all of them (51 KB waited 12 ms behind 200 MB in
traces of cudf issue 15620). Splitting is not enough: only a kernel between two pieces makes the stream's next
copy unready for a moment, in which the engine serves other streams. So at 25 GB/s an urgent copy waits at
most 0.7 ms.
"""


class CudaLink:
    """Copies between page-locked host memory and a CUDA device, with one stream for each direction.

    Urgent copies to the device use a third stream and run between the pieces of bulk copies. Copies from or
    to pageable memory work too, but block the host.
    """

    in_place = False
    bytes_per_second = None

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self._streams = device_streams(self.device)
        # Written by the kernels between pieces, so it is of their stream: memory of another one may still be
        # read there on behalf of its last owner. Made in inference mode, it would be read-only outside of it.
        with torch.inference_mode(False), torch.cuda.stream(self._streams.to_device):
            self._yield = torch.zeros(1, device=self.device)
        self._recording: _CudaRecording | None = None

    def copy(
        self, pairs: Pairs, after: Event | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Event:
        streams = self._streams
        stream = streams.to_host if to_host else streams.urgent if urgent else streams.to_device
        try:
            with torch.cuda.stream(stream):
                if after is not None:
                    after.wait()
                recording = self._recording
                begun = None if recording is None else _recorded(stream, timed=True)
                for destination, source in pairs:
                    if to_host or urgent:
                        destination.copy_(source, non_blocking=True)
                    else:
                        self._copy_in_pieces(destination, source)
                    if not to_host:
                        # If it is freed before the copy ends, the allocator must not reuse it until then.
                        destination.record_stream(stream)
                event = _recorded(stream, timed=recording is not None)
                if recording is not None and begun is not None:
                    recording.copies.append((to_host, pair_bytes(pairs), begun, event))
        except RuntimeError as error:
            with suppress(RuntimeError):
                stream.synchronize()  # copies that were enqueued before the error still use the memory
            return PastEvent(failure(pairs, to_host, error))
        return _CudaEvent(event, self.device, pairs, to_host)

    def _copy_in_pieces(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        entries = PIECE_BYTES // source.itemsize
        pieces = zip(destination.view(-1).split(entries), source.view(-1).split(entries), strict=True)
        for to, piece in pieces:
            to.copy_(piece, non_blocking=True)
            self._yield.fill_(0.0)

    def record_event(self) -> Event:
        return _CudaEvent(_recorded(torch.cuda.current_stream(self.device)), self.device, (), False)

    def record(self) -> None:
        self._recording = _CudaRecording(self.device)

    def recorded(self) -> list[CopyRecord]:
        return [] if self._recording is None else self._recording.take()

    def close(self) -> None:
        for stream in (self._streams.to_device, self._streams.to_host, self._streams.urgent):
            stream.synchronize()


class _CudaRecording:
    """Start and end events of copies, and an event whose time on the host's clock is known."""

    def __init__(self, device: torch.device):
        self._device = device
        self.copies: list[tuple[bool, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._origin = _recorded(torch.cuda.current_stream(device), timed=True)
        self._origin.synchronize()
        self._origin_s = time.perf_counter()

    def take(self) -> list[CopyRecord]:
        copies = [self.copies.pop(0) for _ in range(len(self.copies))]
        records = []
        for to_host, byte_count, begun, ended in copies:
            _CudaEvent(ended, self._device, (), to_host).synchronize()
            start, end = (self._origin_s + self._origin.elapsed_time(event) / 1e3 for event in (begun, ended))
            records.append(CopyRecord(to_host, byte_count, start, end))
        return records


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event, device: torch.device, pairs: Pairs, to_host: bool):
        self._event = event
        self._device = device
        # Not the tensors, which would stay allocated, nor a message, which would be built for every copy.
        self._shapes = [source.shape for _, source in pairs]
        self._byte_count = pair_bytes(pairs)
        self._to_host = to_host

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise self._failure(error) from error

    def done(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, error: RuntimeError) -> CopyFailed:
        copy = describe(self._shapes, self._byte_count, self._to_host)
        return CopyFailed(f"{copy} failed: {error}")


def _recorded(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    # Blocking: a waiting thread sleeps, instead of taking a core from the threads that compute attention.
    event = torch.cuda.Event(enable_timing=timed, blocking=True)
    event.record(stream)
    return event
