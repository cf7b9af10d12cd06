"""The link to a CUDA device: copies on streams of their own."""

from __future__ import annotations

import time
from contextlib import suppress

import torch

from cpu_kv.link import (
    CopyFailed,
    CopyRecord,
    Pairs,
    PassedTicket,
    Ticket,
    TransferStalled,
    describe,
    failure,
    pair_bytes,
)

_POLL_S = 20e-6


class CudaLink:
    """Copies between page-locked memory and a CUDA device, on one stream for each direction.

    Urgent ones to the device have a stream of their own: the card takes turns between both, copy by copy.
    Copies from or to pageable memory work too, but block the host. ``timeout``: seconds that the host waits
    in ``synchronize``.
    """

    in_place = False
    bytes_per_second = None

    def __init__(self, device: torch.device | str, timeout: float = 60.0):
        self.device = torch.device(device)
        self._timeout = timeout
        self._streams = {to_host: torch.cuda.Stream(self.device) for to_host in (False, True)}
        self._urgent = torch.cuda.Stream(self.device)
        self._recording: _CudaRecording | None = None

    def copy(
        self, pairs: Pairs, after: Ticket | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Ticket:
        stream = self._urgent if urgent and not to_host else self._streams[to_host]
        try:
            with torch.cuda.stream(stream):
                if after is not None:
                    after.wait()
                recording = self._recording
                begun = None if recording is None else _recorded(stream, timed=True)
                for destination, source in pairs:
                    destination.copy_(source, non_blocking=True)
                    if not to_host:
                        # Let go before the copy is done, it must not be given to other compute meanwhile.
                        destination.record_stream(stream)
                event = _recorded(stream, timed=recording is not None)
                if recording is not None and begun is not None:
                    recording.copies.append((to_host, pair_bytes(pairs), begun, event))
        except RuntimeError as error:
            with suppress(RuntimeError):
                stream.synchronize()  # what had begun by then uses memory that is given back now
            return PassedTicket(failure(pairs, to_host, error))
        return _CudaTicket(event, self.device, pairs, to_host, self._timeout)

    def mark(self) -> Ticket:
        event = _recorded(torch.cuda.current_stream(self.device))
        return _CudaTicket(event, self.device, (), False, self._timeout)

    def record(self) -> None:
        self._recording = _CudaRecording(self.device)

    def recorded(self) -> list[CopyRecord]:
        return [] if self._recording is None else self._recording.take(self._timeout)

    def close(self) -> None:
        for stream in (*self._streams.values(), self._urgent):
            stream.synchronize()


class _CudaRecording:
    """Copies between two events each, and an event whose time on the host's clock is known."""

    def __init__(self, device: torch.device):
        self._device = device
        self.copies: list[tuple[bool, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._origin = _recorded(torch.cuda.current_stream(device), timed=True)
        self._origin.synchronize()
        self._origin_s = time.perf_counter()

    def take(self, timeout: float) -> list[CopyRecord]:
        copies = [self.copies.pop(0) for _ in range(len(self.copies))]
        records = []
        for to_host, byte_count, begun, ended in copies:
            _CudaTicket(ended, self._device, (), to_host, timeout).synchronize()
            start, end = (self._origin_s + self._origin.elapsed_time(event) / 1e3 for event in (begun, ended))
            records.append(CopyRecord(to_host, byte_count, start, end))
        return records


class _CudaTicket:
    def __init__(
        self, event: torch.cuda.Event, device: torch.device, pairs: Pairs, to_host: bool, timeout: float
    ):
        self._event = event
        self._device = device
        # Not the tensors, which it would keep alive, and no message: there is a ticket for every copy.
        self._shapes = [source.shape for _, source in pairs]
        self._byte_count = pair_bytes(pairs)
        self._to_host = to_host
        self._timeout = timeout

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        # Event.synchronize would wait for ever on a stalled device.
        deadline = time.monotonic() + self._timeout
        while not self.done():
            if time.monotonic() > deadline:
                raise TransferStalled(self._byte_count, self._timeout)
            time.sleep(_POLL_S)

    def done(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            copy = describe(self._shapes, self._byte_count, self._to_host)
            raise CopyFailed(f"{copy} failed: {error}") from error


def _recorded(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event
