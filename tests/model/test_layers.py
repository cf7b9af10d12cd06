"""Orders of layers: what a text describes, and that passes in them compute what the papers say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.tiny_models import byte_ids, tiny_target
from torch import Tensor
from transformers import PreTrainedModel

from offload_rt.attention.backends import TorchCpuBackend
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.streaming import StreamingCache
from offload_rt.errors import UsageError
from offload_rt.model.config_shapes import shape_of
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.passes import PassInput
from offload_rt.model.runner import CausalModel

LAYERS = 6


@pytest.mark.parametrize(
    ("text", "layers", "groups"),
    [
        ("groups:4", 16, [[0], [1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14], [15]]),
        ("groups:2", 6, [[0], [1], [2, 3], [4], [5]]),
        ("groups:2@1", 8, [[0], [1, 2], [3, 4], [5, 6], [7]]),
        ("groups:4@2", 8, [[0], [1], [2, 3, 4, 5], [6], [7]]),
        ("groups:1", 4, [[0], [1], [2], [3]]),
        ("groups:9", 5, [[0], [1, 2, 3], [4]]),
        ("groups:3", 2, [[0], [1]]),
        ("groups:3", 1, [[0]]),
    ],
)
def test_groups_are_aligned_between_the_first_and_the_last_layer(
    text: str, layers: int, groups: list[list[int]]
) -> None:
    plan = LayerOrder.parse(text, layers)
    assert plan is not None
    assert [list(group) for group in plan.groups] == groups
    assert sum(plan.groups, ()) == tuple(range(layers))
    assert not plan.no_attention and not plan.no_mlp


def test_what_is_skipped() -> None:
    plan = LayerOrder.parse("skip:5, 7a,9m,5", 12)
    assert plan is not None
    assert plan.no_attention == {5, 7} and plan.no_mlp == {5, 9}
    assert plan.groups == LayerOrder.whole(12).groups
    assert [layer for layer in range(12) if not plan.exact(layer)] == [5, 7, 9]
    assert LayerOrder.parse("all", 12) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write all, groups:N"),
        ("groups:2@", "write all, groups:N"),
        ("groups:@1", "write all, groups:N"),
        ("groups:2@a", "write all, groups:N"),
        ("every", "write all, groups:N"),
        ("groups", "write all, groups:N"),
        ("groups:0", r"groups:N@F \(N at least 1\)"),
        ("groups:-2", "write all, groups:N"),
        ("groups:2.5", "write all, groups:N"),
        ("skip:", "write all, groups:N"),
        ("skip:1,", "'' is not a layer"),
        ("skip:1b", "'1b' is not a layer like 5, 5a or 5m"),
        ("skip:1am", "'1am' is not a layer"),
        ("skip:a", "'a' is not a layer"),
        ("skip:-1", "'-1' is not a layer"),
        ("skip:4", "layer 4 does not exist in a model of 4 layers, 0 to 3; python -m bench search-skips"),
        ("skip:0,1a,2,3", "no attention is left; skip fewer layers"),
    ],
)
def test_what_is_no_order_of_layers(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        LayerOrder.parse(text, 4)
    assert str(caught.value).startswith(f"layers {text!r}: ")


@pytest.fixture(scope="module", params=["llama-gqa", "qwen3"])
def target(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_target(request.param, layers=LAYERS)


def cached_logits(model: CausalModel, tokens: Sequence[int], text: str) -> Tensor:
    """Of all tokens, in passes of a few over a cache that holds everything."""
    cache = StreamingCache(
        model.kv_layout(),
        model.rotary_frequencies,
        sinks=0,
        window=len(tokens),
        backend=TorchCpuBackend(),
    )
    plan, found = model.layer_order(text), []
    for start in range(0, len(tokens), 7):
        part = tokens[start : start + 7]
        parents = range(start - 1, start + len(part) - 1)
        new = NewTokens.below(cache.speculative, parents, part)
        (output,) = model.forward([PassInput(cache, new, rows=len(part))], plan)
        found.append(output.logits)
        cache.commit(range(len(part)))
    return torch.cat(found)


@torch.inference_mode()
def plain_logits(
    module: PreTrainedModel,
    tokens: Sequence[int],
    groups: Sequence[Sequence[int]],
    no_attention: Sequence[int] = (),
    no_mlp: Sequence[int] = (),
) -> Tensor:
    """Without caches, through transformers' own blocks and attention.

    In a group the first attention block's input is that of all (EasySpec, arXiv 2502.02493); a block that is
    skipped adds nothing (Draft & Verify, arXiv 2309.08168).
    """
    body = module.model
    hidden = body.embed_tokens(torch.tensor([tokens]))
    rotary = body.rotary_emb(hidden, position_ids=torch.arange(len(tokens))[None])
    for group in groups:
        shared = hidden
        for block, layer in ((body.layers[layer], layer) for layer in group):
            if layer not in no_attention:
                attended = block.self_attn(
                    block.input_layernorm(shared), position_embeddings=rotary, attention_mask=None
                )
                hidden = hidden + attended[0]
            if layer not in no_mlp:
                hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    logits: Tensor = module.lm_head(body.norm(hidden))[0]
    return logits


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


TOKENS = byte_ids(40)
ALONE = [[layer] for layer in range(LAYERS)]


def test_groups_of_one_are_the_model_itself(target: PreTrainedModel) -> None:
    model = CausalModel(target, "tiny")
    with torch.inference_mode():
        exact = target(torch.tensor([TOKENS])).logits[0]
    close(cached_logits(model, TOKENS, "all"), exact)
    assert torch.equal(cached_logits(model, TOKENS, "groups:1"), cached_logits(model, TOKENS, "all"))
    close(plain_logits(target, TOKENS, ALONE), exact)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("groups:2", [[0], [1], [2, 3], [4], [5]]),
        ("groups:3", [[0], [1, 2], [3, 4], [5]]),
        ("groups:8", [[0], [1, 2, 3, 4], [5]]),
    ],
)
def test_a_group_shares_its_input(target: PreTrainedModel, text: str, groups: list[list[int]]) -> None:
    found = cached_logits(CausalModel(target, "tiny"), TOKENS, text)
    close(found, plain_logits(target, TOKENS, groups))
    assert (found - plain_logits(target, TOKENS, ALONE)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("text", "no_attention", "no_mlp"),
    [
        ("skip:2", [2], [2]),
        ("skip:0a,5m", [0], [5]),
        ("skip:1,3a,4m,5", [1, 3, 5], [1, 4, 5]),
        ("skip:0,1,2,3,4", range(5), range(5)),
    ],
)
def test_a_skipped_block_adds_nothing(
    target: PreTrainedModel, text: str, no_attention: Sequence[int], no_mlp: Sequence[int]
) -> None:
    found = cached_logits(CausalModel(target, "tiny"), TOKENS, text)
    close(found, plain_logits(target, TOKENS, ALONE, no_attention, no_mlp))
    assert (found - plain_logits(target, TOKENS, ALONE)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("granite", r"GraniteForCausalLM\) does more in a layer.*use layers all"),
        ("gemma3", r"Gemma3ForCausalLM\) does more in a layer.*use layers all"),
        ("cohere", r"cohere cannot be run block by block: .*post_attention_layernorm"),
    ],
)
def test_layers_that_are_not_two_blocks_are_refused(arch: str, message: str) -> None:
    model = CausalModel(tiny_target(arch, layers=3), arch)
    assert model.layer_order("all") is None
    with pytest.raises(UsageError, match=message):
        model.layer_order("groups:2")


def test_blocks_that_are_left_out_cost_nothing() -> None:
    whole, half = (
        shape_of(tiny_target("llama", layers=layers), None, "tiny") for layers in (LAYERS, LAYERS // 2)
    )
    plans = {
        text: LayerOrder.parse(text, LAYERS) or LayerOrder.whole(LAYERS)
        for text in ("groups:2", "skip:1,3,4")
    }
    assert whole.running(plans["groups:2"]) == whole
    halved = whole.running(plans["skip:1,3,4"])
    # But for the norms, which count as part of no block.
    assert halved.layers == half.layers and halved.step_bytes == pytest.approx(half.step_bytes, rel=0.01)
    assert halved.token_bytes == half.token_bytes
