"""Passes that are recorded and replayed are those that would have been run; on a CPU by `recording.py`."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from emulated.gpu import EMULATED, GPUS
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recording import RecordingCapture
from support.reference_attention import ReferenceBackend
from support.small_engine import CUDA, SIZES
from support.tiny_models import ARCHITECTURES, byte_ids, noisy_copy, tiny_target, to
from torch import Tensor

from cpu_kv import PacedLink, SlabAllocator
from cpu_kv.streams import device_streams, finish_devices, release_cached_memory
from offload_rt import LLM, SamplingParams
from offload_rt.attention.backends import AttentionBackend, TorchCpuBackend
from offload_rt.attention.selector import choose_backend
from offload_rt.caches.bounded import MAX_RECORDED_SPECULATION, BoundedCache, fixed_shape_attention
from offload_rt.caches.buffers import BufferPool, KVBuffer
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.streaming import StreamingCache
from offload_rt.engine.batching import PassThread
from offload_rt.kernels.quantize import quantize
from offload_rt.kernels.sizes import GROUP, MASKED_PAGE, QuantizedSize
from offload_rt.model.cuda_graphs import CudaCapture, PassGraphs
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.model.runner import CausalModel, open_runner
from offload_rt.sampling.tokens import Tokens

PAGES = 5
CPU = torch.device("cpu")
SINKS, WINDOW = 2, 14


def no_notice(text: str) -> None:
    raise AssertionError(text)


def streaming_cache(
    model: CausalModel,
    backend: AttentionBackend | None = None,
    pool: BufferPool | None = None,
    window: int = WINDOW,
) -> StreamingCache:
    return StreamingCache(
        model.kv_layout(),
        model.rotary_frequencies,
        sinks=SINKS,
        window=window,
        backend=backend or TorchCpuBackend(),
        pool=pool,
    )


class Walk:
    """Passes of one model over one cache, through a sequence of its own making."""

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
        return PassInput(self.cache, new, rows, states=True)

    def run(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        *,
        on_device: int = 0,
        rows: int = 0,
        plan: LayerOrder | None = None,
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
        assert output.states is not None
        close(self.model.logits(output.states[None]), output.logits)


class TorchModel(CausalModel):
    """Runs its own modules alone, which is what graphs record."""

    def _use_native_layers(self) -> None:
        pass


def twins(
    arch: str, capture: RecordingCapture, dtype: torch.dtype = torch.float32
) -> tuple[Walk, Walk, CausalModel]:
    """The same model with and without graphs, each over a cache of its own."""
    plain = TorchModel(to(tiny_target(arch), dtype), arch)
    graphed = open_runner(to(tiny_target(arch), dtype), arch, no_notice, capture)
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
    model = CausalModel(to(tiny_target(arch), dtype), arch)
    backend = ReferenceBackend() if dtype == torch.float64 else TorchCpuBackend()
    sliced, fixed = streaming_cache(model, backend), streaming_cache(model, backend)
    pages = torch.randn(*sliced.kv.shape[:3], PAGES, model.head_dim, dtype=dtype)
    chosen = torch.randn(*sliced.kv.shape[:3], 2 * GROUP, model.head_dim, dtype=dtype)
    for cache in (sliced, fixed):
        size = QuantizedSize(2 * GROUP, 4)
        cache.buffer = BufferPool().take(model.kv_layout(), cache.buffer.capacity, CPU, PAGES + 2, size)
        cache.buffer.add_means(pages)
        assert cache.buffer.quantized is not None
        for layer, entries in enumerate(chosen):
            quantize(cache.buffer.quantized.layer(layer), *entries)
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
        sliced.quantized = fixed.quantized = (0, 2 * GROUP, GROUP)[step // 2 % 3]
        sliced.begin(new)
        expected, _ = model.compute(sliced, tokens, positions, None, range(count))
        fixed.begin(new)
        frame = fixed_shape_attention(fixed.buffer, backend, count, torch.tensor(fixed.graph_inputs(new)))
        found, _ = model.compute(frame, tokens, positions, None, range(count))
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


@dataclass(frozen=True)
class Step:
    """A pass, and what happens to both caches after it.

    Attributes:
        steps: how far before each token its parent is, less one; the first follows what is held, or the text.
        shares: of the tokens that are given on the device alone, and of the rows that are asked for.
        kept: of the tokens; of them only those whose ancestors are kept, too.
        plan: number of an order of layers, where the architecture has orders.
    """

    steps: list[int]
    shares: tuple[float, float]
    kept: list[bool]
    plan: int
    after: str


STEPS = st.builds(
    Step,
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from(["", "", "settle", "keep", "move", "grow"]),
)


@settings(derandomize=True, deadline=None, max_examples=15)
@given(arch=st.sampled_from(list(ARCHITECTURES)), steps=st.lists(STEPS, min_size=6, max_size=16))
def test_a_replay_computes_what_the_pass_would(arch: str, steps: list[Step]) -> None:
    """Chains and trees, over a cache that grows, turns over or moves to another buffer."""
    capture = RecordingCapture()
    plain, graphed, model = twins(arch, capture)
    assert model.graphs is not None
    model.graphs.RARE = 0
    plans: list[LayerOrder | None] = [None] * 3
    if arch in ("llama-gqa", "qwen3"):
        plans[1:] = (model.layer_order(text) for text in ("skip:1", "skip:0m"))
    results: list[tuple[Tensor, Tensor]] = []
    spare = KVBuffer(torch.empty_like(graphed.cache.kv))
    text, at = byte_ids(2000), 0
    for step in steps:
        count = len(step.steps)
        held = len(plain.cache.speculative)
        tokens, at = text[at : at + count], at + count
        parents = [max(-1 - held, at - 1 - near) for at, near in enumerate(step.steps)]
        on_device, rows = round(step.shares[0] * count), 1 + round(step.shares[1] * (count - 1))
        found = graphed.run(tokens, parents, on_device=on_device, rows=rows, plan=plans[step.plan])
        close(found, plain.run(tokens, parents, plan=plans[step.plan])[-rows:])
        results.append((found, found.clone()))
        kept: list[int] = []
        for new, parent in enumerate(parents):
            if step.kept[new] and (parent < 0 or parent in kept):
                kept.append(new)
        for walk in (plain, graphed):
            cache = walk.cache
            cache.commit(kept)
            if step.after == "settle" and len(cache.speculative):
                cache.keep(
                    [one for one in range(len(cache.speculative)) if cache.speculative.sees[-1] >> one & 1]
                )
                cache.settle()
            elif step.after == "keep":
                cache.keep(range(max(0, len(cache.speculative) - 2)))
            elif step.after == "grow" and len(cache.speculative) < 20:
                walk.run(text[at : at + PassGraphs.LONGEST + 1])
                cache.commit(range(PassGraphs.LONGEST + 1))
        if step.after == "move" and spare.kind == graphed.cache.buffer.kind:
            spare, graphed.cache.buffer = graphed.cache.buffer, spare
            graphed.cache.kv.copy_(spare.kv)
            spare.kv.fill_(100.0)
    assert all(torch.equal(found, then) for found, then in results), "a result outlives the next replay"
    torch.testing.assert_close(graphed.cache.kv, plain.cache.kv, rtol=1e-4, atol=1e-5)
    assert capture.captured <= capture.replayed


def test_what_is_not_recorded() -> None:
    """Long passes, those of several sequences, over much speculation, while others run, and rare ones."""
    capture = RecordingCapture()
    plain, graphed, model = twins("llama", capture)
    text = byte_ids(400)
    for walk in (plain, graphed):
        walk.run(text[:MAX_RECORDED_SPECULATION])
        walk.cache.commit(range(MAX_RECORDED_SPECULATION))
    other, running = Walk(model, streaming_cache(model)), True
    for _ in range(PassGraphs.RARE + 2):
        assert torch.equal(graphed.run([7]), plain.run([7]))
    for walk in (plain, graphed):
        walk.cache.keep(range(MAX_RECORDED_SPECULATION - PassGraphs.LONGEST - 1))
    assert model.graphs is not None
    model.graphs.pass_running = lambda: running
    for _ in range(PassGraphs.RARE + 2):
        long = text[: PassGraphs.LONGEST + 1]
        assert torch.equal(graphed.run(long), plain.run(long))
        output, _ = model.forward([graphed.part(text[:5], None, 0, 5), other.part(text[:2], None, 0, 2)])
        close(output.logits, plain.run(text[:5]))
        # A capture would hold the pass up; the shape is captured when it recurs afterwards.
        assert torch.equal(graphed.run([8]), plain.run([8]))
    running = False
    for _ in range(PassGraphs.RARE):
        graphed.run(text[:5])
    assert capture.captured == 0
    for tokens in ([8], text[:5]):
        close(graphed.run(tokens), plain.run(tokens))
    assert (capture.captured, capture.replayed) == (2, 2)


def replays(walk: Walk, tokens: Sequence[int], times: int) -> Tensor:
    for _ in range(times):
        found = walk.run(tokens)
    return found


def test_every_shape_has_one_graph_whatever_its_tree_and_each_buffer_its_own() -> None:
    capture = RecordingCapture()
    _, graphed, model = twins("llama", capture)
    for number, parents in enumerate(([-1, 0, 1], [-1, -1, -1], [-1, 0, 0], [-1, -1, 1])):
        graphed.run(byte_ids(3, start=number), parents, on_device=number % 3)
    assert (capture.captured, capture.replayed) == (1, 4 - PassGraphs.RARE)
    replays(graphed, byte_ids(2), PassGraphs.RARE + 1)
    for _ in range(PassGraphs.RARE + 1):
        graphed.run(byte_ids(3), plan=model.layer_order("skip:1"))
    assert (capture.captured, capture.replayed) == (3, 4)
    first = graphed.cache.buffer
    graphed.cache.buffer = KVBuffer(first.kv.clone())
    replays(graphed, byte_ids(2), PassGraphs.RARE + 1)
    graphed.cache.buffer = first
    graphed.run(byte_ids(2))
    assert (capture.captured, capture.replayed) == (4, 6)


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassGraphs, "MOST", 2)
    capture = RecordingCapture()
    _, graphed, _ = twins("llama", capture)
    for count in (1, 2, 1, 3):  # 2 was unused for longest
        replays(graphed, byte_ids(count), PassGraphs.RARE + 1)
    for count in (3, 1):
        replays(graphed, byte_ids(count), 1)
    assert capture.captured == 3
    replays(graphed, byte_ids(2), 1)
    assert capture.captured == 4


@pytest.mark.gpu
def test_graphs_leave_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little memory one graph takes the place of another, and where there is none, none is recorded."""
    device, captured, free = torch.device("cuda"), list[int](), [2**30]

    class Counted(CudaCapture):
        def __call__(self, step: Any) -> Any:
            captured.append(1)
            return super().__call__(step)

    model = open_runner(to(tiny_target("llama"), device), "llama", no_notice, Counted(device))
    walk = Walk(model, streaming_cache(model, choose_backend(device)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 2**34))
    recurring = PassGraphs.RARE + 1
    replays(walk, byte_ids(1), recurring)
    replays(walk, byte_ids(2), recurring)
    replays(walk, byte_ids(1), 1)
    assert len(captured) == 2
    free[0] = 2**20
    replays(walk, byte_ids(3), recurring)  # in the place of that of two tokens
    replays(walk, byte_ids(1), 1)
    assert len(captured) == 3
    replays(walk, byte_ids(2), 1)
    assert len(captured) == 4
    other = Walk(model, streaming_cache(model, choose_backend(device)))
    replays(other, byte_ids(1), recurring)
    assert len(captured) == 4


def test_where_a_capture_fails_everything_runs_as_it_comes() -> None:
    notices: list[str] = []
    capture = RecordingCapture()
    plain, graphed, _ = twins("llama", capture)
    model = open_runner(tiny_target("llama"), "the/model", notices.append, capture)
    graphed = Walk(model, streaming_cache(model))
    replays(graphed, byte_ids(1), PassGraphs.RARE + 1)
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


@pytest.mark.gpu
def test_forgotten_memory_does_not_end_a_capture() -> None:
    """Page-locked memory that is garbage is unlocked after the capture, for it waits for the whole device."""
    device = torch.device("cuda")
    made, thresholds, unlocked = torch.ones(8, device=device), gc.get_threshold(), list[bool]()
    device_streams(device)

    def forget() -> None:
        slabs = SlabAllocator(True, pytest.fail)
        slabs.allocate((4096,), torch.float32).result()
        weakref.finalize(slabs, lambda: unlocked.append(torch.cuda.is_current_stream_capturing()))
        cycle: list[object] = [slabs]
        cycle.append(cycle)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        if torch.cuda.is_current_stream_capturing():
            forget()
            gc.set_threshold(1, 1, 1)
            assert [[number] for number in range(1000)] and not unlocked
        return made + 1, made + 2

    try:
        replay, (one, _) = CudaCapture(device)(step)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert unlocked == [False]
    made.fill_(5)
    replay()
    assert one.tolist() == [6.0] * 8


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [finish_devices, release_cached_memory])
def test_other_threads_wait_for_the_device_after_a_capture(waits: Callable[[], None]) -> None:
    device = torch.device("cuda")
    made, other = torch.ones(8, device=device), threading.Thread(target=waits)
    device_streams(device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        if torch.cuda.is_current_stream_capturing():
            other.start()
            other.join(0.1)
            assert other.is_alive()
        return made + 1, made + 2

    CudaCapture(device)(step)
    other.join()


@pytest.mark.gpu
def test_a_model_knows_whether_a_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of an engine: nothing is captured beside its passes over the full cache."""
    known: list[bool] = []
    run = PassThread._run
    with LLM.from_models(to(tiny_target("llama"), CUDA), config="retrieval", overrides=SIZES) as llm:
        graphs = llm.engine.target.graphs
        assert graphs is not None

        def noted(thread: PassThread, *arguments: Any) -> Any:
            known.append(graphs.pass_running())
            return run(thread, *arguments)

        monkeypatch.setattr(PassThread, "_run", noted)
        llm.generate(byte_ids(40), SamplingParams(max_tokens=4))
        assert known and all(known) and not graphs.pass_running()


@pytest.mark.parametrize("window", [14, 900])
def test_buffers_are_whole_pages_of_masked_attention(window: int) -> None:
    """However many entries a cache is given: a GPU splits nothing else among its multiprocessors."""
    buffer = streaming_cache(CausalModel(tiny_target("llama"), "llama"), window=window).buffer
    grown = buffer.with_capacity(buffer.capacity + 1)
    assert buffer.memory.shape[3] % MASKED_PAGE == grown.memory.shape[3] % MASKED_PAGE == 0


def test_nothing_is_captured_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_rt.model.cuda_graphs.recorded", lambda *_: pytest.fail("recorded"))
    model = open_runner(tiny_target("llama"), "llama", no_notice)
    walk = Walk(model, streaming_cache(model))
    model.prepare(walk.cache, [1, 2], None)
    replays(walk, byte_ids(1), PassGraphs.RARE + 3)


def test_graphs_go_with_their_buffer() -> None:
    class Forgetful(RecordingCapture):
        """Keeps nothing of a step, as CUDA does; what it replays is not looked at."""

        def __call__(self, step):  # type: ignore[no-untyped-def]
            return (lambda: None), step()

    model = open_runner(tiny_target("llama"), "llama", no_notice, Forgetful())
    walk = Walk(model, streaming_cache(model))
    replays(walk, byte_ids(1), PassGraphs.RARE + 1)
    buffer = weakref.ref(walk.cache.buffer)
    del walk
    gc.collect()
    assert buffer() is None


SMALL = {
    "retrieval.budget": 64,
    "retrieval.recent": 16,
    "retrieval.refresh": "stride:9",
    "streaming.sinks": 4,
    "streaming.window": 28,
    "speculation.gamma2": 5,
    "speculation.step_down": False,
}


@pytest.mark.parametrize(
    ("config", "recorded"), [("naive", 4), ("streaming", 4), ("retrieval", 2 * 4), ("triforce", 2 + 2 * 10)]
)
def test_what_recurs_is_recorded_before_the_first_pass(
    config: str, recorded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For both buffers of a retrieved cache, and for all sequences that follow: none holds up a round."""
    capture = RecordingCapture()
    monkeypatch.setattr("offload_rt.engine.engine.choose_backend", lambda device: TorchCpuBackend())
    monkeypatch.setattr(PassGraphs, "RARE", 12)  # as often a draft may go on from another's outcome
    target, params = tiny_target("llama-gqa"), SamplingParams(temperature=0.7, seed=1, max_tokens=24)
    sizes = SMALL | {"streaming.window": 60}  # too long to be recorded where the prompt is read
    prompts = [byte_ids(300, start=start) for start in (0, 100)]

    def opened() -> LLM:
        return LLM.from_models(
            target, noisy_copy(target), config=config, overrides=sizes, link=PacedLink(1e9)
        )

    with opened() as llm:
        expected = [llm.generate(prompt, params).tokens for prompt in prompts]
    monkeypatch.setattr("offload_rt.api.opening.open_runner", partial(open_runner, capture=capture))
    with opened() as llm:
        for prompt, tokens in zip(prompts, expected, strict=True):
            stream = llm.stream(prompt, params)
            found = [next(stream).token]
            assert capture.captured == recorded
            assert [*found, *(event.token for event in stream)] == tokens
        assert capture.captured == recorded and capture.replayed > 50
        llm.generate([byte_ids(200), byte_ids(300)], params)
        assert capture.captured == 2 * recorded, "sequences that are open together have buffers of their own"
        llm.generate(byte_ids(300), params)
        assert capture.captured == 2 * recorded


def test_very_long_sequences_have_graphs_of_their_own() -> None:
    """Their rotary frequencies differ; the buffer may be the same."""
    capture = RecordingCapture()
    of_short = open_runner(tiny_target("phi3"), "phi3", no_notice, capture)
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
def test_cuda_graphs(arch: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the passes as they come; bfloat16 to what another order of sums may do."""
    device, captured = torch.device("cuda"), list[object]()
    capture = CudaCapture.__call__

    def noted(*given: Any) -> Any:
        captured.append(given)
        return capture(*given)

    monkeypatch.setattr(CudaCapture, "__call__", noted)
    backend = choose_backend(device)
    plain = CausalModel(to(tiny_target(arch), device, dtype), arch)
    model = open_runner(to(tiny_target(arch), device, dtype), arch, no_notice)
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
    assert len(captured) == 3
