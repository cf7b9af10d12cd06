"""Decoder layers in the native library: against float64, and only where they compute what the modules do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.tiny_models import byte_ids, local_model, tiny_target, to
from torch import Tensor

from offload_rt.attention.sums import Softmax
from offload_rt.kernels.native import load_kernel
from offload_rt.model.dense_layers import DenseHead, DenseLayer, computes_the_same
from offload_rt.model.runner import CausalModel

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="no C++ compiler here")


class ValuesAlone:
    """Attention to oneself: passes by what the dense parts of a layer do not compute."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        group = len(queries) // len(keys)
        seen = (keys.double() @ keys.double().mT).softmax(-1) @ values.double()
        return (seen.repeat_interleave(group, 0) + queries.double().tanh()).to(queries.dtype)


def through_modules(block: Any, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """What the layer's own modules compute around the same attention."""
    attention, dim = block.self_attn, block.self_attn.head_dim
    given = block.input_layernorm(hidden)
    heads = [
        getattr(attention, f"{name}_proj")(given).unflatten(-1, (-1, dim)).transpose(1, 2) for name in "qkv"
    ]
    for at, name in enumerate(("q_norm", "k_norm")):
        if hasattr(attention, name):
            heads[at] = getattr(attention, name)(heads[at])
    for at in range(2):
        left, right = heads[at].chunk(2, dim=-1)
        heads[at] = heads[at] * cosines + torch.cat([-right, left], dim=-1) * sines
    out = ValuesAlone().attend(0, heads[0][0], heads[1][0], heads[2][0], Softmax(1.0))
    mixed: Tensor = hidden + attention.o_proj(out.transpose(0, 1).flatten(1)[None])
    result: Tensor = mixed + block.mlp(block.post_attention_layernorm(mixed))
    return result


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", ["llama-gqa", "qwen2", "qwen3", "mistral"])
def test_layers_are_as_exact_as_their_modules(arch: str, dtype: torch.dtype) -> None:
    """At most twice the modules' error."""
    module = to(tiny_target(arch), dtype)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    model = CausalModel(module, arch)
    generator = torch.Generator().manual_seed(0)
    for step, block in zip(model._steps, model._blocks, strict=True):
        assert isinstance(step, DenseLayer)
        exact = copy.deepcopy(block).double()
        for rows in (1, 2, 3, 4, 7, 32):
            hidden = torch.randn(1, rows, model.hidden_size, generator=generator).to(dtype)
            rotation = model._rotary(hidden, torch.arange(rows)[None] + 9, "full_attention")
            assert rotation is not None
            found = step(hidden, position_embeddings=rotation, attention_pass=ValuesAlone())
            want = through_modules(exact, hidden.double(), *(part.double() for part in rotation))
            peer = through_modules(block, hidden, *rotation)
            usual = max(float((peer - want).abs().max()), torch.finfo(dtype).eps * float(want.abs().max()))
            assert float((found - want).abs().max()) <= 2 * usual


@pytest.mark.parametrize("arch", ["granite", "gemma3", "cohere", "phi3"])
def test_other_layers_stay_with_their_modules(arch: str) -> None:
    """Granite's have the same modules, and scale what they add."""
    model = CausalModel(tiny_target(arch), arch)
    assert model._steps == model._blocks


def test_local_layers_stay_with_their_modules() -> None:
    model = CausalModel(local_model("gpt-oss"), "gpt-oss")
    assert model._steps == model._blocks


def test_hooks_are_called_and_weights_stay_where_they_are() -> None:
    module = tiny_target("llama-gqa")
    state = {name: (one.data_ptr(), one.clone()) for name, one in module.state_dict().items()}
    model, calls = CausalModel(module, "tiny"), list[str]()
    before = model.probe()
    hook = module.get_submodule("model.layers.1.mlp.up_proj").register_forward_hook(
        lambda *_: calls.append("called")
    )
    torch.testing.assert_close(model.probe(), before)
    assert calls == ["called"]
    hook.remove()
    model.restore()
    assert module(torch.tensor([byte_ids(9)])).logits.isfinite().all()
    for name, one in module.state_dict().items():
        assert one.data_ptr() == state[name][0] and torch.equal(one, state[name][1])


def test_training_goes_through_the_modules() -> None:
    """Gradients reach the input, and autocast has its own dtype, in passes of any length."""
    model = CausalModel(tiny_target("llama"), "llama")
    assert isinstance(model._head, DenseHead)
    for tokens in (3, 400):
        hidden = torch.randn(1, tokens, model.hidden_size, requires_grad=True)
        model.logits(hidden).sum().backward()
        assert hidden.grad is not None and bool(hidden.grad.any())
        own = model.module.lm_head(model._norm(hidden))[0]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for given in (hidden, hidden.bfloat16()):
                found = model.logits(given)
                assert found.dtype == torch.bfloat16
                torch.testing.assert_close(found.float(), own, rtol=0.05, atol=0.2)


def test_what_differs_is_noticed() -> None:
    given, added = torch.randn(1, 5, 64), torch.randn(1, 5, 64)
    assert computes_the_same(given, given + added, given + added * (1 + 1e-6))
    assert not computes_the_same(given, given + added, given + added * 1.001)
    assert not computes_the_same(given, given + added * torch.nan, given + added * torch.nan)
