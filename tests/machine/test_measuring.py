"""Measurements of a processor, a GPU and its link."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.machine_cases import assert_positive

from offload_rt.attention.backends import TorchCpuBackend
from offload_rt.machine import measuring
from offload_rt.machine.inventory import read_gpus
from offload_rt.system.hardware import GIB


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("copy", [lambda: None, None], ids=["beside copies", "without a link"])
def test_the_processor_is_measured(copy: Callable[[], None] | None) -> None:
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    host = measuring.measure_host(GIB, copy)
    assert_positive(host)
    for rate in host.attention:
        assert_positive(rate)
    assert [rate.queries for rate in host.attention] == [1, 8, 16, 32]
    assert host.attention_beside_link <= 1 and host.link_beside_attention <= 1
    assert copy is not None or host.attention_beside_link == host.link_beside_attention == 1
    assert torch.equal(torch.get_rng_state(), expected), "the caller's seed still holds"


def test_attention_reads_all_that_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Backend(TorchCpuBackend):
        def add_with_mass(self, total: Any, queries: Any, pages: Any, *arguments: Any) -> Any:
            seen.append((queries.shape[1], pages.keys.nbytes + pages.values.nbytes))
            return super().add_with_mass(total, queries, pages, *arguments)

    monkeypatch.setattr(measuring, "cpu_share_backend", lambda device: Backend())
    clock = iter(range(10_000))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(measuring, "REPEATS", 2)
    attention = measuring.CpuAttention(5_000_000)
    rates = attention.rates()
    assert {size for _, size in seen} == {attention.read_bytes}
    assert attention.read_bytes == 9 * 2**19, "whole pages, of 5,000,000 bytes at most"
    # A second an attention, by this clock.
    assert [rate.rate for rate in rates] == [attention.read_bytes / 1e9] * 4
    assert [queries for queries, _ in seen[-8:]] == [1, 8, 16, 32] * 2


def test_shares_of_attention_and_copies_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, attention takes 2 s and a copy 1 s; side by side, each takes 4 s."""
    alone = iter([2.0, 1.0])

    def seconds(work: Callable[[], object]) -> float:
        in_main = threading.current_thread() is threading.main_thread()
        return next(alone, 4.0) if in_main else 4.0

    monkeypatch.setattr(measuring, "seconds", seconds)
    monkeypatch.setattr(measuring, "REPEATS", 1)
    assert measuring.CpuAttention(2**16).shares_beside(lambda: None) == (0.5, 0.25)


@pytest.mark.parametrize(("available", "largest"), [(64 * GIB, 2**30), (2**30, 2**27), (0, 2**20)])
def test_buffers_leave_most_memory_alone(available: int, largest: int) -> None:
    assert measuring.within(measuring.MEMORY_BYTES, available) == largest


def test_a_link_is_read_while_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies reach 20 and 10 GB/s, and an idle link lowers its generation."""
    flying: list[float] = []

    class Copies:
        def to_device(self, rate: float = 20.0) -> Callable[[], float]:
            flying.append(rate)
            return flying.pop

        def to_host(self) -> Callable[[], float]:
            return self.to_device(10.0)

    monkeypatch.setattr(measuring, "link_now", lambda uuid: (4 if flying else 1, 8))
    assert measuring.measure_link(Copies(), "GPU-1") == (20.0, 10.0, (4, 8))  # type: ignore[arg-type]
    assert flying == []


@pytest.mark.gpu
@pytest.mark.usefixtures("tiny")
def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, *_ = read_gpus()
    monkeypatch.setattr(measuring, "COPY_BYTES", 2**24)
    copies = measuring.PinnedCopies(torch.device("cuda:0"), facts.free_bytes)
    try:
        copies.on_host.fill_(7)
        copies.copy()
        assert bool((copies.on_device == 7).all())
        copies.on_device.fill_(9)
        assert copies.to_host()() > 0
        assert bool((copies.on_host == 9).all())
        monkeypatch.setattr(measuring, "MEMORY_BYTES", 2**26)
        monkeypatch.setattr(measuring, "GPU_PRODUCT", (1024, 1024))
        gpu, _ = measuring.measure_gpu(facts, copies, torch.device("cuda:0"))
    finally:
        copies.close()
    assert_positive(gpu)
