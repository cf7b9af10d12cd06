"""What the runner takes and refuses, that it leaves models as found, and how it reports NaN."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.small_engine import again
from support.tiny_models import (
    ARCHITECTURES,
    byte_ids,
    noisy_copy,
    random_model,
    tiny_draft,
    tiny_target,
    to,
    transformers_greedy,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaModel, PreTrainedModel

from cpu_kv import CopyFailed
from offload_rt import LLM, SamplingParams
from offload_rt.attention.backends import TorchCpuBackend
from offload_rt.attention.sums import Softmax
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.streaming import StreamingCache
from offload_rt.errors import UsageError
from offload_rt.model.attention_hook import ATTENTION_NAME
from offload_rt.model.decoder import NotANumber
from offload_rt.model.passes import PassInput
from offload_rt.model.runner import CausalModel

SHORT = SamplingParams(max_tokens=12)
SMALL = {"retrieval.budget": 64, "retrieval.recent": 16, "streaming.sinks": 4, "streaming.window": 28}


def other(model_type: str, **settings: Any) -> PreTrainedModel:
    """A tiny model of an architecture that is not in `ARCHITECTURES`."""
    sizes = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": None,
    }
    return random_model(model_type, **sizes | settings)


class ScaledLlamaModel(LlamaModel):
    """Scales its embeddings between its modules, as Gemma does in some versions of transformers."""

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> Any:
        return super().forward(**inputs | {"inputs_embeds": 8 * self.embed_tokens(input_ids)})


def scaled_embeddings() -> PreTrainedModel:
    model = tiny_target("llama")
    assert isinstance(model.config, LlamaConfig)
    body = ScaledLlamaModel(model.config)
    body.load_state_dict(model.model.state_dict())
    model.model = body
    return model


def other_granite() -> PreTrainedModel:
    """One whose config no longer says what its modules do."""
    model = tiny_target("granite")
    model.config.embedding_multiplier = 2.0
    return model


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
DEEPSEEK = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
    "first_k_dense_replace": 2,
}
MORE = "is not supported: it does more than run its decoder layers"
NO_KEYWORDS = "is not supported: its layers do not pass keyword arguments on"
ATTENTION = "is not supported: its attention has"

REFUSED = {
    "dynamic": (partial(tiny_target, "llama", rope_parameters=DYNAMIC), r"LlamaForCausalLM .*\(dynamic\)"),
    "scaled": (scaled_embeddings, f"LlamaForCausalLM {MORE}"),
    "granite": (other_granite, f"GraniteForCausalLM {MORE}"),
    "nanochat": (partial(other, "nanochat"), f"NanoChatForCausalLM {MORE}"),
    "gpt2": (partial(other, "gpt2"), "GPT2LMHeadModel is not supported: it has no model.embed_tokens"),
    "mamba": (
        partial(other, "mamba"),
        "MambaForCausalLM .*layers of type linear_attention|MambaForCausalLM .*it has no model",
    ),
    "gemma2": (
        partial(other, "gemma2"),
        r"Gemma2ForCausalLM is not supported: it has attention with capped scores \(attn_logit_soft",
    ),
    "llama4": (partial(other, "llama4_text"), "Llama4ForCausalLM has layers of type chunked_attention"),
    "doge": (partial(other, "doge"), f"DogeForCausalLM {ATTENTION} a mask of its own$"),
    "nemotron": (partial(other, "nemotron"), f"NemotronForCausalLM {NO_KEYWORDS}"),
    "stablelm": (partial(other, "stablelm"), f"StableLmForCausalLM {NO_KEYWORDS}"),
    "deepseek": (
        partial(other, "deepseek_v3", **DEEPSEEK),
        r"DeepseekV3ForCausalLM is not supported: it has latent attention \(MLA\)",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name_and_left_as_found(make: Any, message: str) -> None:
    model = make().train()
    given = model.config._attn_implementation
    with pytest.raises(UsageError, match=message) as caught:
        CausalModel(model, "some/model")
    assert str(caught.value).startswith("some/model: ") and "\n" not in str(caught.value)
    assert model.training and model.config._attn_implementation == given


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_taken(arch: str, dtype: torch.dtype) -> None:
    model = CausalModel(to(tiny_target(arch), dtype), arch)
    assert (model.vocabulary, model.layers, model.head_dim, model.dtype) == (256, 2, 16, dtype)


def test_the_check_decides_and_not_a_list_of_names() -> None:
    """Gemma's scaled embeddings fit where they are a module of their own, and are refused where not."""
    model = other("gemma", eos_token_id=None, bos_token_id=None, initializer_range=0.3)
    expected = transformers_greedy(model, byte_ids(30), SHORT.max_tokens)
    try:
        llm = LLM.from_models(model, config="lookup")
    except UsageError as error:
        assert "GemmaForCausalLM is not supported" in str(error)
        return
    with llm:
        assert llm.generate(byte_ids(30), SHORT).tokens == expected


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_models_are_left_as_found(attention: str) -> None:
    target = tiny_target("llama-gqa")
    draft = noisy_copy(target)
    target.train()
    for model in (target, draft):
        model.set_attn_implementation(attention)
    before = [transformers_greedy(model, byte_ids(20), 10) for model in (target, draft)]
    state = copy.deepcopy(target.state_dict())
    keys = set(vars(target)), set(vars(target.config))
    llm = LLM.from_models(target, draft, config="naive", overrides=SMALL)
    llm.generate(byte_ids(50), SHORT)
    llm.close()
    assert target.training and not draft.training
    for model in (target, draft):
        assert model.config._attn_implementation == attention
    assert (set(vars(target)), set(vars(target.config))) == keys
    assert all(torch.equal(value, state[name]) for name, value in target.state_dict().items())
    assert [transformers_greedy(model, byte_ids(20), 10) for model in (target, draft)] == before


def test_models_are_left_as_found_where_no_llm_comes_of_them() -> None:
    target = tiny_target("llama").train()
    for draft, message in (
        (tiny_draft(300), "LlamaForCausalLM has 300 tokens .* has 256: a draft must share"),
        (other("doge"), "a mask of its own"),
        (None, "drafts with a small model"),
    ):
        with pytest.raises(UsageError, match=message):
            LLM.from_models(target, draft, config="naive")
        assert target.training
    # Where no level of the config drafts with it, nobody asks.
    with LLM.from_models(target, tiny_draft(300), config="lookup") as llm:
        assert llm.generate(byte_ids(5), SHORT).draft is None


def test_a_model_may_draft_for_itself() -> None:
    target = tiny_target("llama").train()
    prompt = byte_ids(10)
    with LLM.from_models(target, target, config="naive", overrides={"speculation.step_down": False}) as llm:
        with llm.read(prompt) as context:
            result, plain = again(context, SHORT), again(context, SHORT, "plain")
        assert result.tokens == plain.tokens
    assert result.timings.accepted_tokens == result.timings.drafted_tokens > 0
    assert target.config._attn_implementation == "sdpa" and target.training


@pytest.mark.parametrize(
    ("weight", "value"),
    [
        ("model.layers.1.mlp.down_proj.weight", torch.nan),
        ("lm_head.weight", torch.inf),
        ("model.norm.weight", -torch.inf),
    ],
)
def test_a_weight_that_is_no_number_is_named(weight: str, value: float) -> None:
    target = tiny_target("llama")
    draft = noisy_copy(target)
    draft.config._name_or_path = "the/draft"
    message = rf"the weight {weight} has NaN or infinite entries; check its file"
    for model, name in ((draft, "the/draft: "), (target, "")):
        with torch.no_grad():
            model.get_parameter(weight).view(-1)[5] = value
        with pytest.raises(NotANumber, match=name + message):
            LLM.from_models(target, draft, config="naive", overrides=SMALL)


@pytest.mark.parametrize("config", ["plain", "triforce"])
def test_an_embedding_that_is_no_number_is_named_where_its_token_occurs(config: str) -> None:
    target = tiny_target("llama")
    draft = noisy_copy(target)
    with torch.no_grad():
        target.model.embed_tokens.weight[99, 5] = torch.inf
    with (
        LLM.from_models(target, draft, config=config, overrides=SMALL) as llm,
        pytest.raises(NotANumber, match=r"the weight model\.embed_tokens\.weight has NaN or infinite"),
    ):
        llm.generate([*byte_ids(30), 99], SHORT)


@pytest.mark.parametrize(
    ("config", "value"), [("plain", torch.nan), ("streaming", torch.nan), ("plain", torch.inf)]
)
@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("model.layers.0.mlp", "output of layer 0.*even in float32"),
        ("model.layers.1.mlp", "output of layer 1.*even in float32"),
        ("model.norm", "final norm and head"),
    ],
)
def test_nan_is_named_where_it_arises(module: str, message: str, config: str, value: float) -> None:
    target = tiny_target("llama")
    with LLM.from_models(target, config=config, overrides=SMALL) as llm:
        expected = llm.generate(byte_ids(30), SHORT).tokens
        hook = target.get_submodule(module).register_forward_hook(
            lambda module, inputs, output: torch.full_like(output, value)
        )
        with pytest.raises(NotANumber, match=message):
            llm.generate(byte_ids(30), SHORT)
        hook.remove()
        # The failure leaves nothing behind.
        assert llm.generate(byte_ids(30), SHORT).tokens == expected


class Breakable(StreamingCache):
    """Attention fails in the layer `fails_in`; -1: no pass begins."""

    fails_in: int | None = None

    def begin(self, new: NewTokens) -> None:
        if self.fails_in == -1:
            raise CopyFailed("layer -1")
        super().begin(new)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        if layer == self.fails_in:
            raise CopyFailed(f"layer {layer}")
        return super().attend(layer, queries, keys, values, softmax)


def part_of(model: CausalModel, text: list[int], parents: list[int], rows: int) -> PassInput:
    """A part over a cache that holds the start of `text`; the rest, in a forest, is new."""
    cache = Breakable(
        model.kv_layout(),
        model.rotary_frequencies,
        sinks=2,
        window=60,
        backend=TorchCpuBackend(),
    )
    old = len(text) - len(parents)
    if old:
        start = NewTokens.below(cache.speculative, range(-1, old - 1), text[:old])
        model.forward([PassInput(cache, start, rows=1)])
        cache.commit(range(old))
        cache.settle()
    return PassInput(cache, NewTokens.below(cache.speculative, parents, text[old:]), rows, states=rows > 1)


# As many new tokens together as the native layers take: with more, all products are other ones.
PARTS = [
    (byte_ids(40), [-1], 1),
    (byte_ids(9, start=100), [-1, 0, 0, 1, 1, -1], 6),
    (byte_ids(25, start=200), list(range(-1, 21)), 3),
    (byte_ids(31, start=300), [-1, 0, 1], 1),
]


@pytest.mark.parametrize("arch", ["llama-gqa", "qwen3"])
@pytest.mark.parametrize(
    ("failing", "layer"), [(None, 0), (0, -1), (0, 1), (1, 0), (2, -1), (2, 1), (3, 0), (3, 1)]
)
def test_sequences_of_one_pass_neither_see_nor_fail_each_other(
    arch: str, failing: int | None, layer: int
) -> None:
    model = CausalModel(tiny_target(arch), arch)
    alone = [model.forward([part_of(model, *part)])[0] for part in PARTS]
    together = [part_of(model, *part) for part in PARTS]
    if failing is not None:
        broken = together[failing].cache
        assert isinstance(broken, Breakable)
        broken.fails_in = layer
    for number, (part, found, expected) in enumerate(
        zip(together, model.forward(together), alone, strict=True)
    ):
        if number == failing:
            assert isinstance(found.error, CopyFailed) and str(found.error) == f"layer {layer}"
            continue
        assert found.logits.shape == (part.rows, model.vocabulary) and found.error is None
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
        assert (found.states is None) == (expected.states is None) == (not part.states)
        if found.states is not None and expected.states is not None:
            torch.testing.assert_close(found.states, expected.states, rtol=1e-5, atol=1e-5)
    if failing is not None:
        with pytest.raises(CopyFailed, match=f"layer {layer}"):  # nobody else is in the pass
            model.forward([together[failing]])


def test_a_second_runner_is_made_while_another_thread_is_in_a_pass() -> None:
    module = tiny_target("llama-gqa")
    first, made = CausalModel(module, "tiny"), list[CausalModel]()
    expected = first.forward([part_of(first, *PARTS[0])])[0].logits

    def hooked_once(act: Callable[[], None]) -> Tensor:
        """Logits where something is done in the first layer, whose own modules run then as it has a hook."""

        def once(*_: object) -> None:
            hook.remove()
            act()

        hook = module.model.layers[0].register_forward_hook(once)
        return first.forward([part_of(first, *PARTS[0])])[0].logits

    def make() -> None:
        thread = threading.Thread(target=lambda: made.append(CausalModel(module, "tiny")))
        thread.start()
        thread.join()

    assert torch.equal(hooked_once(make), hooked_once(lambda: None))
    assert torch.equal(made[0].forward([part_of(made[0], *PARTS[0])])[0].logits, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("first", [0, 1])
def test_the_last_runner_of_a_model_leaves_it_as_it_was_given(attention: str, first: int) -> None:
    module = tiny_target("llama").train()
    module.set_attn_implementation(attention)
    runners = [CausalModel(module, "tiny") for _ in range(2)]
    expected = runners[0].probe()
    for _ in range(2):
        runners[first].restore()  # the second time in vain
        assert module.config._attn_implementation == ATTENTION_NAME and not module.training
    assert torch.equal(runners[1 - first].probe(), expected)
    runners[1 - first].restore()
    assert module.config._attn_implementation == attention and module.training
    with pytest.raises(UsageError, match=f"tiny: its attention was changed to '{attention}' while"):
        runners[0].probe()


def test_a_model_generates_by_itself_while_it_is_open() -> None:
    """Beside our passes, and of several padded sequences, for which transformers makes masks."""
    model: Any = tiny_target("llama-gqa")
    padded = torch.tensor([byte_ids(20), [0] * 8 + byte_ids(12)])
    given = {"input_ids": padded, "attention_mask": (torch.arange(20) >= torch.tensor([[0], [8]])).long()}

    def generated() -> tuple[list[int], list[list[int]]]:
        several = model.generate(**given, max_new_tokens=10, do_sample=False, eos_token_id=None)
        return transformers_greedy(model, byte_ids(50), 10), several.tolist()

    expected = generated()
    with LLM.from_models(model, config="retrieval", overrides=SMALL) as llm:
        ours = llm.generate(byte_ids(90), SHORT).tokens
        stream = llm.stream(byte_ids(90), SHORT)
        next(stream)
        assert generated() == expected
        assert [ours[0], *(event.token for event in stream)] == ours
    assert generated() == expected
