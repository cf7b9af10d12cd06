"""Selection against straightforward float64 versions, with ties."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload_rt.caches.selection import chunk_scores, top_chunks


def plain_attention(queries: Tensor, keys: Tensor, scale: float) -> list[list[list[float]]]:
    """[kv_heads][grouped][tokens] in float64, one number at a time."""
    result = []
    for head_queries, head_keys in zip(queries.double(), keys.double(), strict=True):
        rows = []
        for query in head_queries:
            weights = [math.exp(scale * float(query @ key)) for key in head_keys]
            rows.append([weight / sum(weights) for weight in weights])
        result.append(rows)
    return result


def plain_largest(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]


def random_inputs(seed: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 6, 8, generator=generator), torch.randn(2, tokens, 8, generator=generator)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), tokens=st.integers(1, 12), scale=st.sampled_from([0.125, 1.0]))
def test_scores_and_their_order(seed: int, tokens: int, scale: float) -> None:
    queries, keys = random_inputs(seed, tokens)
    attention = plain_attention(queries, keys, scale)
    mass = [[sum(row[token] for row in rows) for token in range(tokens)] for rows in attention]
    scores = chunk_scores(queries, keys, scale)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, torch.tensor(mass) / queries.shape[1])
    chosen = top_chunks(scores, tokens, first=0)
    assert chosen.tolist() == [plain_largest(row, tokens) for row in mass]


# Few distinct values, so that there are ties in nearly every example. Both zeros are equal.
TIED = st.lists(st.sampled_from([-0.5, -0.25, -0.0, 0.0, 0.25]), min_size=3, max_size=20)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(values=TIED, data=st.data())
def test_retrieval_chooses_the_lower_number_of_equals(values: list[float], data: st.DataObject) -> None:
    scores = torch.tensor([values, values[::-1]])
    first = data.draw(st.integers(0, 2))
    count = data.draw(st.integers(0, len(values) - first))
    expected = [[first + index for index in plain_largest(row[first:], count)] for row in scores.tolist()]
    assert top_chunks(scores, count, first).tolist() == expected
