"""Links: pace, order, failures by name, and that no thread is left. Times have lower bounds only."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, cast

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpu_kv import CopyFailed, CpuLink, Event, Link, PacedLink
from cpu_kv.cuda_link import _CudaEvent
from cpu_kv.link import Pairs


def pair(tokens: int = 1000, value: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(tokens), torch.full((tokens,), value)


def paced_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("cpu_kv-paced")]


class HeldLink(PacedLink):
    """Negative numbers hold up their direction until they are let go; 13 fails."""

    def __init__(self) -> None:
        super().__init__(1e9)
        self.moved: list[float] = []
        self.begun = {-1.0: threading.Event(), -2.0: threading.Event()}
        self.go_on = {-1.0: threading.Event(), -2.0: threading.Event()}

    def move(self, pairs: Pairs) -> None:
        value = float(pairs[0][1][0])
        self.moved.append(value)
        if value < 0:
            self.begun[value].set()
            assert self.go_on[value].wait(30)
            self.begun[value].clear()
        if value == 13:
            raise RuntimeError("the cable was pulled")
        super().move(pairs)


class LinkMachine(RuleBasedStateMachine):
    """A direction is held up by one copy, others are asked for meanwhile, and it is let go.

    Attributes:
        held: of each direction, the event of the copy that holds it up.
        waiting: of each, numbers and events of those behind it, urgent ones or not.
    """

    @initialize()
    def make(self) -> None:
        self.link, self.numbers = HeldLink(), iter(range(20, 10_000))
        self.held: dict[bool, Event] = {}
        self.waiting: dict[bool, dict[bool, list[tuple[float, Event, tuple[torch.Tensor, torch.Tensor]]]]]
        self.waiting = {to_host: {True: [], False: []} for to_host in (False, True)}

    @precondition(lambda self: len(self.held) < 2)
    @rule(to_host=st.booleans())
    def hold(self, to_host: bool) -> None:
        if to_host not in self.held:
            which = -1.0 - to_host
            self.link.go_on[which].clear()
            self.held[to_host] = self.link.copy([pair(value=which)], to_host=to_host)
            assert self.link.begun[which].wait(30)

    @precondition(lambda self: self.held)
    @rule(to_host=st.booleans(), urgent=st.booleans(), fails=st.booleans())
    def copy(self, to_host: bool, urgent: bool, fails: bool) -> None:
        if to_host in self.held:
            copied = pair(3, value=13.0 if fails else next(self.numbers))
            event = self.link.copy([copied], to_host=to_host, urgent=urgent)
            self.waiting[to_host][urgent].append((float(copied[1][0]), event, copied))

    @precondition(lambda self: len(self.held) == 1)
    @rule()
    def copy_after_the_one_that_holds_up_the_other_direction(self) -> None:
        ((to_host, held),) = self.held.items()
        follower = self.link.copy(
            [copied := pair(value=float(next(self.numbers)))], held, to_host=not to_host
        )
        assert not follower.done() and not copied[0].any()
        self.let_go(to_host)
        follower.synchronize()
        assert torch.equal(*copied)

    @precondition(lambda self: self.held)
    @rule(to_host=st.booleans())
    def let_go(self, to_host: bool) -> None:
        if to_host not in self.held:
            return
        before = len(self.link.moved)
        self.link.go_on[-1.0 - to_host].set()
        self.held.pop(to_host).synchronize()
        expected = [*self.waiting[to_host][True], *self.waiting[to_host][False]]
        for value, event, copied in expected:
            if value == 13:
                with pytest.raises(CopyFailed, match=r"copy to the \w+ of 12 bytes \(shapes \[3\]\) failed"):
                    event.wait()
            else:
                event.synchronize()
                assert torch.equal(*copied)
            assert event.done()
        moved = [value for value in self.link.moved[before:] if value in [one for one, *_ in expected]]
        assert moved == [value for value, *_ in expected]
        self.waiting[to_host] = {True: [], False: []}

    @invariant()
    def nothing_passes_what_holds_up(self) -> None:
        for to_host, event in self.held.items():
            assert not event.done()
            assert not any(one.done() for side in self.waiting[to_host].values() for _, one, _ in side)

    def teardown(self) -> None:
        for to_host in list(self.held):
            self.let_go(to_host)
        self.link.close()
        assert not paced_threads()


LinkMachine.TestCase.settings = settings(
    derandomize=True, deadline=None, max_examples=40, stateful_step_count=16
)
TestPacedLink = LinkMachine.TestCase


def test_a_paced_link_takes_its_time() -> None:
    link = PacedLink(bytes_per_second=400_000, latency_s=0.01)
    start = time.monotonic()
    link.copy([pair(), pair()]).wait()  # 8,000 bytes: 20 ms, and 10 ms of latency
    assert time.monotonic() - start >= 0.03
    start = time.monotonic()
    events = [link.copy([pair()]) for _ in range(3)]  # one after another: 20 ms each
    events[-1].synchronize()
    assert time.monotonic() - start >= 0.06
    link.close()


def test_an_interrupt_before_a_copy_is_handed_over_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    link, (asked, later) = PacedLink(1e9), (pair(), pair(value=2.0))
    with monkeypatch.context() as patch:
        patch.setattr("cpu_kv.paced_link.ThreadPoolExecutor.submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            link.copy([asked])
    link.copy([later]).wait()
    assert torch.equal(*later)
    link.close()


@pytest.mark.parametrize("make_link", [CpuLink, lambda: PacedLink(1e9)])
def test_a_failed_copy_is_named_where_it_is_waited_for(make_link: type[CpuLink]) -> None:
    link: Link = make_link()
    event = link.copy([(torch.zeros(3, 4), torch.zeros(3, 5))], to_host=True)
    for wait in (event.wait, event.synchronize):
        with pytest.raises(CopyFailed, match=r"copy to the host of 60 bytes \(shapes \[3, 5\]\) failed"):
            wait()
    assert event.done()
    link.copy([copied := pair()], link.record_event()).wait()  # the link goes on
    assert torch.equal(*copied)
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


def test_close_waits_for_the_copy_under_way_and_for_none_that_takes_long() -> None:
    link = HeldLink()
    event = link.copy([pair(value=-1.0)])
    assert link.begun[-1.0].wait(30)
    threading.Timer(0.05, link.go_on[-1.0].set).start()
    link.close()
    assert event.done()
    slow = PacedLink(bytes_per_second=1)
    begun, queued = (slow.copy([copied := pair(1000)]) for _ in range(2))
    assert not begun.done() and not copied[0].any()  # nothing shows before its time
    slow.close()
    slow.close()
    for unfinished in (begun, queued, slow.copy([pair()])):
        with pytest.raises(CopyFailed):
            unfinished.wait()
    for arguments in ((0,), (1, -1)):
        with pytest.raises(ValueError, match="must be positive"):
            PacedLink(*arguments)
    assert not paced_threads()
