"""A small engine: a pair of tiny models, and sizes that a short sequence overflows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from cpu_kv import CudaLink, Link, PacedLink
from offload_rt import LLM, Context, GenerationResult, SamplingParams
from offload_rt.caches.sizes import GpuTier, Tiers
from offload_rt.engine.batching import PassThread
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.model.runner import CausalModel
from support.tiny_models import byte_ids, noisy_copy, tiny_target, to

CONFIGS = ("plain", "naive", "streaming", "retrieval", "triforce", "lookup", "trees")
PAGE = 16
SIZES: dict[str, object] = {
    "retrieval.budget": 64,
    "retrieval.recent": 16,
    "streaming.sinks": 4,
    "streaming.window": 60,
    "speculation.gamma2": 5,
    "speculation.step_down": False,
    "store.page": PAGE,
    "store.slab_tokens": 64,
}
PROMPT = byte_ids(150)
PARAMS = SamplingParams(max_tokens=40)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
_ON_CUDA = pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)
ON_CUDA = pytest.mark.parametrize("device", [_ON_CUDA])
DEVICES = pytest.mark.parametrize("device", [pytest.param(CPU, id="paced"), _ON_CUDA])
"""Where KV crosses a link."""
STREAMED = Tiers()
LINKS: dict[str, Callable[[], Link | None]] = {"in place": lambda: None, "link": lambda: PacedLink(1e9)}
BY_GPUS = [
    Tiers(16, 32, (GpuTier(32, 16),)),
    Tiers(gpus=(GpuTier(0, 48), GpuTier(64, 0))),
    Tiers(0, 16, (GpuTier(16, 1024),)),
]
"""On other GPUs: where there is none, by other links and streams of the one."""


def link_to(device: torch.device) -> Link:
    return CudaLink(device) if device.type == "cuda" else PacedLink(1e9)


def other_gpu(device: torch.device) -> torch.device:
    """The second GPU, where there is one: else the same."""
    return torch.device("cuda", 1) if device.type == "cuda" and torch.cuda.device_count() > 1 else device


def again(
    context: Context,
    params: SamplingParams = PARAMS,
    config: str | None = None,
    overrides: Mapping[str, object] = {},
) -> GenerationResult:
    """Continues a context from its end, and rewinds it to there."""
    result = context.generate((), params, config, overrides)
    context.rewind(result.prompt_tokens)
    return result


def place(llm: LLM, tiers: Tiers) -> None:
    """Opens sequences in these tiers from here on.

    For tiers that no key of a config gives: those of other GPUs, and packed ones in a GPU that has room for
    plain KV. What a plan decides beside the tiers is decided as for `PROMPT`.
    """
    engine = llm.engine
    engine.planner.configs = [engine.planner.plan(len(PROMPT), PARAMS.max_tokens).config]
    engine.open = partial(engine.open, tiers=tiers)  # type: ignore[method-assign]


def tier_keys(tiers: Tiers) -> dict[str, object]:
    """Keys of `offload` that give these tiers, but for those of other GPUs."""
    return {"resident_tokens": tiers.resident_tokens, "cpu_tokens": tiers.cpu_tokens}


def engine_overrides(**offload: object) -> dict[str, object]:
    """Segments and a ring as small as the caches, a refresh at every round, and keys of `offload`."""
    given = {f"offload.{key}": value for key, value in offload.items()}
    return (
        SIZES | {"retrieval.refresh": "every", "store.ring_buffers": 2, "store.segment_bytes": 8192} | given
    )


def pass_running(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set while a pass runs in its thread."""
    running, start = threading.Event(), PassThread.start

    def watched(thread: PassThread, caches: Any, forward: Callable[[], Any]) -> Any:
        def noted() -> Any:
            running.set()
            try:
                return forward()
            finally:
                running.clear()

        return start(thread, caches, noted)

    monkeypatch.setattr(PassThread, "start", watched)
    return running


def passes_of(
    monkeypatch: pytest.MonkeyPatch, kind: type[Any] = CausalModel
) -> list[tuple[list[int], LayerOrder | None]]:
    """What passes of such models take from here on: new tokens of each sequence, and the order of layers."""
    passes: list[tuple[list[int], LayerOrder | None]] = []
    forward = kind.forward

    def noted(model: Any, parts: Sequence[PassInput], plan: LayerOrder | None = None) -> list[PassOutput]:
        passes.append(([part.new.count for part in parts], plan))
        outputs: list[PassOutput] = forward(model, parts, plan)
        return outputs

    monkeypatch.setattr(kind, "forward", noted)
    return passes


def small_llm(device: torch.device, config: str, shares: Tiers = STREAMED, **offload: object) -> LLM:
    target = tiny_target("llama-gqa")
    draft = noisy_copy(target)
    given = tier_keys(shares) | {"ahead": 2}
    llm = LLM.from_models(
        to(target, device),
        to(draft, device),
        config=config,
        overrides=engine_overrides(**given | offload),
        link=link_to(device),
        other_links=[link_to(other_gpu(device)) for _ in shares.gpus],
    )
    if shares.gpus:
        place(llm, shares)
    return llm
