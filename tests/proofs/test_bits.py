"""Not a bit of what the target computes of a text depends on drafts, trees, batches, drafting ahead, threads.

The log probabilities and the KV of every token are those of plain decoding, to the last bit, in float32 and
in bfloat16, and the KV that of reading the tokens in one go: on a CPU, for models with full attention whose
layers run in the native library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.bits import LEVELS, STEPS, Program, drafting, kv_of, run_program
from support.small_engine import LINKS, PROMPT, engine_overrides
from support.tiny_models import byte_ids, noisy_copy, tiny_target, to
from torch import Tensor
from transformers import PreTrainedModel

from offload_rt import LLM, Context, SamplingParams
from offload_rt.kernels import dense
from offload_rt.kernels.native import load_kernel

pytestmark = pytest.mark.skipif(load_kernel() is None, reason="needs the native library")

LENGTH = 48


MODELS: dict[str, tuple[torch.dtype, dict[str, int]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "dots": (torch.bfloat16, {"head_dim": 32}),
}
"""With head_dim 32, processors that have them use dot products of bfloat16 pairs."""


ODD_SIZES: dict[str, object] = {
    "store.page": 48,
    "store.slab_tokens": 96,
    "store.segment_bytes": 4096,
    "retrieval.chunk": 24,
    "retrieval.budget": 72,
    "retrieval.recent": 24,
}
"""Chunks that are no power of two, of which the native library takes no mass; segments of one page."""


@pytest.fixture(scope="module", autouse=True)
def tiles() -> Iterator[None]:
    """Small models by tiles too, where there are some: test_dense.py compares both ways of large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "TILED_BYTES", 0)
        yield


@dataclass(frozen=True)
class Text:
    """What plain decoding writes behind a prompt."""

    tokens: list[int]
    logprobs: list[float]
    kv: Tensor


@cache
def models(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    dtype, settings = MODELS[name]
    target = to(tiny_target("llama-gqa", **settings), dtype)
    return target, noisy_copy(target)


def open_llm(name: str, config: str, overrides: Mapping[str, object], link: str = "in place") -> LLM:
    options: dict[str, Any] = {"overrides": {**engine_overrides(), **overrides}, "link": LINKS[link]()}
    return LLM.from_models(*models(name), config=config, **options)


@cache
def plainly(name: str, prompt: int, odd: bool = False) -> Text:
    with open_llm(name, "plain", ODD_SIZES if odd else {}) as llm:
        context = llm.read(PROMPT[:prompt])
        result = context.generate((), SamplingParams(max_tokens=LENGTH, logprobs=0))
        assert result.logprobs is not None
        return Text(context.tokens, result.logprobs, kv_of(context, prompt + LENGTH - 1))


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(MODELS)),
    levels=st.sampled_from(list(LEVELS)),
    shape=st.sampled_from(["chain", "tree:2,2", "tree:4,3,3,2", "sequences:3", "grown:12"]),
    depth=st.integers(1, 5),
    prompt=st.integers(20, 100),
    link=st.sampled_from(list(LINKS)),
    ahead=st.sampled_from([0, 2]),
    threads=st.integers(1, 3),
)
def test_drafts_change_no_bit(
    name: str,
    levels: str,
    shape: str,
    depth: int,
    prompt: int,
    link: str,
    ahead: int,
    threads: int,
) -> None:
    """Whatever is drafted, in passes of up to 197 tokens."""
    text = plainly(name, prompt)
    overrides = {**drafting(levels, shape, depth), "offload.ahead": ahead}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with open_llm(name, "retrieval", overrides, link) as llm:
            context = llm.read(PROMPT[:prompt])
            result = context.generate((), SamplingParams(max_tokens=LENGTH, logprobs=0))
            assert context.tokens == text.tokens
            assert result.logprobs == text.logprobs
            assert torch.equal(kv_of(context, prompt + LENGTH - 1), text.kv)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_chunks_of_any_size_change_no_bit(name: str) -> None:
    """Over a link, whose segments come one after the other, each with its attention mass."""
    text = plainly(name, len(PROMPT), odd=True)
    overrides = {**drafting("retrieved", "chain", 3), **ODD_SIZES}
    with open_llm(name, "retrieval", overrides, "link") as llm:
        context = llm.read(PROMPT)
        result = context.generate((), SamplingParams(max_tokens=LENGTH, logprobs=0))
    assert result.timings.drafted_tokens
    assert result.tokens == text.tokens[len(PROMPT) :] and result.logprobs == text.logprobs


@settings(derandomize=True, max_examples=10, deadline=None)
@given(
    name=st.sampled_from(list(MODELS)),
    levels=st.sampled_from(list(LEVELS)),
    shape=st.sampled_from(["chain", "tree:2,2"]),
    prompts=st.lists(st.integers(20, 100), min_size=2, max_size=8),
    link=st.sampled_from(list(LINKS)),
)
def test_a_batch_changes_no_bit(name: str, levels: str, shape: str, prompts: list[int], link: str) -> None:
    """Texts of other lengths, which share the passes, forks among them."""
    with open_llm(name, "retrieval", drafting(levels, shape, 3), link) as llm:
        contexts = [llm.read(PROMPT[:prompt]) for prompt in prompts]
        prompts, contexts = [*prompts, prompts[0]], [*contexts, contexts[0].fork()]
        results = llm.generate_from(contexts, None, SamplingParams(max_tokens=LENGTH, logprobs=0))
        for prompt, context, result in zip(prompts, contexts, results, strict=True):
            text = plainly(name, prompt)
            assert context.tokens == text.tokens
            assert result.logprobs == text.logprobs
            assert torch.equal(kv_of(context, prompt + LENGTH - 1), text.kv)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    name=st.sampled_from(list(MODELS)),
    levels=st.sampled_from(list(LEVELS)),
    shape=st.sampled_from(["chain", "tree:2,2", "grown:12"]),
    link=st.sampled_from(list(LINKS)),
    code=st.sampled_from(["raw", "auto"]),
    chunk=st.sampled_from([1, 7, 32, 2048]),
    steps=st.lists(STEPS, min_size=3, max_size=7),
)
def test_a_program_changes_no_bit(
    name: str, levels: str, shape: str, link: str, code: str, chunk: int, steps: list[tuple[str, int]]
) -> None:
    """What is done with a context between the texts that it writes; it could be read in one go, too."""

    def run(config: str, overrides: Mapping[str, object]) -> Program:
        with open_llm(name, config, {**overrides, "store.code": code}, link) as llm:
            return run_program(llm, [*steps, ("generate", 10)])

    plain, drafted = run("plain", {}), run("retrieval", drafting(levels, shape, 3))
    assert plain.exactness | drafted.exactness == {"bits"}
    assert drafted.tokens == plain.tokens and drafted.logprobs == plain.logprobs
    assert torch.equal(drafted.kv, plain.kv)
    with open_llm(name, "plain", {"prefill.chunk": chunk}) as llm:
        read = llm.read(plain.tokens)
        assert torch.equal(kv_of(read, len(plain.tokens) - 1), plain.kv)


@settings(derandomize=True, max_examples=12, deadline=None)
@given(
    name=st.sampled_from(list(MODELS)),
    link=st.sampled_from(list(LINKS)),
    prompt=st.integers(20, 100),
    chunk=st.sampled_from([1, 7, 32, 2048]),
    piece=st.sampled_from([0, 30, 64]),
    start=st.integers(0, 60),
    cached=st.integers(1, 100),
)
def test_a_score_has_the_bits_of_decoding(
    name: str, link: str, prompt: int, chunk: int, piece: int, start: int, cached: int
) -> None:
    """Log probabilities of tokens that are read are those of tokens that are decoded, with a prefix too."""
    text = plainly(name, prompt)
    with open_llm(name, "plain", {"prefill.chunk": chunk, "prefill.piece": piece}, link) as llm:
        score = llm.score(text.tokens, top=1, start=start)
        scored = max(prompt, start)
        assert score.logprobs[scored:] == text.logprobs[scored - prompt :]
        assert all(score.greedy[scored:])
        assert score.logprobs.count(None) == max(1, start) == score.greedy.count(None)
        with llm.read(text.tokens[:cached]) as context:
            behind = context.score(text.tokens[cached:], top=1)
        assert behind.logprobs[max(cached, prompt) :] == text.logprobs[max(0, cached - prompt) :]


WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 1024},
    "qwen2": {"use_sliding_window": True, "sliding_window": 1100, "max_window_layers": 1},
}
LONG = byte_ids(2000)


@cache
def windowed(arch: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = to(tiny_target(arch, max_position_embeddings=4096, **WINDOWED[arch]), dtype)
    return target, noisy_copy(target)


def open_windowed(
    arch: str, dtype: torch.dtype, config: str, overrides: Mapping[str, object], link: str = "in place"
) -> LLM:
    options: dict[str, Any] = {"overrides": {**engine_overrides(), **overrides}, "link": LINKS[link]()}
    target, draft = windowed(arch, dtype)
    return LLM.from_models(target, draft, config=config, **options)


def windows_of(context: Context) -> Tensor:
    """The newest 1,000 tokens' KV of the layers with windows."""
    windows = context._sequence.full.local.history.windows.values()
    return torch.stack([window.kv[:, :, -1000:] for window in windows])


@cache
def plain_windows(arch: str, dtype: torch.dtype, prompt: int) -> Text:
    with open_windowed(arch, dtype, "plain", {}) as llm:
        context = llm.read(LONG[:prompt])
        result = context.generate((), SamplingParams(max_tokens=LENGTH, logprobs=0))
        assert result.logprobs is not None and result.exactness == "bits"
        return Text(context.tokens, result.logprobs, windows_of(context))


@settings(derandomize=True, max_examples=12, deadline=None, phases=[Phase.generate])
@given(
    arch=st.sampled_from(list(WINDOWED)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    levels=st.sampled_from(["draft", "lookup", "retrieved"]),
    shape=st.sampled_from(["chain", "tree:4,3,3,2", "grown:12"]),
    prompt=st.sampled_from([200, 1010, 1270, 1300, 1535]),
    chunk=st.sampled_from([7, 300, 2048]),
    link=st.sampled_from(list(LINKS)),
)
def test_windows_change_no_bit(
    arch: str, dtype: torch.dtype, levels: str, shape: str, prompt: int, chunk: int, link: str
) -> None:
    """Texts that leave their windows while they are read, while they are written, or not at all."""

    if arch == "mistral" and levels == "retrieved":  # of full attention, which it has not
        levels = "draft"
    plain = plain_windows(arch, dtype, prompt)
    with open_windowed(arch, dtype, "retrieval", drafting(levels, shape, 4), link) as llm:
        context = llm.read(LONG[:prompt])
        result = context.generate((), SamplingParams(max_tokens=LENGTH, logprobs=0))
        assert result.exactness == "bits"
        assert context.tokens == plain.tokens and result.logprobs == plain.logprobs
        assert torch.equal(windows_of(context), plain.kv)
    with open_windowed(arch, dtype, "plain", {"prefill.chunk": chunk}) as llm:
        assert torch.equal(windows_of(llm.read(plain.tokens)), plain.kv)


def exactness(model: PreTrainedModel) -> tuple[str, str]:
    with LLM.from_models(model, config="plain", overrides=engine_overrides()) as llm:
        result = llm.generate(PROMPT[:20], SamplingParams(max_tokens=2))
    values = result.to_json()
    assert values["exactness"] == result.exactness
    assert values.get("exactness_reason", "") == result.exactness_reason
    return result.exactness, result.exactness_reason


def test_a_result_says_whether_its_bits_are_those_of_plain_decoding() -> None:
    model = models("bfloat16")[0]
    assert exactness(model) == ("bits", "")
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert exactness(model) == ("distribution", "LlamaDecoderLayer, which runs in torch")
    hook.remove()
    hook = model.lm_head.register_forward_hook(lambda *_: None)
    assert exactness(model) == ("distribution", "the output head, which runs in torch")
    hook.remove()
    assert exactness(model) == ("bits", "")


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        ("granite", "GraniteDecoderLayer, which runs in torch"),
        ("gemma3", "Gemma3DecoderLayer, which runs in torch"),
        ("mistral", "sliding windows of 16 tokens"),
    ],
)
def test_other_models_keep_the_distribution(arch: str, reason: str) -> None:
    window = {"sliding_window": 16} if arch == "mistral" else {}
    assert exactness(tiny_target(arch, **window)) == ("distribution", reason)


def test_attention_of_several_devices_keeps_the_distribution() -> None:
    reason = "attention that several devices share"
    overrides = {**engine_overrides(), "offload.cpu_tokens": 64}
    with LLM.from_models(
        models("float32")[0], config="plain", overrides=overrides, link=LINKS["link"]()
    ) as llm:
        result = llm.generate(PROMPT[:100], SamplingParams(max_tokens=2))
    assert (result.exactness, result.exactness_reason) == ("distribution", reason)


def test_attention_of_torch_keeps_the_distribution() -> None:
    kernel = load_kernel()
    assert kernel is not None
    narrow = tiny_target("llama-gqa", head_dim=kernel.lanes // 2)
    reason = f"attention to heads of {kernel.lanes // 2} entries, which runs in torch"
    assert exactness(narrow) == ("distribution", reason)
