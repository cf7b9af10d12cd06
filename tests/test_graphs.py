"""Passes that are recorded and replayed are those that would have been run; on a CPU by `recording.py`."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from recording import RecordingCapture
from tiny_models import ARCHITECTURES, byte_ids, noisy_copy, tiny_target
from torch import Tensor

from offload_rt import LLM, SamplingParams
from offload_rt.attention import AttentionBackend, ReferenceBackend, TorchCpuBackend, choose_backend
from offload_rt.caches.base import NewTokens
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.streaming import StreamingCache
from offload_rt.graphs import GraphedModel
from offload_rt.model import CausalModel

CPU = torch.device("cpu")
SINKS, WINDOW = 2, 14


def no_notice(text: str) -> None:
    raise AssertionError(text)


def streaming_cache(model: CausalModel, backend: AttentionBackend | None = None) -> StreamingCache:
    return StreamingCache(
        model.layers,
        model.kv_heads,
        model.head_dim,
        model.dtype,
        model.device,
        sinks=SINKS,
        window=WINDOW,
        inverse_frequencies=model.rotary_frequencies,
        backend=backend or TorchCpuBackend(),
    )


class Walk:
    """Passes of one model over one cache, through a text of its own making."""

    def __init__(self, model: CausalModel, cache: BoundedCache) -> None:
        self.model = model
        self.cache = cache

    def run(self, tokens: Sequence[int], *, parents: Sequence[int] = (), on_device: int = 0) -> Tensor:
        """Logits of all new tokens: a chain, below it a tree; the last of them given on the device alone."""
        chain = len(tokens) - len(parents)
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        start = self.cache.length
        positions = [*range(start, start + chain), *(start + chain - 1 + depth for depth in depths)]
        new = NewTokens.chain_and_tree(chain, parents, self.model.device, self.model.dtype)
        host = len(tokens) - on_device
        drawn = torch.tensor(tokens[host:], device=self.model.device) if on_device else None
        return self.model.forward(self.cache, tokens[:host], positions, new, len(tokens), drawn)


def twins(
    arch: str, capture: RecordingCapture, dtype: torch.dtype = torch.float32
) -> tuple[Walk, Walk, GraphedModel]:
    """The same model with and without graphs, each over a cache of its own."""
    plain = CausalModel(tiny_target(arch).to(dtype), arch)
    graphed = GraphedModel(tiny_target(arch).to(dtype), arch, no_notice, capture)
    backend = ReferenceBackend() if dtype == torch.float64 else TorchCpuBackend()
    return (
        Walk(plain, streaming_cache(plain, backend)),
        Walk(graphed, streaming_cache(graphed, backend)),
        graphed,
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["float64", "float32"]
)
@torch.inference_mode()
def test_fixed_shapes_give_the_same_logits(arch: str, dtype: torch.dtype, tolerance: float) -> None:
    """Over a cache that is empty, filling, full and turned over, with speculation behind its entries."""
    model = CausalModel(tiny_target(arch).to(dtype), arch)
    backend = ReferenceBackend() if dtype == torch.float64 else TorchCpuBackend()
    sliced, fixed = streaming_cache(model, backend), streaming_cache(model, backend)
    text = byte_ids(200)
    shapes: set[tuple[int, ...]] = set()
    for step, count in enumerate((1, 3, 1, 2, 7, 1, 1, 5, 4, 1, 2, 9, 1)):
        tokens = text[sliced.length : sliced.length + count]
        positions = torch.arange(sliced.length, sliced.length + count)
        new = NewTokens.chain_and_tree(count, (), CPU, dtype)
        sliced.begin(new)
        expected = model.compute(sliced, torch.tensor(tokens), positions, count)
        fixed.begin(new)
        fixed.fix(torch.tensor(fixed.end))
        found = model.compute(fixed, torch.tensor(tokens), positions, count)
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
        )
        assert fixed._frame is not None and fixed._frame.mask is not None
        shapes.add(tuple(fixed._frame.mask.shape))
        for cache in (sliced, fixed):
            cache.commit(range(count))
            if step % 3 == 1:
                cache.truncate(max(cache.verified_length, cache.length - 2))
            elif step % 3 == 2:
                cache.settle()
    assert sliced.entries == SINKS + WINDOW < sliced.verified_length
    assert len(shapes) == 7  # as many as there are counts


def test_fixed_shapes_need_a_pass() -> None:
    model = CausalModel(tiny_target("llama"), "llama")
    with pytest.raises(RuntimeError, match="call begin first"):
        streaming_cache(model).fix(torch.tensor(0))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_replay_computes_what_the_pass_would(arch: str) -> None:
    capture = RecordingCapture()
    plain, graphed, _ = twins(arch, capture)
    text = byte_ids(400)
    at = 0
    for step in range(40):
        count = (1, 2, 1, 3)[step % 4]
        tokens = text[at : at + count]
        expected = plain.run(tokens)
        found = graphed.run(tokens, on_device=step % 2)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        kept = count - (step % 5 == 4 and count > 1)
        for walk in (plain, graphed):
            walk.cache.commit(range(kept))
            if step % 3 == 0:
                walk.cache.settle()
        at += kept
    torch.testing.assert_close(graphed.cache.keys, plain.cache.keys, rtol=1e-4, atol=1e-5)
    assert capture.captured == 3  # one for each number of new tokens
    assert capture.replayed == 40 - 3 * GraphedModel.RARE


def test_a_result_outlives_the_next_replay() -> None:
    _, graphed, _ = twins("llama", RecordingCapture())
    results = []
    for token in byte_ids(6):
        found = graphed.run([token])
        results.append((found, found.clone()))
        graphed.cache.commit([0])
    assert all(torch.equal(found, then) for found, then in results)


def test_rows_are_the_last_ones() -> None:
    capture = RecordingCapture()
    _, graphed, model = twins("llama", capture)
    new = NewTokens.chain_and_tree(4, (), CPU, torch.float32)
    for _ in range(GraphedModel.RARE + 1):
        whole = graphed.run(byte_ids(4))
    assert capture.replayed == 1
    last = model.forward(graphed.cache, byte_ids(4), range(4), new, 2)
    assert torch.equal(last, whole[-2:])


def test_what_is_not_recorded() -> None:
    capture = RecordingCapture()
    plain, graphed, _ = twins("llama", capture)
    text = byte_ids(200)
    long = GraphedModel.LONGEST + 1
    for walk in (plain, graphed):
        walk.run(text[:3])
        walk.cache.commit(range(3))
    for _ in range(GraphedModel.RARE + 2):
        for tokens, parents in ((text[:5], (-1, -1, 0)), (text[:long], ())):
            expected = plain.run(tokens, parents=parents)
            assert torch.equal(graphed.run(tokens, parents=parents), expected)
    assert capture.captured == 0
    for _ in range(GraphedModel.RARE):
        graphed.run(text[:5])
    assert capture.captured == 0  # so rare
    graphed.run(text[:5])
    assert capture.captured == 1
    # A tree of as many tokens is not taken for the chain.
    expected = plain.run(text[:5], parents=(-1, -1, 0))
    assert torch.equal(graphed.run(text[:5], parents=(-1, -1, 0)), expected)
    assert capture.replayed == 1


def replays(walk: Walk, tokens: Sequence[int], times: int) -> Tensor:
    for _ in range(times):
        found = walk.run(tokens)
    return found


def test_buffers_that_move_are_told_apart() -> None:
    """As a cache does that fills a second buffer while the first one is read, and then turns to it."""
    capture = RecordingCapture()
    plain, graphed, _ = twins("llama-gqa", capture)
    for walk in (plain, graphed):
        walk.run(byte_ids(9))
        walk.cache.commit(range(9))
        walk.cache.settle()
    cache, tokens = graphed.cache, byte_ids(2, start=50)
    expected = plain.run(tokens)
    replays(graphed, tokens, GraphedModel.RARE + 1)
    first = cache.keys, cache.values
    second = cache.keys.flip(2).roll(9, 2).contiguous(), cache.values.flip(2).roll(9, 2).contiguous()
    cache.keys, cache.values = second  # the same entries, in another order
    first[0].fill_(100.0)
    found = replays(graphed, tokens, GraphedModel.RARE + 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert capture.captured == 2
    cache.keys, cache.values = first
    first[0].copy_(second[0])
    first[1].copy_(second[1])
    second[0].fill_(100.0)
    torch.testing.assert_close(graphed.run(tokens), expected, rtol=1e-5, atol=1e-5)
    assert (capture.captured, capture.replayed) == (2, 3)


def test_a_cache_that_grows_is_captured_anew() -> None:
    capture = RecordingCapture()
    plain, graphed, model = twins("llama", capture)
    text = byte_ids(400)
    room = graphed.cache.keys.shape[2]
    replays(graphed, text[:1], GraphedModel.RARE + 2)
    replays(graphed, text[:2], GraphedModel.RARE + 2)
    assert (capture.captured, capture.replayed) == (2, 4)
    for walk in (plain, graphed):
        walk.run(text[:room])
        walk.cache.commit(range(room))
    for count in (1, 1, 1, 1, 2):
        expected = plain.run(text[room : room + count])
        found = graphed.run(text[room : room + count])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert graphed.cache.keys.shape[2] > room
    assert (capture.captured, capture.replayed) == (3, 6)
    assert len(model._of_cache[graphed.cache].graphs) == 1  # those of the old buffer are gone


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphedModel, "MOST", 2)
    capture = RecordingCapture()
    _, graphed, model = twins("llama", capture)
    for count in (1, 2, 1, 3):  # 2 was unused for longest
        replays(graphed, byte_ids(count), GraphedModel.RARE + 1)
    assert [key[3] for key in model._of_cache[graphed.cache].graphs] == [1, 3]
    replays(graphed, byte_ids(1), 1)
    assert capture.captured == 3
    replays(graphed, byte_ids(2), 1)
    assert capture.captured == 4


def test_where_a_capture_fails_everything_runs_as_it_comes() -> None:
    notices: list[str] = []
    capture = RecordingCapture()
    plain, graphed, _ = twins("llama", capture)
    model = GraphedModel(tiny_target("llama"), "the/model", notices.append, capture)
    graphed = Walk(model, streaming_cache(model))
    replays(graphed, byte_ids(1), GraphedModel.RARE + 1)
    assert capture.replayed == 1
    capture.fails = True
    for step in range(6):
        for count in (2, 3, 1):
            expected = plain.run(byte_ids(count, start=step))
            assert torch.equal(graphed.run(byte_ids(count, start=step)), expected)
    assert capture.replayed <= 3  # before it failed
    assert notices == ["the/model: no CUDA graphs, which makes drafting slower: no graph today"]


def test_nothing_is_captured_on_a_cpu() -> None:
    model = GraphedModel(tiny_target("llama"), "llama", no_notice)
    walk = Walk(model, streaming_cache(model))
    replays(walk, byte_ids(1), GraphedModel.RARE + 3)
    assert not model._of_cache


def test_graphs_go_with_their_cache() -> None:
    class Forgetful(RecordingCapture):
        """Keeps nothing of a step, as CUDA does; what it replays is not looked at."""

        def __call__(self, step):  # type: ignore[no-untyped-def]
            return (lambda: None), step()

    model = GraphedModel(tiny_target("llama"), "llama", no_notice, Forgetful())
    walk = Walk(model, streaming_cache(model))
    replays(walk, byte_ids(1), GraphedModel.RARE + 1)
    assert len(model._of_cache) == 1
    del walk
    gc.collect()
    assert len(model._of_cache) == 0


SMALL = {
    "retrieval.budget": 64,
    "retrieval.recent": 16,
    "retrieval.refresh": "stride:9",
    "draft.sinks": 4,
    "draft.window": 28,
    "speculation.gamma2": 5,
    "speculation.step_down": False,
}


@pytest.mark.parametrize("config", ["naive", "streaming", "retrieval", "triforce"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_decoding_with_graphs(config: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_rt.api.choose_backend", lambda device: TorchCpuBackend())
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    target = tiny_target("llama-gqa")
    found = []
    for capture in (None, RecordingCapture()):
        monkeypatch.setattr("offload_rt.api.GraphedModel", partial(GraphedModel, capture=capture))
        with LLM.from_models(target, noisy_copy(target), config=config, overrides=SMALL) as llm:
            found.append(llm.generate(byte_ids(300), params).tokens)
    assert found[0] == found[1]
    assert isinstance(capture, RecordingCapture) and capture.replayed > 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs(arch: str, dtype: torch.dtype) -> None:
    """Against the passes as they come; bfloat16 to what another order of sums may do."""
    device = torch.device("cuda")
    backend = choose_backend(device)
    plain = CausalModel(tiny_target(arch).to(device, dtype), arch)
    model = GraphedModel(tiny_target(arch).to(device, dtype), arch, no_notice)
    walks = Walk(plain, streaming_cache(plain, backend)), Walk(model, streaming_cache(model, backend))
    text, at = byte_ids(400), 0
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for step in range(40):
        count = (1, 2, 1, 3)[step % 4]
        expected, found = (walk.run(text[at : at + count]) for walk in walks)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
        for walk in walks:
            walk.cache.commit(range(count))
            if step % 3 == 0:
                walk.cache.settle()
        at += count
    assert len(model._of_cache[walks[1].cache].graphs) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("config", ["naive", "retrieval", "triforce"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_decoding_with_cuda_graphs(config: str, temperature: float) -> None:
    target = tiny_target("llama-gqa")
    draft = noisy_copy(target).cuda()
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    with LLM.from_models(target.cuda(), draft, config=config, overrides=SMALL) as llm:
        result = llm.generate(byte_ids(300), params)
        if temperature == 0:
            assert result.tokens == llm.plain(params).tokens
    assert len(result.tokens) == 40
