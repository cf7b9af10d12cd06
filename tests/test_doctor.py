"""What doctor reads, measures, keeps, warns of and prints."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload_rt import cli, devices
from offload_rt.devices import CACHE_FOLDER
from offload_rt.errors import UsageError
from offload_rt.machine import advice, doctor, inventory, measuring, measuring_gpu
from offload_rt.machine.doctor import Report, inspect
from offload_rt.machine.hardware import GIB, AttentionRate, Gpu, Hardware, Host
from offload_rt.machine.inventory import Card, HostFacts, Versions, read_cards, read_versions
from offload_rt.machine.measuring_gpu import LinkFigures

HEALTHY = Report(
    measured_at="2026-01-02T03:04:05+00:00",
    load_average=0.1,
    hardware=Hardware(
        host=Host(
            memory_bytes=90 * GIB,
            lockable_bytes=90 * GIB,
            memory_rate=70.0,
            compute_rate=900.0,
            attention=(AttentionRate(1, 60.0), AttentionRate(16, 40.5)),
            attention_beside_link=0.75,
            link_beside_attention=0.875,
            launch_ms=0.25,
            threads=16,
        ),
        gpus=(Gpu("NVIDIA GeForce RTX 4090", 23 * GIB, 920.0, 160.0, 26.0, 26.5, 0.125),),
        measured=True,
    ),
    links=(LinkFigures(20.5, 21.5, 4, 16, True),),
    host=HostFacts(
        processor="AMD Ryzen 9 7950X",
        cores=32,
        cores_of_machine=32,
        threads=16,
        instruction_sets=("avx2", "avx512f"),
        numa_nodes=1,
        native_kernel="built",
        attention="native-cpu",
        governor="schedutil",
        energy_preference=None,
        total_bytes=96 * GIB,
        available_bytes=90 * GIB,
        memory_limit_bytes=None,
        lock_limit_bytes=None,
        swap_used_bytes=0,
    ),
    cards=(
        Card(
            name="NVIDIA GeForce RTX 4090",
            uuid="GPU-1",
            bus="0000:01:00.0",
            device=0,
            total_bytes=24 * GIB,
            free_bytes=23 * GIB,
            link_generation=1,  # asleep
            link_generation_most=4,
            link_width=16,
            link_width_most=16,
            numa_node=0,
            performance_state=8,
            power_limit_watts=450.0,
            power_default_watts=450.0,
        ),
    ),
    versions=Versions("3.12.1", "2.13.0", "5.23.0", "2.8.0", "580.1"),
    notices=("a note",),
)


def changed(report: Any, path: str, value: object) -> Any:
    """`report` with another value at `path`, where `cards.0.name` means `cards[0].name`."""
    name, _, rest = path.partition(".")
    if isinstance(report, tuple):
        place = int(name)
        inner = changed(report[place], rest, value) if rest else value
        return (*report[:place], inner, *report[place + 1 :])
    return replace(report, **{name: changed(getattr(report, name), rest, value) if rest else value})


# Measuring


def assert_positive(figures: Any) -> None:
    for field in dataclasses.fields(figures):
        value = getattr(figures, field.name)
        if isinstance(value, float):
            assert math.isfinite(value) and value > 0, field.name


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that show only that they work."""
    for name in ("MEMORY_BYTES", "ATTENTION_BYTES", "COPY_BYTES"):
        monkeypatch.setattr(measuring, name, 2**20)
    monkeypatch.setattr(doctor, "COPY_BYTES", 2**20)
    monkeypatch.setattr(measuring, "PRODUCT", (8, 64))
    monkeypatch.setattr(measuring, "LAYERS", 1)
    monkeypatch.setattr(measuring, "REPEATS", 1)
    monkeypatch.setattr(measuring_gpu, "PRODUCT_WIDTH", 64)


@pytest.mark.usefixtures("tiny")
def test_the_processor_is_measured() -> None:
    told = []
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    host = measuring.measure_host(GIB, None, lambda *progress: told.append(progress))
    assert_positive(host)
    for rate in host.attention:
        assert_positive(rate)
    assert [rate.queries for rate in host.attention] == [1, 8, 16, 32]
    assert host.attention_beside_link <= 1 and host.link_beside_attention <= 1
    assert host.threads == torch.get_num_threads()
    assert [(done, total) for _, done, total in told] == [(step, 5) for step in range(5)]
    assert torch.equal(torch.get_rng_state(), expected)  # the caller's seed still holds


def test_attention_reads_all_that_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def backend(queries: Any, keys: Any, values: Any, scale: float, mask: Any) -> None:
        seen.append((queries.shape[1], keys.nbytes + values.nbytes))

    monkeypatch.setattr(measuring, "choose_backend", lambda device: backend)
    clock = iter(range(10_000))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(clock))
    kv = measuring.HostKV(5_000_000)
    monkeypatch.setattr(measuring, "REPEATS", 2)
    rates = kv.rates()
    assert {size for _, size in seen} == {kv.read_bytes}
    assert 4_990_000 <= kv.read_bytes <= 5_000_000
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


def test_the_stand_in_copies_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        measuring.torch, "empty", lambda *a, **k: made.append(torch.zeros(*a, **k)) or made[0]
    )
    measuring.memory_copy(1000)()
    assert made[0].sum() == 1000


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

        def rate() -> float:
            together = len(set(self.began)) == 2
            self.flying.remove(direction)
            if not self.flying:
                self.began = []
            return both if together else alone

        self.began = list(self.flying)
        return rate

    def to_device(self) -> Callable[[], float]:
        return self._begin("in", 20.0, 15.0)

    def to_host(self) -> Callable[[], float]:
        return self._begin("out", 10.0, 5.0)


def test_rates_of_a_link_and_its_state_while_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = FakeCopies()
    monkeypatch.setattr(measuring_gpu, "link_now", lambda uuid: (4 if copies.flying else 1, 8))
    to_device, to_host, figures = measuring_gpu.measure_link(copies, HEALTHY.cards[0])  # type: ignore[arg-type]
    assert (to_device, to_host) == (20.0, 10.0)
    assert figures == LinkFigures(15.0, 5.0, generation=4, width=8, pinned=True)
    assert copies.flying == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_card_is_measured(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    card = read_cards()[0]
    device = torch.device("cuda:0")
    copies = measuring_gpu.PinnedCopies(device, 2**24)
    try:
        copies._sources.fill_(7)
        copies.copy()
        assert bool((copies._inwards == 7).all())
        copies._outwards.fill_(9)
        torch.cuda.synchronize()
        copies.to_host()()
        assert bool((copies._results == 9).all())
        monkeypatch.setattr(measuring, "MEMORY_BYTES", 2**26)
        monkeypatch.setattr(measuring_gpu, "PRODUCT_WIDTH", 1024)
        gpu, link = measuring_gpu.measure_gpu(card, copies, device, lambda *_: None)
    finally:
        copies.close()
    assert_positive(gpu)
    assert_positive(link)
    assert copies._slabs.bytes_pinned == 0


# Keeping


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder, a machine that changes only where a test says so, and a count of measurements."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    monkeypatch.setattr(doctor, "read_host", lambda: HEALTHY.host)
    monkeypatch.setattr(doctor, "read_cards", lambda: HEALTHY.cards)
    monkeypatch.setattr(doctor, "read_versions", lambda: HEALTHY.versions)
    monkeypatch.setattr(doctor, "lockable_memory", lambda host: host.available_bytes)
    return tmp_path


@pytest.fixture
def measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measurements, as they are made."""
    made: list[str] = []

    def measure(cards: Any, host: Any, on_progress: Any) -> Any:
        made.append("measured")
        forgotten = replace(HEALTHY.hardware.host, memory_bytes=0, lockable_bytes=0)
        gpu = replace(HEALTHY.hardware.gpus[0], memory_bytes=0)
        return Hardware(forgotten, (gpu,), True), HEALTHY.links

    monkeypatch.setattr(doctor, "_measure", measure)
    return made


def test_measures_once(measured: list[str], folder: Path) -> None:
    first = inspect()
    assert first.hardware == HEALTHY.hardware
    assert inspect() == first
    assert len(measured) == 1
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_refresh_measures_again_and_keeps_that(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inspect()
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (7.25, 0.0, 0.0))
    inspect(refresh=True)
    assert len(measured) == 2
    assert inspect().load_average == 7.25
    assert len(measured) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"{}",
        b'{"hardware": {}}',
        "no figure",
    ],
)
def test_a_damaged_or_foreign_file_is_replaced(
    measured: list[str], folder: Path, content: bytes | str
) -> None:
    inspect()
    (path,) = folder.iterdir()
    values = json.loads(path.read_text())
    if isinstance(content, str):
        del values["hardware"]["host"]["launch_ms"]
        content = json.dumps(values).encode()
    path.write_bytes(content)
    inspect()
    inspect()
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("host.processor", "Z80"),
        ("host.cores", 3),
        ("host.threads", 1),
        ("host.attention", "torch-cpu"),
        ("host.total_bytes", 48 * GIB),
        ("cards.0.uuid", "GPU-2"),
        ("cards.0.bus", "0000:02:00.0"),
        ("versions.torch", "2.14.0"),
    ],
)
def test_another_machine_is_measured(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, path: str, value: object
) -> None:
    inspect()
    other = changed(HEALTHY, path, value)
    for part in ("host", "cards", "versions"):
        monkeypatch.setattr(doctor, f"read_{part}", lambda part=part: getattr(other, part))
    inspect()
    assert len(measured) == 2


def test_what_is_free_is_never_old(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inspect()
    now = changed(HEALTHY, "host.available_bytes", 5 * GIB)
    now = changed(now, "cards.0.free_bytes", 3 * GIB)
    monkeypatch.setattr(doctor, "read_host", lambda: now.host)
    monkeypatch.setattr(doctor, "read_cards", lambda: now.cards)
    monkeypatch.setattr(doctor, "lockable_memory", lambda host: host.available_bytes // 2)
    report = inspect()
    assert len(measured) == 1
    assert report.hardware.host.memory_bytes == 5 * GIB
    assert report.hardware.host.lockable_bytes == 5 * GIB // 2
    assert report.hardware.gpus[0].memory_bytes == 3 * GIB
    assert (report.host, report.cards) == (now.host, now.cards)


def test_a_folder_that_cannot_be_written_is_a_notice(
    measured: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv(CACHE_FOLDER, str(folder / "file" / "below"))
    report = inspect()
    assert report.hardware == HEALTHY.hardware
    assert len(report.notices) == 1 and "OFFLOAD_RT_CACHE" in report.notices[0]
    assert inspect().notices == report.notices
    assert len(measured) == 2


def test_nothing_half_written_stays(
    measured: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", refuse)
    assert "the disk is full" in inspect().notices[0]
    assert list(folder.iterdir()) == []


def test_everything_without_a_card(folder: Path, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_cards", lambda: ())
    report = inspect()
    assert_positive(report.hardware.host)
    assert report.hardware.gpus == () and report.links == ()
    assert report.hardware.host.memory_bytes == HEALTHY.host.available_bytes
    assert report.notices == (doctor.STAND_IN,)
    assert inspect() == report


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "23.0 GiB of free memory are too few"),
        (
            RuntimeError("CUDA error: unspecified launch failure\nmore"),
            "unspecified launch failure; check it",
        ),
    ],
)
def test_a_card_that_fails_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(doctor, "PinnedCopies", fail)
    with pytest.raises(UsageError, match=r"GPU 0 \(NVIDIA GeForce RTX 4090\)") as refusal:
        inspect()
    assert told in str(refusal.value) and "more" not in str(refusal.value)
    assert list(folder.iterdir()) == []


def test_copies_are_given_back_and_serve_the_processors_measurement(
    folder: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []

    class Copies:
        def __init__(self, device: torch.device, size: int) -> None:
            events.append((str(device), size))

        def copy(self) -> None: ...

        def close(self) -> None:
            events.append("closed")

    def measure_host(available: int, copy: Any, on_progress: Any) -> Host:
        events.append(copy.__func__ is Copies.copy)
        return HEALTHY.hardware.host

    monkeypatch.setattr(doctor, "PinnedCopies", Copies)
    monkeypatch.setattr(doctor, "measure_gpu", lambda *_: (HEALTHY.hardware.gpus[0], HEALTHY.links[0]))
    monkeypatch.setattr(doctor, "measure_host", measure_host)
    report = inspect()
    assert events == [("cuda:0", 2**20), True, "closed"]
    assert report.hardware == HEALTHY.hardware and report.notices == ()


# What the driver says


class NVMLError(Exception):
    pass


def driver(**answers: Any) -> SimpleNamespace:
    """pynvml on a machine with one RTX 4090; an answer that is an exception is raised."""
    given: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlSystemGetDriverVersion": "580.1",
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetName": "NVIDIA GeForce RTX 4090",
        "nvmlDeviceGetUUID": "GPU-1",
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:0A:00.0"),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=24 * GIB, free=20 * GIB),
        "nvmlDeviceGetCurrPcieLinkGeneration": 1,
        "nvmlDeviceGetGpuMaxPcieLinkGeneration": 4,
        "nvmlDeviceGetCurrPcieLinkWidth": 8,
        "nvmlDeviceGetMaxPcieLinkWidth": 8,
        "nvmlDeviceGetPerformanceState": 8,
        "nvmlDeviceGetEnforcedPowerLimit": 300_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": 450_000,
        **answers,
    }

    def question(answer: Any) -> Callable[..., Any]:
        def ask(*_: object) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask

    functions = {name: question(answer) for name, answer in given.items()}
    return SimpleNamespace(NVMLError=NVMLError, **functions)


@pytest.fixture
def with_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Installs a driver and a slot in which the card says that it can do ×16."""
    place = tmp_path / "0000:0a:00.0"
    place.mkdir()
    (place / "max_link_width").write_text("16\n")
    (place / "numa_node").write_text("-1\n")
    monkeypatch.setattr(inventory, "_PCI_DEVICES", tmp_path)

    def install(**answers: Any) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", driver(**answers))

    return install


@pytest.fixture
def torch_sees(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """torch computes on cards of these uuids."""

    def see(*uuids: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(uuids))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device])
        )
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device}")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (19 * GIB, 24 * GIB))

    return see


@pytest.mark.parametrize(
    "answers", [{"nvmlInit": NVMLError("driver not loaded")}, {"nvmlDeviceGetCount": 0}], ids=str
)
def test_no_driver_or_no_card(
    with_driver: Callable[..., None], torch_sees: Callable[..., None], answers: dict[str, Any]
) -> None:
    with_driver(**answers)
    torch_sees()
    assert read_cards() == ()
    assert read_versions().driver == (None if "nvmlInit" in answers else "580.1")


def test_a_card_in_a_narrow_slot(with_driver: Callable[..., None], torch_sees: Callable[..., None]) -> None:
    with_driver()
    torch_sees("1")  # torch leaves the prefix out
    assert read_cards() == (
        Card(
            name="NVIDIA GeForce RTX 4090",
            uuid="GPU-1",
            bus="0000:0a:00.0",
            device=0,
            total_bytes=24 * GIB,
            free_bytes=19 * GIB,
            link_generation=1,
            link_generation_most=4,
            link_width=8,
            link_width_most=16,
            numa_node=None,
            performance_state=8,
            power_limit_watts=300.0,
            power_default_watts=450.0,
        ),
    )
    assert inventory.link_now("GPU-1") == (1, 8)


def test_what_the_driver_does_not_say_is_unknown(
    with_driver: Callable[..., None], torch_sees: Callable[..., None]
) -> None:
    unknown = NVMLError("not supported")
    with_driver(
        nvmlDeviceGetPciInfo=unknown,
        nvmlDeviceGetMemoryInfo=unknown,
        nvmlDeviceGetCurrPcieLinkWidth=unknown,
        nvmlDeviceGetMaxPcieLinkWidth=unknown,
        nvmlDeviceGetEnforcedPowerLimit=unknown,
    )
    torch_sees()
    (card,) = read_cards()
    assert (card.bus, card.link_width, card.link_width_most, card.power_limit_watts) == (None,) * 4
    assert (card.device, card.total_bytes, card.free_bytes) == (None, 0, 0)
    assert inventory.link_now("GPU-1") == (1, None)


def test_cards_stand_in_torchs_order_and_hidden_ones_behind(
    with_driver: Callable[..., None], torch_sees: Callable[..., None]
) -> None:
    with_driver()
    torch_sees("MIG-7")
    seen, hidden = read_cards()
    assert (seen.name, seen.uuid, seen.device, seen.free_bytes) == ("card 0", "MIG-7", 0, 19 * GIB)
    assert (hidden.uuid, hidden.device, hidden.free_bytes) == ("GPU-1", None, 20 * GIB)


# What the system says


def test_the_host_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    host = inventory.read_host()
    assert host.processor and host.cores >= 1 and host.total_bytes > host.available_bytes > 0
    assert host.threads == torch.get_num_threads()
    monkeypatch.setattr(inventory, "load_kernel", lambda: None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(inventory.shutil, "which", lambda name: None)
    assert inventory.read_host().native_kernel == "no compiler"
    monkeypatch.setenv("CXX", "/bin/false")
    assert inventory.read_host().native_kernel == "build failed"
    monkeypatch.setenv("OFFLOAD_RT_NATIVE", "0")
    assert inventory.read_host().native_kernel == "switched off"


def test_a_containers_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "max").write_text(f"{2**30}\n")
    (tmp_path / "used").write_text(f"{2**29}\n")
    files = (str(tmp_path / "max"), str(tmp_path / "used"))
    monkeypatch.setattr(devices, "_CGROUP_LIMITS", (files,))
    assert devices.memory_limit() == 2**30
    assert devices.available_memory() == 2**29
    (tmp_path / "max").write_text(f"{2**62}\n")  # how version 1 says that there is none
    assert devices.memory_limit() is None


@pytest.mark.parametrize(
    ("limit", "binds", "lockable"),
    [(None, True, 90 * GIB), (GIB, False, 90 * GIB), (GIB, True, GIB), (400 * GIB, True, 90 * GIB)],
)
def test_what_can_be_locked(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, binds: bool, lockable: int
) -> None:
    """A limit counts only for what is held to it: the lock is tried under a lowered one."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)

    def can_lock(memory: torch.Tensor) -> bool:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return not (binds and 0 <= soft < memory.nbytes)

    monkeypatch.setattr(inventory, "_can_lock", can_lock)
    facts = replace(HEALTHY.host, lock_limit_bytes=limit)
    assert inventory.lockable_memory(facts) == lockable
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before


def test_the_systems_own_lock() -> None:
    assert inventory._can_lock(torch.zeros(4096, dtype=torch.uint8))
    assert not inventory._can_lock(torch.empty(2**40, dtype=torch.uint8, device="meta"))


# Warnings


def test_a_healthy_machine_has_no_warnings() -> None:
    assert advice.warnings(HEALTHY) == ()
    assert (
        advice.warnings(
            changed(
                changed(HEALTHY, "host.governor", "powersave"),
                "host.energy_preference",
                "balance_performance",
            )
        )
        == ()
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"links.0.width": 8, "hardware.gpus.0.to_device_rate": 13.0}, ["×8", "×16", "slot"]),
        ({"links.0.generation": 3}, ["PCIe 3", "can do 4", "BIOS"]),
        ({"hardware.gpus.0.to_device_rate": 12.0}, ["12.0 GB/s of the 31.5", "numactl"]),
        ({"hardware.gpus.0.to_host_rate": 12.0}, ["12.0 GB/s of the 31.5"]),
        ({"links.0.pinned": False, "hardware.gpus.0.to_device_rate": 5.0}, ["page-locked", "ulimit -l"]),
        ({"cards.0.power_limit_watts": 200.0}, ["200 W of 450 W", "nvidia-smi -i 0000:01:00.0 -pl 450"]),
        ({"cards.0.device": None, "hardware.gpus": (), "links": ()}, ["cannot use NVIDIA", "CUDA"]),
        ({"versions.flash_attn": None}, ["flash-attn", "pip install"]),
        ({"load_average": 9.0}, ["load average was 9.0 on 32", "--refresh"]),
        ({"host.governor": "powersave"}, ["governor powersave", "cpupower"]),
        (
            {"host.governor": "powersave", "host.energy_preference": "power"},
            ["preference: power", "cpupower"],
        ),
        ({"host.native_kernel": "no compiler"}, ["native kernel", "install g++"]),
        ({"host.native_kernel": "switched off"}, ["native kernel", "OFFLOAD_RT_NATIVE"]),
        ({"host.native_kernel": "build failed"}, ["native kernel", "build failed"]),
        ({"host.memory_limit_bytes": 40 * GIB}, ["container", "40.0 of 96.0 GiB"]),
        ({"host.available_bytes": 10 * GIB}, ["only 10.0 of 96.0 GiB"]),
        ({"host.swap_used_bytes": 2 * GIB}, ["2.0 GiB", "moved out"]),
        ({"hardware.host.lockable_bytes": 8 * 2**20}, ["0.01 of 90.0 GiB", "ulimit -l", "limits.conf"]),
    ],
)
def test_what_is_wrong_is_told_with_its_remedy(changes: dict[str, object], told: list[str]) -> None:
    report = HEALTHY
    for path, value in changes.items():
        report = changed(report, path, value)
    (warning,) = advice.warnings(report)
    for words in told:
        assert words in warning


def test_locking_is_no_matter_without_a_card() -> None:
    report = changed(HEALTHY, "hardware.host.lockable_bytes", 0)
    report = replace(report, cards=(), links=(), hardware=replace(report.hardware, gpus=()))
    assert advice.warnings(report) == ()


# The command


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every `refresh` that was asked for; the machine is healthy, but for a ×8 slot."""
    asked: list[bool] = []

    def inspect(refresh: bool, on_progress: Callable[[str, int, int], None] | None) -> Report:
        asked.append(refresh)
        if on_progress is not None:
            on_progress("the moon", 0, 2)
        narrow: Report = changed(HEALTHY, "links.0.width", 8)
        return narrow

    monkeypatch.setattr(doctor, "inspect", inspect)
    return asked


def test_the_command_prints_and_writes(
    inspected: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    assert cli.main(["doctor", "--refresh", "--json", str(path)]) == 0
    assert inspected == [True]
    out, err = capsys.readouterr()
    assert err == "measuring  the moon (1 of 2)\n"
    for words in (
        "AMD Ryzen 9 7950X; 32 of 32 processors, threads: 16, NUMA nodes: 1",
        "90.0 GiB of 96.0 GiB available",
        "60.0 GB/s at 1 query, 40.5 at 16",
        "attention keeps 75% of its rate, the link 88%",
        "23.0 GiB of 24.0 GiB free",
        "PCIe 4 ×8 while copying; the card can do 4 ×16",
        "26.0 GB/s; both ways 20.5",
        "26.5 GB/s; both ways 21.5",
        "python 3.12.1, torch 2.13.0, transformers 5.23.0, flash-attn 2.8.0, driver 580.1",
        "a note",
    ):
        assert words in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100
    _, _, shown = out.partition("\nWarnings\n")
    assert shown.startswith("  - GPU 0: its link is ×8 wide")
    written = json.loads(path.read_text())
    (warning,) = written.pop("warnings")
    assert "×8" in warning
    narrow = changed(HEALTHY, "links.0.width", 8)
    assert written == json.loads(json.dumps(narrow.to_json()))


def test_quiet(inspected: list[bool], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert inspected == [False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json", "{folder}"], "is a folder"),
        (["--json", "{folder}/no/out.json"], "its folder does not exist"),
        (["--refreshed"], "--refreshed"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_measured(
    inspected: list[bool],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    assert cli.main(["doctor", *(argument.format(folder=tmp_path) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), inspected) == ("", 1, [])
    assert said in err
    assert os.listdir(tmp_path) == []
