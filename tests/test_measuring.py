"""What is measured of a processor, a card and its link."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from machine_cases import HEALTHY, assert_positive
from machine_cases import tiny as tiny  # a fixture

from offload_rt.attention.backends import TorchCpuBackend
from offload_rt.machine import measuring
from offload_rt.machine.hardware import GIB
from offload_rt.machine.inventory import read_cards
from offload_rt.machine.measuring import LinkFigures


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("copy", [lambda: None, None], ids=["beside copies", "without a link"])
def test_the_processor_is_measured(copy: Callable[[], None] | None) -> None:
    told = []
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    host = measuring.measure_host(GIB, copy, lambda *progress: told.append(progress))
    assert_positive(host)
    for rate in host.attention:
        assert_positive(rate)
    assert [rate.queries for rate in host.attention] == [1, 8, 16, 32]
    assert host.attention_beside_link <= 1 and host.link_beside_attention <= 1
    assert copy is not None or host.attention_beside_link == host.link_beside_attention == 1
    total = 4 if copy is None else 5
    assert [progress[1:] for progress in told] == [(done, total) for done in range(total)]
    assert torch.equal(torch.get_rng_state(), expected)  # the caller's seed still holds


def test_attention_reads_all_that_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Backend(TorchCpuBackend):
        def parts_with_mass(self, queries: Any, keys: Any, values: Any, *arguments: Any) -> Any:
            seen.append((queries.shape[1], keys.nbytes + values.nbytes))
            return super().parts_with_mass(queries, keys, values, *arguments)

    monkeypatch.setattr(measuring, "cpu_share_backend", lambda device: Backend())
    clock = iter(range(10_000))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(clock))
    kv = measuring.HostKV(5_000_000)
    monkeypatch.setattr(measuring, "REPEATS", 2)
    rates = kv.rates()
    assert {size for _, size in seen} == {kv.read_bytes}
    assert kv.read_bytes == 9 * 2**19, "whole pages, of 5,000,000 bytes at most"
    # A second an attention, by this clock.
    assert [rate.rate for rate in rates] == [kv.read_bytes / 1e9] * 4
    assert [queries for queries, _ in seen[-8:]] == [1, 8, 16, 32] * 2


def test_shares_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, attention takes 2 s and a copy 1 s; side by side, each takes 4 s."""
    alone = iter([2.0, 1.0])

    def seconds(work: Callable[[], object]) -> float:
        in_main = threading.current_thread() is threading.main_thread()
        return next(alone, 4.0) if in_main else 4.0

    monkeypatch.setattr(measuring, "seconds", seconds)
    monkeypatch.setattr(measuring, "REPEATS", 1)
    assert measuring.beside(measuring.HostKV(2**16), lambda: None) == (0.5, 0.25)


def test_a_copy_that_fails_beside_attention_is_told() -> None:
    made = 0

    def copy() -> None:
        nonlocal made
        made += 1
        if made > 2:
            raise RuntimeError("the link is gone")

    with pytest.raises(RuntimeError, match="the link is gone"):
        measuring.beside(measuring.HostKV(2**16), copy)


@pytest.mark.parametrize(("available", "largest"), [(64 * GIB, 2**30), (2**30, 2**27), (0, 2**20)])
def test_buffers_leave_most_memory_alone(available: int, largest: int) -> None:
    assert measuring.within(measuring.MEMORY_BYTES, available) == largest


class FakeCopies:
    """Copies at given rates: alone 20 and 10 GB/s, both at once 15 and 5."""

    pinned = True

    def __init__(self) -> None:
        self.flying: list[str] = []

    def _begin(self, direction: str, alone: float, both: float) -> Callable[[], float]:
        self.flying.append(direction)
        self.together = len(self.flying) == 2

        def rate() -> float:
            self.flying.remove(direction)
            return both if self.together else alone

        return rate

    def to_device(self) -> Callable[[], float]:
        return self._begin("in", 20.0, 15.0)

    def to_host(self) -> Callable[[], float]:
        return self._begin("out", 10.0, 5.0)


def test_rates_of_a_link_and_its_state_while_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = FakeCopies()
    monkeypatch.setattr(measuring, "link_now", lambda uuid: (4 if copies.flying else 1, 8))
    to_device, to_host, figures = measuring.measure_link(copies, HEALTHY.cards[0])  # type: ignore[arg-type]
    assert (to_device, to_host) == (20.0, 10.0)
    assert figures == LinkFigures(15.0, 5.0, generation=4, width=8, pinned=True)
    assert copies.flying == []


@pytest.mark.gpu
def test_a_card_is_measured(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    card = read_cards()[0]
    device = torch.device("cuda:0")
    monkeypatch.setattr(measuring, "COPY_BYTES", 2**24)
    copies = measuring.PinnedCopies(device, card.free_bytes)
    try:
        copies._sources.fill_(7)
        copies.copy()
        assert bool((copies._inwards == 7).all())
        copies._outwards.fill_(9)
        torch.cuda.synchronize()
        copies.to_host()()
        assert bool((copies._results == 9).all())
        monkeypatch.setattr(measuring, "MEMORY_BYTES", 2**26)
        monkeypatch.setattr(measuring, "PRODUCT_WIDTH", 1024)
        gpu, link = measuring.measure_gpu(card, copies, device, lambda *_: None)
    finally:
        copies.close()
    assert_positive(gpu)
    assert_positive(link)
    assert copies._slabs.bytes_pinned == 0
