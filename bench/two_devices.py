"""A draft pass with its groups of layers on two devices, timed beside one device: `paper --parts devices`.

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
from transformers import LlamaConfig, LlamaForCausalLM

from bench.results import Row
from cpu_kv import CpuLink, CudaLink
from offload_rt.attention.backends import choose_backend, torch_threads
from offload_rt.caches.base import NewTokens
from offload_rt.caches.split import ModelLayers, SplitCache
from offload_rt.caches.streaming import StreamingCache
from offload_rt.model.layer_plan import LayerPlan
from offload_rt.model.passes import PassInput
from offload_rt.model.runner import CausalModel
from offload_rt.second_device import SecondDevice


@dataclass(frozen=True)
class Case:
    """A random draft model and its cache, so long that attention takes most of a pass.

    Attributes:
        entries: of the cache, which is full.
        tokens: of a pass.
        repeats: passes of each form, in turn.
    """

    layers: int = 8
    hidden: int = 256
    intermediate: int = 512
    entries: int = 16384
    tokens: int = 8
    repeats: int = 21


QUICK = Case(hidden=64, intermediate=64, entries=64, repeats=2)
SIZES = (2, 3, 4)


def plans(layers: int) -> dict[str, LayerPlan]:
    """Plans to compare: `groups:N`, and pairs of all layers but the first and the last.

    EasySpec aligns groups at multiples of N, which leaves layers 1 and 6 of eight alone.
    """
    found = {f"groups:{size}": LayerPlan.parse(f"groups:{size}", layers) for size in SIZES}
    pairs = [tuple(range(at, min(at + 2, layers - 1))) for at in range(1, layers - 1, 2)]
    paired = {"pairs": LayerPlan(((0,), *pairs, (layers - 1,)))}
    return paired | {name: plan for name, plan in found.items() if plan is not None}


def random_draft(case: Case, device: torch.device, dtype: torch.dtype) -> CausalModel:
    """A Llama with random weights."""
    config: Any = LlamaConfig(
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 64,
        num_key_value_heads=case.hidden // 64,
        vocab_size=512,
        max_position_embeddings=4 * case.entries,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: Any = LlamaForCausalLM(config)
    return CausalModel(module.to(device, dtype).eval(), "random draft")


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
    plan: LayerPlan
    tokens: int

    def logits(self) -> Tensor:
        """Logits of the last token of a pass."""
        given = PassInput(self.cache, NewTokens.chain(self.tokens), rows=1)
        (output,) = self.model.forward([given], self.plan)
        return output.logits.float().cpu()

    def __call__(self) -> tuple[float, ...]:
        """Runs it; returns its ms, and the ms of CPU time in this thread and in all threads."""
        clocks = perf_counter, thread_time, process_time
        started = [clock() for clock in clocks]
        self.logits()
        return tuple(1e3 * (clock() - before) for clock, before in zip(clocks, started, strict=True))


@contextmanager
def second_device(home: torch.device) -> Iterator[SecondDevice | None]:
    """Another core or another GPU; None: there is no other GPU."""
    if home.type == "cuda" and torch.cuda.device_count() < 2:
        yield None
        return
    link = CpuLink() if home.type == "cpu" else CudaLink(torch.device("cuda", 1 - (home.index or 0)))
    second = SecondDevice(home, link, threads=1)
    try:
        yield second
    finally:
        second.close()
        link.close()


@torch.inference_mode()
def measured(home: torch.device, case: Case, names: Sequence[str] = ()) -> Iterator[Row]:
    """Yields the median times of a pass on one device and on two, taken in turn, and what it exchanges.

    Args:
        names: of `plans`; empty: all.
    """
    dtype = torch.float32 if home.type == "cpu" else torch.bfloat16
    with second_device(home) as second, torch_threads(1 if home.type == "cpu" else None):
        if second is None:
            return
        model = random_draft(case, home, dtype)
        whole = _filled(model, case, range(case.layers))
        for name, plan in plans(case.layers).items():
            if names and name not in names:
                continue
            shared = plan.on_two_devices()
            model.remote_blocks.take(second, sorted(shared.remote))
            split = _split(model, case, second, shared)
            forms = _Form(model, whole, plan, case.tokens), _Form(model, split, shared, case.tokens)
            alone = _Form(model, whole, LayerPlan.whole(case.layers), case.tokens)
            computed = [form.logits() for form in forms]
            before = second.exchanges
            turns = [[form() for form in (alone, *forms)] for _ in range(case.repeats + 2)][2:]
            in_turn, one, two = (
                [median(column) for column in zip(*of_form, strict=True)]
                for of_form in zip(*turns, strict=True)
            )
            row: Row = {"layers": name, "groups": [list(group) for group in plan.groups]}
            row |= {"in_turn_ms": in_turn[0], "one_device_ms": one[0], "two_devices_ms": two[0]}
            row |= {"share": two[0] / one[0], "exchanges": (second.exchanges - before) / (case.repeats + 2)}
            apart = (computed[0] - computed[1]).abs().max() / computed[0].abs().max()
            row |= {"difference": float(apart)}  # of the logits, over the largest one
            # Where other programs take the cores, these times say what the first would have waited for.
            yield row | {"one_cpu_ms": one[1], "first_cpu_ms": two[1], "second_cpu_ms": two[2] - two[1]}
        model.restore()


def _split(model: CausalModel, case: Case, second: SecondDevice, plan: LayerPlan) -> SplitCache:
    home = [layer for layer in range(case.layers) if layer not in plan.remote]
    here = _filled(ModelLayers.of(model, home, None), case, home)
    remote = sorted(plan.remote)
    with second.on_stream():
        there = _filled(ModelLayers.of(model, remote, second), case, remote)
    return SplitCache(here, there, second, plan.remote, case.layers)
