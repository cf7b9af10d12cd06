"""Greedy tokens of every shipped config equal those of transformers' `generate`, for every architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.tiny_heads import write_head
from support.tiny_models import ARCHITECTURES, byte_ids, noisy_copy, tiny_target, transformers_greedy
from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams
from offload_rt.config.files import config_names

NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 2, 7, 100, 1000, 4000)
TIE = 1e-4

IN_ONE_BLOCK = ("granite", "cohere", "cohere2", "gemma3")  # their layers cannot be grouped
# A Latin square: every architecture and every config meets every prompt length.
CASES = [
    (arch, config, PROMPT_LENGTHS[(row + column) % len(PROMPT_LENGTHS)])
    for row, arch in enumerate(ARCHITECTURES)
    for column, config in enumerate(config_names())
    if config != "easyspec" or arch not in IN_ONE_BLOCK
]


@dataclass
class Record:
    """Totals over all cases: drafted tokens by config, and differences that a tie explains."""

    proposed: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    ties: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def record() -> Iterator[Record]:
    record = Record()
    yield record
    # Checked here, so that it also holds if only some cases are selected.
    assert len(record.ties) <= 1, f"too many ties to believe: {record.ties}"
    for config, proposed in record.proposed.items():
        if proposed > 300:
            accepted = record.accepted[config] / proposed
            exact = config == "shared"  # it drafts with all of the target over all of the text
            assert accepted > 0.99 if exact else 0 < accepted < 1, f"{config} drafts teach nothing"


def overrides(number: int) -> dict[str, object]:
    """Caches small enough to overflow, of sizes that vary with the case."""
    chunk = (4, 8)[number % 2]
    return {
        "retrieval.budget": (64, 128, 256)[number % 3],
        "retrieval.bits": (8, 4, 16)[number // 3 % 3],
        "retrieval.recent": 24,
        "retrieval.chunk": chunk,
        "retrieval.refresh": ("every", "stride:20", "acceptance:0.4")[number // 2 % 3],
        "speculation.gamma1": (2, 3)[number % 2],
        "speculation.gamma2": (5, 4, 7)[number % 3],
        "speculation.step_down": False,
        "streaming.sinks": (4, 0, 16)[number % 3],
        "streaming.window": (60, 33)[number % 2],
        "prefill.chunk": (2048, 96)[number % 2],
        "store.page": (256, 16)[number // 2 % 2],
        "store.slab_tokens": 256,
        "store.segment_bytes": 65536,
    }


def is_tie(model: PreTrainedModel, text: list[int]) -> bool:
    """Returns whether the two most likely tokens after `text` are nearly tied."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([text])).logits[0, -1]
    best, second = map(float, logits.topk(2).values.tolist())
    return best - second < TIE


@pytest.mark.parametrize(("arch", "config", "length"), CASES)
def test_equals_generate(arch: str, config: str, length: int, record: Record, tmp_path: Path) -> None:
    number = CASES.index((arch, config, length))
    prompt = byte_ids(length, start=1000 * number)
    for seed in (number, number + 1000, number + 2000):
        target = tiny_target(arch, seed=seed)
        expected = transformers_greedy(target, prompt, NEW_TOKENS)
        if len(set(expected)) > 5:
            break
    else:
        pytest.fail("these checkpoints repeat themselves: choose other seeds")
    draft = noisy_copy(target)

    settings = overrides(number)
    if config == "heads":
        settings["head.path"] = str(write_head(target, tmp_path / "head", seed=number))
    with LLM.from_models(target, draft, config=config, overrides=settings) as llm:
        result = llm.generate(prompt, SamplingParams(max_tokens=NEW_TOKENS))

    timings = result.timings
    record.proposed[config] = record.proposed.get(config, 0) + timings.drafted_tokens
    record.accepted[config] = record.accepted.get(config, 0) + timings.accepted_tokens
    assert len(result.tokens) == NEW_TOKENS and result.finish_reason == "length"
    if result.tokens != expected:
        pairs = zip(result.tokens, expected, strict=True)
        first = next(i for i, (found, wanted) in enumerate(pairs) if found != wanted)
        assert is_tie(target, [*prompt, *expected[:first]]), (
            f"token {first} is {result.tokens[first]}, transformers has {expected[first]}"
        )
        record.ties.append(f"{arch} {config} {length}")
