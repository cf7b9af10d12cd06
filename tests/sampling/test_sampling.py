"""Probabilities against transformers' logits processors; draws against those probabilities and their seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from offload_rt.sampling.sampler import GeneratorDraws, Sampler, choices, pick
from offload_rt.sampling.trees import Tree, forest


def transformers_probs(sampler: Sampler, logits: Tensor) -> Tensor:
    """Applies the processors in the order of `generate`."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampler.temperature)])
    if sampler.top_k > 0:
        processors.append(TopKLogitsWarper(sampler.top_k))
    if sampler.top_p < 1:
        processors.append(TopPLogitsWarper(sampler.top_p))
    if sampler.min_p > 0:
        processors.append(MinPLogitsWarper(sampler.min_p))
    ids: Any = torch.zeros(len(logits), 1, dtype=torch.long)
    warped: Tensor = processors(ids, logits)
    return warped.softmax(-1)


SAMPLING = st.builds(
    Sampler,
    temperature=st.sampled_from([0.2, 0.6, 1.0, 1.7]),
    top_p=st.sampled_from([1e-6, 0.1234, 0.5017, 0.8003, 0.9507, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.0503, 0.3101, 1.0]),
)


@given(
    sampler=SAMPLING, seed=st.integers(0, 10**6), spread=st.sampled_from([0.1, 1.0, 5.0]), ties=st.booleans()
)
@settings(derandomize=True, deadline=None, max_examples=160)
def test_probs_are_those_of_transformers(sampler: Sampler, seed: int, spread: float, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(3, 50, generator=generator, dtype=torch.float64)
    if ties:
        logits = torch.randint(0, 4, (3, 50), generator=generator).double()
    found, expected = sampler.probs(logits), transformers_probs(sampler, logits)
    if ties and sampler.top_p < 1.0:  # it may cut between equals; only the number of those kept is specified
        found, expected = found.sort(-1).values, expected.sort(-1).values
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("penalty", [0.4, 1.0, 1.3])
def test_repetition_penalties_are_those_of_transformers(dtype: torch.dtype, penalty: float) -> None:
    sampler = Sampler(0.8, min_p=0.1, repetition_penalty=penalty)
    rows, (prompt, *generated) = noise(4, 50).to(dtype), torch.randint(50, (5, 9), generator=seeded())
    wide = rows.to(torch.promote_types(dtype, torch.float32))
    counts = torch.stack([tokens.bincount(minlength=50) for tokens in generated])
    found = sampler.penalised(rows, counts.to(wide.dtype), prompt.bincount(minlength=50) > 0)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for at, tokens in enumerate(generated):
        ids: Any = torch.cat([prompt, tokens])[None]
        torch.testing.assert_close(found[at : at + 1], processor(ids, wide[at : at + 1]))
    torch.testing.assert_close(sampler.probs(found), transformers_probs(sampler, found))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def noise(rows: int, vocabulary: int) -> Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=seeded(), dtype=torch.float64)


def test_presence_and_frequency_penalties() -> None:
    """By OpenAI's formula, behind the repetition penalty as in vLLM."""
    sampler = Sampler(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits, counts = torch.tensor([[4.0, 4.0, -4.0, -4.0, 4.0]]), torch.tensor([[0.0, 1.0, 3.0, 0.0, 0.0]])
    found = sampler.penalised(logits, counts, torch.tensor([False, False, False, False, True]))
    assert found.tolist() == [[4.0, 1.25, -9.25, -4.0, 2.0]]
    for sampler in (Sampler(1.0), Sampler(1.0, 0.5, 3, min_p=0.5)):
        assert not sampler.penalises


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 1e30, 1e308])
def test_an_extreme_repetition_penalty_makes_no_nan(penalty: float) -> None:
    sampler = Sampler(1.0, repetition_penalty=penalty)
    logits = torch.tensor([[0.0, 30.0, -30.0, -torch.inf]])
    found = sampler.penalised(logits, torch.ones(1, 4), torch.zeros(4, dtype=torch.bool))
    assert torch.isfinite(found[:, :3]).all() and torch.isfinite(sampler.probs(found)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_narrow_logits_give_wide_probs(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(1)).to(dtype)
    probs = Sampler(0.7, 0.9, 20).probs(logits)
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wide = Sampler(0.7, 0.9, 20).probs(logits.double())
    torch.testing.assert_close(probs.double(), wide, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-38, 1e-40, 1e-300, 5e-324])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_tiny_temperature_leaves_the_largest_logits_alone(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.tensor([[1.0, 30.0, -2.0, 30.0], [0.5, 0.25, -1.0, -torch.inf]], dtype=dtype)
    probs = Sampler(temperature).probs(logits)
    assert probs.tolist() == [[0.0, 0.5, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0]]
    assert Sampler(temperature, 0.9, 2).probs(logits).tolist() == probs.tolist()


def test_the_lowest_id_wins_a_tie() -> None:
    assert choices(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 2.0]])).tolist() == [1, 0]


def drawn(seed: int) -> list[int]:
    draws = GeneratorDraws(seed)
    probs, coin = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.5])
    return [
        value
        for _ in range(50)
        for value in (int(draws.categorical(probs)), int(draws.descend(forest([1]), coin)))
    ]


def test_a_seed_repeats_its_draws() -> None:
    state = torch.get_rng_state()
    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is untouched


def test_accepting_drafts_does_not_change_the_tokens_drawn() -> None:
    probs = torch.ones(1000)
    tossing, plain = GeneratorDraws(3), GeneratorDraws(3)
    for _ in range(20):
        tossing.descend(forest([2]), torch.tensor([0.5, 0.5]))
        assert tossing.categorical(probs) == plain.categorical(probs)


def test_draws_have_their_distribution() -> None:
    """By Hoeffding, a correct source fails each comparison with probability 2 exp(-2 n d^2) < 1e-8."""
    draws, n, allowed = GeneratorDraws(0), 10_000, 0.032
    probs = torch.tensor([1.0, 0.0, 3.0, 2.0])  # need not be normalized
    tokens = draws.categorical(probs.expand(n, -1)).tolist()
    for token, weight in enumerate(probs.tolist()):
        assert abs(tokens.count(token) / n - weight / 6) < allowed
    assert 1 not in tokens
    # Two children of the root, and one below the first of them.
    tree, chances = Tree((-1, -1, 0)), torch.tensor([0.5, 0.4, 1.5])
    ends = [int(draws.descend(tree, chances)) for _ in range(n)]
    for row, weight in enumerate((0.3, 0.0, 0.2, 0.5)):
        assert abs(ends.count(row) / n - weight) < allowed
    assert 1 not in ends
    # Tokens and coins of one seed are independent.
    draws, coin, half = GeneratorDraws(0), torch.tensor([0.5]), torch.ones(2)
    equal = sum(int(draws.categorical(half)) == int(draws.descend(forest([1]), coin)) for _ in range(n))
    assert abs(equal / n - 0.5) < allowed


def float64(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.1, 1.0, 7.0]), min_size=1, max_size=12).filter(any),
    steps=st.integers(1, 300),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_pick_is_the_inverse_cumulative_distribution(weights: list[float], steps: int) -> None:
    probs = torch.tensor(weights)
    uniforms = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    picked = pick(probs.expand(steps, -1), uniforms).tolist()
    for token, weight in enumerate(probs.double() / probs.double().sum()):
        assert abs(picked.count(token) - steps * float(weight)) <= 1
        assert weight > 0 or token not in picked


def test_pick_at_the_ends_of_the_interval() -> None:
    nearly_one = math.nextafter(1.0, 0.0)
    for probs in (
        torch.tensor([0.0, 2.0, 1.0, 0.0]),
        torch.rand(100_000, generator=torch.Generator().manual_seed(0)).softmax(-1),
    ):
        padded = torch.nn.functional.pad(probs, (2, 3))
        assert float(padded[int(pick(padded, float64(0.0)))]) > 0
        assert float(padded[int(pick(padded, float64(nearly_one)))]) > 0
    nan = torch.full((4,), torch.nan)
    assert 0 <= int(pick(nan, float64(0.5))) < 4  # an id that an embedding takes; NaN is reported elsewhere
