"""On a GPU, too, not a bit of what the target computes of a text depends on drafts, trees, batches or tiers.

On the emulated device, operators take each query and page by itself in torch, in place of Triton kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from emulated.gpu import EMULATED
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.bits import LEVELS, STEPS, drafting, kv_of, run_program
from support.plain_operators import as_of_kernels
from support.small_engine import CUDA, PROMPT, engine_overrides
from support.tiny_models import noisy_copy, tiny_target, to
from torch import Tensor

from cpu_kv import CudaLink
from cpu_kv.packed import PackedShape, PageCodec
from offload_rt import LLM, SamplingParams
from offload_rt.attention import cuda_backends
from offload_rt.engine import engine
from offload_rt.kernels import operators
from offload_rt.model import fixed_rows

pytestmark = pytest.mark.gpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Parts = tuple[Tensor, Tensor]


def alone(queries: Tensor, row: int, keys: Tensor, values: Tensor, scale: float) -> Parts:
    """Attention of one row over keys and values `[kv_heads, tokens, head_dim]`."""
    given = (
        one.clone(memory_format=torch.contiguous_format) for one in (queries[:, row, None], keys, values)
    )
    query, keys, values = given
    out, lse = operators.attend_pages(query, keys[None], values[None], scale, None, None, 1, 1)
    return out[0], lse[0]


def joined(rows: Sequence[Sequence[Parts]], like: Tensor) -> Parts:
    """Of each page, of each row."""
    wide = torch.promote_types(like.dtype, torch.float32)
    if not rows:
        return like.new_empty(0, *like.shape), like.new_empty(0, *like.shape[:2], dtype=wide)
    outs, lses = ([torch.cat([one[side] for one in page], 1) for page in rows] for side in range(2))
    return torch.stack(outs), torch.stack(lses)


def attend_pages(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mass: Tensor | None,
    reference: Tensor | None,
    period: int,
    step: int,
) -> Parts:
    if mass is not None and reference is not None:
        operators.chunk_mass_(mass, queries, keys, reference, scale, period, step)
    rows = range(queries.shape[1])
    pages = zip(keys, values, strict=True)
    return joined([[alone(queries, row, *page, scale) for row in rows] for page in pages], queries)


def attend_packed(queries: Tensor, packed: Tensor, page_size: int, *others: Any) -> Parts:
    shape = PackedShape(len(queries), page_size, queries.shape[2])
    pages = queries.new_empty(len(packed), 2, len(queries), page_size, queries.shape[2], dtype=torch.bfloat16)
    PageCodec().decode(shape, packed, pages)
    return attend_pages(queries, *pages.to(queries.dtype).transpose(0, 1), *others)


def attend_tail(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    page_size: int,
    count: int,
    shared: int,
    paths: Tensor | None,
    lengths: Tensor | None,
    scale: float,
) -> Parts:
    longest = count if paths is None else paths.shape[1]
    pages = -(-(shared + longest) // page_size)
    found: list[list[Parts]] = [[] for _ in range(pages)]
    for row in range(queries.shape[1]):
        number = row % count
        own = list(range(shared + number + 1))
        if paths is not None and lengths is not None:
            own = [*range(shared), *paths[number].tolist()][: int(lengths[number])]
        for page in range(pages):
            places = own[page * page_size : (page + 1) * page_size]
            part = alone(queries, row, keys[:, places], values[:, places], scale)
            nothing = torch.zeros_like(part[0]), torch.full_like(part[1], -torch.inf)
            found[page].append(part if places else nothing)
    return joined(found, queries)


def combine(parts: Tensor, lses: Tensor, out: Tensor | None = None, lse: Tensor | None = None) -> Parts:
    wide = torch.promote_types(parts.dtype, torch.float32)
    rows = []
    for row in range(parts.shape[2]):
        total: Any = ()
        if out is not None and lse is not None:
            total = out[:, row, None].clone(), lse[:, row, None].clone()
        for part, its in zip(parts[:, :, row, None], lses[:, :, row, None], strict=True):
            if not total:
                total = torch.zeros_like(part, dtype=wide), torch.full_like(its, -torch.inf)
            total = operators.combine(part[None].clone(), its[None].clone(), *total)
        rows.append(total)
    one, other = (torch.cat([row[side] for row in rows], 1) for side in range(2))
    return one, other


@pytest.fixture(scope="module", autouse=True)
def by_query() -> Iterator[None]:
    if not EMULATED:
        yield
        return
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.library._scoped_library("offload_rt", "IMPL") as library,
    ):
        for module in (cuda_backends, engine):
            patch.setattr(module, "use_triton", lambda *given: None)
        patch.setattr(cuda_backends, "queries_are_alike", lambda *given: True)
        for operator in (attend_pages, attend_packed, attend_tail, combine):
            library.impl(operator.__name__, operator, "CPU")
            plain = as_of_kernels(getattr(operators, operator.__name__))
            library.impl(operator.__name__, plain, "Meta")  # of which the emulation learns the shapes
        yield


def open_llm(name: str, config: str, overrides: Mapping[str, object] = {}) -> LLM:
    target = tiny_target("llama-gqa")
    models = [to(model, CUDA, DTYPES[name]) for model in (target, noisy_copy(target))]
    options: dict[str, Any] = {
        "overrides": {**engine_overrides(cpu_tokens=0), **overrides},
        "link": CudaLink(CUDA),
    }
    return LLM.from_models(models[0], models[1], config=config, **options)


SETTINGS = settings(derandomize=True, max_examples=8, deadline=None, phases=[Phase.generate])


@SETTINGS
@given(
    name=st.sampled_from(list(DTYPES)),
    levels=st.sampled_from(list(LEVELS)),
    shape=st.sampled_from(["chain", "tree:2,2", "tree:4,3,3,2", "grown:12"]),
    depth=st.integers(1, 5),
    code=st.sampled_from(["raw", "packed"]),
    ahead=st.sampled_from([0, 2]),
    resident=st.sampled_from([0, 32, 400]),
    steps=st.lists(STEPS, min_size=1, max_size=4),
)
def test_a_program_changes_no_bit(
    name: str,
    levels: str,
    shape: str,
    depth: int,
    code: str,
    ahead: int,
    resident: int,
    steps: list[tuple[str, int]],
) -> None:
    """Whatever is drafted, in passes of up to 197 tokens, and wherever KV lies.

    Text is read behind earlier KV by torch's kernels, which go by how that lies in segments.
    """
    steps = [("generate", 12), *steps, ("generate", 12)]
    placed = {
        "offload.cpu_tokens": 0,
        "offload.resident_tokens": resident,
        "store.code": "raw" if name == "float32" else code,
    }
    with open_llm(name, "plain", placed if "append" in dict(steps) else {}) as llm:
        plain = run_program(llm, steps)
    overrides = {**drafting(levels, shape, depth), "offload.ahead": ahead, **placed}
    with open_llm(name, "retrieval", overrides) as llm:
        drafted = run_program(llm, steps)
    assert plain.exactness | drafted.exactness == {"bits"}
    assert drafted.tokens == plain.tokens and drafted.logprobs == plain.logprobs
    assert torch.equal(drafted.kv, plain.kv)


@pytest.mark.parametrize("name", DTYPES)
def test_a_batch_changes_no_bit(name: str) -> None:
    """Eight texts of other lengths, whose passes have up to 136 tokens."""
    prompts, params = [20 + 7 * number for number in range(8)], SamplingParams(max_tokens=12, logprobs=0)
    with open_llm(name, "plain") as llm:
        plain = [llm.read(PROMPT[:prompt]) for prompt in prompts]
        expected = [context.generate((), params) for context in plain]
        kv = [kv_of(context, len(context.tokens) - 1) for context in plain]
    with open_llm(name, "retrieval", drafting("retrieved", "tree:4,3", 3)) as llm:
        contexts = [llm.read(PROMPT[:prompt]) for prompt in prompts]
        found = llm.generate_from(contexts, None, params)
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        assert [one.logprobs for one in found] == [one.logprobs for one in expected]
        for context, wanted in zip(contexts, kv, strict=True):
            assert torch.equal(kv_of(context, len(context.tokens) - 1), wanted)


def test_a_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: list[int] = []

    def exactness(arch: str = "llama-gqa", hook: bool = False) -> tuple[str, str]:
        target = to(tiny_target(arch), CUDA)
        with LLM.from_models(target, config="plain", overrides=engine_overrides(cpu_tokens=0)) as llm:
            if hook:
                target.model.layers[1].mlp.register_forward_hook(
                    lambda _, given, out: hooked.append(out.shape[1])
                )
            result = llm.generate(PROMPT[:20], SamplingParams(max_tokens=2))
        return result.exactness, result.exactness_reason

    assert exactness() == ("bits", "")
    assert exactness(hook=True) == ("distribution", "a hook of a module")
    assert set(hooked) == {19, 1}, "a hook sees no padding"
    assert exactness("granite") == ("distribution", "products of GraniteDecoderLayer")
    reason = "attention to heads of 16 entries, which runs in torch"
    for name, found in (("use_triton", "no compiler"), ("queries_are_alike", False)):
        with monkeypatch.context() as patch:
            patch.setattr(cuda_backends, name, lambda *given, found=found: found)
            assert exactness() == ("distribution", reason)
    monkeypatch.setattr(fixed_rows, "rows_are_alike", lambda model: False)
    monkeypatch.setattr("offload_rt.model.runner.rows_are_alike", lambda model: False)
    assert exactness() == ("distribution", "products on this GPU")
