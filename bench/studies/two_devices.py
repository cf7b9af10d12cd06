"""A draft pass with its groups of layers on two devices, timed beside one device.

On a CPU a device is a core: two threads with one core each stand for two devices. On two GPUs they are those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time, thread_time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.random_models import model_of
from bench.results import Row
from cpu_kv import CpuLink, CudaLink
from offload_rt.attention.backends import torch_threads
from offload_rt.attention.selector import choose_backend
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.split import ModelLayers, SplitCache
from offload_rt.caches.streaming import StreamingCache
from offload_rt.machine.measuring import CPU
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.passes import PassInput
from offload_rt.model.runner import CausalModel
from offload_rt.model.shape import ModelShape
from offload_rt.system.second_device import SecondDevice

PLANS = ("groups:2@1", "groups:2", "groups:3", "groups:4")
"""EasySpec's alignment leaves layers 1 and 6 of eight alone, too; from layer 1 on, groups are full."""


@dataclass(frozen=True)
class Case:
    """Passes over a full cache.

    Attributes:
        entries: of the cache.
        tokens: of a pass.
        repeats: passes of each form, in turn.
    """

    entries: int
    tokens: int = 8
    repeats: int = 21


def random_draft(
    device: torch.device, dtype: torch.dtype = torch.float32, hidden: int = 256
) -> PreTrainedModel:
    """A Llama of 8 layers with random weights: MLPs twice as wide as hidden states, heads of 64."""
    heads = hidden // 64
    shape = ModelShape("draft", 8, hidden, 2 * hidden, heads, heads, 64, 512, 0)  # it counts its parameters
    drafting: Any = model_of(shape, CPU, dtype)
    moved: PreTrainedModel = drafting.to(device)
    return moved


def _filled(model: Any, case: Case, layers: Sequence[int]) -> StreamingCache:
    """A full cache of some layers of a model, with KV that depends on the layer."""
    frequencies = model.rotary_frequencies
    backend = choose_backend(frequencies.device)
    cache = StreamingCache(model.kv_layout(), frequencies, sinks=0, window=case.entries, backend=backend)
    for kv, layer in zip(cache.kv, layers, strict=True):
        kv.copy_(torch.randn(kv.shape, generator=torch.Generator().manual_seed(layer)))
    cache.entries = cache.verified_length = case.entries
    return cache


@dataclass(frozen=True)
class _Form:
    """A pass over a cache, by a plan, on one device or on two."""

    model: CausalModel
    cache: Any
    plan: LayerOrder
    tokens: int

    def logits(self) -> Tensor:
        """Logits of the last token of a pass."""
        pass_input = PassInput(self.cache, NewTokens.chain(self.tokens), rows=1)
        (output,) = self.model.forward([pass_input], self.plan)
        return output.logits.float().cpu()

    def __call__(self) -> tuple[float, ...]:
        """Runs it; returns its ms, and the ms of CPU time in this thread and in all threads."""
        clocks = perf_counter, thread_time, process_time
        starts = [clock() for clock in clocks]
        self.logits()
        return tuple(1e3 * (clock() - before) for clock, before in zip(clocks, starts, strict=True))


@contextmanager
def second_device(home: torch.device) -> Iterator[SecondDevice]:
    """Another core or another GPU."""
    link = CpuLink() if home.type == "cpu" else CudaLink(torch.device("cuda", 1 - (home.index or 0)))
    second = SecondDevice(home, link, threads=1)
    try:
        yield second
    finally:
        second.close()
        link.close()


@torch.inference_mode()
def measured(module: PreTrainedModel, case: Case, names: Sequence[str] = PLANS) -> Iterator[Row]:
    """Yields the median times of a pass on one device and on two, taken in turn, and what it exchanges.

    Yields nothing where there is no second GPU beside the first.
    Where other programs take the cores, the CPU times tell what the first device would have waited for.

    Args:
        module: a transformers model.
        names: plans of groups, see `LayerOrder.parse`.
    """
    on_cpu = module.device.type == "cpu"
    if not on_cpu and torch.cuda.device_count() < 2:
        return
    with second_device(module.device) as second, torch_threads(1 if on_cpu else None):
        model = CausalModel(module, "draft")
        whole = _filled(model, case, range(model.layers))
        alone = _Form(model, whole, LayerOrder.whole(model.layers), case.tokens)
        for name in names:
            plan = model.layer_order(name)
            assert plan is not None
            two_device_plan = plan.on_two_devices()
            split = _split(model, case, second, two_device_plan)
            forms = _Form(model, whole, plan, case.tokens), _Form(model, split, two_device_plan, case.tokens)
            one_logits, two_logits = (form.logits() for form in forms)
            turns = [[form() for form in (alone, *forms)] for _ in range(case.repeats + 1)][1:]
            in_turn, one, two = (
                [median(column) for column in zip(*of_form, strict=True)]
                for of_form in zip(*turns, strict=True)
            )
            row: Row = {"layers": name, "groups": [list(group) for group in plan.groups]}
            row |= {"in_turn_ms": in_turn[0], "one_device_ms": one[0], "two_devices_ms": two[0]}
            row |= {"share": two[0] / one[0], "exchanges": two_device_plan.exchanges}
            # Of the logits, over the largest one.
            row |= {"difference": float((one_logits - two_logits).abs().max() / one_logits.abs().max())}
            cpu_ms = {"one_cpu_ms": one[1], "first_cpu_ms": two[1], "second_cpu_ms": two[2] - two[1]}
            yield row | cpu_ms if on_cpu else row
        model.restore()


def _split(model: CausalModel, case: Case, second: SecondDevice, plan: LayerOrder) -> SplitCache:
    model.remote_blocks.take(second, remote := sorted(plan.remote))
    home = [layer for layer in range(model.layers) if layer not in plan.remote]
    home_cache = _filled(ModelLayers.of(model, home, None), case, home)
    with second.on_stream():
        away_cache = _filled(ModelLayers.of(model, remote, second), case, remote)
    return SplitCache(home_cache, away_cache, second, plan.remote, model.layers)
