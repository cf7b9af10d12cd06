"""What the host launches for a verification, and in which order: counted on the emulated device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from emulated.gpu import EMULATED, GPUS
from support.small_engine import CUDA, engine_overrides, place
from support.tiny_models import byte_ids, random_model, to
from torch import Tensor

from cpu_kv import CudaLink, KVLayout, PagedKVStore, PlainPages, TransferEngine, cuda_link
from offload_rt import LLM, SamplingParams
from offload_rt.attention import cuda_backends
from offload_rt.attention.page_codec import MachineCodec
from offload_rt.caches.full import FullCache
from offload_rt.caches.refresh import RetrievalRefresh
from offload_rt.caches.remote import CpuAttention, GpuAttention
from offload_rt.caches.selection import AttentionScores
from offload_rt.caches.sizes import GpuTier, Tiers
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.model.runner import CausalModel
from offload_rt.system.device_copies import to_device, to_host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EMULATED, reason="of the emulated device alone"),
]

LAYERS = 32
TARGET = 4000
"""Launches of a verification pass that leave the GPU waiting for its link, not for the host."""
PAGE = 32
SEGMENT = 2 * PAGE
CPU_TOKENS = SEGMENT
HEAD_DIM = 16
PIECES = 4
"""Copies of a segment: 64 MiB in pieces of 16. Packed it has 49 MiB, and as many."""


@contextmanager
def engine_of_32_layers(
    kv_heads: int,
    segments: int,
    refresh_from: str = "stream",
    refresh: str = "stride:1000",
    code: str = "raw",
    resident: int = 1,
) -> Iterator[tuple[LLM, list[int]]]:
    """A target in bfloat16 whose pass streams so many segments a layer, and a prompt for it."""
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
    segment_bytes = SEGMENT * token_bytes(kv_heads)
    tiers = Tiers(resident * SEGMENT, CPU_TOKENS)
    sizes = engine_overrides(ahead=0, refresh_from=refresh_from) | {"store.code": code}
    sizes |= {"store.page": PAGE, "store.slab_tokens": 512, "store.segment_bytes": segment_bytes}
    sizes |= {"retrieval.refresh": refresh}
    target = to(target, CUDA, torch.bfloat16)
    piece_bytes, cuda_link.PIECE_BYTES = cuda_link.PIECE_BYTES, segment_bytes // PIECES
    try:
        with LLM.from_models(target, config="retrieval", overrides=sizes, link=CudaLink(CUDA)) as llm:
            place(llm, tiers)
            yield llm, byte_ids((resident + segments) * SEGMENT + CPU_TOKENS + PAGE // 2)
    finally:
        cuda_link.PIECE_BYTES = piece_bytes


def token_bytes(kv_heads: int) -> int:
    """Bytes of a token's KV in a layer."""
    return 2 * kv_heads * HEAD_DIM * 2


@pytest.mark.parametrize(
    ("kv_heads", "segments", "code", "resident"),
    [
        pytest.param(8, 12, "raw", 1, id="llama2-7b"),
        pytest.param(2, 4, "raw", 1, id="llama3.1-8b"),
        pytest.param(2, 3, "packed", 5, id="llama3.1-8b, packed"),
    ],
)
def test_a_verification_launches_little(
    kv_heads: int, segments: int, code: str, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments a layer are those of the two models at 127K tokens, by the plan for an RTX 4090.

    The kernels between pieces of bulk copies are among the launches. Nothing else uses a copy engine.
    """
    launches: list[int] = []
    copies: list[int] = []
    unpacked: list[str] = []
    forward, decode = CausalModel.forward, MachineCodec.decode

    def noted(*arguments: Any) -> None:
        unpacked.append("on the GPU" if arguments[2].is_cuda else "on the CPU")
        decode(*arguments)

    def counted(model: CausalModel, parts: Sequence[PassInput], *arguments: Any) -> list[PassOutput]:
        before = vars(GPUS.counters).copy()
        unpacked.clear()
        outputs = forward(model, parts, *arguments)
        if isinstance(parts[0].cache, FullCache) and parts[0].new.count > 1:
            assert any(cache.mass_chunk for cache in parts[0].cache.derived), "attention mass is measured too"
            launches.append(GPUS.counters.kernels - before["kernels"])
            copies.append(GPUS.counters.copies_to_device - before["copies_to_device"])
            assert GPUS.counters.copies_to_host == before["copies_to_host"]
            assert "on the GPU" not in unpacked, "packed pages are attended as they are"
        return outputs

    # Operators are counted, whose kernels the emulation has not.
    monkeypatch.setattr(cuda_backends, "use_triton", lambda *given: None)
    monkeypatch.setattr(cuda_backends, "queries_are_alike", lambda *given: True)
    with engine_of_32_layers(kv_heads, segments, code=code, resident=resident) as (llm, prompt):
        monkeypatch.setattr(CausalModel, "forward", counted)
        monkeypatch.setattr(MachineCodec, "decode", noted)
        result = llm.generate(prompt, SamplingParams(max_tokens=4))
    read = result.transfer.bytes_to_device - result.transfer.bytes_abandoned
    layout = llm.engine.store.layout
    streamed = LAYERS * layout.layer_bytes(segments * SEGMENT)
    assert read >= result.rounds * streamed, "all of it was streamed"
    assert launches and max(launches) <= TARGET, launches
    assert max(copies) < LAYERS * (segments * PIECES + 1), "of segments, and of the next pass's first ones"


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
    pages = PlainPages(*torch.randn(2, 2, heads, PAGE, dim))
    torch.cuda.synchronize()
    chunk = 8 if wants_mass else None
    before = vars(GPUS.counters).copy()
    answers: list[list[Tensor]] = []
    for layer in range(layers):
        started: Future[list[Tensor]] = tier.start(layer, queries[layer], [pages], dim**-0.5, chunk)
        answers.append([one + 0 for one in tier.finish(started)])  # as `AttentionSum.add` reads them
    launched = {name: number - before[name] for name, number in vars(GPUS.counters).items()}
    kernels = launched.pop("kernels")
    assert kernels == layers * (1 + len(answers[0])) and not any(launched.values())
    for layer, (out, lse, *mass) in enumerate(answers):
        history = [side.double() for side in pages.head_major()]
        scores = queries[layer].cpu().double() @ history[0].mT * dim**-0.5
        torch.testing.assert_close(out.cpu().double(), scores.softmax(-1) @ history[1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse.cpu().double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
        assert len(mass) == wants_mass
    tier.close()


def test_an_exchange_with_another_gpu_uses_no_copy_engine() -> None:
    """Nor for the attention mass of as many tokens of Llama-2-7B as a second GPU attends at 127K."""
    heads, count, chunk, tokens = 32, 17, 8, 64 * 1024
    layout = KVLayout(layers=1, kv_heads=heads, head_dim=4, dtype=torch.bfloat16, page_size=256)
    other = torch.device("cuda", 1)
    with PagedKVStore(layout) as store:
        kv = torch.randn(2, heads, tokens, layout.head_dim).bfloat16()
        sequence = store.new_sequence()
        sequence.append(0, *kv)
        engine = TransferEngine(sequence, CudaLink(other), segment_tokens=256)
        tier = GpuAttention(engine, GpuTier(tokens), CUDA)
        tier.load(0)
        tier.open(0, tokens)
        queries = torch.randn(heads, count, layout.head_dim).bfloat16().to(CUDA)
        torch.cuda.synchronize(CUDA)
        torch.cuda.synchronize(other)
        before = vars(GPUS.counters).copy()
        out, _, mass = tier.finish(tier.start(0, queries, [], 0.5, chunk))
        assert GPUS.counters.copies_to_device == before["copies_to_device"]
        assert GPUS.counters.copies_to_host == before["copies_to_host"]
        assert mass.nbytes == heads * tokens // chunk * 4 and out.device == mass.device == CUDA
        torch.cuda.synchronize(CUDA)
        tier.close()


def test_numbers_of_a_pass_use_no_copy_engine() -> None:
    to_host(to_device([1], CUDA))  # allocates the buffers
    before = vars(GPUS.counters).copy()
    numbers = list(range(1000))
    assert to_host(to_device(numbers, CUDA))[0].tolist() == numbers
    assert GPUS.counters.copies_to_device == before["copies_to_device"]
    assert GPUS.counters.copies_to_host == before["copies_to_host"]


def test_a_refresh_from_the_store_gathers_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    take = RetrievalRefresh.take_from_store

    def counted(refill: RetrievalRefresh) -> None:
        before = GPUS.counters.copies_to_device
        take(refill)
        copies.append(GPUS.counters.copies_to_device - before)

    monkeypatch.setattr(RetrievalRefresh, "take_from_store", counted)
    with engine_of_32_layers(2, 1, refresh_from="store", refresh="every") as (llm, prompt):
        llm.generate(prompt, SamplingParams(max_tokens=4))
    assert copies and not any(copies)
