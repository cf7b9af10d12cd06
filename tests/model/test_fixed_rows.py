"""A token has the same bits in every pass of fixed rows, and libraries see no other number of rows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_target, to
from torch.utils._python_dispatch import TorchDispatchMode

from offload_rt.kernels.plane_products import OPERATOR
from offload_rt.kernels.sizes import PASS_ROWS
from offload_rt.model import fixed_rows
from offload_rt.model.fixed_rows import compute_in_fixed_rows, rows_are_alike
from offload_rt.model.runner import CausalModel

ATEN = torch.ops.aten


class Sums(TorchDispatchMode):
    """Notes the rows over which products and means are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (ATEN.linear.default, OPERATOR.default, ATEN.mean.dim):
            self.rows.append(args[0].shape[1])
        assert func not in (ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default) or len(args[-1]) == 1
        return func(*args, **kwargs or {})


def in_torch(arch: str, dtype: torch.dtype = torch.float32, *, planes: bool = False) -> CausalModel:
    """A model whose layers run in torch, as on a GPU."""
    model = CausalModel(to(tiny_target(arch), dtype), "a model", planes=planes)
    model._steps, model._head = list(model._blocks), model._own_head
    return model


@pytest.mark.parametrize("count", [1, 17, PASS_ROWS, PASS_ROWS + 1, 200])
@pytest.mark.parametrize("arch", ["llama-gqa", "qwen2", "qwen3", "qwen3 in planes"])
@torch.inference_mode()
def test_every_sum_is_over_as_many_rows(arch: str, count: int) -> None:
    arch, _, planes = arch.partition(" ")
    model = in_torch(arch, torch.bfloat16 if planes else torch.float32, planes=bool(planes))
    ids = torch.arange(count) % 100
    with Sums() as sums:
        logits, hidden = compute_in_fixed_rows(model, fixed_rows.OwnValues(), ids, ids, range(count), {})
    assert len(logits) == len(hidden) == count
    layers = 2 + 7 + (2 if arch == "qwen3" else 0)  # norms, products, and norms of heads
    assert sums.rows == [PASS_ROWS] * ((layers * model.layers + 2) * -(-count // PASS_ROWS))


@torch.inference_mode()
def test_rows_are_those_asked_for() -> None:
    model, ids = in_torch("llama-gqa"), torch.arange(90)
    every = compute_in_fixed_rows(model, fixed_rows.OwnValues(), ids, ids, range(90), {})
    for rows in ([3], [5, 6, 7], [2, 70, 89]):
        some = compute_in_fixed_rows(model, fixed_rows.OwnValues(), ids, ids, rows, {})
        assert all(torch.equal(one, other[rows]) for one, other in zip(some, every, strict=True))


@pytest.mark.parametrize(
    ("dtype", "planes"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_tokens_are_alike_in_passes_of_fixed_rows(dtype: torch.dtype, planes: bool) -> None:
    assert rows_are_alike(in_torch("qwen3", dtype, planes=planes))


def test_the_check_computes_no_more_than_a_model_can() -> None:
    """Queries may be so large that a hidden state made of them overflows float16."""
    model = in_torch("qwen2", torch.float16)
    for layer in model.module.model.layers:
        layer.self_attn.q_proj.bias.data.fill_(6e4)
    assert rows_are_alike(model)


def test_the_check_finds_products_that_depend_on_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_rows, "PASS_ROWS", 1)
    monkeypatch.setattr(fixed_rows, "_RowsApart", nullcontext)
    assert not rows_are_alike(in_torch("qwen3"))
