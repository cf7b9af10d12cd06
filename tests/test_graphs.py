"""Passes that are recorded and replayed are those that would have been run; on a CPU by `recording.py`."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from emulated_gpu import EMULATED, GPUS
from recording import RecordingCapture
from reference_attention import ReferenceBackend
from tiny_models import ARCHITECTURES, byte_ids, noisy_copy, tiny_target
from torch import Tensor

from cpu_kv import PacedLink
from offload_rt import LLM, SamplingParams
from offload_rt.attention.backends import AttentionBackend, TorchCpuBackend, choose_backend
from offload_rt.caches.base import NewTokens
from offload_rt.caches.bounded import MAX_RECORDED_SPECULATION, BoundedCache, fixed_shape_attention
from offload_rt.caches.buffers import BufferPool, KVBuffer
from offload_rt.caches.streaming import StreamingCache
from offload_rt.model.cuda_graphs import CudaCapture, GraphedModel
from offload_rt.model.layer_plan import LayerPlan
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.model.runner import CausalModel
from offload_rt.rejection_sampling import Tokens

PAGES = 5
SINKS, WINDOW = 2, 14


def no_notice(text: str) -> None:
    raise AssertionError(text)


def streaming_cache(
    model: CausalModel, backend: AttentionBackend | None = None, pool: BufferPool | None = None
) -> StreamingCache:
    return StreamingCache(
        model.kv_layout(),
        model.rotary_frequencies,
        sinks=SINKS,
        window=WINDOW,
        backend=backend or TorchCpuBackend(),
        pool=pool,
    )


class Walk:
    """Passes of one model over one cache, through a text of its own making."""

    def __init__(self, model: CausalModel, cache: BoundedCache) -> None:
        self.model = model
        self.cache = cache
        self.outputs: list[PassOutput] = []

    def part(
        self, tokens: Sequence[int], parents: Sequence[int] | None, on_device: int, rows: int
    ) -> PassInput:
        held = len(self.cache.speculative)
        if parents is None:
            parents = range(-1, len(tokens) - 1)
        known = tokens[: len(tokens) - on_device]
        drawn = Tokens(tensor=torch.tensor(tokens[len(known) :], device=self.model.device))
        below = [held + parent for parent in parents]
        new = NewTokens.below(self.cache.speculative, below, known, drawn if on_device else None)
        return PassInput(self.cache, new, rows, hidden=True)

    def run(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        *,
        on_device: int = 0,
        rows: int = 0,
        plan: LayerPlan | None = None,
    ) -> Tensor:
        """Logits of new tokens; the last `on_device` of them are given on the device alone.

        Args:
            parents: counted from the first of the pass, below 0 those it follows; None: a chain.
            rows: 0: of all.
        """
        part = self.part(tokens, parents, on_device, rows or len(tokens))
        (output,) = self.model.forward([part], plan)
        self.outputs.append(output)
        self.check(output)
        return output.logits

    @torch.inference_mode()
    def check(self, output: PassOutput) -> None:
        assert output.hidden is not None
        close(self.model.logits(output.hidden[None]), output.logits)


def twins(
    arch: str, capture: RecordingCapture, dtype: torch.dtype = torch.float32
) -> tuple[Walk, Walk, GraphedModel]:
    """The same model with and without graphs, each over a cache of its own."""
    plain = CausalModel(tiny_target(arch).to(dtype), arch)
    graphed = GraphedModel(tiny_target(arch).to(dtype), arch, no_notice, capture)
    return Walk(plain, streaming_cache(plain)), Walk(graphed, streaming_cache(graphed)), graphed


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


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
    pages = torch.randn(*sliced.kv.shape[:3], PAGES, model.head_dim, dtype=dtype)
    for cache in (sliced, fixed):
        cache._mean_slots = PAGES + 2
        cache.buffer = cache._take_buffer()
        cache.buffer.add_means(pages)
    text = byte_ids(200)
    shapes: set[tuple[int, ...]] = set()
    for step, count in enumerate((1, 3, 1, 2, 7, 1, 1, 5, 4, 1, 2, 9, 1)):
        held = len(sliced.speculative)
        tokens = torch.tensor(text[sliced.verified_length + held :][:count])
        # Every other pass a tree, whose new tokens follow the first of the pass or each other.
        parents = [max(0, at - 2) + held if step % 2 and at > 1 else held + at - 1 for at in range(count)]
        new = NewTokens.below(sliced.speculative, parents, tokens.tolist())
        positions = torch.tensor([sliced.verified_length + depth - 1 for depth in new.depths])
        sliced.unretrieved = fixed.unretrieved = step % 3 * 30  # of nothing, no page is seen
        sliced.begin(new)
        expected = model.compute(sliced, tokens, positions, None, range(count))
        fixed.begin(new)
        frame = fixed_shape_attention(fixed.buffer, backend, count, torch.tensor(fixed.graph_inputs(new)))
        found = model.compute(frame, tokens, positions, None, range(count))
        close(found, expected, tolerance)
        assert frame.mask is not None
        shapes.add(tuple(frame.mask.shape))
        for cache in (sliced, fixed):
            cache.commit(range(count))
            if step % 3 == 1:
                cache.keep(range(max(0, len(cache.speculative) - 2)))
            elif step % 3 == 2:
                cache.keep(
                    [at for at in range(len(cache.speculative)) if cache.speculative.sees[-1] >> at & 1]
                )
                cache.settle()
    assert sliced.entries == SINKS + WINDOW < sliced.verified_length
    assert len(shapes) == 7  # as many as there are counts


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_replay_computes_what_the_pass_would(arch: str) -> None:
    capture = RecordingCapture()
    plain, graphed, _ = twins(arch, capture)
    text = byte_ids(400)
    at = 0
    for step in range(28):
        count = (1, 2, 1, 3)[step % 4]
        tokens = text[at : at + count]
        close(graphed.run(tokens, on_device=step % 2), plain.run(tokens))
        kept = count - (step % 5 == 4 and count > 1)
        for walk in (plain, graphed):
            walk.cache.commit(range(kept))
            if step % 3 == 0:
                walk.cache.settle()
        at += kept
    torch.testing.assert_close(graphed.cache.kv, plain.cache.kv, rtol=1e-4, atol=1e-5)
    assert capture.captured == 3  # one for each number of new tokens
    assert capture.replayed == 28 - 3 * GraphedModel.RARE


TREES = [
    [-1, 0, 1, 2, 3],
    [-1, -1, -1, -1, -1],
    [-3, 0, 0, 1, 1],
    [-2, -1, 0, 1, 1],
    [-1, -3, 0, 1, 3],
    [-2, -2, 1, -1, 0],
]
"""Five new tokens each, below three that the cache holds."""


def test_one_graph_serves_every_tree_of_as_many_tokens() -> None:
    capture = RecordingCapture()
    plain, graphed, _ = twins("llama-gqa", capture)
    text = byte_ids(100)
    for walk in (plain, graphed):
        walk.run(text[:20])
        walk.cache.commit(range(20))
        walk.cache.settle()
        walk.run(text[20:23])
        walk.cache.commit(range(3))
    for turn in range(2):
        for number, parents in enumerate(TREES):
            tokens = text[30 + 5 * number :][:5]
            close(graphed.run(tokens, parents, on_device=3 * turn), plain.run(tokens, parents))
    assert (capture.captured, capture.replayed) == (1, 2 * len(TREES) - GraphedModel.RARE)
    # The tree that stays is where every later pass looks for it.
    for walk in (plain, graphed):
        walk.cache.commit([0, 3, 4])
        walk.cache.keep([0, 1, 3])
    tokens = text[60:65]
    close(graphed.run(tokens, TREES[-1]), plain.run(tokens, TREES[-1]))
    assert capture.captured == 1


def test_more_speculation_than_fixed_shapes_tell_of_runs_as_it_comes() -> None:
    capture = RecordingCapture()
    plain, graphed, _ = twins("llama", capture)
    text = byte_ids(400)
    for walk in (plain, graphed):
        walk.run(text[:MAX_RECORDED_SPECULATION])
        walk.cache.commit(range(MAX_RECORDED_SPECULATION))
    for _ in range(GraphedModel.RARE + 2):
        assert torch.equal(graphed.run([7]), plain.run([7]))
    assert capture.captured == 0
    for walk in (plain, graphed):
        walk.cache.keep(range(MAX_RECORDED_SPECULATION - 1))
    for _ in range(GraphedModel.RARE + 1):
        close(graphed.run([7]), plain.run([7]))
    assert (capture.captured, capture.replayed) == (1, 1)


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
    _, graphed, _ = twins("llama", capture)
    for _ in range(GraphedModel.RARE + 1):
        whole = graphed.run(byte_ids(4))
    assert capture.replayed == 1
    assert torch.equal(graphed.run(byte_ids(4), rows=2), whole[-2:])


def test_what_is_not_recorded() -> None:
    capture = RecordingCapture()
    plain, graphed, model = twins("llama", capture)
    text = byte_ids(200)
    long = GraphedModel.LONGEST + 1
    for walk in (plain, graphed):
        walk.run(text[:3])
        walk.cache.commit(range(3))
    other = Walk(model, streaming_cache(model))
    for _ in range(GraphedModel.RARE + 2):
        assert torch.equal(graphed.run(text[:long]), plain.run(text[:long]))
        # Of several texts.
        output, _ = model.forward([graphed.part(text[:5], None, 0, 5), other.part(text[:2], None, 0, 2)])
        close(output.logits, plain.run(text[:5]))
    assert capture.captured == 0
    for _ in range(GraphedModel.RARE):
        graphed.run(text[:5])
    assert capture.captured == 0  # so rare
    graphed.run(text[:5])
    assert capture.captured == 1


def test_orders_of_layers_are_told_apart() -> None:
    capture = RecordingCapture()
    plain, graphed, model = twins("llama", capture)
    plans = [None, *(model.layer_plan(text) for text in ("skip:1", "skip:0m"))]
    tokens = byte_ids(3)
    for _ in range(GraphedModel.RARE + 1):
        for plan in plans:
            close(graphed.run(tokens, plan=plan), plain.run(tokens, plan=plan))
    assert (capture.captured, capture.replayed) == (3, 3)


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
    first = cache.buffer
    moved = cache.kv.flip(3).roll(9, 3).contiguous()
    second = cache.buffer = KVBuffer(moved)  # the same entries, in another order
    first.kv[:, 0].fill_(100.0)
    found = replays(graphed, tokens, GraphedModel.RARE + 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert capture.captured == 2
    cache.buffer = first
    first.kv.copy_(second.kv)
    second.kv[:, 0].fill_(100.0)
    torch.testing.assert_close(graphed.run(tokens), expected, rtol=1e-5, atol=1e-5)
    assert (capture.captured, capture.replayed) == (2, 3)


def test_a_cache_that_grows_is_captured_anew() -> None:
    capture = RecordingCapture()
    plain, graphed, model = twins("llama", capture)
    text = byte_ids(400)
    room = graphed.cache.kv.shape[3]
    replays(graphed, text[:1], GraphedModel.RARE + 2)
    replays(graphed, text[:2], GraphedModel.RARE + 2)
    assert (capture.captured, capture.replayed) == (2, 4)
    for walk in (plain, graphed):
        walk.run(text[:room])
        walk.cache.commit(range(room))
    for count in (1, 1, 1, 1, 2):
        expected = plain.run(text[room : room + count])
        close(graphed.run(text[room : room + count]), expected)
    assert graphed.cache.kv.shape[3] > room
    assert (capture.captured, capture.replayed) == (3, 6)
    assert len(model._of_buffer[graphed.cache.buffer].graphs) == 1


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphedModel, "MOST", 2)
    capture = RecordingCapture()
    _, graphed, model = twins("llama", capture)
    for count in (1, 2, 1, 3):  # 2 was unused for longest
        replays(graphed, byte_ids(count), GraphedModel.RARE + 1)
    assert [key[0] for key in model._of_buffer[graphed.cache.buffer].graphs] == [1, 3]
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


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_stream_and_the_memory_pool_as_they_were() -> None:
    capture, stream = CudaCapture(torch.device("cuda")), torch.cuda.current_stream()
    made = torch.ones(8, device="cuda")

    def waits() -> tuple[torch.Tensor, torch.Tensor]:
        if torch.cuda.is_current_stream_capturing():
            made.sum().item()  # not allowed there: the capture is invalid
        return made + 1, made + 2

    with pytest.raises(RuntimeError):
        capture(waits)
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    if EMULATED:
        assert not GPUS.open_pools
    assert (made + 1).tolist() == [2.0] * 8
    replay, (one, other) = CudaCapture(torch.device("cuda"))(lambda: (made + 1, made + 2))
    made.fill_(5)
    replay()
    assert one.tolist() == [6.0] * 8 and other.tolist() == [7.0] * 8


def test_nothing_is_captured_while_a_pass_runs() -> None:
    """A capture would hold the pass up; the shape is captured when it recurs afterwards."""
    capture = RecordingCapture()
    plain, graphed, model = twins("llama", capture)
    running = True
    model.pass_running = lambda: running
    for step in range(GraphedModel.RARE + 3):
        assert torch.equal(graphed.run(byte_ids(1, start=step)), plain.run(byte_ids(1, start=step)))
    assert capture.captured == 0
    running = False
    assert torch.equal(graphed.run(byte_ids(1)), plain.run(byte_ids(1)))
    assert capture.captured == 1


def test_nothing_is_captured_on_a_cpu() -> None:
    model = GraphedModel(tiny_target("llama"), "llama", no_notice)
    walk = Walk(model, streaming_cache(model))
    model.prepare(walk.cache, [1, 2], None)
    replays(walk, byte_ids(1), GraphedModel.RARE + 3)
    assert not model._of_buffer


def test_graphs_go_with_their_buffer() -> None:
    class Forgetful(RecordingCapture):
        """Keeps nothing of a step, as CUDA does; what it replays is not looked at."""

        def __call__(self, step):  # type: ignore[no-untyped-def]
            return (lambda: None), step()

    model = GraphedModel(tiny_target("llama"), "llama", no_notice, Forgetful())
    walk = Walk(model, streaming_cache(model))
    replays(walk, byte_ids(1), GraphedModel.RARE + 1)
    assert len(model._of_buffer) == 1
    del walk
    gc.collect()
    assert len(model._of_buffer) == 0


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
    monkeypatch.setattr("offload_rt.engine.engine.choose_backend", lambda device: TorchCpuBackend())
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    target = tiny_target("llama-gqa")
    found = []
    for capture in (None, RecordingCapture()):
        monkeypatch.setattr("offload_rt.api.GraphedModel", partial(GraphedModel, capture=capture))
        with LLM.from_models(target, noisy_copy(target), config=config, overrides=SMALL) as llm:
            found.append(llm.generate(byte_ids(300), params).tokens)
    assert found[0] == found[1]
    assert isinstance(capture, RecordingCapture) and capture.replayed > 20


@pytest.mark.parametrize(
    ("config", "recorded"), [("naive", 2), ("streaming", 2), ("retrieval", 4), ("triforce", 2 + 2 * 4)]
)
def test_what_recurs_is_recorded_before_the_first_pass(
    config: str, recorded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For both buffers of a retrieved cache, and for all texts that follow: no capture holds up a round."""
    capture = RecordingCapture()
    monkeypatch.setattr("offload_rt.engine.engine.choose_backend", lambda device: TorchCpuBackend())
    monkeypatch.setattr("offload_rt.api.GraphedModel", partial(GraphedModel, capture=capture))
    monkeypatch.setattr(GraphedModel, "RARE", 12)  # as often a draft may go on from another's outcome
    target, params = tiny_target("llama-gqa"), SamplingParams(temperature=0.7, seed=1, max_tokens=40)
    sizes = SMALL | {"draft.window": 60}  # too long to be recorded where the prompt is read
    with LLM.from_models(
        target, noisy_copy(target), config=config, overrides=sizes, link=PacedLink(1e9)
    ) as llm:
        for start in (0, 100):
            stream = llm.stream(byte_ids(300, start=start), params)
            next(stream)
            assert capture.captured == recorded
            for _ in stream:
                pass
        assert capture.captured == recorded and capture.replayed > 100
        llm.generate([byte_ids(200), byte_ids(300)], params)
        assert capture.captured == 2 * recorded, "texts that are open together have buffers of their own"
        llm.generate(byte_ids(300), params)
        assert capture.captured == 2 * recorded


def test_very_long_texts_have_graphs_of_their_own() -> None:
    """Their rotary frequencies differ; the buffer may be the same."""
    capture = RecordingCapture()
    of_short = GraphedModel(tiny_target("phi3"), "phi3", no_notice, capture)
    of_long = of_short.for_length(5000, 10)
    assert of_long is not of_short
    pool = BufferPool()
    logits = []
    for model in (of_short, of_long):
        cache = streaming_cache(model, pool=pool)
        model.prepare(cache, [3], None)
        walk = Walk(model, cache)
        logits.append(walk.run(byte_ids(3)))
        plain = CausalModel(model.module, "plain").for_length(5000 if model is of_long else 10, 10)
        close(logits[-1], Walk(plain, streaming_cache(plain)).run(byte_ids(3)))
        cache.release()
    assert capture.captured == capture.replayed == 2


@pytest.mark.gpu
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
        for walk in walks:
            walk.run(text[at : at + count])
            walk.cache.commit(range(count))
            if step % 3 == 0:
                walk.cache.settle()
        at += count
    for one, other in zip(*(walk.outputs for walk in walks), strict=True):  # all are there, to the end
        most = float(one.logits.abs().max())
        torch.testing.assert_close(other.logits, one.logits, rtol=0, atol=tolerance * most)
        walks[1].check(other)
    assert len(model._of_buffer[walks[1].cache.buffer].graphs) == 3
