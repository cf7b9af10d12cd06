"""The caches against a plain list of tokens and attention in float64, under random passes.

A token is a random key, value and query for each layer; rotation is applied here as a model would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpu_kv import CpuLink, KVLayout, Link, PacedLink, PagedKVStore, TransferEngine
from offload_rt.attention import ReferenceBackend, TorchCpuBackend
from offload_rt.caches.base import Cache, NewTokens
from offload_rt.caches.full import FullCache
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.caches.streaming import StreamingCache
from offload_rt.config import RefreshPolicy

LAYERS, KV_HEADS, HEADS, DIM = 2, 2, 4, 8
SCALE = 0.5
FREQUENCIES = 100.0 ** (-torch.arange(0, DIM, 2) / DIM)
CPU = torch.device("cpu")
LAYOUT = KVLayout(LAYERS, KV_HEADS, DIM, torch.float32, page_size=8)
EXAMPLES = settings(derandomize=True, deadline=None, max_examples=50)


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

    key: Tensor
    value: Tensor
    query: Tensor


class Source:
    """Random tokens."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def tokens(self, count: int) -> list[Token]:
        return [
            Token(
                torch.randn(LAYERS, KV_HEADS, DIM, generator=self._generator),
                torch.randn(LAYERS, KV_HEADS, DIM, generator=self._generator),
                torch.randn(LAYERS, HEADS, DIM, generator=self._generator),
            )
            for _ in range(count)
        ]


def stacked(parts: list[Tensor]) -> Tensor:
    """Parts `[layers, heads, head_dim]` of tokens as `[layers, heads, tokens, head_dim]`."""
    return torch.stack(parts, dim=2)


@dataclass(frozen=True)
class Shape:
    """New tokens of a pass: a chain, below it a tree, and the path through it that is kept."""

    chain: int
    parents: list[int]
    path: list[int]

    @property
    def count(self) -> int:
        return self.chain + len(self.parents)

    @property
    def kept(self) -> list[int]:
        return [*range(self.chain), *(self.chain + node for node in self.path)]

    def ancestors(self, node: int) -> list[int]:
        """Tree nodes from the root down to `node`, inclusive."""
        line = []
        while node >= 0:
            line.append(node)
            node = self.parents[node]
        return line[::-1]

    def depths(self) -> list[int]:
        """Distance of every new token from the last one before the pass."""
        return [
            *range(1, self.chain + 1),
            *(self.chain + len(self.ancestors(n)) for n in range(len(self.parents))),
        ]

    def sees(self) -> Tensor:
        """`[count, count]`, who sees whom."""
        sees = torch.zeros(self.count, self.count, dtype=torch.bool)
        for token in range(self.chain):
            sees[token, : token + 1] = True
        for node in range(len(self.parents)):
            sees[self.chain + node, : self.chain] = True
            sees[self.chain + node, [self.chain + n for n in self.ancestors(node)]] = True
        return sees


@st.composite
def shapes(draw: st.DrawFn, longest_chain: int = 4) -> Shape:
    chain = draw(st.integers(1, longest_chain))
    size = draw(st.integers(0, 5))
    straight = draw(st.booleans())
    parents = [node - 1 if straight else draw(st.integers(-1, node - 1)) for node in range(size)]
    shape = Shape(chain, parents, [])
    end = draw(st.integers(-1, size - 1))
    return Shape(chain, parents, shape.ancestors(end))


def expected_attention(
    queries: Tensor, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], sees: Tensor
) -> Tensor:
    """Attention in float64 of new tokens over old ones and themselves; `[heads, count, head_dim]` each."""
    keys = torch.cat([old[0].double(), new[0].double()], dim=1).repeat_interleave(HEADS // KV_HEADS, 0)
    values = torch.cat([old[1].double(), new[1].double()], dim=1).repeat_interleave(HEADS // KV_HEADS, 0)
    scores = queries.double() @ keys.transpose(1, 2) * SCALE
    count = sees.shape[0]
    scores[:, :, -count:] = scores[:, :, -count:].masked_fill(~sees, -torch.inf)
    return scores.softmax(-1) @ values


def run(cache: Cache, shape: Shape, tokens: list[Token]) -> list[Tensor]:
    """A pass of `tokens`, rotated to where they stand in the text; what each layer's attention gave."""
    positions = [cache.length - 1 + depth for depth in shape.depths()]
    cache.begin(NewTokens.chain_and_tree(shape.chain, shape.parents, CPU, torch.float32))
    keys = rotate(stacked([token.key for token in tokens]), positions).float()
    queries = rotate(stacked([token.query for token in tokens]), positions).float()
    values = stacked([token.value for token in tokens])
    return [cache.attend(layer, queries[layer], keys[layer], values[layer], SCALE) for layer in range(LAYERS)]


def check(found: list[Tensor], wanted: list[Tensor]) -> None:
    for layer in range(LAYERS):
        torch.testing.assert_close(found[layer].double(), wanted[layer], rtol=0, atol=2e-5)


class PlainStreaming:
    """What a streaming cache stands for: all tokens of the text, and which of them are held."""

    def __init__(self, sinks: int, window: int) -> None:
        self.sinks, self.window = sinks, window
        self.verified: list[Token | None] = []  # None: skipped
        self.speculative: list[Token] = []

    def held(self) -> list[Token]:
        later = self.verified[self.sinks :]
        return [t for t in [*self.verified[: self.sinks], *later[-self.window :]] if t is not None]

    def attention(self, shape: Shape, tokens: list[Token]) -> list[Tensor]:
        """Positions are the numbers of the slots, counted from the first sink."""
        old = [*self.held(), *self.speculative]
        places = [len(old) - 1 + depth for depth in shape.depths()]
        old_keys, old_values = torch.zeros(2, LAYERS, KV_HEADS, 0, DIM)
        if old:
            old_keys = rotate(stacked([t.key for t in old]), range(len(old)))
            old_values = stacked([t.value for t in old])
        keys = rotate(stacked([t.key for t in tokens]), places)
        values = stacked([t.value for t in tokens])
        queries = rotate(stacked([t.query for t in tokens]), places)
        return [
            expected_attention(
                queries[layer],
                (old_keys[layer], old_values[layer]),
                (keys[layer], values[layer]),
                shape.sees(),
            )
            for layer in range(LAYERS)
        ]


STREAMING_OPERATIONS = st.one_of(
    st.tuples(st.just("pass"), shapes()),
    st.tuples(st.just("pass"), shapes(longest_chain=20)),
    st.tuples(st.just("truncate"), st.floats(0, 1)),
    st.tuples(st.just("settle"), st.none()),
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
    cache = StreamingCache(
        LAYERS,
        KV_HEADS,
        DIM,
        torch.float32,
        CPU,
        sinks=sinks,
        window=window,
        inverse_frequencies=FREQUENCIES,
        backend=TorchCpuBackend(),
    )
    plain, source = PlainStreaming(sinks, window), Source(seed)
    for name, argument in operations:
        if name == "pass":
            assert isinstance(argument, Shape)
            tokens = source.tokens(argument.count)
            check(run(cache, argument, tokens), plain.attention(argument, tokens))
            cache.commit(argument.kept)
            plain.speculative += [tokens[i] for i in argument.kept]
        elif name == "truncate":
            assert isinstance(argument, float)
            kept = round(argument * len(plain.speculative))
            cache.truncate(len(plain.verified) + kept)
            del plain.speculative[kept:]
        elif name == "settle":
            cache.settle()
            plain.verified += plain.speculative
            plain.speculative = []
        elif name == "reset":
            cache.reset()
            plain = PlainStreaming(sinks, window)
        elif len(plain.verified) == sinks and not plain.speculative:
            assert isinstance(argument, int)
            cache.skip(argument)
            plain.verified += [None] * argument
        assert cache.verified_length == len(plain.verified)
        assert cache.length == len(plain.verified) + len(plain.speculative)
        assert cache.entries == len(plain.held()) <= sinks + window
    probe = Shape(1, [-1, -1], [])
    tokens = source.tokens(probe.count)
    check(run(cache, probe, tokens), plain.attention(probe, tokens))


def test_a_streaming_cache_skips_only_right_behind_its_sinks() -> None:
    cache = StreamingCache(
        LAYERS,
        KV_HEADS,
        DIM,
        torch.float32,
        CPU,
        sinks=2,
        window=4,
        inverse_frequencies=FREQUENCIES,
        backend=ReferenceBackend(),
    )
    with pytest.raises(ValueError, match="sinks alone"):
        cache.skip(5)
    with pytest.raises(ValueError, match="fills itself"):
        cache.build(torch.empty(0))
    with pytest.raises(RuntimeError, match="commit without a pass"):
        cache.commit([0])
    with pytest.raises(ValueError, match="cannot truncate to 1"):
        cache.truncate(1)


@contextmanager
def full_cache(link: Link, ring: int, chunk: int | None, segment: int = 8) -> Iterator[FullCache]:
    with PagedKVStore(LAYOUT, slab_tokens=16) as store:
        sequence = store.new_sequence(chunk)
        engine = TransferEngine(sequence, link, segment_tokens=segment, ring_buffers=ring)
        try:
            yield FullCache(sequence, engine, LAYOUT, HEADS, CPU, TorchCpuBackend())
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

    def attention(self, shape: Shape, tokens: list[Token]) -> list[Tensor]:
        return attention_over(self.keys, self.values, len(self.tokens), shape, tokens)


def attention_over(
    old_keys: Tensor, old_values: Tensor, length: int, shape: Shape, tokens: list[Token]
) -> list[Tensor]:
    """Attention of new tokens that follow `length` ones, over old KV `[layers, kv_heads, n, head_dim]`."""
    places = [length - 1 + depth for depth in shape.depths()]
    keys = rotate(stacked([t.key for t in tokens]), places)
    queries = rotate(stacked([t.query for t in tokens]), places)
    values = stacked([t.value for t in tokens])
    return [
        expected_attention(
            queries[layer], (old_keys[layer], old_values[layer]), (keys[layer], values[layer]), shape.sees()
        )
        for layer in range(LAYERS)
    ]


FULL_OPERATIONS = st.one_of(
    st.tuples(st.just("pass"), shapes(longest_chain=12)),
    st.tuples(st.just("abandon"), shapes()),
    st.tuples(st.just("truncate"), st.floats(0, 1)),
)


@pytest.mark.parametrize(("link", "ring"), [("cpu", 2), ("paced", 2), ("paced", 3), ("paced", 4)])
@settings(EXAMPLES, max_examples=15)
@given(operations=st.lists(FULL_OPERATIONS, min_size=1, max_size=10), seed=st.integers(0, 100))
def test_the_full_cache(link: str, ring: int, operations: list[tuple[str, object]], seed: int) -> None:
    plain, source = PlainFull(), Source(seed)
    with full_cache(make_link(link), ring, chunk=None) as cache:
        for name, argument in operations:
            if name == "truncate":
                assert isinstance(argument, float)
                kept = round(argument * len(plain.tokens))
                cache.truncate(kept)
                plain.truncate(kept)
            else:
                assert isinstance(argument, Shape)
                tokens = source.tokens(argument.count)
                check(run(cache, argument, tokens), plain.attention(argument, tokens))
                if name == "pass":
                    cache.commit(argument.kept)
                    plain.append([tokens[i] for i in argument.kept])
                else:
                    cache.abandon()
            assert cache.length == cache.verified_length == len(plain.tokens)
        keys, values = cache.read(0, len(plain.tokens))
        torch.testing.assert_close(keys, plain.keys, rtol=0, atol=1e-6)
        assert torch.equal(values, plain.values)


class PlainRetrieval:
    """Which tokens a retrieved cache holds for each layer and head, by the words of its docstring.

    Attributes:
        due: the queries to choose by before the next pass; None where nothing is to be chosen anew.
    """

    def __init__(self, full: PlainFull, budget: int, chunk: int, recent: int, policy: RefreshPolicy) -> None:
        self.full, self.policy = full, policy
        self.budget, self.chunk, self.recent = budget, chunk, recent
        self.refreshes = 0
        self.always: list[int] = []  # tokens that are not overwritten
        self.chosen: list[list[list[int]]] = []  # [layer][head], in falling importance
        self.rounds: deque[tuple[int, int]] = deque(maxlen=RetrievedCache.ROLLING_ROUNDS)
        self.since = 0
        self.due: Tensor | None = None

    def build(self, queries: Tensor) -> None:
        """`queries` `[layers, heads, tokens, head_dim]`, rotated: those of the newest tokens, at most 8."""
        self.refreshes += 1
        self.rounds.clear()
        self.since = 0
        self.due = None
        length = len(self.full.tokens)
        if length <= self.budget:
            self.always = list(range(length))
            self.chosen = [[[] for _ in range(KV_HEADS)] for _ in range(LAYERS)]
            return
        start = (length - self.recent) // self.chunk * self.chunk
        start = max(start, length - (self.budget - self.chunk))
        self.always = [*range(self.chunk), *range(start, length)]
        count = (self.budget - len(self.always)) // self.chunk
        keys = self.full.keys.double()
        chunks = length // self.chunk
        means = keys[:, :, : chunks * self.chunk].unflatten(2, (chunks, self.chunk)).mean(3)
        means = means.repeat_interleave(HEADS // KV_HEADS, 1)
        weights = (queries[:, :, -8:].double() @ means.transpose(-1, -2) * SCALE).softmax(-1)
        scores = weights.mean(2).unflatten(1, (KV_HEADS, HEADS // KV_HEADS)).mean(2)
        best = scores[:, :, 1 : start // self.chunk].argsort(-1, descending=True)[:, :, :count] + 1
        self.chosen = [
            [[c * self.chunk + i for c in head for i in range(self.chunk)] for head in layer]
            for layer in best.tolist()
        ]

    def adopt(self, count: int, proposed: int, queries: Tensor) -> None:
        length = len(self.full.tokens)
        self.since += count
        self.rounds.append((count - 1, proposed))
        room = self.budget - len(self.always)  # the rest can be overwritten, or was never filled
        if self.due is not None or count > room or (length > self.budget and self.is_due()):
            self.due = queries
            return
        self.always += range(length - count, length)
        room -= count
        self.chosen = [[head[:room] for head in layer] for layer in self.chosen]

    def is_due(self) -> bool:
        if self.policy.kind == "every":
            return True
        if self.policy.kind == "stride":
            return self.since >= self.policy.value
        accepted = sum(a for a, _ in self.rounds)
        proposed = sum(p for _, p in self.rounds)
        full = len(self.rounds) == self.rounds.maxlen
        return full and proposed > 0 and accepted < self.policy.value * proposed

    def held(self, layer: int, head: int) -> list[int]:
        return sorted([*self.always, *self.chosen[layer][head]])


RETRIEVED_OPERATIONS = st.one_of(
    st.tuples(st.just("verify"), shapes(longest_chain=1)),
    st.tuples(st.just("verify"), shapes(longest_chain=6)),
    st.tuples(st.just("draft"), shapes()),
    st.tuples(st.just("draft"), shapes(longest_chain=1)),
    st.tuples(st.just("truncate"), st.floats(0, 1)),
)
SIZES = [(16, 4, 4), (12, 4, 8), (13, 4, 8), (24, 8, 5), (8, 2, 2), (5, 1, 3)]


@pytest.mark.parametrize("policy", ["every", "stride:7", "acceptance:0.5"])
@pytest.mark.parametrize("link", ["cpu", "paced"])
@settings(EXAMPLES, max_examples=25)
@given(
    operations=st.lists(RETRIEVED_OPERATIONS, min_size=6, max_size=20),
    prompt=st.sampled_from([0, 1, 11, 16, 40]),
    sizes=st.sampled_from(SIZES),
    sinks=st.sampled_from([0, 3]),
    seed=st.integers(0, 100),
)
def test_caches_derived_from_the_full_one(
    policy: str,
    link: str,
    operations: list[tuple[str, object]],
    prompt: int,
    sizes: tuple[int, int, int],
    sinks: int,
    seed: int,
) -> None:
    budget, chunk, recent = sizes
    full, source = PlainFull(), Source(seed)
    with full_cache(make_link(link), 2, chunk) as cache:
        cache.scale = SCALE
        parsed = RefreshPolicy.parse(policy)
        retrieved = RetrievedCache(
            cache, budget=budget, chunk=chunk, recent=recent, refresh=parsed, backend=TorchCpuBackend()
        )
        streaming = StreamingCache(
            LAYERS,
            KV_HEADS,
            DIM,
            torch.float32,
            CPU,
            sinks=sinks,
            window=recent,
            inverse_frequencies=FREQUENCIES,
            backend=TorchCpuBackend(),
            source=cache,
        )
        retrieval = PlainRetrieval(full, budget, chunk, recent, parsed)
        window = PlainStreaming(sinks, recent)
        if prompt:
            shape = Shape(prompt, [], [])
            tokens = source.tokens(prompt)
            run(cache, shape, tokens)
            cache.commit(shape.kept)
            full.append(tokens)
            queries = rotated_queries(tokens, range(prompt))
            cache.derived += [retrieved, streaming]
            cache.build_derived()
            retrieval.build(queries)
        else:
            # An empty text: nothing to build from, everything comes by adoption.
            cache.derived += [retrieved, streaming]
            retrieval.chosen = [[[] for _ in range(KV_HEADS)] for _ in range(LAYERS)]
        speculative: list[Token] = []
        for name, argument in operations:
            length = len(full.tokens)
            if name == "verify":
                assert isinstance(argument, Shape)
                tokens = source.tokens(argument.count)
                check(run(cache, argument, tokens), full.attention(argument, tokens))
                cache.commit(argument.kept)
                kept = [tokens[i] for i in argument.kept]
                full.append(kept)
                queries = rotated_queries(kept, range(length, length + len(kept)))
                retrieval.adopt(len(kept), argument.count - 1, queries)
                # What was speculated behind as many tokens stays, but in a cache that is to choose anew.
                speculative = speculative[len(kept) :]
                assert streaming.length == len(full.tokens) + len(speculative)
                if retrieval.due is not None:
                    speculative = []
                    streaming.truncate(len(full.tokens))
            elif name == "draft":
                assert isinstance(argument, Shape)
                tokens = source.tokens(argument.count)
                window.verified, window.speculative = list(full.tokens), speculative
                check(run(streaming, argument, tokens), window.attention(argument, tokens))
                attended = run(retrieved, argument, tokens)
                if retrieval.due is not None:
                    retrieval.build(retrieval.due)
                check(
                    attended,
                    [
                        retrieved_attention(retrieval, layer, speculative, argument, tokens)
                        for layer in range(LAYERS)
                    ],
                )
                streaming.commit(argument.kept)
                retrieved.commit(argument.kept)
                speculative = [*speculative, *(tokens[i] for i in argument.kept)]
            else:
                assert isinstance(argument, float)
                speculative = speculative[: round(argument * len(speculative))]
                streaming.truncate(length + len(speculative))
                retrieved.truncate(length + len(speculative))
            check_retrieved(retrieved, retrieval, full)
            for derived in (streaming, retrieved):
                assert derived.verified_length == len(full.tokens)
                assert derived.length == len(full.tokens) + len(speculative)
                assert derived.entries <= derived.budget


def rotated_queries(tokens: list[Token], positions: Sequence[int]) -> Tensor:
    return rotate(stacked([token.query for token in tokens]), positions)


def retrieved_attention(
    retrieval: PlainRetrieval, layer: int, speculative: list[Token], shape: Shape, tokens: list[Token]
) -> Tensor:
    """What `layer` should attend to: what is held of the text, what is speculative, and the pass itself."""
    full = retrieval.full
    length = len(full.tokens)
    keys, values = full.keys[layer], full.values[layer]
    held = [retrieval.held(layer, head) for head in range(KV_HEADS)]
    old_keys = torch.stack([keys[head, held[head]] for head in range(KV_HEADS)]).double()
    old_values = torch.stack([values[head, held[head]] for head in range(KV_HEADS)]).double()
    if speculative:
        places = range(length, length + len(speculative))
        draft_keys = rotate(stacked([t.key for t in speculative]), places)[layer]
        draft_values = stacked([t.value for t in speculative])[layer].double()
        old_keys = torch.cat([old_keys, draft_keys], dim=1)
        old_values = torch.cat([old_values, draft_values], dim=1)
    expand = [old_keys[None].expand(LAYERS, -1, -1, -1), old_values[None].expand(LAYERS, -1, -1, -1)]
    return attention_over(*expand, length + len(speculative), shape, tokens)[layer]


def check_retrieved(cache: RetrievedCache, plain: PlainRetrieval, full: PlainFull) -> None:
    """The verified entries are the KV of exactly the tokens that should be held."""
    length = len(full.tokens)
    assert cache.refreshes == plain.refreshes
    if plain.due is not None:
        return  # what it holds now, nobody will see
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            held = plain.held(layer, head)
            if length > cache.budget:
                assert set(range(cache.chunk)) <= set(held)
            assert set(range(max(0, length - cache.recent), length)) <= set(held)
            entries = cache.values[layer, head, : cache.entries]
            same = (entries[:, None] == full.values[layer, head]).all(-1)
            found = same.nonzero()[:, 1].tolist()
            assert sorted(found) == held
            torch.testing.assert_close(
                cache.keys[layer, head, : cache.entries], full.keys[layer, head, found], rtol=0, atol=1e-6
            )


@pytest.mark.parametrize(
    ("policy", "accepted", "refreshed"),
    [
        ("every", 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
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
    draft, probe = Shape(1, [-1, 0], [0, 1][:accepted]), Shape(1, [], [])
    with full_cache(CpuLink(), 2, chunk=4) as cache:
        prompt = Shape(60, [], [])
        run(cache, prompt, source.tokens(60))
        cache.commit(prompt.kept)
        retrieved = RetrievedCache(
            cache,
            budget=40,
            chunk=4,
            recent=4,
            refresh=RefreshPolicy.parse(policy),
            backend=TorchCpuBackend(),
        )
        cache.derived.append(retrieved)
        cache.build_derived()
        found = []
        for number in range(1, 13):
            before = retrieved.refreshes
            run(cache, draft, source.tokens(draft.count))
            cache.commit(draft.kept)
            run(retrieved, probe, source.tokens(1))
            if retrieved.refreshes > before:
                found.append(number)
        assert found == refreshed
