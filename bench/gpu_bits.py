"""The check of `python -m bench gpu` that compares every composition with plain decoding, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from bench.gpu_checks import Subject
from bench.random_models import random_model, random_prompt
from bench.results import Row
from cpu_kv import CudaLink
from offload_rt import LLM, GenerationResult, SamplingParams

CHAIN = [{"model": "target", "cache": "retrieved"}]
TREE = [{"model": "target", "cache": "retrieved", "draft": "tree:4,3,3,2"}]  # of more tokens than fixed rows
STREAMED: dict[str, object] = {"offload.resident_tokens": 0, "offload.cpu_tokens": 0}
COMPOSITIONS: dict[str, tuple[str, dict[str, object]]] = {
    "plain, streamed": ("plain", STREAMED),
    "retrieval": ("retrieval", {"speculation.levels": CHAIN}),
    "retrieval, streamed": ("retrieval", {"speculation.levels": CHAIN, **STREAMED}),
    "retrieval, streamed raw": ("retrieval", {"speculation.levels": CHAIN, **STREAMED, "store.code": "raw"}),
    "trees, streamed": ("retrieval", {"speculation.levels": TREE, **STREAMED}),
    "lookup": ("lookup", {}),
}


def bits(subject: Subject) -> Iterator[Row]:
    """Compares log probabilities of every composition with those of plain decoding, bit by bit."""
    prompt = random_prompt(1000, subject.sizes.tokens_context)
    for dtype in (torch.bfloat16, torch.float32):
        plain = _generated(subject, dtype, prompt, "plain", {})
        yield {f"{str(dtype).removeprefix('torch.')}": plain.exactness_reason or plain.exactness}
        for name, (config, keys) in COMPOSITIONS.items():
            found = _generated(subject, dtype, prompt, config, keys)
            assert found.logprobs is not None and plain.logprobs is not None
            pairs = zip(found.logprobs, plain.logprobs, strict=False)
            equal = next((at for at, (one, other) in enumerate(pairs) if one != other), len(plain.tokens))
            name = f"{name}, {str(dtype).removeprefix('torch.')}"
            yield {name: equal}
            if found.exactness == plain.exactness == "bits" and equal < len(plain.tokens):
                yield {"failed": f"{name}: token {equal} has other bits than in plain decoding"}


def _generated(
    subject: Subject, dtype: torch.dtype, prompt: list[int], config: str, keys: Mapping[str, object]
) -> GenerationResult:
    model = random_model("tiny", torch.device("cpu"), dtype)  # the same weights each time
    target = torch.nn.Module.to(model, subject.device)
    overrides = {**subject.sizes.config, "speculation.gamma2": 6, **keys}
    overrides |= {"retrieval.budget": 512, "retrieval.recent": 64}
    link = CudaLink(subject.device)
    with LLM.from_models(target, config=config, overrides=overrides, link=link) as llm:
        return llm.generate(prompt, SamplingParams(max_tokens=subject.sizes.new_tokens, logprobs=0))
