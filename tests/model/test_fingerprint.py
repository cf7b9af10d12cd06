"""Whatever changes what a model computes changes its fingerprint; what changes nothing does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import tiny_target
from transformers import PreTrainedModel

from offload_rt.model.runner import CausalModel
from offload_rt.model.weights_digest import checksum, weights_digest


def digest(model: PreTrainedModel) -> str:
    runner = CausalModel(model, "one")
    try:
        return weights_digest(runner)
    finally:
        runner.restore()


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("llama-gqa")


@pytest.mark.parametrize(
    "setting",
    [
        {"rms_norm_eps": 1e-3},
        {"num_experts_per_tok": 1},
        {"norm_topk_prob": True},
        {"clip_qkv": 4.0},
        {"no_rope_layers": [0, 1]},
        {"residual_multiplier": 0.5},
        {"attention_multiplier": 0.5},
        {"query_pre_attn_scalar": 7},
        {"routed_scaling_factor": 2.5},
        {"hidden_act": "gelu"},
        {"layer_types": ["full_attention"] * 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}},
        {"max_position_embeddings": 4096},
        {"a_setting_of_a_later_transformers": 1},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_setting_that_may_change_what_is_computed(target: PreTrainedModel, setting: dict[str, Any]) -> None:
    before, runner = digest(target), CausalModel(target, "one")
    kept = copy.deepcopy(vars(target.config))
    try:
        for name, value in setting.items():
            setattr(target.config, name, value)
        assert weights_digest(runner) != before
    finally:
        vars(target.config).clear()
        vars(target.config).update(kept)
        runner.restore()
    assert digest(target) == before


def test_settings_that_change_nothing(target: PreTrainedModel) -> None:
    other = copy.deepcopy(target)
    for name, value in {
        "_name_or_path": "elsewhere",
        "transformers_version": "9.0",
        "use_cache": False,
        "eos_token_id": 7,
        "initializer_range": 0.5,
        "attention_dropout": 0.1,
    }.items():
        setattr(other.config, name, value)
    assert digest(other) == digest(target)


def test_every_weight_counts(target: PreTrainedModel) -> None:
    """One bit of one value, at the beginning, in the middle, at the end of any tensor."""
    seen = {digest(target)}
    for name, weight in target.named_parameters():
        flat = weight.data.view(-1).view(torch.int32)
        at = {"embed": len(flat) // 2 + 3, "norm": 0}.get(name.split(".")[1].split("_")[0], len(flat) - 1)
        flat[at] ^= 1
        found = digest(target)
        assert found not in seen, name
        seen.add(found)
        flat[at] ^= 1


def test_buffers_of_the_checkpoint_count() -> None:
    """The bias of a router is a buffer, and chooses the experts."""
    torch.manual_seed(0)
    model = tiny_target("llama-gqa")
    model.model.layers[0].mlp.register_buffer("e_score_correction_bias", torch.zeros(4))
    before = digest(model)
    model.model.layers[0].mlp.e_score_correction_bias[2] = 1e-3
    assert digest(model) != before


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_checksum_depends_on_every_byte(data: st.DataObject) -> None:
    """Whatever the dtype, the length, and where a tensor begins; and equal tensors have the same."""
    length, offset = data.draw(st.integers(0, 300)), data.draw(st.integers(0, 9))
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]))
    size = dtype.itemsize
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    raw = torch.randint(256, ((length + offset) * size,), dtype=torch.uint8, generator=seed)
    tensor = raw.view(dtype)[offset:]
    before = checksum(tensor)
    assert torch.equal(before, checksum(tensor.clone()))
    if length:
        changed = data.draw(st.sets(st.integers(0, length * size - 1), min_size=1, max_size=4))
        for at in changed:
            raw[offset * size + at] ^= data.draw(st.sampled_from([1, 128, 255]))
        assert not torch.equal(before, checksum(tensor))
    assert not torch.equal(before, checksum(torch.cat([tensor.clone().reshape(-1), tensor.new_ones(1)])))


def test_signs_that_change_in_pairs_show() -> None:
    values = torch.ones(64)
    before = checksum(values)
    for first in range(63):
        changed = values.clone()
        changed[first : first + 2] *= -1
        assert not torch.equal(before, checksum(changed))
