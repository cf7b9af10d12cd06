"""TriForce's table 1: how often a small cache drafts what the full one accepts, by how it is chosen."""

from __future__ import annotations

import torch

from bench import acceptance, needles
from bench.context import ContextReader
from bench.inputs import say
from bench.paper.runs import BUDGET_SHARE, Row, Study, base
from offload_rt.config import load_config
from offload_rt.model import CausalModel

DEPTHS = 5
TABLE_1 = {
    acceptance.TOP_K: (0.9921, 0.9989),
    acceptance.STREAMING: (0.9156, 0.0519),
    acceptance.HEAVY_HITTERS: (0.9179, 0.0739),
    acceptance.MEAN_KEYS: (0.9649, 0.9878),
}
"""On PG-19 and on needles, 120K tokens and a budget of 4K."""


def policies(study: Study) -> list[Row]:
    """Teacher forced, T = 1, entries chosen anew every eight tokens.

    On the text that follows, and on the rest of a passage of random tokens whose beginning has been repeated.
    """
    arguments, models = study.arguments, study.models
    model = CausalModel(models.target, models.names[0] or "target")
    config = load_config("retrieval", base(arguments))
    special = set(models.tokenizer.all_special_ids)
    alphabet = [token for token in range(model.vocabulary) if token not in special]
    generator = torch.Generator().manual_seed(0)
    books: dict[str, list[float]] = {kind: [] for kind in acceptance.CACHES}
    passages: dict[str, list[float]] = {kind: [] for kind in acceptance.CACHES}
    for number, tokens in enumerate(study.books, 1):
        say(f"policies: text {number} of {len(study.books)}")
        length = min(
            arguments.context, (len(tokens) - acceptance.ROUND) // acceptance.ROUND * acceptance.ROUND
        )
        positions = min(arguments.new_tokens, len(tokens) - length) // acceptance.ROUND * acceptance.ROUND
        budgets = {"": max(2 * config.retrieval.chunk + acceptance.SINKS, length // BUDGET_SHARE)}
        kinds = list(acceptance.CACHES)
        with ContextReader(model, config, length + positions) as reader:
            reader.read(tokens[:length])
            following = tokens[length : length + positions]
            found = acceptance.acceptance(reader, following, budgets, kinds, tokens[:length])
            for kind in kinds:
                books[kind].append(float(found[kind, ""].mean()))
        planted = needles.plant(tokens, length, DEPTHS, 1, alphabet, generator)
        with ContextReader(model, config, length + needles.PASSAGE) as reader:
            reader.read(planted.tokens)
            for passage in (passage for one in planted.passages for passage in one):
                found = acceptance.acceptance(reader, passage, budgets, kinds, planted.tokens)
                for kind in kinds:
                    # What follows the last token of the passage is no part of it.
                    passages[kind].append(float(found[kind, ""][needles.CUE : -1].mean()))
    return [
        {
            "cache": kind,
            "books": sum(books[kind]) / len(books[kind]),
            "needles": sum(passages[kind]) / len(passages[kind]),
            "paper_books": TABLE_1.get(kind, (None, None))[0],
            "paper_needles": TABLE_1.get(kind, (None, None))[1],
        }
        for kind in acceptance.CACHES
    ]
