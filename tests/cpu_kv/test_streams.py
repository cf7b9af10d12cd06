"""One set of streams for each device and process."""

from __future__ import annotations

import pytest
import torch

from cpu_kv import CudaLink
from cpu_kv.streams import device_streams, follower

pytestmark = pytest.mark.gpu


def test_every_link_and_engine_is_given_the_same_streams() -> None:
    streams = device_streams(torch.device("cuda"))
    assert device_streams(torch.device("cuda", 0)) is streams
    all_of_them = {streams.to_device, streams.to_host, streams.urgent}
    all_of_them |= {streams.verification, streams.capture, streams.remote}
    assert len(all_of_them) == 6 and torch.cuda.default_stream() not in all_of_them
    # The kernels between two pieces of a bulk copy must not wait for a draft's.
    assert streams.to_device.priority < streams.verification.priority < streams.to_host.priority
    for _ in range(40):  # torch would have handed out a stream twice by then
        CudaLink("cuda").close()
    assert device_streams(torch.device("cuda")) is streams
    made = {stream: follower(stream, torch.device("cuda")) for stream in all_of_them}
    assert len(set(made.values()) - all_of_them) == 6
    assert all(follower(stream, torch.device("cuda")) is one for stream, one in made.items())


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_each_device_has_its_own() -> None:
    one, other = (device_streams(torch.device("cuda", index)) for index in (0, 1))
    assert other.to_device.device.index == 1
    assert not set(vars(one).values()) & set(vars(other).values())
