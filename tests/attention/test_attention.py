"""Attention in pieces against attention in one piece, and both against the reference in float64."""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_attention import ReferenceBackend, attend, causal_mask, merge
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from cpu_kv import PlainPages, head_major
from offload_rt.attention.backends import AttentionBackend, TorchCpuBackend, fold, folded_mask, unfold
from offload_rt.attention.cuda_backends import FlashAttnBackend, TorchCudaBackend, cuda_backend, preferred
from offload_rt.attention.selector import choose_backend, cpu_share_backend
from offload_rt.attention.sums import AttentionSum
from offload_rt.caches.new_tokens import NewTokens, sees_entries
from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.kernels import operators
from offload_rt.kernels.tail import TailView
from offload_rt.sampling.tokens import Tokens
from offload_rt.system.openmp import WAIT_POLICY, wait_passively

DIM = 32
SCALE = DIM**-0.5
CPU = torch.device("cpu")
CUDA = torch.device("cuda")

ON_CPU = [
    pytest.param(backend, dtype, CPU, id=f"{backend.name}-{str(dtype)[6:]}")
    for backend in {b.name: b for b in (ReferenceBackend(), TorchCpuBackend(), choose_backend(CPU))}.values()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
]


def has_flash_attn() -> bool:
    try:
        FlashAttnBackend()
    except (ImportError, OSError):
        return False
    return True


NO_FLASH = pytest.mark.skipif(not has_flash_attn(), reason="no flash-attn")
ON_CUDA = [
    pytest.param(kind, dtype, CUDA, id=f"{kind.name}-{str(dtype)[6:]}", marks=[pytest.mark.gpu, *more])
    for kind, more in ((TorchCudaBackend, []), (FlashAttnBackend, [NO_FLASH]))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
BACKENDS = pytest.mark.parametrize(("made", "dtype", "device"), [*ON_CPU, *ON_CUDA])
HEADS = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])

Made = AttentionBackend | type[AttentionBackend]
"""A backend; those for CUDA are made where they are used, since that may need their package."""


def ready(made: Made) -> AttentionBackend:
    return made() if isinstance(made, type) else made


def random_parts(
    heads: int, kv_heads: int, queries: int, tokens: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; keys are scaled so that attention is neither flat nor a single spike."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, queries, DIM), (kv_heads, tokens, DIM), (kv_heads, tokens, DIM))
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    drawn[1] *= 2.0
    q, k, v = (part.to(dtype).to(device) for part in drawn)
    return q, k, v


def exact(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """In float64, every head apart; owes nothing to the code under test."""
    q, k, v = (part.double().cpu() for part in (queries, keys, values))
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = torch.einsum("hqd,htd->hqt", q, k) * SCALE
    if mask is not None:
        scores = scores + mask.double().cpu()
    return torch.einsum("hqt,htd->hqd", scores.softmax(-1), v), scores.logsumexp(-1)


def torch_itself(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """torch's own attention, in one piece and in the same dtype."""
    group = len(queries) // len(keys)
    k, v = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    bias = None if mask is None else mask.to(queries)
    out: Tensor = scaled_dot_product_attention(queries[None], k[None], v[None], bias, scale=SCALE)[0]
    return out


def assert_close(
    found: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    in_one_piece: Tensor | None = None,
) -> None:
    """At most twice the error of attention in one piece, and lse to the dtype's precision.

    Args:
        in_one_piece: by the same backend; torch's own attention counts anyway.
    """
    out, lse = found
    assert out.dtype == q.dtype and out.shape == q.shape and lse.shape == q.shape[:2]
    assert lse.dtype in (torch.promote_types(q.dtype, torch.float32), torch.float64)
    wanted, wanted_lse = exact(q, k, v, mask)
    scale = float(wanted.abs().max())
    whole = [torch_itself(q, k, v, mask)] + ([] if in_one_piece is None else [in_one_piece])
    usual = max(float((one.double().cpu() - wanted).abs().max()) for one in whole)
    # torch may be lucky, over a few queries most of all: its error counts as no less than rounding brings,
    # that of the result in 16 bits, that of the scores beside it in wider dtypes.
    least = (1 if q.dtype.itemsize == 2 else 8) * torch.finfo(q.dtype).eps * scale
    assert float((out.double().cpu() - wanted).abs().max()) <= 2 * max(usual, least)
    tolerance = 1e-10 if q.dtype == torch.float64 else 1e-5 if q.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(lse.double().cpu(), wanted_lse, rtol=0, atol=tolerance)


def tree_mask(queries: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of a chain of some tokens and a random tree below it, as the verifier makes it."""
    source = random.Random(seed)
    chain = source.randint(1, queries)
    parents = [source.randint(chain - 1, node - 1) for node in range(chain, queries)]
    new = NewTokens.below(SpeculativeTokens(), [*range(-1, chain - 1), *parents], [0] * queries)
    return new.mask(0, torch.empty(0, dtype=dtype, device=device))


def folded(backend: AttentionBackend, mask: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    return folded_mask(backend, mask, queries, len(keys))


@BACKENDS
@pytest.mark.parametrize("queries", [1, 40])
def test_a_segment_without_keys_adds_nothing(
    made: Made, dtype: torch.dtype, device: torch.device, queries: int
) -> None:
    """What kernels of CUDA return for no keys is undefined, and would count."""
    backend = ready(made)
    q, k, v = random_parts(4, 2, queries, 24, dtype, device, seed=5)
    q, k, v = fold(q, 2), k[None], v[None]
    pages = PlainPages(k, v)
    whole = backend.add(None, q, pages, SCALE)
    for mask in (None, backend.mask(q.new_zeros(q.shape[1], 0), dtype)):
        for empty in (pages.cut(0, 0), pages[:0]):  # no tokens; no pages
            nothing = empty, SCALE, mask
            out, lse = backend.add(None, q, *nothing)
            assert not out.any() and bool(torch.isneginf(lse).all())
            for total in (backend.add(whole, q, *nothing), backend.add((out, lse), q, pages, SCALE)):
                torch.testing.assert_close(total, whole, rtol=1e-6, atol=1e-6)


def laid_out(part: Tensor, page: int | None) -> Tensor:
    """A segment `[kv_heads, tokens, head_dim]` in pages or as a strided view; what lies beside it is NaN."""
    heads, tokens, dim = part.shape
    if page is not None and tokens % page == 0:
        memory = torch.full((tokens // page + 2, 2, heads, page, dim), torch.nan).to(part)
        memory[1:-1, 1] = part.unflatten(1, (-1, page)).transpose(0, 1)
        return memory[1:-1, 1]
    memory = torch.full((heads, tokens + 200, dim), torch.nan).to(part)
    memory[:, 100:-100] = part
    return memory[:, 100:-100]


@BACKENDS
@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    queries=st.sampled_from([1, 2, 7, 16, 33, 64]),
    page=st.sampled_from([None, 16, 100]),
    tokens=st.sampled_from([1, 5, 400]),
    cuts=st.sets(st.integers(1, 399), max_size=6),
    factor=st.sampled_from([1.0, 1.0, 2.0]),
)
def test_pieces_cut_anywhere_merge_to_the_whole(
    made: Made,
    dtype: torch.dtype,
    device: torch.device,
    heads: tuple[int, int],
    queries: int,
    page: int | None,
    tokens: int,
    cuts: set[int],
    factor: float,
) -> None:
    """History in segments without a mask, then the new tokens under theirs, as the full cache attends.

    With many queries to a page, the pages are joined first.
    """
    backend, scale = ready(made), factor * SCALE
    total = max(tokens, queries + 1)
    total = total if page is None else -(-total // page) * page
    history = total - queries
    q, k, v = random_parts(*heads, queries, total, dtype, device, seed=queries + total)

    def attended(start: int, end: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        keys, values = (laid_out(part[:, start:end], page) for part in (k, v))
        return attend(backend, q, keys, values, scale, mask)

    new_mask = tree_mask(queries, queries, dtype, device)
    at = sorted({cut if page is None else cut // page * page for cut in cuts if cut < history} - {0})
    parts = [attended(*ends) for ends in pairwise([0, *at, history])]
    parts.append(attended(history, total, folded(backend, new_mask, q, k)))
    mask = torch.cat([new_mask.new_zeros(queries, history), new_mask], dim=1)
    whole = attended(0, total, folded(backend, mask, q, k))
    assert_close(whole, factor * q, k, v, mask)
    assert_close(attended(0, total), factor * q, k, v)
    assert_close(merge(parts, backend), factor * q, k, v, mask, whole[0])
    assert_close(merge(parts[::-1], backend), factor * q, k, v, mask, whole[0])
    keys, values = k[:, history:], v[:, history:]
    assert_close(backend.causal(q, keys, values, scale), factor * q, keys, values, causal_mask(queries, q))


@BACKENDS
@HEADS
@pytest.mark.parametrize(("shared", "queries", "page"), [(0, 1, 16), (0, 70, 16), (5, 70, 16), (37, 300, 64)])
def test_a_prompt_sees_what_is_before_it(
    made: Made,
    dtype: torch.dtype,
    device: torch.device,
    heads: int,
    kv_heads: int,
    shared: int,
    queries: int,
    page: int,
) -> None:
    """Tokens in order over full pages, and over a tail of `shared` tokens and themselves."""
    backend, before = ready(made), 4 * page
    q, k, v = random_parts(heads, kv_heads, queries, before + shared + queries, dtype, device, seed=queries)
    pages = PlainPages(*(laid_out(part[:, :before], page) for part in (k, v)))
    total = AttentionSum(backend, q, kv_heads, SCALE)
    tail = PlainPages.one(k[:, before:], v[:, before:])
    total.attend_prompt(tail, TailView(page, queries, shared), [pages])
    assert total.lse is not None
    mask = torch.nn.functional.pad(causal_mask(queries, q), (before + shared, 0))
    assert_close((total.result(), unfold(total.lse, heads)), q, k, v, mask)


@BACKENDS
@HEADS
@pytest.mark.parametrize(
    ("queries", "pages", "page", "unit"),
    [
        (1, 8, 256, 8),
        (3, 7, 24, 8),
        (6, 1, 2048, 8),
        (16, 9, 256, 8),
        (17, 3, 256, 128),
        (70, 9, 64, 1),
        (5, 3, 48, 3),
    ],
)
def test_weights_of_some_queries_summed_over_units(
    made: Made,
    dtype: torch.dtype,
    device: torch.device,
    heads: int,
    kv_heads: int,
    queries: int,
    pages: int,
    page: int,
    unit: int,
) -> None:
    """At most four of a pass's queries, from all over it, the last one among them."""
    backend = ready(made)
    q, k, v = random_parts(heads, kv_heads, queries, pages * page, dtype, device, seed=page)
    k, v = (part.unflatten(1, (pages, page)).transpose(0, 1).contiguous() for part in (k, v))
    total = AttentionSum(backend, q, kv_heads, SCALE, unit)
    total.track_mass(0, pages * page)
    middle = pages // 2
    for part in (slice(middle), slice(middle, pages)):  # of segments that have to be brought to one reference
        if len(k[part]):
            total.attend_tracked(PlainPages(k[part], v[part]))
    result = total.result()
    assert total.lse is not None
    assert_close((result, unfold(total.lse, heads)), q, head_major(k), head_major(v))
    (mass,) = total.mass
    assert mass.reference is not None
    units = mass.mass * (total.sample.rows(mass.reference) - total.sample.rows(total.lse)).exp()[..., None]
    chosen = sorted(range(queries - 1, -1, -math.ceil(queries / 4)))
    asking = fold(q, kv_heads).double().unflatten(1, (-1, queries))[:, :, chosen].flatten(1, 2)
    weights = (SCALE * asking @ head_major(k).double().mT).softmax(-1).unflatten(-1, (-1, unit)).sum(-1)
    assert len(chosen) <= 4 and units.shape == weights.shape
    assert float((units - weights).abs().max()) <= 40 * max(
        torch.finfo(kind).eps for kind in (dtype, torch.float32)
    ) * float(weights.max())


def test_weights_of_large_scores_in_float16() -> None:
    q, k = torch.full((2, 1, 128), 30.0).half(), torch.full((2, 2, 16, 128), 30.0).half()
    total = AttentionSum(TorchCpuBackend(), q, 2, 128**-0.5, 8)
    total.track_mass(0, 32)
    total.attend_tracked(PlainPages(k, k))
    units = total.mass[0].mass
    assert bool(units.isfinite().all()) and len(set(units.flatten().tolist())) == 1


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor that operations make has."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **kwargs or {})
        for one in results if isinstance(results, tuple) else (results,):
            if isinstance(one, Tensor) and not func.is_view:
                self.count = max(self.count, one.numel())
        return results


def test_attention_mass_copies_no_keys() -> None:
    """They lie between values, and would be copied for a product with all pages at once."""
    kv = torch.randn(4, 2, 4, 128, 64)
    queries, reference = torch.randn(4, 2, 64), torch.zeros(4, 2)
    units = torch.empty(4, 2, 4 * 128 // 8)
    made = Largest()
    with made:
        operators.chunk_mass_(units, queries, kv[:, 0], reference, 0.1, 2, 1)
    assert 0 < made.count <= kv[0, 0].numel()


@pytest.mark.parametrize("offset", [-200.0, 200.0])
def test_merging_pieces_of_very_different_weight(offset: float) -> None:
    """Nothing overflows where one piece outweighs the other by exp(200)."""
    q, k, v = random_parts(2, 2, 3, 40, torch.float32, CPU, seed=3)
    near, far = (
        attend(TorchCpuBackend(), q, k[:, part], v[:, part], SCALE) for part in (slice(20), slice(20, 40))
    )
    out, lse = merge([near, (far[0], far[1] + offset)])
    heavier, weight = (near[0], near[1]) if offset < 0 else (far[0], far[1] + offset)
    torch.testing.assert_close(out, heavier)
    torch.testing.assert_close(lse, weight)


@BACKENDS
@pytest.mark.parametrize("tokens", [128, 384, 500])
def test_pages_that_are_masked_completely_count_for_nothing(
    made: Made, dtype: torch.dtype, device: torch.device, tokens: int
) -> None:
    """A masked segment of whole pages is split at every 128 keys on a GPU; some query sees one part alone."""
    q, k, v = random_parts(4, 2, 5, tokens, dtype, device, seed=3)
    mask = torch.zeros(5, tokens, dtype=torch.promote_types(dtype, torch.float32), device=device)
    mask[0, :-3] = -torch.inf  # nothing but the end of the last page
    mask[1, 1:] = -torch.inf
    mask[2, 128:260] = -torch.inf
    mask[3, ::2] = -torch.inf
    backend = ready(made)
    found = attend(backend, q, k, v, SCALE, folded(backend, mask, q, k))
    assert_close(found, q, k, v, mask)


@pytest.mark.gpu
def test_a_long_masked_segment_is_split_among_the_multiprocessors() -> None:
    backend = TorchCudaBackend()
    q, k, v = random_parts(4, 2, 5, 1024, torch.float16, torch.device("cuda"), seed=4)
    mask = folded(backend, torch.zeros(5, 1024, device="cuda"), q, k)
    outs, _ = backend.parts(fold(q, 2), k[None], v[None], SCALE, mask)
    assert len(outs) == 8


def ancestors(parents: Sequence[int], token: int) -> set[int]:
    """With `token` itself; a parent of -1 is none of them."""
    return set() if token < 0 else {token} | ancestors(parents, parents[token])


@pytest.mark.parametrize(("held", "count"), [(0, 1), (0, 9), (3, 1), (3, 9), (58, 9), (130, 5), (70, 70)])
@pytest.mark.parametrize("nearest", [1, 3, 200], ids=["chain", "tall", "wide"])
def test_a_token_sees_its_ancestors(held: int, count: int, nearest: int) -> None:
    """Parents are among the `nearest` tokens before a token, or its parent is the text."""
    source = random.Random(held + count + nearest)
    parents = [max(-1, token - source.randint(1, nearest)) for token in range(held + count)]
    tokens = SpeculativeTokens()
    for parent in parents[:held]:
        tokens.add((Tokens([0]), 0), parent)
    new = NewTokens.below(tokens, parents[held:], [0] * count)
    assert (new.count, list(new.parents)) == (count, parents[held:])
    mask = new.mask(held, torch.empty(0, dtype=torch.bfloat16))
    assert mask.shape == (count, held + count) and mask.dtype == torch.float32
    words = torch.tensor(new.words(4)).view(count, 4)
    columns = torch.arange(held + count + 300)
    for token in range(count):
        expected = ancestors(parents, held + token)
        assert {other for other in range(held + count) if mask[token, other] == 0} == expected
        assert set(columns[sees_entries(words, columns)[token]].tolist()) == expected
        assert new.depths[token] == len(expected)
    assert set(mask.unique().tolist()) <= {0.0, -torch.inf}
    assert new.sees_all(held) == (count == 1 and not mask.any())


class NamedBackend(ReferenceBackend):
    def __init__(self, name: str, ms: float | None) -> None:
        self.name = name
        self.ms = ms  # None: it was built for another GPU


@pytest.mark.parametrize(("ms", "chosen"), [(0.5, "flash"), (0.99, "torch"), (1.0, "torch"), (None, "torch")])
def test_flash_attn_only_where_it_is_faster(ms: float | None, chosen: str) -> None:
    def measured(backend: AttentionBackend) -> float:
        assert isinstance(backend, NamedBackend)
        if backend.ms is None:
            raise RuntimeError("no kernel image is available for execution on the device")
        return backend.ms

    assert preferred(NamedBackend("torch", 1.0), NamedBackend("flash", ms), measured).name == chosen


@pytest.mark.parametrize(
    "package", ["", "raise OSError('libcudart.so.11: cannot open')"], ids=["other", "broken"]
)
def test_a_flash_attn_that_is_not_the_one(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn-4 has the same name and no `flash_attn_func`; a wheel for another torch does not load."""
    (tmp_path / "flash_attn.py").write_text(package)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert choose_backend(torch.device("cuda", 7)).name == "torch-cuda"
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    cuda_backend.cache_clear()


def test_cores_are_left_to_the_threads_that_feed_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((16, 13), (4, 1), (2, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda cores=cores: cores)
        share = cpu_share_backend(torch.device("cuda", 0))
        assert isinstance(share, TorchCpuBackend) and share.threads == threads
    alone = cpu_share_backend(CPU)
    assert isinstance(alone, TorchCpuBackend) and alone.threads is None


def test_idle_threads_sleep_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "version"
    for there, wanted, expected in (
        (False, None, None),
        (True, None, "PASSIVE"),
        (True, "active", "active"),
    ):
        if there:
            driver.touch()
        monkeypatch.delenv(WAIT_POLICY, raising=False)
        if wanted is not None:
            monkeypatch.setenv(WAIT_POLICY, wanted)
        wait_passively([str(tmp_path / "other"), str(driver)])
        assert os.environ.get(WAIT_POLICY) == expected
