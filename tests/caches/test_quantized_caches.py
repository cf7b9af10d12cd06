"""Retrieved caches of quantised entries against a plain list of tokens that quantises the same way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forest import Forest as AnyForest
from support.plain_caches import (
    EXAMPLES,
    KV_HEADS,
    LAYERS,
    LAYOUT,
    OPERATIONS,
    Pass,
    PlainFull,
    PlainRetrieval,
    Source,
    Token,
    check,
    expected_attention,
    full_cache,
    make_link,
    placed,
    prefer,
    read_prompt,
    retrieved_cache,
    rotated_queries,
    run,
)
from torch import Tensor

from cpu_kv import KVLayout
from offload_rt.caches import retrieved
from offload_rt.caches import sizes as sizes_of_caches
from offload_rt.kernels.quantize import quantize
from offload_rt.kernels.quantized import QuantizedKV
from offload_rt.kernels.sizes import GROUP, QuantizedSize

SPARE = {8: 1 / 16, 4: 0.0}  # room of shared ranges, as a share of them on both sides
ROOM = 12  # verified tokens between two refreshes


def rounded(x: Tensor, axis: int, bits: int, spare: float = 0.0, of: Tensor | None = None) -> Tensor:
    """What codes of `x` stand for that share a range along an axis: that of `of`, with room on both sides."""
    of = x if of is None else of
    low, high = of.amin(axis, keepdim=True), of.amax(axis, keepdim=True)
    low, high = low - spare * (high - low), high + spare * (high - low)
    zero = (low - low.abs() / 256).bfloat16().float()
    step = ((high - zero) * ((1 + 1 / 128) / (2**bits - 1))).bfloat16().float()
    nearest: Tensor = zero + step * ((x - zero) / step).round().clamp(0, 2**bits - 1)
    return nearest


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bits=st.sampled_from([8, 4]),
    dim=st.sampled_from([8, 64, 80, 96]),
    groups=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_a_code_is_at_most_half_a_step_away(
    dtype: torch.dtype, bits: int, dim: int, groups: int, seed: int
) -> None:
    """Channels are far from zero, or hold one value; only the first tokens are written."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, 2, groups * GROUP, dim + 16, generator=generator)[
        ..., :dim
    ]  # with gaps between them
    rows = rows * 10 ** torch.randint(-3, 2, (dim,), generator=generator) + 100 * (torch.arange(dim) % 8 == 3)
    rows[..., 5] = rows[0, 0, 0, 5]
    keys, values = rows.to(dtype)
    layout = KVLayout(2, 2, dim, dtype)
    kv = QuantizedKV.empty(layout, (groups + 1) * GROUP, bits, torch.device("cpu"))
    kv.clear()
    layer = kv.layer(1)
    quantize(layer, keys, values)
    assert layer.bits == bits and kv.nbytes == QuantizedSize((groups + 1) * GROUP, bits).nbytes(layout)
    found = layer.first(groups * GROUP).dequantized(torch.float32)
    # In 8 bits all keys of a head share their ranges, and in 4 those of a group.
    in_groups = keys.float().unflatten(1, (1, groups * GROUP) if bits == 8 else (groups, GROUP))
    for side, wanted, whole, spare in (
        (found[0], rounded(in_groups, 2, bits, SPARE[bits]).flatten(1, 2), in_groups, SPARE[bits]),
        (found[1], rounded(values.float(), 2, bits), values.float(), 0.0),
    ):
        torch.testing.assert_close(side, wanted.nan_to_num(nan=0.0), rtol=1e-6, atol=1e-30)
        span = (
            whole.amax(2, keepdim=True)
            - whole.amin(2, keepdim=True)
            + whole.abs().amax(2, keepdim=True) / 128
        )
        error = (side.reshape(whole.shape) - whole).abs()
        assert bool((error <= 0.52 * (1 + 2 * spare) * span / (2**bits - 1) + 1e-30).all())
    assert not any(codes[:, groups * GROUP :].any() for codes in (layer.key_codes, layer.value_codes))
    assert not any(tensor.any() for tensor in kv.layer(0))


def of_heads(whole: Tensor, tokens: list[list[list[int]]]) -> Tensor:
    """Rows of `[layers, kv_heads, tokens, head_dim]`, some tokens of each head."""
    layers = (torch.stack([whole[la, h, tokens[la][h]] for h in range(KV_HEADS)]) for la in range(LAYERS))
    return torch.stack(list(layers))


class PlainQuantized(PlainRetrieval):
    """Which tokens are quantised, in the order of their groups, and which of the newest ones are not."""

    bits: int
    ranging: list[list[list[int]]] | None = None
    """Tokens whose keys have set the ranges that a head shares, by layer and head; None: none have yet."""

    def restart(self, queries: Tensor) -> None:
        super().restart(queries)
        self.ranging = None

    def build(self, queries: Tensor) -> None:
        self.refreshes += 1
        self.due = None
        length, page, unit = len(self.full.tokens), LAYOUT.page_size, math.lcm(self.chunk, GROUP)
        self.window = max(self.recent, min(page - 1, self.budget // 2)) + self.chunk + unit
        recent = max(self.recent, min(length % page, self.budget // 2))
        start = max((length - recent) // self.chunk * self.chunk, length - (self.budget - self.chunk))
        count = -(-(self.budget - (length - start)) // unit) * unit
        if count >= start:
            start = count = start // unit * unit
        if length <= self.window:
            start = count = 0
        self.always = list(range(start, length))
        self.pages = min(self.room, start // page)
        self.rest = self.pages * page - count
        if self.rest <= 0:
            self.pages = 0
        before = self.slots if self.bits == 8 else [[[] for _ in range(KV_HEADS)] for _ in range(LAYERS)]
        self.slots = self.chosen = [[[] for _ in range(KV_HEADS)] for _ in range(LAYERS)]
        if not count:
            return
        scores = self.scores(queries, start).clone()
        scores[:, :, 1:] += scores[:, :, :-1].clone() / 2
        if self.over_link:
            prefer(scores, before, count // self.chunk)
        best = (
            scores[:, :, 1:].argsort(dim=-1, descending=True, stable=True)[:, :, : count // self.chunk - 1]
            + 1
        )
        firsts = [[[0, *head] for head in layer] for layer in best.tolist()]
        self.slots = [list(map(placed, *layers)) for layers in zip(firsts, before, strict=True)]
        self.chosen = [
            [[c * self.chunk + i for c in head for i in range(self.chunk)] for head in layer]
            for layer in self.slots
        ]
        if not any(map(any, before)):  # all entries are quantised anew
            self.ranging = self.chosen

    def adopt(self, count: int, queries: Tensor) -> None:
        length = len(self.full.tokens)
        full = len(self.always) + count > self.window + ROOM
        if self.due is not None or full or (length > self.budget and self.refresh.due):
            self.due = queries
            return
        self.always += range(length - count, length)

    def attention(self, forest: AnyForest[Token], new: int) -> list[Tensor]:
        sides = []
        for whole, axis in ((self.full.keys, 1), (self.full.values, 2)):
            means = (
                whole[:, :, : self.pages * LAYOUT.page_size]
                .unflatten(2, (self.pages, LAYOUT.page_size))
                .mean(3)
            )
            kept = chosen = of_heads(whole, self.chosen)
            if chosen.shape[2] and self.bits == 8 and axis == 1:
                assert self.ranging is not None
                kept = rounded(chosen, 2, 8, SPARE[8], of_heads(whole, self.ranging))
            elif chosen.shape[2]:
                kept = rounded(chosen.unflatten(2, (-1, GROUP)), axis + 2, self.bits).flatten(2, 3)
            sides.append(torch.cat([means, kept, whole[:, :, self.always]], 2))
        bias = torch.zeros(sides[0].shape[2], dtype=torch.float64)
        if self.pages:
            bias[: self.pages] = math.log(self.rest / self.pages)
        keys, values = sides
        return expected_attention(keys, values, forest, new, len(self.full.tokens), bias)


@pytest.mark.parametrize("policy", ["stride:9", "stride:1000"])
@pytest.mark.parametrize("link", ["cpu", "paced"])
@settings(EXAMPLES, max_examples=10)
@given(
    operations=st.lists(OPERATIONS, min_size=6, max_size=14),
    prompt=st.sampled_from([0, 11, 70, 150]),
    sizes=st.sampled_from([(64, 4, 4), (40, 8, 5), (97, 4, 12), (12, 2, 8)]),
    chosen_by=st.tuples(st.sampled_from([None, 0.8]), st.sampled_from([0, 20])),
    bits=st.sampled_from([8, 4]),
    seed=st.integers(0, 100),
)
def test_a_retrieved_cache_of_quantised_entries(
    policy: str,
    link: str,
    operations: list[tuple[str, object, int | None]],
    prompt: int,
    sizes: tuple[int, int, int],
    chosen_by: tuple[float | None, int],
    bits: int,
    seed: int,
) -> None:
    """Verified tokens enter, speculation is rolled back, and refreshes choose anew, in any order."""
    decay, means = chosen_by
    full, source, forest = PlainFull(), Source(seed), AnyForest[Token]()
    with pytest.MonkeyPatch.context() as patch, full_cache(make_link(link), 2, sizes[1]) as cache:
        for module in (retrieved, sizes_of_caches):
            patch.setattr(module, "VERIFIED_ROOM", ROOM)
        cache.scale = 0.5
        found = retrieved_cache(cache, sizes, policy, decay, means, bits)
        plain = PlainQuantized(full, sizes, found.refresh, decay, means, link != "cpu")
        plain.bits, plain.window = bits, found.room - ROOM
        queries = read_prompt(cache, full, source.tokens(prompt))
        cache.derived.append(found)
        if prompt:
            cache.build_derived()
            plain.restart(queries)
            plain.build(queries)
        for name, argument, follows in operations:
            length, held = len(full.tokens), len(forest)
            if name == "verify":
                assert isinstance(argument, Pass) and argument.end is not None and follows is not None
                line = [forest.tokens[n] for n in forest.line(held - 1 - follows % (held + 1))]
                checked = AnyForest[Token](line, list(range(-1, len(line) - 1)))
                checked = checked.with_new(source.tokens(argument.count), argument.parents(len(line)))
                run(cache, checked, len(checked))
                plain.verified(checked)
                path = checked.line(len(checked) - 1 - argument.end % len(checked))
                cache.commit(path)
                kept = [checked.tokens[node] for node in path]
                full.append(kept)
                plain.adopt(len(kept), rotated_queries(kept, range(length, length + len(kept))))
                forest = forest.after(kept) if plain.due is None else AnyForest()
            elif name == "draft":
                assert isinstance(argument, Pass)
                grown = forest.with_new(source.tokens(argument.count), argument.parents(held))
                attended = run(found, grown, argument.count)
                if plain.due is not None:
                    plain.build(plain.due)
                check(attended, plain.attention(grown, argument.count))
                indices = argument.kept(grown)
                found.commit(indices)
                forest = grown.only([*range(held), *(held + index for index in indices)])
            elif name == "keep":
                assert isinstance(argument, list)
                entries = forest.closed(argument)
                found.keep(entries)
                forest = forest.only(entries)
            assert found.refresh.count == plain.refreshes
            assert found.speculative.parents == forest.parents
            if plain.due is None:
                assert (found.entries, found.quantized) == (len(plain.always), len(plain.chosen[0][0]))
        probe = forest.with_new(source.tokens(2), [len(forest) - 1, len(forest)])
        attended = run(found, probe, 2)
        if plain.due is not None:
            plain.build(plain.due)
        check(attended, plain.attention(probe, 2))
