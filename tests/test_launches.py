"""What the host launches for a verification, and in which order: counted on the emulated device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from emulated_gpu import EMULATED, GPUS
from small_engine import CUDA, PAGE, engine_overrides
from tiny_models import byte_ids, random_model
from torch import Tensor

from cpu_kv import CudaLink
from offload_rt import LLM, SamplingParams
from offload_rt.caches.full import FullCache
from offload_rt.caches.remote import CpuAttention
from offload_rt.caches.selection import AttentionScores
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.model.runner import CausalModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EMULATED, reason="of the emulated device alone"),
]

LAYERS = 32
TARGET = 4000
"""Launches of a verification pass that leave the GPU waiting for its link, not for the host."""
CPU_TOKENS = 4 * PAGE


@contextmanager
def engine_of_32_layers(kv_heads: int, segments: int) -> Iterator[tuple[LLM, list[int]]]:
    """A target with so many KV heads whose pass streams so many segments a layer, and a prompt for it."""
    target = random_model(
        "llama",
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        vocab_size=256,
        max_position_embeddings=4096,
    )
    token_bytes = 2 * kv_heads * 16 * 4  # of a layer
    streamed = 4 * segments * PAGE  # four pages a segment
    sizes = engine_overrides(ahead=0, cpu_tokens=CPU_TOKENS, resident_tokens=0, refresh_from="stream")
    sizes |= {"store.segment_bytes": 4 * PAGE * token_bytes, "retrieval.refresh": "stride:1000"}
    with LLM.from_models(target.to(CUDA), config="retrieval", overrides=sizes, link=CudaLink(CUDA)) as llm:
        yield llm, byte_ids(streamed + CPU_TOKENS + PAGE // 2)


@pytest.mark.parametrize(
    ("kv_heads", "segments"), [pytest.param(8, 12, id="llama2-7b"), pytest.param(2, 4, id="llama3.1-8b")]
)
def test_a_verification_launches_little(
    kv_heads: int, segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments a layer are those of the two models at 127K tokens, by the plan for an RTX 4090."""
    launches: list[int] = []
    forward = CausalModel.forward

    def counted(model: CausalModel, parts: Sequence[PassInput], *arguments: Any) -> list[PassOutput]:
        before = GPUS.counters.kernels
        outputs = forward(model, parts, *arguments)
        if isinstance(parts[0].cache, FullCache) and parts[0].new.count > 1:
            assert any(cache.mass_chunk for cache in parts[0].cache.derived), "attention mass is measured too"
            launches.append(GPUS.counters.kernels - before)
        return outputs

    with engine_of_32_layers(kv_heads, segments) as (llm, prompt):
        monkeypatch.setattr(CausalModel, "forward", counted)
        result = llm.generate(prompt, SamplingParams(max_tokens=12))
    read = result.transfer.bytes_to_device - result.transfer.bytes_abandoned
    tokens = len(prompt) // PAGE * PAGE - CPU_TOKENS
    assert read >= result.rounds * tokens * LAYERS * 2 * kv_heads * 16 * 4, "all of it was streamed"
    assert launches and max(launches) <= TARGET, launches


def test_queries_leave_before_the_bookkeeping_of_the_layer_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU attends layer l + 1 while the host adds up the attention mass of layer l."""
    order: list[tuple[str, int]] = []
    start, add = CpuAttention.start, AttentionScores.add

    def started(tier: CpuAttention, layer: int, *arguments: Any) -> Any:
        order.append(("queries", layer))
        return start(tier, layer, *arguments)

    def added(scores: AttentionScores, layer: int, *arguments: Any) -> None:
        order.append(("mass", layer))
        add(scores, layer, *arguments)

    with engine_of_32_layers(2, 1) as (llm, prompt):
        monkeypatch.setattr(CpuAttention, "start", started)
        monkeypatch.setattr(AttentionScores, "add", added)
        llm.generate(prompt, SamplingParams(max_tokens=8))
    begun = order.index(("queries", 0))
    a_pass = order[begun : begun + 2 * LAYERS]
    expected = [("queries", 0)]
    for layer in range(1, LAYERS):
        expected += [("queries", layer), ("mass", layer - 1)]
    assert a_pass == [*expected, ("mass", LAYERS - 1)]


@pytest.mark.parametrize("wants_mass", [False, True])
def test_an_exchange_with_the_cpu_takes_one_kernel_each_way(wants_mass: bool) -> None:
    """And no copy engine: bulk copies on the link do not hold it up."""
    layers, heads, count, dim = 3, 2, 5, 16
    tier = CpuAttention(2 * PAGE, CUDA)
    queries = torch.randn(layers, heads, count, dim).to(CUDA)
    keys, values = torch.randn(2, 2, heads, PAGE, dim)
    torch.cuda.synchronize()
    chunk = 8 if wants_mass else None
    before = vars(GPUS.counters).copy()
    answers: list[list[Tensor]] = []
    for layer in range(layers):
        started: Future[list[Tensor]] = tier.start(layer, queries[layer], [(keys, values)], dim**-0.5, chunk)
        answers.append([one + 0 for one in tier.finish(started)])  # as `AttentionSum.add` reads them
    launched = {name: number - before[name] for name, number in vars(GPUS.counters).items()}
    kernels = launched.pop("kernels")
    assert kernels == layers * (1 + len(answers[0])) and not any(launched.values())
    for layer, (out, lse, *mass) in enumerate(answers):
        history = [part.transpose(0, 1).flatten(1, 2).double() for part in (keys, values)]
        scores = queries[layer].cpu().double() @ history[0].mT * dim**-0.5
        torch.testing.assert_close(out.cpu().double(), scores.softmax(-1) @ history[1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse.cpu().double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
        assert len(mass) == wants_mass
    tier.close()
