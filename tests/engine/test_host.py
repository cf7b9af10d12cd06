"""How often decoding makes the host wait for the device: once a verified step, and never to draft."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.small_engine import CUDA
from support.tiny_models import byte_ids, noisy_copy, tiny_target, to
from torch import Tensor

from offload_rt import LLM, SamplingParams
from offload_rt.config.draft_shape import DraftShape
from offload_rt.engine import batching as scheduler
from offload_rt.engine.batching import run_alone
from offload_rt.system.device_copies import to_device, to_host

OVERRIDES = {
    "retrieval.budget": 64,
    "retrieval.recent": 16,
    "retrieval.refresh": "stride:9",
    "streaming.sinks": 4,
    "streaming.window": 28,
    "speculation.gamma1": 2,
    "speculation.gamma2": 5,
    "speculation.step_down": False,
}
READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")


@dataclass
class Reads:
    """Records where Python reads the values of tensors.

    Attributes:
        downloads: results of `to_host`, each in memory of its own, by address.
        others: where other values were read.
    """

    downloads: dict[int, Tensor] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def to_host(self, *tensors: Tensor) -> list[Tensor]:
        copies = [tensor.clone() for tensor in tensors]
        self.downloads |= {copy.data_ptr(): copy for copy in copies}
        return copies

    def watch(self, method: str) -> Callable[..., Any]:
        given = getattr(Tensor, method)

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.data_ptr() not in self.downloads:
                stack = traceback.walk_stack(sys._getframe(1))
                frames = [f"{frame.f_code.co_filename}:{line}" for frame, line in stack]
                # The store's own tensors are in host memory, and so are the scores of a refresh.
                if "caches/refresh.py" not in frames[0] and not any("/cpu_kv/" in one for one in frames):
                    self.others.append(f"{method}: {frames[0]}")
            return given(tensor, *args, **kwargs)

        return read


SAMPLING = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    found = Reads()
    monkeypatch.setattr(scheduler, "to_host", found.to_host)
    for method in READS:
        monkeypatch.setattr(Tensor, method, found.watch(method))
    yield found
    monkeypatch.undo()


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "T=0.7", "penalties"])
@pytest.mark.parametrize("config", ["plain", "naive", "streaming", "retrieval", "triforce", "lookup"])
def test_the_host_waits_once_a_verified_step(config: str, sampling: dict[str, float], reads: Reads) -> None:
    target = tiny_target("llama")
    params = SamplingParams(**sampling, seed=1, max_tokens=60)  # type: ignore[arg-type]
    with LLM.from_models(target, noisy_copy(target), config=config, overrides=OVERRIDES) as llm:
        events = llm.stream(byte_ids(300), params)
        (sequence,) = llm.engine.sequences
        levels = sequence.verifier.levels
        before = {level.name: (level.host_reads, level.passes) for level in levels}  # of the prefill
        reads.others.clear()
        tokens = [event.token for event in events]
        waits = {level.name: level.host_reads - before[level.name][0] for level in levels}
        passes = {level.name: level.passes - before[level.name][1] for level in levels}
    assert len(tokens) == 60
    assert reads.others == []
    assert len(reads.downloads) >= sum(waits.values())
    verified = {"target:full"} | ({"target:retrieved"} if config == "triforce" else set())
    assert {name for name in waits if waits[name]} == verified
    for name in verified:
        assert waits[name] == passes[name] > 0


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_there_and_back(name: str) -> None:
    device = torch.device(name)
    numbers = to_device(range(1000), device)
    assert numbers.dtype == to_device([], device).dtype == torch.long
    first, second = to_host(numbers, numbers.double() / 2)
    assert first.tolist() == list(range(1000)) and float(second[3]) == 1.5


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLING[::2], ids=["greedy", "penalties"])
@pytest.mark.parametrize("config", ["naive", "retrieval", "triforce"])
def test_drafting_does_not_wait_for_a_gpu(
    config: str, sampling: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch itself refuses whatever waits, except `to_host`."""

    def allowed(*tensors: Tensor) -> list[Tensor]:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return to_host(*tensors)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    target = tiny_target("llama")
    draft = to(noisy_copy(target), CUDA)
    overrides = OVERRIDES | {"retrieval.refresh": "stride:1000"}  # to refresh, the host reads scores
    overrides |= {"store.page": 16, "offload.resident_tokens": 0, "offload.cpu_tokens": 0}
    params = SamplingParams(**sampling, seed=1, max_tokens=60)  # type: ignore[arg-type]
    with LLM.from_models(to(target, CUDA), draft, config=config, overrides=overrides) as llm:
        events = llm.stream(byte_ids(300), params)
        for _ in range(24):  # until all graphs are captured
            next(events)
        (sequence,) = llm.engine.sequences
        monkeypatch.setattr(scheduler, "to_host", allowed)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.inference_mode():
                proposal = sequence.verifier.drafter.proposal(sequence.view, DraftShape(depth=5))
                drafted = run_alone(proposal.complete())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(drafted.tokens) >= 5
        events.close()
