"""The engine over a store of packed pages does bit by bit what it does over one of raw pages.

On a GPU another kernel attends to packed pages, whose sums are rounded otherwise.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_engine import (
    CPU,
    CUDA,
    PAGE,
    PROMPT,
    SIZES,
    engine_overrides,
    link_to,
    other_gpu,
    place,
    tier_keys,
)
from support.tiny_models import noisy_copy, tiny_target, to

from cpu_kv import KVLayout
from offload_rt import LLM, Context, SamplingParams, UsageError
from offload_rt.caches.sizes import GpuTier, Tiers, stored_layout
from offload_rt.engine.saved_context import SavedContext
from offload_rt.text.tokenize import common_beginning

SHARES = [Tiers(), Tiers(32, 48), Tiers(16, 32, (GpuTier(16, 16),)), Tiers(64, 32, packed=False)]
GREEDY, HOT = SamplingParams(max_tokens=12), SamplingParams(max_tokens=8, temperature=1.0, seed=3)


def opened(device: torch.device, config: str, code: str, shares: Tiers) -> LLM:
    target = to(tiny_target("llama-gqa"), torch.bfloat16)
    draft = noisy_copy(target)
    llm = LLM.from_models(
        to(target, device),
        to(draft, device),
        config=config,
        overrides=engine_overrides(ahead=0, **tier_keys(shares)) | {"store.code": code},
        link=link_to(device),
        other_links=[link_to(other_gpu(device)) for _ in shares.gpus],
    )
    place(llm, shares)
    return llm


def outcome(llm: LLM, second: SamplingParams = HOT) -> tuple[Any, ...]:
    """Tokens, rounds and prompts, greedy and sampled, of a sequence that is read on and cut within a page."""
    with llm, llm.read(PROMPT) as context:
        found = []
        for params in (GREEDY, second):
            prompt = list(context.tokens)
            result = context.generate((), params)
            context.append(PROMPT[:21])
            context.rewind(len(context.tokens) - 9)
            found.append((result.tokens, result.rounds, [one.accepted for one in result.levels], prompt))
        with context.fork() as fork:
            found.append((fork.generate((), second).tokens, 0, [], list(context.tokens)))
        layout = llm.engine.store.layout
        assert layout.packed == (llm.engine.planner.configs[0].store.code != "raw")
    return tuple(found)


CASES = [pytest.param(CPU, config, SHARES[1], id=f"{config}-paced") for config in ("plain", "triforce")]
CASES += [pytest.param(CPU, "retrieval", shares, id=f"paced-{n}") for n, shares in enumerate(SHARES)]
CASES += [
    pytest.param(CUDA, config, shares, id=f"{config}-cuda", marks=pytest.mark.gpu)
    for config, shares in (("retrieval", SHARES[1]), ("triforce", SHARES[2]))
]


@pytest.mark.parametrize(("device", "config", "shares"), CASES)
def test_the_same_tokens_in_the_same_rounds(device: torch.device, config: str, shares: Tiers) -> None:
    if device.type == "cpu":
        assert outcome(opened(device, config, "auto", shares)) == outcome(
            opened(device, config, "raw", shares)
        )
        return
    packed, raw = (outcome(opened(device, config, code, shares), GREEDY) for code in ("packed", "raw"))
    for one, other in zip(packed, raw, strict=True):
        if one != other:
            (tokens, *_, prompt), (others, *_) = one, other
            equal = common_beginning(tokens, others)
            assert gap([*prompt, *tokens[:equal]], tokens[equal], others[equal]) < 0.01
            break  # what follows is another sequence


def gap(text: list[int], one: int, other: int) -> float:
    """By how much the probabilities of two next tokens differ."""
    with torch.inference_mode():
        probs = tiny_target("llama-gqa")(torch.tensor([text])).logits[0, -1].softmax(-1)
    return float((probs[one] - probs[other]).abs())


def test_in_place_too(tmp_path: Path) -> None:
    """Attended as they lie; a saved context is as if never saved, whatever form its pages had."""
    target, path = to(tiny_target("llama-gqa"), torch.bfloat16), tmp_path / "a.safetensors"

    def make(code: str, page: int = PAGE) -> LLM:
        given = SIZES | {"store.code": code, "store.page": page}
        return LLM.from_models(target, config="retrieval", overrides=given)

    results = []
    for code in ("raw", "packed", "auto"):
        with make(code) as llm, llm.read(PROMPT) as context:
            assert llm.engine.store.layout.packed == (code == "packed")
            results.append((context.generate((), HOT).tokens, llm.engine.store.used_bytes))
            context.rewind(150)
            if code != "auto":
                context.save(path.with_name(code))
    assert results[0] == results[2] and results[1][0] == results[0][0] and results[1][1] < results[0][1]
    assert path.with_name("packed").stat().st_size < path.with_name("raw").stat().st_size
    for saved, code, page in product(("raw", "packed"), ("raw", "packed"), (PAGE, 2 * PAGE)):
        with make(code, page) as llm, make("raw", page) as other, other.read(PROMPT) as fresh:
            restored = llm.load(path.with_name(saved))
            assert restored.generate((), HOT).tokens == fresh.generate((), HOT).tokens


@pytest.mark.parametrize("load", ["packed", "raw"])
def test_pages_that_cannot_be_packed_are_saved_as_they_are(load: str, tmp_path: Path) -> None:
    """Also in a file of packed ones, and where a file is loaded in part."""
    target, path = to(tiny_target("llama-gqa"), torch.bfloat16), tmp_path / "a.safetensors"
    with LLM.from_models(target, config="plain", overrides=SIZES | {"store.code": "packed"}) as llm:
        context = llm.read(PROMPT)
        kv = llm.engine.sequences[0].full.sequence
        for page in (1, 3):
            kv.open_page(0, page * PAGE)[:] = kv.views(0, page * PAGE, (page + 1) * PAGE)[0].side(0)[:, None]
            kv.open_page(0, page * PAGE)[..., ::2] *= 2.0 ** (-60 * torch.arange(PAGE).fmod(2))[:, None]
        wanted = [torch.cat([torch.stack(pages.head_major()) for pages in kv.views(n)], 2) for n in range(2)]
        assert [at for at, _, pages in kv.forms(0, 0, 144) if pages is not None] == [PAGE, 3 * PAGE]
        context.save(path)
    for tokens in (PROMPT, PROMPT[: 3 * PAGE + 7]):
        with LLM.from_models(target, config="plain", overrides=SIZES | {"store.code": load}) as llm:
            with SavedContext(path) as file:
                Context.load(llm, file, 10, list(tokens))
            kv = llm.engine.sequences[0].full.sequence
            for n in range(2):
                found = torch.cat([torch.stack(pages.head_major()) for pages in kv.views(n)], 2)
                assert (
                    torch.equal(found, wanted[n][:, :, : found.shape[2]])
                    and found.shape[2] >= len(tokens) - 1
                )


def test_what_cannot_be_packed_is_refused() -> None:
    target = tiny_target("llama-gqa")
    remedy = "packs only bfloat16, but the model's KV is float32: run it with --dtype bfloat16"
    with pytest.raises(UsageError, match=remedy):
        LLM.from_models(target, config="plain", overrides=SIZES | {"store.code": "packed"})
    with pytest.raises(UsageError, match=r"store.code = 'zip': must be one of auto, raw, packed"):
        LLM.from_models(target, config="plain", overrides=SIZES | {"store.code": "zip"})
    layout = KVLayout(2, 2, 64, torch.bfloat16, page_size=64)
    assert stored_layout(layout, "auto", over_link=True).packed
    assert stored_layout(layout, "auto", over_link=True, triton=False) == layout, "plain torch is slow"
    assert stored_layout(layout, "packed", over_link=True, triton=False).packed
    layout = KVLayout(2, 2, 63, torch.bfloat16)
    assert stored_layout(layout, "auto", over_link=True) == layout
    with pytest.raises(UsageError, match=r"64,512 values in rows of 63, too many or an odd number"):
        stored_layout(layout, "packed", over_link=True)
