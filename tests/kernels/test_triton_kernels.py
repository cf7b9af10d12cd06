"""The Triton kernels against float64, and against the plain form of each operator.

Where there is no GPU, Triton's interpreter runs them (`conftest.py`).
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from emulated.gpu import EMULATED
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

ON_GPU = torch.cuda.is_available() and not EMULATED
triton = pytest.importorskip("triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")
if EMULATED:
    pytest.skip("they run on a GPU, or in the interpreter", allow_module_level=True)

from cpu_kv import KVLayout  # noqa: E402
from cpu_kv.packed import PackedShape, PageCodec  # noqa: E402
from offload_rt.attention import backends, cuda_backends  # noqa: E402
from offload_rt.kernels import (  # noqa: E402
    operators,
    triton_kernels,
    triton_operators,
    triton_packing,
    triton_pages,
    triton_planes,
)
from offload_rt.kernels.planes import BLOCK, WeightPlanes  # noqa: E402
from offload_rt.kernels.quantize import quantize  # noqa: E402
from offload_rt.kernels.quantized import QuantizedKV  # noqa: E402
from offload_rt.kernels.sizes import GROUP  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
ATTEND = (cuda_backends.TorchCudaBackend() if ON_GPU else backends.TorchCpuBackend()).parts
INF = float("inf")
WIDE = settings(derandomize=True, deadline=None, max_examples=12)
DTYPES = st.sampled_from([torch.float16, torch.float32, torch.bfloat16])


def multiply_in_float64() -> None:
    """Lets the interpreter sum a product as precisely as tensor cores do, whichever row of a tile it is in.

    Otherwise the order is that of numpy's library for this processor, and bfloat16 is taken for whole
    numbers.
    """

    def wide(handle: Any) -> Any:
        data = handle.data
        if handle.dtype.scalar == triton.language.bfloat16:
            data = (data.astype("uint32") << 16).view("float32")
        return data.astype("float64")

    def create_dot(_: Any, one: Any, other: Any, sums: Any, *given: object) -> Any:
        product = (wide(one) @ wide(other)).astype(sums.data.dtype)
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


if not ON_GPU:
    multiply_in_float64()


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


class Draw:
    """Random tensors, some of them views with gaps."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(dtype).to(DEVICE)


@WIDE
@given(
    dtype=DTYPES,
    pages=st.integers(1, 40),
    rows=st.integers(1, 5),
    dim=st.sampled_from([16, 64, 96]),
    masked=st.integers(0, 40),
    summed=st.booleans(),
    offset=st.sampled_from([0.0, 60.0, -60.0]),
)
def test_merging(
    dtype: torch.dtype, pages: int, rows: int, dim: int, masked: int, summed: bool, offset: float
) -> None:
    """Of pages, the first `masked` ones of row 0 are masked completely, all of them perhaps."""
    draw, heads = Draw(pages), 2
    parts, lses = draw(pages, heads, rows, dim, dtype=dtype), draw(pages, heads, rows) * 3
    lses[:masked, :, 0] = -INF
    parts[:masked, :, 0] = 0
    before = (draw(heads, rows, dim), draw(heads, rows) + offset) if summed else ()
    out, lse = triton_operators.combine(parts, lses, *before)
    every = lses.double() if not before else torch.cat([lses, before[1][None]]).double()
    values = parts.double() if not before else torch.cat([parts.double(), before[0][None].double()])
    total = every.logsumexp(0)
    weights = (every - total).exp().nan_to_num(nan=0.0)
    close(out, (values * weights[..., None]).sum(0), dtype)
    close(lse, total, dtype)
    plain = operators.combine(parts, lses, *before)
    close(out, plain[0], dtype)
    close(lse, plain[1], dtype)


PAGED = st.builds(
    PackedShape,
    kv_heads=st.integers(1, 3),
    page_size=st.sampled_from([4, 16, 40]),
    head_dim=st.sampled_from([6, 16, 80]),
)


def paged(shape: PackedShape, pages: int, scale: float, generator: torch.Generator) -> Tensor:
    """Pages of normal values, and of some that are far below the largest of their channels."""
    sizes = (pages, 2, shape.kv_heads, shape.page_size, shape.head_dim)
    values, tiny = (torch.randn(sizes, generator=generator) for _ in range(2))
    return torch.where(tiny.abs() < 0.01 * scale, values * 2.0**-20, values).to(torch.bfloat16)


@WIDE
@given(
    shape=PAGED,
    pages=st.integers(0, 3),
    side=st.integers(0, 1),
    scale=st.sampled_from([0.0, 1.0, 4.0]),
    seed=st.integers(0, 2**32),
)
def test_packing_and_unpacking(shape: PackedShape, pages: int, side: int, scale: float, seed: int) -> None:
    values = paged(shape, pages, scale, torch.Generator().manual_seed(seed))
    packed = PageCodec().encode(shape, values)
    whole = slice(None) if len(values) else slice(0)
    assert torch.equal(triton_packing.encode(shape, values.to(DEVICE)).cpu()[whole], packed[whole])
    expected = torch.empty_like(values[:, side:].contiguous())
    PageCodec().decode(shape, packed, expected, side)
    found = torch.empty_like(expected, device=DEVICE)
    triton_packing.decode(shape, packed.to(DEVICE), found, side)
    assert torch.equal(found.cpu().view(torch.int16), expected.view(torch.int16))


@WIDE
@given(
    shape=PAGED,
    pages=st.integers(1, 3),
    runs=st.integers(0, 9),
    scale=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_chosen_tokens_of_packed_pages(
    shape: PackedShape, pages: int, runs: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    packed = PageCodec().encode(shape, paged(shape, pages, scale, generator))
    page, head, token = (
        torch.randint(0, end, (runs,), generator=generator)
        for end in (pages, shape.kv_heads, shape.page_size // 4)
    )
    for side in range(2):
        expected = torch.empty(runs, 4, shape.head_dim, dtype=torch.bfloat16)
        PageCodec().take(shape, packed, side, page, head, 4 * token, expected)
        found = torch.empty_like(expected, device=DEVICE)
        pages_there, heads_there, tokens_there = (one.to(DEVICE) for one in (page, head, 4 * token))
        triton_packing.take(shape, packed.to(DEVICE), side, pages_there, heads_there, tokens_there, found)
        assert torch.equal(found.cpu().view(torch.int16), expected.view(torch.int16))


@WIDE
@given(
    dtype=DTYPES,
    packs=st.booleans(),
    shape=PAGED,
    pages=st.integers(1, 9),
    group=st.integers(1, 3),
    count=st.integers(1, 12),
    step=st.integers(1, 3),
    chunk=st.sampled_from([None, 4, 8]),
    scale=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_attention_over_pages(
    dtype: torch.dtype,
    packs: bool,
    shape: PackedShape,
    pages: int,
    group: int,
    count: int,
    step: int,
    chunk: int | None,
    scale: float,
    seed: int,
) -> None:
    """Plain and packed, some with as many escapes as a list can hold; attention mass in the same pass."""
    generator, draw = torch.Generator().manual_seed(seed), Draw(seed)
    values = paged(shape, pages, scale, generator)
    packed = PageCodec().encode(shape, values)
    packed = packed[~shape.overflows(packed)]
    if not len(packed):
        return
    plain = torch.empty(len(packed), *values.shape[1:], dtype=torch.bfloat16)
    PageCodec().decode(shape, packed, plain)
    keys, attended = plain.to(DEVICE).double().transpose(0, 1).transpose(1, 2).flatten(2, 3)
    queries = draw(shape.kv_heads, group * count, shape.head_dim, dtype=dtype)
    softmax_scale, sampled = shape.head_dim**-0.5, group * -(-count // step)
    scores = queries.double() @ keys.mT * softmax_scale
    chunk = chunk if chunk and shape.page_size % chunk == 0 else None
    mass, reference = None, draw(shape.kv_heads, group * count)
    if chunk is not None:
        chunks = len(packed) * shape.page_size // chunk
        mass = draw(shape.kv_heads, sampled, chunks + 3)[:, :, 1:-2]
    kv: tuple[Any, ...] = packed.to(DEVICE), shape.page_size
    if not packs:
        kv = plain.to(DEVICE, dtype).transpose(0, 1).unbind()
        keys, attended = (side.double().transpose(0, 1).flatten(1, 2) for side in kv)
        scores = queries.double() @ keys.mT * softmax_scale
    name = "attend_packed" if packs else "attend_pages"
    for module in (triton_operators, operators):
        found = getattr(module, name)(queries, *kv, softmax_scale, mass, reference, count, step)
        out, lse = operators.combine(*found)
        close(out, scores.softmax(-1) @ attended, dtype)
        close(lse, scores.logsumexp(-1), dtype)
        if mass is not None and chunk is not None:
            expected = operators.sampled_rows((scores - reference.double()[..., None]).exp(), count, step)
            close(mass, expected.unflatten(2, (-1, chunk)).sum(-1), dtype)
            mass.fill_(-INF)


@pytest.mark.parametrize("dim", [16, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_check_of_bits_finds_what_depends_on_other_queries(
    dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert triton_operators.queries_are_alike(dtype, dim, DEVICE)
    for name in ("attend_tail", "attend_packed") if dtype == torch.bfloat16 else ("attend_tail",):
        with monkeypatch.context() as patch:
            right = getattr(triton_operators, name)
            patch.setattr(
                triton_operators, name, lambda *given, of=right: (1.01 * of(*given)[0], of(*given)[1])
            )
            assert not triton_operators.queries_are_alike(dtype, dim, DEVICE)


class Tree:
    """Tokens of a pass behind `shared` ones of a tail: for each its ancestors in order, itself last."""

    def __init__(self, data: st.DataObject, shared: int) -> None:
        self.shared, self.paths = shared, list[list[int]]()
        for node in range(data.draw(st.integers(1, 9))):
            parent = data.draw(st.integers(-1, node - 1))
            self.paths.append([*(self.paths[parent] if parent >= 0 else []), node])

    def view(self) -> tuple[int, int, Tensor, Tensor]:
        """What `attend_tail` takes of it behind the page size."""
        longest = max(map(len, self.paths))
        rows = [[self.shared + node for node in path] for path in self.paths]
        paths = torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int32)
        lengths = torch.tensor([self.shared + len(row) for row in rows], dtype=torch.int32)
        return len(rows), self.shared, paths.to(DEVICE), lengths.to(DEVICE)


@WIDE
@given(
    data=st.data(),
    dtype=DTYPES,
    page=st.sampled_from([4, 16, 40]),
    dim=st.sampled_from([6, 16, 80]),
    shared=st.integers(0, 50),
    group=st.integers(1, 3),
    in_order=st.booleans(),
)
def test_attention_over_a_tail(
    data: st.DataObject, dtype: torch.dtype, page: int, dim: int, shared: int, group: int, in_order: bool
) -> None:
    """Each token of a tree, or of a chain, over its own tokens."""
    tree, draw, heads, scale = Tree(data, shared), Draw(shared + page), 2, dim**-0.5
    count, *view = tree.view()
    if in_order:
        tree.paths, view = [list(range(at + 1)) for at in range(count)], [shared, None, None]
    queries = draw(heads, group * count, dim, dtype=dtype)
    kv = draw(2, heads, shared + count + 3, dim, dtype=dtype)
    for module in (triton_operators, operators):
        parts = module.attend_tail(queries, *kv, page, count, *view, scale)
        out, lse = operators.combine(*parts)
        for at, path in enumerate(tree.paths):
            keys, values = kv[:, :, [*range(shared), *(shared + node for node in path)]].double()
            rows = slice(at, None, count)
            scores = scale * queries[:, rows].double() @ keys.mT
            close(out[:, rows], scores.softmax(-1) @ values, dtype)
            close(lse[:, rows], scores.logsumexp(-1), dtype)


@settings(WIDE, max_examples=6)
@given(
    data=st.data(),
    dtype=DTYPES,
    page=st.sampled_from([4, 16, 40]),
    dim=st.sampled_from([6, 16, 80, 200]),
    paged=st.integers(0, 5),
    begun=st.integers(0, 60),
    group=st.integers(1, 3),
    packs=st.booleans(),
)
def test_a_query_has_the_bits_that_it_has_alone(
    data: st.DataObject,
    dtype: torch.dtype,
    page: int,
    dim: int,
    paged: int,
    begun: int,
    group: int,
    packs: bool,
) -> None:
    """Whatever is beside it, wherever full pages end and the tail begins, packed or plain, in any calls."""
    draw, heads, scale = Draw(paged + begun), 2, dim**-0.5
    tree = Tree(data, begun)
    count, shared, paths, lengths = tree.view()
    before = paged * page
    kv = draw(2, heads, before + begun + count, dim, dtype=torch.bfloat16).to(dtype)
    pages = kv[:, :, :before].unflatten(2, (paged, page)).transpose(1, 2)
    queries, heads_dim = draw(heads, group * count, dim, dtype=dtype), (heads, page, dim)
    if packs:
        shape = PackedShape(*heads_dim)
        bits = pages.transpose(0, 1).to(torch.bfloat16).contiguous()
        packed = triton_packing.encode(shape, bits)
        packs = not bool(shape.overflows(packed.cpu()).any())
    total: tuple[Any, ...] = ()
    cuts = sorted({0, paged, *data.draw(st.lists(st.integers(0, paged), max_size=3))})
    for start, stop in pairwise(cuts):
        if packs:
            given: Any = "attend_packed", (packed[start:stop], page)
        else:
            given = "attend_pages", tuple(pages[:, start:stop])
        parts = getattr(triton_operators, given[0])(queries, *given[1], scale, None, None, 1, 1)
        total = triton_operators.combine(*parts, *total)
    tail = triton_operators.attend_tail(
        queries, kv[0, :, before:], kv[1, :, before:], page, count, shared, paths, lengths, scale
    )
    total = triton_operators.combine(*tail, *total)
    for at, path in enumerate(tree.paths):
        own = kv[:, :, [*range(before + shared), *(before + shared + node for node in path)]]
        seen = own.shape[2]
        cut = data.draw(st.integers(0, (seen - 1) // page)) * page  # pages that are in a store
        asking, alone = queries[:, at::count].contiguous(), tuple[Any, ...]()
        if cut:
            full = own[:, :, :cut].unflatten(2, (-1, page)).transpose(1, 2)
            alone = triton_operators.combine(
                *triton_operators.attend_pages(asking, full[0], full[1], scale, None, None, 1, 1)
            )
        last = triton_operators.attend_tail(
            asking, own[0, :, cut:], own[1, :, cut:], page, 1, seen - cut - 1, None, None, scale
        )
        for one, other in zip(triton_operators.combine(*last, *alone), total, strict=True):
            assert torch.equal(one, other[:, at::count])


def test_a_sum_in_strided_memory_is_merged_as_it_is() -> None:
    """Kernels read rows one after the other, and a view may have gaps between them."""
    draw, heads, rows, dim = Draw(3), 2, 5, 16
    parts, lses = draw(3, heads, rows, dim), draw(3, heads, rows)
    wide, lse = draw(heads, 2 * rows, dim)[:, ::2], draw(rows, heads).T
    assert not wide.is_contiguous() and not lse.is_contiguous()
    expected = operators.combine(parts, lses, wide, lse)
    for one, other in zip(triton_operators.combine(parts, lses, wide, lse), expected, strict=True):
        close(one, other.double(), torch.float32)


MASS = given(
    dtype=DTYPES,
    pages=st.integers(1, 3),
    tokens=st.sampled_from([16, 48, 128]),
    chunk=st.sampled_from([8, 16]),
    group=st.integers(1, 3),
    count=st.integers(1, 9),
    step=st.integers(1, 3),
)


@WIDE
@MASS
def test_attention_mass_of_chunks(
    dtype: torch.dtype, pages: int, tokens: int, chunk: int, group: int, count: int, step: int
) -> None:
    """By sampled queries, over keys that lie between values."""
    draw, heads, dim, scale = Draw(tokens + pages), 2, 32, 0.2
    step = min(step, count)
    queries, kv = (
        draw(heads, group * count, dim, dtype=dtype),
        draw(pages, 2, heads, tokens, dim, dtype=dtype),
    )
    keys, reference = kv[:, 0], draw(heads, group * count) + 2
    chunks = pages * tokens // chunk
    mass = torch.full((heads, group * -(-count // step), chunks + 2), torch.nan, device=DEVICE)
    asked: tuple[Any, ...] = (queries, keys, reference, scale, count, step)
    triton_operators.chunk_mass_(mass[:, :, 1:-1], *asked)
    sampled = [g * count + (count - 1) % step + at for g in range(group) for at in range(0, count, step)]
    scores = scale * queries[:, sampled].double() @ keys.transpose(0, 1).flatten(1, 2).double().mT
    wanted = (scores - reference[:, sampled, None].double()).exp().unflatten(2, (chunks, chunk)).sum(3)
    close(mass[:, :, 1:-1], wanted, dtype)
    assert mass[:, :, :: chunks + 1].isnan().all(), "nothing beside it is written"


@WIDE
@given(
    chunks=st.sampled_from([1, 7, 1500]),
    group=st.integers(1, 3),
    count=st.integers(1, 9),
    step=st.integers(1, 3),
    together=st.booleans(),
)
def test_attention_mass_is_added_up(chunks: int, group: int, count: int, step: int, together: bool) -> None:
    draw, heads = Draw(chunks), 2
    step = min(step, count)
    sampled = group * -(-count // step)
    mass = draw(heads, 1 if together else sampled, chunks).abs()
    reference, lse = draw(heads, group * count), draw(heads, group * count) + 1
    scores = draw(heads, chunks + 3)
    expected = scores.clone()
    arguments = (mass, reference, lse, 0.8, count, step)
    triton_operators.add_mass_(scores[:, 1:-2], *arguments)
    operators.add_mass_(expected[:, 1:-2], *arguments)
    close(scores, expected, torch.float32)


@settings(WIDE, max_examples=8)
@given(
    dtype=DTYPES,
    bits=st.sampled_from([8, 4]),
    groups=st.sampled_from([1, 9]),  # of which a program takes eight
    rows=st.sampled_from([1, 5, 70]),
    dim=st.sampled_from([16, 32, 80]),
    seen=st.none() | st.integers(0, 9 * GROUP),
)
def test_attention_over_quantised_entries(
    dtype: torch.dtype, bits: int, groups: int, rows: int, dim: int, seen: int | None
) -> None:
    """Of a layer's first tokens, so that heads lie apart; of none, perhaps."""
    draw, heads, tokens = Draw(groups + rows), 2, groups * GROUP
    memory = QuantizedKV.empty(KVLayout(1, heads, dim, dtype), 10 * GROUP, bits, torch.device(DEVICE))
    layer = memory.layer(0).first(tokens)
    quantize(layer, *draw(2, heads, tokens, dim, dtype=dtype))
    queries = draw(heads, rows, dim + 8, dtype=dtype)[..., :dim]
    count = None if seen is None else torch.tensor(min(seen, tokens), device=DEVICE)
    keys, values = layer.first(tokens).dequantized(dtype)
    left = slice(tokens if count is None else int(count))
    scores = 0.2 * queries.double() @ keys[:, left].double().mT
    for attend in (triton_operators.attend_quantized, operators.attend_quantized):
        out, lse = triton_operators.combine(*attend(queries, *layer, count, 0.2))
        close(out, scores.softmax(-1) @ values[:, left].double(), dtype)
        close(lse, scores.logsumexp(-1), dtype)


@settings(WIDE, max_examples=12)
@given(
    dtype=DTYPES,
    bits=st.sampled_from([8, 4]),
    groups=st.integers(1, 3),
    dim=st.sampled_from([16, 64, 80]),
    seed=st.integers(0, 100),
)
def test_quantising(dtype: torch.dtype, bits: int, groups: int, dim: int, seed: int) -> None:
    """Rows with gaps between them; channels far from zero, or of one value.

    On a GPU bit by bit as the plain form. The interpreter cuts bfloat16 off instead of rounding it.
    """
    draw, heads, tokens = Draw(seed), 2, groups * GROUP
    entries = draw(2, heads, tokens + 8, dim + 16, dtype=dtype)[:, :, 8:, :dim]
    entries[..., 3] += 100
    entries[..., 5] = 0.5
    memory = QuantizedKV.empty(KVLayout(2, heads, dim, dtype), 4 * GROUP, bits, torch.device(DEVICE))
    found, wanted = (memory.layer(at).first(tokens) for at in range(2))
    keys, values = entries
    triton_operators.quantize_(keys, values, *found)
    operators.quantize_(keys, values, *wanted)
    if DEVICE == "cuda":
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    sides = zip(
        found.dequantized(torch.float32), wanted.dequantized(torch.float32), entries.float(), strict=True
    )
    for (one, other, true), axis in zip(sides, (1, 2), strict=True):
        step = (true.amax(axis, keepdim=True) - true.amin(axis, keepdim=True)) / (2**bits - 1)
        off = 0.52 * step + true.abs().amax(axis, keepdim=True) / 100
        assert bool(((one - true).abs() <= off).all()) and bool(((other - true).abs() <= off).all())


@settings(WIDE, max_examples=12)
@given(
    dtype=DTYPES,
    chunk=st.sampled_from([2, 8, 16]),
    dim=st.sampled_from([16, 64, 80]),
    seed=st.integers(0, 100),
)
def test_quantising_chunks(dtype: torch.dtype, chunk: int, dim: int, seed: int) -> None:
    """Some slots get other chunks, as in the plain form, and those between them stay as they were."""
    draw, heads, tokens, device = Draw(seed), 3, 2 * GROUP, torch.device(DEVICE)
    memory = QuantizedKV.empty(KVLayout(2, heads, dim, dtype), tokens, 8, device)
    memory.clear()
    found, wanted = (memory.layer(at) for at in range(2))
    before = draw(2, heads, tokens, dim, dtype=dtype)
    for one in (found, wanted):
        one.share_ranges(before[0])
    places = torch.randperm(heads * tokens // chunk, generator=torch.Generator().manual_seed(seed))[:5].to(
        device
    )
    keys, values = draw(2, len(places), chunk + 3, dim + 16, dtype=dtype)[:, :, 3:, :dim]
    head, slot = places // (tokens // chunk), places % (tokens // chunk)
    triton_operators.quantize_chunks_(keys, values, head, slot, *found)
    operators.quantize_chunks_(keys, values, head, slot, *wanted)
    if DEVICE == "cuda":
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    sides = zip(*(layer.dequantized(torch.float32) for layer in (found, wanted)), strict=True)
    for pair in sides:
        new, same = (side.unflatten(1, (-1, chunk))[head, slot] for side in pair)
        off = (new - same).abs() <= 1.02 * (same.amax() - same.amin()) / 255 + same.abs() / 100
        assert bool(off.all())
    others = torch.ones(heads, tokens // chunk, dtype=torch.bool, device=device)
    others[head, slot] = False
    for codes in (found.key_codes, found.value_codes):
        assert not codes.unflatten(1, (-1, chunk))[others].any()


@pytest.mark.parametrize("name", ["_combine", "_chunk_mass", "_add_mass", "_quantized"])
def test_what_varies_from_pass_to_pass_is_compiled_once(name: str) -> None:
    kernel = getattr(triton_kernels, name)
    names = set(inspect.signature(kernel.fn).parameters)
    layout = {"dim", "page_stride", "head_stride", "row_stride", "query_head_stride", "query_row_stride"}
    layout |= {"key_page_stride", "key_head_stride", "key_row_stride"}
    pointers = {"parts", "lses", "out", "lse", "new_out", "new_lse", "mass", "asking", "keys", "reference"}
    layout |= {"heads", "code_head_stride", "code_row_stride", "key_range_stride", "value_range_stride"}
    pointers |= {"count", "key_codes", "key_ranges", "value_codes", "value_ranges"}
    constants = {one for one in names if one.isupper()} | {"scale", "decay", "scores"}
    assert names - layout - pointers - constants <= set(triton_kernels.VARIES)


def test_the_check_that_comes_before_their_use_finds_a_kernel_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for layout in (triton_operators.SMALL, KVLayout(1, 1, 80, torch.bfloat16, page_size=32)):
        triton_operators.check(ATTEND, layout, 3, DEVICE)
    right, decode = triton_operators.combine, triton_packing.decode
    with (
        monkeypatch.context() as patch,
        pytest.raises(RuntimeError, match="packs or unpacks pages otherwise"),
    ):
        patch.setattr(
            triton_packing, "decode", lambda shape, rows, out: decode(shape, rows, out) or out.neg_()
        )
        triton_operators.check(ATTEND, device=DEVICE)
    for name in ("attend_pages", "attend_tail"):
        kernel = getattr(triton_pages, name)
        with (
            monkeypatch.context() as patch,
            pytest.raises(RuntimeError, match="a kernel differs from its plain form by"),
        ):
            patch.setattr(
                triton_pages, name, lambda *given, kernel=kernel: [1.1 * one for one in kernel(*given)]
            )
            triton_operators.check(ATTEND, device=DEVICE)
    for wrong in (
        lambda *arguments: tuple(1.1 * one for one in right(*arguments)),
        lambda *arguments: tuple(one.nan_to_num(0) * 0 for one in right(*arguments)),
    ):
        monkeypatch.setattr(triton_operators, "combine", wrong)
        with pytest.raises(RuntimeError, match="a kernel differs from its plain form by"):
            triton_operators.check(ATTEND, device=DEVICE)


def test_kernels_that_fail_for_one_model_serve_none(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = (KVLayout(1, 2, dim, torch.bfloat16) for dim in (64, 128))
    checked: list[tuple[Any, ...]] = []

    def check(attend: Any, *shape: Any) -> None:
        checked.append(shape)
        if wrong in shape:
            raise RuntimeError("a kernel differs")

    monkeypatch.setattr(cuda_backends, "_CHECKED", {})
    monkeypatch.setattr(triton_operators, "check", check)
    kernel, plain = (lambda one: one + 1), (lambda one: one)
    assert cuda_backends.use_triton() is None and checked == [()]
    assert cuda_backends.use_triton(right, 4) is None and cuda_backends.use_triton(right, 4) is None
    assert checked == [(), (right, 4)] and cuda_backends._run_checked(kernel, plain, 1) == 2
    failure = "RuntimeError: a kernel differs"
    for shape in ((wrong, 4), (right, 4), ()):
        assert cuda_backends.use_triton(*shape) == failure
    assert len(checked) == 3 and cuda_backends._run_checked(kernel, plain, 1) == 1


@settings(WIDE, max_examples=10)
@given(
    outs=st.integers(1, 70),
    blocks=st.integers(1, 4),
    rows=st.sampled_from([1, 2, 5, 17, 96, 130]),
    biased=st.booleans(),
    draft=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_products_with_weights_in_planes(
    outs: int, blocks: int, rows: int, biased: bool, draft: bool, seed: int
) -> None:
    """Inputs that choose one column show its weights, bit by bit, the listed ones too."""
    draw, ins = Draw(seed), BLOCK * blocks
    matrix = draw(outs, ins)
    rare = draw(outs, ins) > 2.9
    split = WeightPlanes.split((torch.where(rare, 2.0**-20, 1.0) * matrix).to(torch.bfloat16))
    if split is None:  # too many are rare
        return
    weight = split.expanded(draft=draft)
    bias = draw(outs, dtype=torch.bfloat16) if biased else None
    inputs = draw(1, rows, ins, dtype=torch.bfloat16)
    found = triton_planes.plane_product(inputs, split.parts, bias, draft)
    exact = inputs.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert found.shape == (1, rows, outs)
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-12)
    assert torch.equal(triton_planes.expanded(split, draft), weight)
    unit = torch.eye(ins, dtype=torch.bfloat16, device=DEVICE)
    for some in unit.split(96):
        columns = triton_planes.plane_product(some, split.parts, None, draft)
        assert torch.equal(columns, some @ weight.T)


def test_the_check_of_planes_finds_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_planes.check(DEVICE)
    right, product = triton_planes.expanded, triton_planes._product
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="differs from its plain form"):
        patch.setattr(triton_planes, "_product", lambda *given: 1.1 * product(*given))
        triton_planes.check(DEVICE)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="expands weights .* to others"):
        patch.setattr(triton_planes, "expanded", lambda *given: right(*given).neg_())
        triton_planes.check(DEVICE)
