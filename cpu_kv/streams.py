"""The CUDA streams of this process: one set for each device, shared by all links and engines.

torch has 32 streams of each priority and hands them out in turn. If every engine asked for streams of its
own, two of them would soon share one, and a copy would wait for an unrelated graph.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceStreams:
    """The streams of one device, besides its default stream, which computes drafts.

    Attributes:
        to_device: bulk copies from the host. Has the highest priority because of the tiny kernels between
            the pieces of a copy: queued behind the thread blocks of a draft they would hold up the link.
        to_host: copies to the host.
        urgent: copies from the host that must not queue behind bulk copies.
        verification: passes over the full cache, at high priority.
        capture: warm-up and capture of CUDA graphs.
        remote: attention over the KV that this device holds for another one.
    """

    to_device: torch.cuda.Stream
    to_host: torch.cuda.Stream
    urgent: torch.cuda.Stream
    verification: torch.cuda.Stream
    capture: torch.cuda.Stream
    remote: torch.cuda.Stream


# Reentrant: the garbage collector may call `finish_devices` while a stream is created.
_lock = threading.RLock()
_streams: dict[torch.device, DeviceStreams] = {}
_followers: dict[tuple[torch.cuda.Stream, torch.device], torch.cuda.Stream] = {}


def device_streams(device: torch.device) -> DeviceStreams:
    """Returns the streams of a CUDA device; the first call creates them."""
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    with _lock:
        if device not in _streams:
            priorities = (-2, 0, -1, -1, 0, 0)  # torch clamps them to the device's range
            _streams[device] = DeviceStreams(
                *(torch.cuda.Stream(device, priority=priority) for priority in priorities)
            )
        return _streams[device]


# A wait for a whole device invalidates a capture on it, whichever threads the two are in. Reentrant, as the
# garbage collector may call `finish_devices` within one of these functions.
_capture_lock = threading.RLock()


@contextmanager
def capture_section() -> Iterator[None]:
    """Within it a CUDA graph may be captured: the functions below wait in other threads until it ends.

    Nothing is garbage-collected meanwhile: the collector would run finalizers in the thread that captures,
    and some wait for the device.
    """
    with _capture_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def finish_device(device: torch.device) -> None:
    """Blocks the host until a device has finished all enqueued work."""
    with _capture_lock:
        torch.cuda.synchronize(device)


def finish_devices() -> None:
    """Blocks the host until every device with such streams has finished all enqueued work."""
    with _lock:
        devices = list(_streams)
    for device in devices:
        finish_device(device)


def release_cached_memory() -> None:
    """Returns to CUDA the memory that torch caches on every device, once their work has finished."""
    with _capture_lock:
        torch.cuda.empty_cache()


def follower(stream: torch.cuda.Stream, device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of another device that computes on behalf of `stream`.

    Each stream has a follower of its own, so that a pass that waits for its link does not hold up a draft.
    """
    with _lock:
        if (stream, device) not in _followers:
            _followers[stream, device] = torch.cuda.Stream(device)
        return _followers[stream, device]
