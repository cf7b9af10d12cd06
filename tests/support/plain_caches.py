"""Caches as plain lists of tokens, and attention over them in float64: what real caches are held against.

A token is a random key, value and query for each layer; rotation is applied here as a model would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from cpu_kv import CpuLink, KVLayout, Link, PacedLink, PagedKVStore, TransferEngine
from offload_rt.attention.backends import TorchCpuBackend
from offload_rt.attention.sums import Softmax
from offload_rt.caches.base import Cache
from offload_rt.caches.full import FullCache
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.prompt_writer import PromptWriter
from offload_rt.caches.retrieved import RefreshSchedule, RetrievedCache
from offload_rt.caches.selection import LAST_QUERIES, AttentionScores, MeanKeyScores, Selection
from offload_rt.config.schema import RefreshPolicy
from offload_rt.engine.prefill import PromptAttention
from support.forest import Forest as AnyForest

LAYERS, KV_HEADS, HEADS, DIM = 2, 2, 4, 8
SCALE = 0.5
FREQUENCIES = 100.0 ** (-torch.arange(0, DIM, 2) / DIM)
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
            prompt.begin()
            prompt.kv_alone = True
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
        scores: Tensor = weights.mean(2).unflatten(1, (KV_HEADS, HEADS // KV_HEADS)).mean(2)
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
    selection: Selection = MeanKeyScores(source)
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
