"""What is said of other programs that work on this machine."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import psutil
import pytest

from offload_rt.machine.other_work import OtherWork


class Machine:
    """Two cores on which this process may run, and a third, each with the seconds that it has worked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, load: float) -> None:
        self.seconds = [100.0, 200.0, 300.0]
        self.own = self.now = 0.0
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
        monkeypatch.setattr(os, "times", lambda: (self.own, 0.0, 0.0, 0.0, self.now))
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [self.core(busy) for busy in self.seconds])

    @staticmethod
    def core(busy: float) -> SimpleNamespace:
        return SimpleNamespace(user=busy / 2, system=busy / 4, nice=busy / 4, idle=50.0)

    def works(self, seconds: float, own: float, others: float, elsewhere: float = 0.0) -> None:
        self.now += seconds
        self.own += own
        self.seconds = [self.seconds[0] + own, self.seconds[1] + others, self.seconds[2] + elsewhere]


def test_work_that_began_after_this_program_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, load=0.1)
    other = OtherWork()
    machine.works(10, own=10, others=1, elsewhere=10)
    assert other.note() is None, "its own work, a little of others, and that on other cores"
    machine.works(10, own=5, others=10)
    assert other.note() == "other work slows it down: it took 28% of the time of 2 cores meanwhile"
    other.restart()
    assert other.note() is None
    machine.works(0.5, own=0, others=0.5)
    assert other.note() is None, "too short to know"
    machine.works(4.5, own=0, others=4.5)
    assert other.note() == "other work slows it down: it took 50% of the time of 2 cores meanwhile"


def test_work_before_this_program_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, load=3.0)
    assert OtherWork().note() is None
    Machine(monkeypatch, load=3.1)
    assert OtherWork().note() == "other work slows it down: the load average was 3.1 on 2 cores before it"
