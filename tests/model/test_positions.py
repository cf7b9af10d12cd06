"""Models that compute otherwise from some position on: logits and tokens are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.small_engine import SIZES
from support.tiny_models import byte_ids, tiny_target, to
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from offload_rt import LLM, SamplingParams, UsageError
from offload_rt.kernels.native import load_kernel
from offload_rt.model.architecture import CACHE_ARGUMENT
from offload_rt.model.attention_hook import open_model, restore_model
from offload_rt.model.dense_layers import DenseLayer, dense_layer
from offload_rt.model.layer_kinds import layer_kinds
from offload_rt.model.runner import CausalModel

BORDER = 64
_SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}
_GROWING: dict[str, dict[str, Any]] = {
    "ministral3": {
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4096 / BORDER,
            "original_max_position_embeddings": BORDER,
            "llama_4_scaling_beta": 0.8,
        },
    },
    "llama4_text": {
        "layer_types": ["full_attention"] * 2,
        "no_rope_layers": [1, 0],
        "attn_temperature_tuning": True,
        "floor_scale": BORDER,
        "attn_scale": 0.8,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "moe_layers": [],
    },
}
"""Models whose queries grow in steps of `BORDER` positions."""


def _model(model_type: str) -> PreTrainedModel:
    torch.manual_seed(5)
    config = AutoConfig.for_model(model_type, **_SMALL, **_GROWING[model_type])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return model


@pytest.mark.parametrize("drafts", ["plain", "lookup"])
@pytest.mark.parametrize("model_type", _GROWING)
def test_tokens_and_logits_across_the_border(model_type: str, drafts: str) -> None:
    """In passes of one token, of several, and in a prefill in pieces."""
    model, prompt = _model(model_type), byte_ids(BORDER - 9)
    ids = torch.tensor([prompt])
    generate: Any = model.generate
    expected = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
    with LLM.from_models(model, config=drafts, overrides=SIZES | {"prefill.chunk": 16}) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=1)
        result = llm.generate(prompt, params)
        again = llm.generate([prompt, prompt[3:]], params)[0]
    assert result.tokens == again.tokens == expected[0, len(prompt) :].tolist()


class _Clamped(LlamaMLP):
    """Differs from Llama's for large values only."""

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1e6) * self.up_proj(x))


class _ClampedInPlace(LlamaMLP):
    def forward(self, x: Tensor) -> Any:
        gate = self.gate_proj(x)
        gate.clamp_(max=1e6)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class _Branching(LlamaMLP):
    """Looks at a value."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * 2 if float(x.max()) > 1e6 else x)


class _OfLength(LlamaMLP):
    """Differs for a single token only."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1.0 if x.shape[1] > 1 else 1.0 + 1e-6)


class _Swapped(LlamaMLP):
    """The same product, with its factors in the other order."""

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))


class _GrowingQueries(nn.Linear):
    """Stands for a projection whose class the native library does not know."""


class _LatePositions(LlamaAttention):
    """Adds positions that a probe of a few early tokens never has."""

    def forward(self, hidden_states: Tensor, **given: Any) -> Any:
        late = (given["position_ids"] > 10**6).to(hidden_states.dtype)
        return super().forward(hidden_states + late[..., None], **given)


class _PastLength(LlamaAttention):
    """Asks its cache how long it is."""

    def forward(self, hidden_states: Tensor, **given: Any) -> Any:
        past = given[CACHE_ARGUMENT].get_seq_length(self.layer_idx)
        return super().forward(hidden_states + (past > 10**6), **given)


class _OtherNorm(LlamaRMSNorm):
    """Rounds behind the weight."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        exact = hidden_states.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * exact).to(hidden_states.dtype)


@pytest.mark.skipif(load_kernel() is None, reason="no C++ compiler here")
@pytest.mark.parametrize(
    ("part", "kind", "native"),
    [
        ("mlp", LlamaMLP, True),
        ("mlp", _Swapped, True),
        ("mlp", _Clamped, False),
        ("mlp", _ClampedInPlace, False),
        ("mlp", _Branching, False),
        ("mlp", _OfLength, False),
        ("self_attn", _LatePositions, False),
        ("self_attn", _PastLength, False),
        ("self_attn.q_proj", _GrowingQueries, False),
        ("input_layernorm", _OtherNorm, False),
    ],
)
def test_a_native_layer_stands_for_its_operations_only(part: str, kind: type, native: bool) -> None:
    """Whatever a module does beside them, and for whichever input it shows."""
    module = to(tiny_target("llama-gqa"), torch.bfloat16)
    block = module.model.layers[1]
    block.get_submodule(part).__class__ = kind
    kinds = layer_kinds(module)
    open_model(module)
    try:
        found, *others = (  # for one token and for several, and with the results of both
            [dense_layer(layer, torch.bfloat16, kinds) for layer in module.model.layers] for _ in range(3)
        )
    finally:
        restore_model(module)
    assert isinstance(found[0], DenseLayer)
    assert isinstance(found[1], DenseLayer) == native
    assert all([*map(type, again)] == [*map(type, found)] for again in others)


def test_logits_that_are_not_the_models_at_late_positions_are_refused() -> None:
    """A model whose body does more than its layers, from some position on."""
    module = tiny_target("llama-gqa")

    class Late(type(module.model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, **given: Any) -> Any:
            out = super().forward(input_ids, **given)
            if given[CACHE_ARGUMENT].get_seq_length() > 4096:
                out.last_hidden_state = out.last_hidden_state * 2
            return out

    module.model.__class__ = Late
    with pytest.raises(UsageError, match="it does more than run its decoder layers in turn"):
        CausalModel(module, "late")
