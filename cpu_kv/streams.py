"""The CUDA streams of this process: one set for each device, whoever uses it.

torch hands out 32 streams of a priority in turn. If every engine asked for its own, some of them would soon
share a stream, and a copy would wait for a graph that has nothing to do with it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceStreams:
    """The streams of one device besides its default stream, on which drafts are computed.

    Attributes:
        to_device: bulk copies from the host. Its priority is the highest, for the sake of the tiny kernels
            between their pieces: behind the grids of a draft they would hold up the link.
        to_host: copies to the host.
        urgent: copies from the host that are awaited, so that they need not queue behind bulk copies.
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


_lock = threading.RLock()  # the garbage collector may run `finish_devices` while a stream is made
_streams: dict[torch.device, DeviceStreams] = {}
_followers: dict[tuple[torch.cuda.Stream, torch.device], torch.cuda.Stream] = {}


def device_streams(device: torch.device) -> DeviceStreams:
    """Returns the streams of a CUDA device, which are made when they are first asked for."""
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    with _lock:
        if device not in _streams:
            priorities = (-2, 0, -1, -1, 0, 0)  # torch takes a higher one than there is for the highest
            _streams[device] = DeviceStreams(*(torch.cuda.Stream(device, priority=one) for one in priorities))
        return _streams[device]


def finish_devices() -> None:
    """Blocks the host until every device that has such streams has done what was enqueued."""
    with _lock:
        devices = list(_streams)
    for device in devices:
        torch.cuda.synchronize(device)


def follower(stream: torch.cuda.Stream, device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on another device that computes for `stream` alone.

    A pass that waits for its link must not hold up a draft, so each stream has a follower of its own.
    """
    with _lock:
        if (stream, device) not in _followers:
            _followers[stream, device] = torch.cuda.Stream(device)
        return _followers[stream, device]
