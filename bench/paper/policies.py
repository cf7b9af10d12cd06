"""TriForce's table 1: how often a small cache drafts what the full one accepts, by how it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch

from bench import needles
from bench.acceptance import CACHES, HEAVY_HITTERS, MEAN_KEYS, ROUND, SINKS, STREAMING, TOP_K, acceptance
from bench.context import ContextReader
from bench.inputs import say
from bench.paper.runs import BUDGET_SHARE, Row, Study
from offload_rt.config import load_config
from offload_rt.model import CausalModel

DEPTHS = 5
TABLE_1 = {
    TOP_K: (0.9921, 0.9989),
    STREAMING: (0.9156, 0.0519),
    HEAVY_HITTERS: (0.9179, 0.0739),
    MEAN_KEYS: (0.9649, 0.9878),
}
"""On PG-19 and on needles, 120K tokens and a budget of 4K."""


def policies(study: Study) -> list[Row]:
    """Teacher forced, T = 1, entries chosen anew every eight tokens.

    On the text that follows, and on the rest of a passage of random tokens whose beginning has been repeated.
    """
    arguments, models = study.arguments, study.models
    model = CausalModel(models.target, models.names[0])
    config = load_config("retrieval", study.keys)
    alphabet = needles.alphabet(models.tokenizer, model.vocabulary)
    generator = torch.Generator().manual_seed(0)
    books: list[dict[str, float]] = []
    passages: list[dict[str, float]] = []
    for number, tokens in enumerate(study.books, 1):
        say(f"policies: text {number} of {len(study.books)}")
        length = min(arguments.context, (len(tokens) - ROUND) // ROUND * ROUND)
        positions = min(arguments.new_tokens, len(tokens) - length) // ROUND * ROUND
        budget = max(2 * config.retrieval.chunk + SINKS, length // BUDGET_SHARE)
        with ContextReader(model, config, length + positions) as reader:
            reader.read(tokens[:length])
            books.append(_means(reader, tokens[length : length + positions], budget, slice(None)))
        planted, hidden = needles.plant(tokens, length, DEPTHS, 1, alphabet, generator)
        with ContextReader(model, config, length + needles.PASSAGE) as reader:
            reader.read(planted)
            # What follows the last token of the passage is no part of it.
            asked = slice(needles.CUE, -1)
            passages += [_means(reader, passage, budget, asked) for passage in hidden]
    rows = []
    for kind in CACHES:
        paper_books, paper_needles = TABLE_1.get(kind, (None, None))
        row = {"cache": kind, "books": fmean(one[kind] for one in books)}
        row |= {"needles": fmean(one[kind] for one in passages)}
        rows.append(row | {"paper_books": paper_books, "paper_needles": paper_needles})
    return rows


def _means(reader: ContextReader, tokens: Sequence[int], budget: int, part: slice) -> dict[str, float]:
    """By cache, the mean acceptance behind a part of `tokens`."""
    found = acceptance(reader, tokens, {"": budget}, list(CACHES))
    return {kind: float(values[part].mean()) for (kind, _), values in found.items()}
