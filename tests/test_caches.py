"""The caches against a plain list of tokens and attention in float64, under random passes.

A token is a random key, value and query for each layer; rotation is applied here as a model would.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from forest import Forest as AnyForest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpu_kv import CpuLink, KVLayout, Link, PacedLink, PagedKVStore, PlainPages, TransferEngine
from offload_rt.attention.backends import TorchCpuBackend
from offload_rt.attention.sums import Softmax
from offload_rt.caches.base import Cache
from offload_rt.caches.buffers import BufferPool
from offload_rt.caches.full import FullCache
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.prompt_writer import PromptWriter
from offload_rt.caches.refresh import ChosenChunks, EntryLayout, RetrievalRefresh
from offload_rt.caches.retrieved import RefreshSchedule, RetrievedCache
from offload_rt.caches.selection import LAST_QUERIES, AttentionScores, MeanKeyScores, Selection
from offload_rt.caches.shared import SharedCache
from offload_rt.caches.streaming import StreamingCache
from offload_rt.config.schema import RefreshPolicy
from offload_rt.engine.prefill import PromptAttention

LAYERS, KV_HEADS, HEADS, DIM = 2, 2, 4, 8
SCALE = 0.5
FREQUENCIES = 100.0 ** (-torch.arange(0, DIM, 2) / DIM)
CPU = torch.device("cpu")
LAYOUT = KVLayout(LAYERS, KV_HEADS, DIM, torch.float32, page_size=8)
EXAMPLES = settings(derandomize=True, deadline=None, max_examples=25)


def rotate(vectors: Tensor, positions: Sequence[int]) -> Tensor:
    """`[..., tokens, head_dim]` in float64, rotated to `positions`, as Llama does."""
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * FREQUENCIES.double()
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    wide = vectors.double()
    turned = torch.cat([-wide[..., DIM // 2 :], wide[..., : DIM // 2]], dim=-1)
    return wide * cos + turned * sin


@dataclass(frozen=True, eq=False)
class Token:
    """Not rotated: key and value `[layers, kv_heads, head_dim]`, query `[layers, heads, head_dim]`."""

    id: int
    key: Tensor
    value: Tensor
    query: Tensor


class Source:
    """Random tokens, no two of the same id."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._made = 0

    def tokens(self, count: int) -> list[Token]:
        return [self._token() for _ in range(count)]

    def _token(self) -> Token:
        self._made += 1
        return Token(
            self._made,
            torch.randn(LAYERS, KV_HEADS, DIM, generator=self._generator),
            torch.randn(LAYERS, KV_HEADS, DIM, generator=self._generator),
            torch.randn(LAYERS, HEADS, DIM, generator=self._generator),
        )


def stacked(parts: list[Tensor], heads: int = KV_HEADS) -> Tensor:
    """Parts `[layers, heads, head_dim]` of tokens as `[layers, heads, tokens, head_dim]`."""
    return torch.stack(parts, dim=2) if parts else torch.zeros(LAYERS, heads, 0, DIM)


Forest = AnyForest[Token]


@dataclass(frozen=True)
class Pass:
    """New tokens of a pass and which of them are kept, whatever the cache holds.

    Attributes:
        steps: how far before each token its parent is, less one; 0: the token right before it.
        end: how far before the last token the kept path ends; None: all are kept.
    """

    steps: list[int]
    end: int | None

    @property
    def count(self) -> int:
        return len(self.steps)

    def parents(self, held: int) -> list[int]:
        """In the count that starts with the `held` speculative entries."""
        return [max(-1, held + at - 1 - step) for at, step in enumerate(self.steps)]

    def kept(self, forest: Forest) -> list[int]:
        """Of the new tokens, which are the last ones of `forest`."""
        if self.end is None:
            return list(range(self.count))
        held = len(forest) - self.count
        line = forest.line(len(forest) - 1 - self.end % self.count)
        return [entry - held for entry in line if entry >= held]


CHAINS = st.integers(1, 20).map(lambda count: [0] * count)
TREES = st.lists(st.integers(0, 9), min_size=1, max_size=8)
ENDS = st.integers(0, 7)
PASSES = st.builds(Pass, CHAINS | TREES, ENDS)  # a path is kept, as a verification does
GROWTHS = st.builds(Pass, TREES, st.none() | ENDS)  # or all of a tree, as it grows


def expected_weights(
    keys: Tensor, forest: Forest, new: int, first_place: int, bias: Tensor | None = None
) -> Tensor:
    """Softmax in float64 of the last `new` tokens of a forest, `[layers, heads, new, n + forest]`.

    Args:
        keys: `[layers, kv_heads, n, head_dim]` of the text, rotated.
        first_place: position right behind the text.
        bias: `[n]`, added to the scores of the text.
    """
    places = [first_place + depth - 1 for depth in forest.depths()]
    count = keys.shape[2]
    keys = torch.cat([keys.double(), rotate(stacked([t.key for t in forest.tokens]), places)], 2)
    queries = rotate(stacked([t.query for t in forest.tokens[-new:]], HEADS), places[-new:])
    scores = queries @ keys.repeat_interleave(HEADS // KV_HEADS, 1).transpose(-1, -2) * SCALE
    if bias is not None:
        scores[..., :count] += bias
    hidden = torch.ones(new, len(forest), dtype=torch.bool)
    for row, entry in enumerate(range(len(forest) - new, len(forest))):
        hidden[row, forest.line(entry)] = False
    scores[..., keys.shape[2] - len(forest) :].masked_fill_(hidden, -torch.inf)
    return scores.softmax(-1)


def expected_attention(
    keys: Tensor, values: Tensor, forest: Forest, new: int, first_place: int, bias: Tensor | None = None
) -> list[Tensor]:
    """What those weights make of `values` and the forest's; for each layer `[heads, new, head_dim]`."""
    weights = expected_weights(keys, forest, new, first_place, bias)
    values = torch.cat([values, stacked([t.value for t in forest.tokens])], 2).double()
    return list(weights @ values.repeat_interleave(HEADS // KV_HEADS, 1))


def run(cache: Cache, forest: Forest, new: int) -> list[Tensor]:
    """A pass of the last `new` tokens of `forest`; what each layer's attention gave."""
    assert len(cache.speculative) == len(forest) - new
    tokens = forest.tokens[-new:]
    told = NewTokens.below(cache.speculative, forest.parents[-new:], [token.id for token in tokens])
    positions = [cache.verified_length + depth - 1 for depth in forest.depths()[-new:]]
    assert told.depths == forest.depths()[-new:]
    cache.begin(told)
    keys = rotate(stacked([token.key for token in tokens]), positions).float()
    queries = rotate(stacked([token.query for token in tokens], HEADS), positions).float()
    values = stacked([token.value for token in tokens])
    return [
        cache.attend(layer, queries[layer], keys[layer], values[layer], Softmax(SCALE))
        for layer in range(LAYERS)
    ]


def check(found: list[Tensor], wanted: list[Tensor]) -> None:
    for layer in range(LAYERS):
        torch.testing.assert_close(found[layer].double(), wanted[layer], rtol=0, atol=2e-5)


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


@contextmanager
def full_cache(link: Link, ring: int, chunk: int | None, segment: int = 8) -> Iterator[FullCache]:
    with PagedKVStore(LAYOUT, slab_tokens=16) as store:
        sequence = store.new_sequence(chunk, page_means=chunk is not None)
        engine = TransferEngine(sequence, link, segment_tokens=segment, ring_buffers=ring)
        try:
            yield FullCache(engine, TorchCpuBackend())
        finally:
            engine.close()
            link.close()


def make_link(name: str) -> Link:
    # Slow enough that a write-back is under way for a while after it was asked for.
    return CpuLink() if name == "cpu" else PacedLink(1e9, latency_s=5e-4)


class PlainFull:
    """The whole text, and the KV of it as the model puts it out."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        # [layers, kv_heads, tokens, head_dim], rotated, float32
        self.keys = self.values = torch.zeros(LAYERS, KV_HEADS, 0, DIM)

    def append(self, tokens: list[Token]) -> None:
        positions = range(len(self.tokens), len(self.tokens) + len(tokens))
        self.tokens += tokens
        self.keys = torch.cat([self.keys, rotate(stacked([t.key for t in tokens]), positions).float()], 2)
        self.values = torch.cat([self.values, stacked([t.value for t in tokens])], 2)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]

    def attention(self, forest: Forest, new: int | None = None) -> list[Tensor]:
        new = len(forest) if new is None else new
        return expected_attention(self.keys, self.values, forest, new, len(self.tokens))


def read_prompt(cache: FullCache, plain: PlainFull, tokens: list[Token]) -> Tensor:
    """Takes a prompt into an empty cache as a prefill does; its queries, rotated."""
    queries = rotated_queries(tokens, range(len(tokens)))
    if tokens:
        plain.append(tokens)
        writer, last = PromptWriter(cache, len(tokens)), []
        writer.start()
        prompt = PromptAttention(cache, writer)
        for layer in range(LAYERS):
            prompt.begin(kv_alone=True)
            prompt.attend(
                layer, queries[layer].float(), plain.keys[layer], plain.values[layer], Softmax(SCALE)
            )
            last.append(prompt.last_queries)
        writer.finish(last)
    return queries


def rotated_queries(tokens: list[Token], positions: Sequence[int]) -> Tensor:
    return rotate(stacked([token.query for token in tokens], HEADS), positions)


def weighed(queries: int) -> list[int]:
    """Of so many, at most four, from all over them and the last one among them."""
    step = math.ceil(queries / 4)
    return list(range(queries - 1, -1, -step))


def placed(best: list[int], before: list[int]) -> list[int]:
    """Chunks by slot: those that were held before stay, and the others fill the places that are left."""
    others = iter([chunk for chunk in best if chunk not in before[: len(best)]])
    stays = [chunk if chunk in best else None for chunk in before[: len(best)]]
    stays += [None] * (len(best) - len(stays))
    return [next(others) if chunk is None else chunk for chunk in stays]


def prefer(scores: Tensor, slots: list[list[list[int]]], count: int) -> None:
    """Doubles the scores of the chunks in the first `count` slots, which a refresh would leave there."""
    for layer, heads in enumerate(slots):
        for head, chunks in enumerate(heads):
            scores[layer, head, chunks[:count]] *= 2


class PlainRetrieval:
    """Which tokens a retrieved cache holds for each layer and head, by the words of its docstring.

    Attributes:
        refresh: when the cache chooses anew; `test_when_a_retrieved_cache_chooses_anew` proves that.
        due: the queries to choose by before the next pass; None where nothing is to be chosen anew.
    """

    def __init__(
        self,
        full: PlainFull,
        sizes: tuple[int, int, int],
        refresh: RefreshSchedule,
        decay: float | None,
        room: int,
        over_link: bool,
    ) -> None:
        self.full, self.refresh = full, refresh
        self.over_link = over_link
        self.decay, self.room = decay, room
        self.attended: Tensor | None = None  # [layers, kv_heads, chunks]
        self.next_covered: int | None = None
        self.pages, self.rest = 0, 0
        self.budget, self.chunk, self.recent = sizes
        self.refreshes = 0
        self.always: list[int] = []  # tokens that are not overwritten
        self.chosen: list[list[list[int]]] = [[[] for _ in range(KV_HEADS)] for _ in range(LAYERS)]
        self.slots: list[list[list[int]]] = self.chosen  # the chunks that are whole among them
        self.due: Tensor | None = None

    def restart(self, queries: Tensor) -> None:
        """What the prompt's last queries attend to of its whole pages."""
        end = len(self.full.tokens) // LAYOUT.page_size * LAYOUT.page_size
        keys = self.full.keys[:, :, :end].double().repeat_interleave(HEADS // KV_HEADS, 1)
        scores = queries[:, :, -LAST_QUERIES:].double() @ keys.transpose(-1, -2) * SCALE
        self.attended = None
        self.slots = [[[] for _ in range(KV_HEADS)] for _ in range(LAYERS)]
        self.count_attention(scores.softmax(-1)[:, :, weighed(scores.shape[2])])

    def count_attention(self, weights: Tensor) -> None:
        """What a pass attended to of the sequence's whole pages `[layers, heads, queries, tokens]`."""
        heads = weights.sum(2).unflatten(1, (KV_HEADS, -1)).sum(2)
        chunks = heads.unflatten(2, (-1, self.chunk)).sum(3) if heads.shape[2] else heads
        if self.attended is not None:
            chunks[:, :, : self.attended.shape[2]] += (self.decay or 0) * self.attended
        self.attended = chunks

    def verified(self, forest: Forest) -> None:
        """The full cache has passed over `forest`, and committed nothing of it yet."""
        length = len(self.full.tokens)
        end = length // LAYOUT.page_size * LAYOUT.page_size
        # A pass goes over the pages that were whole when the one before it began.
        covered, self.next_covered = end if self.next_covered is None else self.next_covered, end
        weights = expected_weights(self.full.keys, forest, len(forest), length)[..., :covered]
        self.count_attention(weights[:, :, weighed(len(forest))])

    def scores(self, queries: Tensor, start: int) -> Tensor:
        """Of the chunks before token `start`, `[layers, kv_heads, chunks]`, as `retrieval.select` says."""
        chunks = start // self.chunk
        if self.decay is not None:
            assert self.attended is not None
            missing = max(0, chunks - self.attended.shape[2])
            return torch.nn.functional.pad(self.attended, (0, missing))[:, :, :chunks]
        chunks = len(self.full.tokens) // self.chunk
        means = (
            self.full.keys.double()[:, :, : chunks * self.chunk].unflatten(2, (chunks, self.chunk)).mean(3)
        )
        means = means.repeat_interleave(HEADS // KV_HEADS, 1)
        weights = (queries[:, :, -LAST_QUERIES:].double() @ means.transpose(-1, -2) * SCALE).softmax(-1)
        scores = weights.mean(2).unflatten(1, (KV_HEADS, HEADS // KV_HEADS)).mean(2)
        return scores[:, :, : start // self.chunk]

    def build(self, queries: Tensor) -> None:
        """`queries` `[layers, heads, tokens, head_dim]`, rotated; the last ones choose."""
        self.refreshes += 1
        self.due = None
        length = len(self.full.tokens)
        if length <= self.budget:
            self.always = list(range(length))
            self.slots = self.chosen = [[[] for _ in range(KV_HEADS)] for _ in range(LAYERS)]
            self.pages = 0
            return
        page = length // LAYOUT.page_size * LAYOUT.page_size
        recent = max(self.recent, min(length - page, self.budget // 2))
        start = (length - recent) // self.chunk * self.chunk
        start = max(start, length - (self.budget - self.chunk))
        self.always = [*range(self.chunk), *range(start, length)]
        # What is chosen again stays in its place, and the others come in falling importance.
        count = (self.budget - len(self.always)) // self.chunk
        scores = self.scores(queries, start).clone()
        scores[:, :, 1:] += scores[:, :, :-1].clone() / 2
        if self.over_link:
            prefer(scores, self.slots, count)
        best = scores[:, :, 1:].argsort(dim=-1, descending=True, stable=True)[:, :, :count] + 1
        self.pages = min(self.room, start // LAYOUT.page_size)
        self.rest = self.pages * LAYOUT.page_size - self.chunk * (1 + count)
        if self.rest <= 0:
            self.pages = 0
        self.slots = [list(map(placed, *layers)) for layers in zip(best.tolist(), self.slots, strict=True)]
        self.chosen = [
            [[c * self.chunk + i for c in head for i in range(self.chunk)] for head in layer]
            for layer in self.slots
        ]

    def adopt(self, count: int, queries: Tensor) -> None:
        length = len(self.full.tokens)
        room = self.budget - len(self.always)  # the rest can be overwritten, or was never filled
        if self.due is not None or count > room or (length > self.budget and self.refresh.due):
            self.due = queries
            return
        self.always += range(length - count, length)
        room -= count
        self.chosen = [[head[:room] for head in layer] for layer in self.chosen]
        self.slots = [[head[: room // self.chunk] for head in layer] for layer in self.slots]

    def held(self, layer: int, head: int) -> list[int]:
        return sorted([*self.always, *self.chosen[layer][head]])

    def attention(self, forest: Forest, new: int) -> list[Tensor]:
        full = self.full
        keys, values = (
            torch.stack(
                [
                    torch.stack([whole[layer, head, self.held(layer, head)] for head in range(KV_HEADS)])
                    for layer in range(LAYERS)
                ]
            )
            for whole in (full.keys, full.values)
        )
        # Pages by their means; together they weigh as much as the tokens that they stand for.
        whole = slice(self.pages * LAYOUT.page_size)
        means = [
            part[:, :, whole].unflatten(2, (self.pages, LAYOUT.page_size)).mean(3)
            for part in (full.keys, full.values)
        ]
        bias = torch.zeros(self.pages + keys.shape[2], dtype=torch.float64)
        if self.pages:
            bias[: self.pages] = math.log(self.rest / self.pages)
        keys, values = (torch.cat(both, 2) for both in zip(means, (keys, values), strict=True))
        return expected_attention(keys, values, forest, new, len(full.tokens), bias)


OPERATIONS = st.one_of(
    st.tuples(st.just("verify"), PASSES, st.integers(0, 20)),
    st.tuples(st.just("verify"), st.builds(Pass, st.just([0]), ENDS), st.integers(0, 20)),
    st.tuples(st.just("abandon"), PASSES, st.integers(0, 20)),
    st.tuples(st.just("rewind"), st.none(), st.none()),
    st.tuples(st.just("draft"), GROWTHS, st.none()),
    st.tuples(st.just("draft"), st.builds(Pass, TREES, st.none()), st.none()),
    st.tuples(st.just("keep"), st.lists(st.booleans(), max_size=20), st.none()),
)


def retrieved_cache(
    source: FullCache,
    sizes: tuple[int, int, int],
    policy: str,
    decay: float | None = None,
    room: int = 0,
    bits: int = 16,
) -> RetrievedCache:
    """Of so many entries, chunks of so many tokens, and so many recent ones."""
    budget, chunk, recent = sizes
    selection: Selection = MeanKeyScores(source.layout, source.sequence.summaries)
    if decay is not None:
        selection = AttentionScores(source.layout, source.device, chunk, decay, pages=200)
    return RetrievedCache(
        source,
        budget=budget,
        chunk=chunk,
        recent=recent,
        refresh=RefreshPolicy.parse(policy),
        selection=selection,
        mean_slots=room,
        bits=bits,
    )


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
            keys, values = cache.engine.read(0, len(full.tokens)).unbind(1)
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
        return lambda layer: (threads.append(threading.current_thread()), scores(layer))[1]

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
        refill = RetrievalRefresh(cache.engine, 4, extent, slow, buffer, executor)
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
