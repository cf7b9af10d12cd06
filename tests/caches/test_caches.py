"""The caches against a plain list of tokens and attention in float64, under random passes.

A token is a random key, value and query for each layer; rotation is applied here as a model would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plain_caches import (
    DIM,
    EXAMPLES,
    FREQUENCIES,
    GROWTHS,
    KV_HEADS,
    LAYERS,
    LAYOUT,
    OPERATIONS,
    PASSES,
    SCALE,
    Forest,
    Pass,
    PlainFull,
    PlainRetrieval,
    Source,
    Token,
    check,
    expected_attention,
    full_cache,
    make_link,
    read_prompt,
    retrieved_cache,
    rotate,
    rotated_queries,
    run,
    stacked,
)
from torch import Tensor

from cpu_kv import CpuLink, KVLayout, PlainPages
from offload_rt.attention.backends import TorchCpuBackend
from offload_rt.caches.buffers import BufferPool
from offload_rt.caches.full import FullCache
from offload_rt.caches.refresh import ChosenChunks, EntryLayout, RetrievalRefresh
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.caches.selection import MeanKeyScores
from offload_rt.caches.shared import SharedCache
from offload_rt.caches.streaming import StreamingCache

CPU = torch.device("cpu")


class PlainStreaming:
    """What a streaming cache stands for: all tokens of the text, and which of them are held."""

    def __init__(self, sinks: int, window: int) -> None:
        self.sinks, self.window = sinks, window
        self.verified: list[Token | None] = []  # None: skipped

    def held(self) -> list[Token]:
        later = self.verified[self.sinks :]
        return [t for t in [*self.verified[: self.sinks], *later[-self.window :]] if t is not None]

    def attention(self, forest: Forest, new: int) -> list[Tensor]:
        """Positions are the numbers of the slots, counted from the first sink."""
        old = self.held()
        keys = rotate(stacked([t.key for t in old]), range(len(old)))
        return expected_attention(keys, stacked([t.value for t in old]), forest, new, len(old))


def streaming_cache(sinks: int, window: int, source: FullCache | None = None) -> StreamingCache:
    return StreamingCache(
        KVLayout(LAYERS, KV_HEADS, DIM, torch.float32),
        FREQUENCIES,
        sinks=sinks,
        window=window,
        backend=TorchCpuBackend(),
        source=source,
    )


STREAMING_OPERATIONS = st.one_of(
    st.tuples(st.just("pass"), GROWTHS),
    st.tuples(st.just("pass"), PASSES),
    st.tuples(st.just("keep"), st.lists(st.booleans(), max_size=20)),
    st.tuples(st.just("settle"), st.integers(0, 9)),
    st.tuples(st.just("skip"), st.integers(1, 30)),
    st.tuples(st.just("reset"), st.none()),
)


@EXAMPLES
@given(
    operations=st.lists(STREAMING_OPERATIONS, min_size=4, max_size=16),
    sinks=st.sampled_from([0, 1, 4]),
    window=st.sampled_from([1, 5, 12]),
    seed=st.integers(0, 100),
)
def test_a_streaming_cache_that_fills_itself(
    operations: list[tuple[str, object]], sinks: int, window: int, seed: int
) -> None:
    cache = streaming_cache(sinks, window)
    plain, forest, source = PlainStreaming(sinks, window), Forest(), Source(seed)
    for name, argument in operations:
        if name == "pass":
            assert isinstance(argument, Pass)
            held = len(forest)
            grown = forest.with_new(source.tokens(argument.count), argument.parents(held))
            check(run(cache, grown, argument.count), plain.attention(grown, argument.count))
            kept = argument.kept(grown)
            cache.commit(kept)
            forest = grown.only([*range(held), *(held + index for index in kept)])
        elif name == "keep":
            assert isinstance(argument, list)
            kept = forest.closed(argument)
            cache.keep(kept)
            forest = forest.only(kept)
        elif name == "settle":
            assert isinstance(argument, int)
            line = forest.line(len(forest) - 1 - argument)
            cache.keep(line)
            cache.settle()
            plain.verified += [forest.tokens[entry] for entry in line]
            forest = Forest()
        elif name == "reset":
            cache.reset()
            plain, forest = PlainStreaming(sinks, window), Forest()
        elif len(plain.verified) == sinks and not len(forest):
            assert isinstance(argument, int)
            cache.skip(argument)
            plain.verified += [None] * argument
        assert cache.verified_length == len(plain.verified)
        assert cache.speculative.parents == forest.parents
        assert cache.entries == len(plain.held()) <= sinks + window
    probe = forest.with_new(source.tokens(3), [len(forest) - 1, len(forest), len(forest)])
    check(run(cache, probe, 3), plain.attention(probe, 3))


def test_a_streaming_cache_skips_only_right_behind_its_sinks() -> None:
    cache = streaming_cache(2, 4)
    with pytest.raises(ValueError, match="sinks alone"):
        cache.skip(5)
    with pytest.raises(ValueError, match="fills itself"):
        cache.build(torch.empty(0))
    with pytest.raises(RuntimeError, match="commit without a pass"):
        cache.commit([0])


class SmallSharedCache(SharedCache):
    PORTION = 3


@pytest.mark.parametrize("policy", ["every", "stride:7", "acceptance:0.5"])
@pytest.mark.parametrize("link", ["cpu", "paced"])
@settings(EXAMPLES, max_examples=12)
@given(
    operations=st.lists(OPERATIONS, min_size=6, max_size=20),
    ring=st.integers(2, 4),
    prompt=st.sampled_from([0, 1, 11, 16, 40]),
    sizes=st.sampled_from([(16, 4, 4), (12, 4, 8), (13, 4, 8), (24, 8, 5), (8, 2, 2), (5, 1, 3)]),
    chosen_by=st.tuples(st.sampled_from([None, 0.8, 1.0]), st.sampled_from([0, 2, 20])),
    sinks=st.sampled_from([0, 3]),
    seed=st.integers(0, 100),
)
def test_the_full_cache_and_those_derived_from_it(
    policy: str,
    link: str,
    operations: list[tuple[str, object, int | None]],
    ring: int,
    prompt: int,
    sizes: tuple[int, int, int],
    chosen_by: tuple[float | None, int],
    sinks: int,
    seed: int,
) -> None:
    decay, room = chosen_by
    _, chunk, recent = sizes
    full, source = PlainFull(), Source(seed)
    with full_cache(make_link(link), ring, chunk) as cache:
        cache.scale = SCALE
        retrieved = retrieved_cache(cache, sizes, policy, decay, room)
        streaming = streaming_cache(sinks, recent, cache)
        shared = SmallSharedCache(cache)
        retrieval = PlainRetrieval(full, sizes, retrieved.refresh, decay, room, link != "cpu")
        window = PlainStreaming(sinks, recent)
        queries = read_prompt(cache, full, source.tokens(prompt))
        cache.derived += [retrieved, streaming, shared]

        def build() -> None:
            cache.build_derived()
            retrieval.restart(queries)
            retrieval.build(queries)

        if prompt:  # else there is nothing to build from: everything comes by adoption
            build()
        forest = Forest()
        for name, argument, follows in operations:
            length, held = len(full.tokens), len(forest)
            if name == "rewind":
                cache.rewind(prompt)
                full.truncate(prompt)
                retrieval.next_covered = None
                forest = Forest()
                if not prompt:
                    break  # no sequence is continued but behind a prompt
                build()
            elif name in ("verify", "abandon"):
                assert isinstance(argument, Pass) and follows is not None
                # What was speculated on the way to one of the entries, and other tokens around and behind it.
                line = [forest.tokens[n] for n in forest.line(held - 1 - follows % (held + 1))]
                checked = Forest(line, list(range(-1, len(line) - 1)))
                checked = checked.with_new(source.tokens(argument.count), argument.parents(len(line)))
                check(run(cache, checked, len(checked)), full.attention(checked))
                retrieval.verified(checked)
                if name == "abandon":
                    cache.abandon()
                    retrieval.next_covered = None  # nor is the stream of the next pass
                    continue
                assert argument.end is not None
                path = checked.line(len(checked) - 1 - argument.end % len(checked))
                cache.commit(path)
                kept = [checked.tokens[node] for node in path]
                full.append(kept)
                asking = rotated_queries(kept, range(length, length + len(kept)))
                retrieval.adopt(len(kept), asking)
                forest = forest.after(kept)
                assert streaming.speculative.parents == shared.speculative.parents == forest.parents
                if retrieval.due is not None:  # what is to choose anew keeps no speculation
                    forest = Forest()
                    streaming.keep([])
                    shared.keep([])
            elif name == "draft":
                assert isinstance(argument, Pass)
                grown = forest.with_new(source.tokens(argument.count), argument.parents(held))
                window.verified = list(full.tokens)
                check(run(streaming, grown, argument.count), window.attention(grown, argument.count))
                attended = run(shared, grown, argument.count)
                check(attended, full.attention(grown, argument.count))
                attended = run(retrieved, grown, argument.count)
                if retrieval.due is not None:
                    retrieval.build(retrieval.due)
                check(attended, retrieval.attention(grown, argument.count))
                indices = argument.kept(grown)
                for derived in (streaming, retrieved, shared):
                    derived.commit(indices)
                forest = grown.only([*range(held), *(held + index for index in indices)])
            else:
                assert isinstance(argument, list)
                entries = forest.closed(argument)
                for derived in (streaming, retrieved, shared):
                    derived.keep(entries)
                forest = forest.only(entries)
            check_retrieved(retrieved, retrieval, full)
            keys, values = cache.transfer.read(0, len(full.tokens)).unbind(1)
            torch.testing.assert_close(keys, full.keys, rtol=0, atol=1e-6)
            assert torch.equal(values, full.values)
            for derived in (streaming, retrieved, shared):
                assert derived.verified_length == len(full.tokens)
                assert derived.speculative.parents == forest.parents
                assert derived.entries <= derived.room


def check_retrieved(cache: RetrievedCache, plain: PlainRetrieval, full: PlainFull) -> None:
    """The verified entries are the KV of exactly the tokens that should be held."""
    length = len(full.tokens)
    assert cache.refresh.count == plain.refreshes
    if plain.due is not None:
        return  # what it holds now, nobody will see
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            held = plain.held(layer, head)
            if length > cache.budget:
                assert set(range(cache.chunk)) <= set(held)
            assert set(range(max(0, length - cache.recent), length)) <= set(held)
            keys, values = cache.kv[layer, :, head, : cache.entries]
            same = (values[:, None] == full.values[layer, head]).all(-1)
            found = same.nonzero()[:, 1].tolist()
            assert sorted(found) == held
            torch.testing.assert_close(keys, full.keys[layer, head, found], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("policy", "accepted", "refreshed"),
    [
        ("every", 0, list(range(1, 13))),
        ("stride:3", 0, [3, 6, 9, 12]),
        ("stride:4", 2, [2, 4, 6, 8, 10, 12]),  # three tokens a verification
        ("acceptance:0.6", 0, [8]),  # judges eight rounds, and then eight others
        ("acceptance:0.6", 1, [8]),
        ("acceptance:0.5", 1, []),  # half is not less than half
        ("acceptance:1", 2, [11]),  # all accepted: only for want of room, 32 tokens
        ("stride:1000", 1, []),
    ],
)
def test_when_a_retrieved_cache_chooses_anew(policy: str, accepted: int, refreshed: list[int]) -> None:
    source = Source(0)
    with full_cache(CpuLink(), 2, chunk=4) as cache:
        read_prompt(cache, PlainFull(), source.tokens(60))
        retrieved = retrieved_cache(cache, (40, 4, 4), policy)
        cache.derived.append(retrieved)
        cache.build_derived()
        found = []
        for number in range(1, 13):
            before = retrieved.refresh.count
            run(cache, Forest(source.tokens(3), [-1, 0, 1]), 3)
            cache.commit(range(1 + accepted))
            run(retrieved, Forest(source.tokens(1), [-1]), 1)
            if retrieved.refresh.count > before:
                found.append(number)
        assert found == refreshed


def test_a_cache_chooses_in_one_thread_that_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source, threads, now = Source(0), list[threading.Thread](), MeanKeyScores.scores

    def noted(selection: MeanKeyScores, queries: Tensor, scale: float) -> Callable[[int], Tensor]:
        scores = now(selection, queries, scale)

        def of_layer(layer: int) -> Tensor:
            threads.append(threading.current_thread())
            return scores(layer)

        return of_layer

    monkeypatch.setattr(MeanKeyScores, "scores", noted)
    with full_cache(CpuLink(), 2, chunk=4) as cache:
        queries = read_prompt(cache, PlainFull(), source.tokens(60))
        caches = [retrieved_cache(cache, (40, 4, 4), "every") for _ in range(2)]
        for retrieved in (caches[0], caches[0], caches[1]):
            retrieved.fill(queries[:, :, -1:])
        first, *_, other = threads
        assert threads == 2 * LAYERS * [first] + LAYERS * [other] and first != other
        caches[0].release()
        assert not first.is_alive() and other.is_alive() and first != threading.current_thread()
        caches[1].release()
        assert not other.is_alive()


def test_a_refresh_that_is_given_up_chooses_for_no_further_layer() -> None:
    """`close` waits for the layer that is being chosen; the thread goes on to serve others."""
    choosing, go_on, layers = threading.Event(), threading.Event(), list[int]()

    def slow(layer: int) -> ChosenChunks:
        layers.append(layer)
        choosing.set()
        assert go_on.wait(10)
        return ChosenChunks.of(torch.zeros(3, 0, dtype=torch.long), torch.device("cpu"))

    with full_cache(CpuLink(), 2, chunk=4) as cache, ThreadPoolExecutor(max_workers=1) as executor:
        buffer, extent = BufferPool().take(LAYOUT, 40, torch.device("cpu")), EntryLayout(40, 0, 0, 0, 0)
        refill = RetrievalRefresh(cache.transfer, 4, extent, slow, buffer, executor)
        assert choosing.wait(10)
        threading.Timer(0.1, go_on.set).start()
        for _ in range(2):
            refill.close()
            assert go_on.is_set()
        assert executor.submit(lambda: "served").result(10) == "served"
        assert layers == [0]


@pytest.mark.parametrize(("chunk", "between", "heads_apart"), [(4, 24, 8), (4, 22, 10), (6, 20, 9)])
def test_chunks_are_picked_by_rows(chunk: int, between: int, heads_apart: int) -> None:
    """Of pages, and where a chunk is no whole number of the tokens between two heads or two pages."""
    sides = [
        memory[5:].as_strided((3, 2, 8, 2), (between * 2, heads_apart * 2, 2, 1))
        for memory in torch.randn(2, 600)
    ]
    assert all(side.unique().numel() == side.numel() for side in sides)
    page, head, at = torch.tensor([[0, 2, 1, 2], [1, 0, 1, 1], [0, 0, 0, 8 // chunk - 1]])
    picked = torch.empty(2, 4, chunk, 2)
    PlainPages(*sides).take_chunks(chunk, page, head, at, picked)
    for side, found in zip(sides, picked, strict=True):
        for one, *place, first in zip(found, page, head, at * chunk, strict=True):
            assert torch.equal(one, side[tuple(place)][first : first + chunk])


@pytest.mark.gpu
def test_a_buffer_that_grows_is_copied_before_others_have_its_memory() -> None:
    buffer = BufferPool().take(LAYOUT, 2**16, torch.device("cuda"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)  # what comes next is late
        grown = buffer.with_capacity(2**16 + 1)
    shape = buffer.memory.shape
    del buffer
    other = torch.ones(shape, device="cuda")
    torch.cuda.synchronize()
    assert not grown.memory.any() and other.all()
