"""The engine samples its target's distribution: real models, real caches, real random numbers."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from support.tiny_models import byte_ids, noisy_copy, tiny_target
from transformers import PreTrainedModel

from offload_rt import LLM, GenerationResult, SamplingParams

VOCABULARY = 6
PROMPT = byte_ids(60, vocabulary=VOCABULARY)
BUDGET = 24
GAMMA2 = 4
SAMPLES = 800
BATCH = 40
FALSE_FAILURE = 1e-7
"""Probability that a correct engine fails a comparison. Seeds are fixed: a test that passes always passes."""

Pair = tuple[int, ...]


def probs_of_pairs(model: PreTrainedModel, prompt: list[int]) -> dict[Pair, float]:
    """The exact distribution of the next two tokens, by transformers alone."""
    with torch.inference_mode():
        texts = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
        logits = model(texts, use_cache=False).logits.double()
    first = logits[0, -2].softmax(-1)
    second = logits[:, -1].softmax(-1)
    return {(a, b): float(first[a] * second[a, b]) for a, b in product(range(VOCABULARY), repeat=2)}


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability of a larger chi-square value: the regularised upper incomplete gamma function."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def p_value(counts: Counter[Pair], probs: dict[Pair, float]) -> float:
    """Probability that counts with the distribution `probs` deviate from it at least as much as these.

    Pearson's test; rare pairs share a cell, so that every cell expects at least ten.
    """
    n = sum(counts.values())
    cells: list[tuple[float, float]] = []
    observed = expected = 0.0
    for pair, weight in sorted(probs.items(), key=lambda item: item[1]):
        observed, expected = observed + counts[pair], expected + n * weight
        if expected >= 10:
            cells.append((observed, expected))
            observed = expected = 0.0
    assert expected == 0, "the most likely pair is a cell of its own"
    return chi_square_tail(sum((found - due) ** 2 / due for found, due in cells), len(cells) - 1)


def test_the_p_value() -> None:
    probs: dict[Pair, float] = {(0,): 0.25, (1,): 0.736, (2,): 0.013, (3,): 0.001}
    assert chi_square_tail(18.307, 10) == pytest.approx(0.05, abs=2e-5)  # from the usual table
    assert p_value(Counter({(0,): 250, (1,): 736, (2,): 14}), probs) == 1.0
    assert p_value(Counter({(0,): 350, (1,): 636, (2,): 14}), probs) < 1e-10
    assert p_value(Counter({(0,): 225, (1,): 720, (3,): 55}), probs) < 1e-10


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    model = tiny_target("llama-gqa", vocabulary=VOCABULARY, seed=3, layers=1)
    with torch.no_grad():  # far tokens say much, so that what is not retrieved is missed
        model.model.layers[0].self_attn.o_proj.weight *= 5
    return model


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return noisy_copy(target, noise=0.3)


@pytest.fixture(scope="module")
def results(target: PreTrainedModel, draft: PreTrainedModel) -> list[GenerationResult]:
    """A continuation of one prompt for each seed."""
    overrides = {
        "retrieval.budget": BUDGET,
        "retrieval.chunk": 4,
        "retrieval.recent": 4,
        "streaming.sinks": 2,
        "streaming.window": 14,
        # Finds in a text of so few tokens would leave the small model nothing to draw.
        "speculation.levels": ["draft:streaming", "target:retrieved"],
        "speculation.gamma1": 2,
        "speculation.gamma2": GAMMA2,
        "speculation.step_down": False,
    }

    drawn = [SamplingParams(temperature=1.0, max_tokens=GAMMA2 + 1, seed=seed) for seed in range(SAMPLES)]
    with LLM.from_models(target, draft, config="triforce", overrides=overrides) as llm:
        batches = (drawn[at : at + BATCH] for at in range(0, SAMPLES, BATCH))
        return [result for batch in batches for result in llm.generate([PROMPT] * BATCH, batch)]


def test_first_tokens_have_the_distribution_of_the_target(
    results: list[GenerationResult], target: PreTrainedModel
) -> None:
    counts = Counter(tuple(result.tokens[:2]) for result in results)
    assert p_value(counts, probs_of_pairs(target, PROMPT)) > FALSE_FAILURE


def test_another_distribution_would_be_told_apart(
    results: list[GenerationResult], target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    counts = Counter(tuple(result.tokens[:2]) for result in results)
    assert p_value(counts, probs_of_pairs(draft, PROMPT)) < FALSE_FAILURE
    assert p_value(counts, probs_of_pairs(target, PROMPT[-BUDGET:])) < FALSE_FAILURE


def test_every_level_accepted_and_rejected(results: list[GenerationResult]) -> None:
    assert len(PROMPT) > 2 * BUDGET
    for level in ("draft:streaming", "target:retrieved"):
        stats = [found for result in results for found in result.levels if found.name == level]
        proposed, accepted = sum(s.proposed for s in stats), sum(s.accepted for s in stats)
        assert proposed > 2 * SAMPLES
        assert 0.2 < accepted / proposed < 0.8
