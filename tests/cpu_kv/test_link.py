"""Links: pace, order, failures by name, and that no thread is left. Times have lower bounds only."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from cpu_kv import CopyFailed, CpuLink, Link, PacedLink
from cpu_kv.cuda_link import _CudaEvent
from cpu_kv.link import Pairs


def pair(tokens: int = 1000, value: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(tokens), torch.full((tokens,), value)


def paced_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("cpu_kv-paced")]


def test_cpu_link_copies_at_once() -> None:
    link = CpuLink()
    destination, source = pair()
    event = link.copy([(destination, source)], link.record_event())
    assert event.done()
    assert torch.equal(destination, source)
    assert link.in_place
    link.close()


def test_paced_link_takes_its_time() -> None:
    link = PacedLink(bytes_per_second=400_000, latency_s=0.01)
    start = time.monotonic()
    pairs = [pair(), pair()]  # 8,000 bytes: 20 ms, and 10 ms of latency
    event = link.copy(pairs)
    event.wait()
    assert time.monotonic() - start >= 0.03
    assert all(torch.equal(destination, source) for destination, source in pairs)
    start = time.monotonic()
    events = [link.copy([pair()]) for _ in range(3)]  # one after another: 20 ms each
    events[-1].synchronize()
    assert time.monotonic() - start >= 0.06
    assert all(event.done() for event in events)
    link.close()


class RecordingLink(PacedLink):
    def __init__(self) -> None:
        super().__init__(1e9)
        self.moved: list[float] = []
        self.held_up, self.go_on = threading.Event(), threading.Event()

    def move(self, pairs: Pairs) -> None:
        value = float(pairs[0][1][0])
        if value < 0:  # such copies hold up their lane
            self.held_up.set()
            assert self.go_on.wait(30)
        super().move(pairs)
        self.moved.append(value)


def test_an_interrupt_before_a_copy_is_handed_over_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    link, (asked, later) = PacedLink(1e9), (pair(), pair(value=2.0))
    with monkeypatch.context() as patch:
        patch.setattr(link._directions[False].thread, "submit", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            link.copy([asked])
    link.copy([later]).wait()
    assert torch.equal(*later)
    link.close()


def test_urgent_copies_overtake_those_that_have_not_begun() -> None:
    link = RecordingLink()
    link.copy([pair(value=-1.0)])
    assert link.held_up.wait(30)
    events = [link.copy([pair(value=number)], urgent=number > 2) for number in (1.0, 2.0, 3.0, 4.0)]
    link.go_on.set()
    for event in events:
        event.synchronize()
    assert link.moved == [-1.0, 3.0, 4.0, 1.0, 2.0]
    link.close()


def test_copies_of_a_direction_keep_their_order_and_directions_are_independent() -> None:
    link = RecordingLink()
    held_up = link.copy([pair(value=-1.0)])
    events = [link.copy([pair(value=float(number))]) for number in range(1, 4)]
    other_way = link.copy([pair(value=10.0)], to_host=True)
    other_way.synchronize()
    assert link.moved == [10.0]
    assert not held_up.done()
    link.go_on.set()
    events[-1].synchronize()
    assert link.moved == [10.0, -1.0, 1.0, 2.0, 3.0]
    link.close()


def test_a_copy_waits_for_what_it_goes_after() -> None:
    link = RecordingLink()
    held_up = link.copy([pair(value=-1.0)])
    follower = link.copy([pair(value=5.0)], after=held_up, to_host=True)
    assert not follower.done()
    link.go_on.set()
    follower.synchronize()
    assert link.moved == [-1.0, 5.0]
    link.close()


@pytest.mark.parametrize("make_link", [CpuLink, lambda: PacedLink(1e9)])
def test_a_failed_copy_is_named_where_it_is_waited_for(make_link: type[CpuLink]) -> None:
    link: Link = make_link()
    event = link.copy([(torch.zeros(3, 4), torch.zeros(3, 5))], to_host=True)
    for wait in (event.wait, event.synchronize):
        with pytest.raises(CopyFailed, match=r"copy to the host of 60 bytes \(shapes \[3, 5\]\) failed"):
            wait()
    destination, source = pair()
    link.copy([(destination, source)]).wait()  # the link goes on
    assert torch.equal(destination, source)
    link.close()


def test_a_copy_that_cuda_fails_is_named_and_its_memory_not_kept() -> None:
    class Failed:
        def synchronize(self) -> None:
            raise RuntimeError("the device is gone")

        query = synchronize

    source = torch.zeros(3, 5)
    event = _CudaEvent(cast(Any, Failed()), CpuLink.device, [(torch.zeros(3, 5), source)], True)
    kept = weakref.ref(source)
    del source
    assert kept() is None
    for asked in (event.synchronize, event.done):
        with pytest.raises(CopyFailed, match=r"host of 60 bytes \(shapes \[3, 5\]\) failed: the device is g"):
            asked()


def test_close_does_not_wait_for_copies_that_take_long() -> None:
    link = PacedLink(bytes_per_second=1)
    destination, source = pair(1000)
    event = link.copy([(destination, source)])
    queued = link.copy([pair(1000)])
    assert not event.done() and destination.sum() == 0  # nothing shows before its time
    link.close()
    link.close()
    for unfinished in (event, queued, link.copy([pair()])):
        with pytest.raises(CopyFailed):
            unfinished.wait()
    assert not paced_threads()


def test_close_waits_for_the_copy_under_way() -> None:
    link = RecordingLink()
    event = link.copy([pair(value=-1.0)])
    assert link.held_up.wait(30)
    threading.Timer(0.05, link.go_on.set).start()
    link.close()
    assert event.done()
    assert not paced_threads()


@pytest.mark.parametrize("arguments", [(0,), (1, -1)])
def test_paces_that_make_no_sense(arguments: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        PacedLink(*arguments)
    assert not paced_threads()
