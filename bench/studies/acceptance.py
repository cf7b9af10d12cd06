"""Acceptance of what the target would draft over a small cache.

The acceptance of a proposal q by p is 1 minus their total variation distance, the sum of min(p, q). Both
follow the same true text (teacher forcing) at temperature 1: p over the full KV, q over the small cache. The
text is passed in rounds of `ROUND` tokens, as in decoding: first over the small cache, then over the full
cache, which commits them, and the small cache adopts the verified KV. The nth token of a round is therefore
drafted n tokens after the latest refresh.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from bench.results import Row
from bench.studies import needles
from bench.studies.texts import Texts, passed, recompose, take
from cpu_kv import PlainPages
from offload_rt.attention.backends import fold, folded_mask
from offload_rt.attention.sums import AttentionSum, Softmax
from offload_rt.caches.base import Cache
from offload_rt.caches.full import FullCache
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.caches.selection import AttentionScores, chunk_scores, top_chunks
from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.drafting.levels.configs import load_config
from offload_rt.engine.sequence import TokenSequence
from offload_rt.model.runner import CausalModel
from offload_rt.sampling.sampler import Sampler

DEPTHS = 5  # at which passages are planted
ROUND = 8
STRIDE = 128
SINKS = 16
NEVER = "stride:1000000000"
"""A refresh policy without refreshes: what H2O evicts is gone."""
RETRIEVAL = "retrieval"
RETRIEVAL_STRIDE = f"retrieval, stride:{STRIDE}"
DRAFT_PLANE = "retrieval, draft plane"
"""The target drafts by one plane of its weights, which are in bfloat16."""
EIGHT_BITS, FOUR_BITS = "retrieval, 8 bits", "retrieval, 4 bits"
MEAN_KEYS = "mean keys (TriForce)"
HEAVY_HITTERS = "heavy hitters (H2O)"
TOP_K = "exact top-k"
TOP_K_FIRST_WHOLE = "exact top-k, first layer whole"
STREAMING = "StreamingLLM"


class ExactTopKCache:
    """The entries with the largest true attention mass, for each layer and KV head.

    They are chosen by the very queries that attend to them, which takes all keys: a reference for choices by
    attention mass, not a system. It does not bound acceptance: where attention is spread evenly, as in the
    first layer of many models, the heaviest entries are a biased sample of the whole.

    Args:
        whole: number of first layers that attend to all KV.
    """

    def __init__(self, full: FullCache, budget: int, whole: int = 0) -> None:
        self.speculative = SpeculativeTokens()
        self.local = full.local.derived()
        self._full, self._budget, self._whole = full, budget, whole

    @property
    def verified_length(self) -> int:
        return self._full.verified_length

    def begin(self, new: NewTokens) -> None:
        self._full.transfer.flush()
        self.local.begin(new, 0)
        self._new_tokens = new

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        full, length = self._full, self.verified_length
        runs = [pages.plain() for pages in full.sequence.views(layer, 0, length)]
        if layer >= self._whole:
            sides = zip(*(pages.head_major() for pages in runs), strict=True)
            kv = [torch.cat(side, dim=1).to(full.device) for side in sides]
            mass = chunk_scores(fold(queries, len(keys)), kv[0], softmax.scale)  # of single tokens
            top = top_chunks(mass, min(self._budget, length), first=0)
            runs = [PlainPages.one(*(side.take_along_dim(top[..., None], 1) for side in kv))]
        total = AttentionSum(full.backend, queries, len(keys), softmax.scale)
        for pages in runs:
            total.attend(PlainPages(pages.keys.to(full.device), pages.values.to(full.device)))
        mask = folded_mask(full.backend, self._new_tokens.mask(0, keys), queries, len(keys))
        total.attend(PlainPages.one(keys, values), mask)
        return total.result(softmax.sinks)

    def commit(self, indices: Sequence[int]) -> None:
        """Does nothing: verified KV is in the full cache."""

    def keep(self, entries: Sequence[int]) -> None:
        """Does nothing: there are no speculative tokens."""

    def settle(self) -> None:
        """Does nothing, like `keep`."""


def count_prompt(sequence: TokenSequence) -> None:
    """Counts what queries of the sequence attended to, as H2O does: `ROUND` queries after each page."""
    full, length, page = sequence.full, sequence.full.verified_length, sequence.full.layout.page_size
    (cache,) = full.derived
    assert isinstance(cache, RetrievedCache) and isinstance(cache.selection, AttentionScores)
    cache.selection.values.zero_()
    for at in range(page, length - ROUND, page):
        full.start_from(at)
        passed(sequence.verifier, sequence.tokens[at : at + ROUND], 1)
    full.rewind(length)


Keys = dict[str, object]
BY_MEANS: Keys = {"retrieval.select": "mean_keys"}
ALONE: Keys = {"retrieval.rest": False}
PLAIN: Keys = {"speculation.levels": []}
CACHES: dict[str, Keys] = {
    RETRIEVAL: {},
    RETRIEVAL_STRIDE: {"retrieval.refresh": f"stride:{STRIDE}"},
    DRAFT_PLANE: {},
    EIGHT_BITS: {"retrieval.bits": 8},
    FOUR_BITS: {"retrieval.bits": 4},
    "retrieval, rest left out": ALONE,
    MEAN_KEYS: BY_MEANS | ALONE,
    "mean keys, rest estimated": BY_MEANS,
    HEAVY_HITTERS: {"retrieval.select": "heavy_hitters", "retrieval.refresh": NEVER} | ALONE,
    STREAMING: {"speculation.levels": ["target:streaming"]},
    TOP_K: PLAIN,
    TOP_K_FIRST_WHOLE: PLAIN,
}
"""Small caches as configuration keys; refreshed every round unless they say otherwise."""


def small_cache(sequence: TokenSequence, kind: str, budget: int) -> Cache:
    """Builds one of `CACHES` with `budget` entries at the end of the sequence."""
    full, retrieval = sequence.full, sequence.plan.config.retrieval
    keys: Keys = {
        "retrieval.bits": 16,
        "retrieval.budget": budget,
        "retrieval.recent": min(retrieval.recent, budget // 4),
    }
    keys |= {"retrieval.chunk": retrieval.chunk, "retrieval.refresh": "every"}
    keys |= {"streaming.sinks": SINKS, "streaming.window": budget - SINKS, "offload.refresh_from": "store"}
    recompose(sequence, load_config("retrieval", keys | CACHES[kind]))
    if CACHES[kind] is PLAIN:
        return ExactTopKCache(full, budget, whole=int(kind == TOP_K_FIRST_WHOLE))
    (cache,) = sequence._caches
    if kind == HEAVY_HITTERS:
        assert isinstance(cache, RetrievedCache)
        count_prompt(sequence)
        assert full.last_queries is not None
        cache.fill(full.last_queries)
    return cache


TABLE_1 = {
    TOP_K: (0.9921, 0.9989),
    STREAMING: (0.9156, 0.0519),
    HEAVY_HITTERS: (0.9179, 0.0739),
    MEAN_KEYS: (0.9649, 0.9878),
}
"""The paper's acceptance on PG-19 and on needles, for 120K tokens and a budget of 4K."""


@torch.inference_mode()
def acceptance(sequence: TokenSequence, tokens: Sequence[int], kind: str, budget: int) -> Tensor:
    """Acceptance `[tokens]`, float64, after each of `tokens`, which continue what has been read.

    Their number is a multiple of `ROUND`.
    """
    cache = small_cache(sequence, kind, budget)
    full, small = sequence.verifier, replace(sequence.verifier, cache=cache)
    if kind == DRAFT_PLANE:
        assert isinstance(full.model, CausalModel)
        small = replace(small, order=full.model.drafting(None))
    probs = Sampler(temperature=1.0).probs
    shares = []
    for at in range(0, len(tokens), ROUND):
        drafted, true = (
            probs(passed(cache, tokens[at : at + ROUND], ROUND).logits) for cache in (small, full)
        )
        full.cache.commit(range(ROUND))
        shares.append(torch.minimum(true, drafted).sum(-1).double().cpu())
    return torch.cat(shares)


def small_caches(study: Texts) -> list[Row]:
    """Contents of a small cache.

    TriForce, table 1. Acceptance of drafts over a small cache, refreshed every 8 tokens unless named
    otherwise, teacher forced, T = 1: on the books' own text, and on passages of random tokens that were
    planted in the text and are repeated behind it. Exact top-k chooses by the very queries that attend. The
    demo target's first layer attends evenly, so that its heaviest entries do not represent the others: it is
    also shown with that layer whole.
    """
    sizes, positions = study.sizes, study.sizes.positions // ROUND * ROUND
    least, generator = 2 * study.config(RETRIEVAL).retrieval.chunk + SINKS, torch.Generator().manual_seed(0)
    rows = []
    caches = [kind for kind in sizes.caches if kind != DRAFT_PLANE or study.target.dtype == torch.bfloat16]
    for length in (sizes.context // divisor for divisor in sizes.divisors):
        books, passages = (defaultdict[tuple[str, int], list[Tensor]](list) for _ in range(2))
        kinds = list(product(caches, (max(least, length // share) for share in sizes.shares)))
        for name, tokens in study.books.items():
            prompt, after = tokens[:length], tokens[length : length + positions]
            purpose = f"{name}: acceptance after {length} tokens"
            with study.sequence(purpose, prompt, positions, "retrieval") as sequence:
                take(sequence, prompt)
                for kind in kinds:
                    books[kind].append(acceptance(sequence, after, *kind))
            depths = min(DEPTHS, length // (2 * (needles.PASSAGE + needles.SPACING)))
            planted, hidden = needles.plant(tokens, length, depths, 1, study.alphabet, generator)
            purpose = f"{name}: passages in {length} tokens"
            with study.sequence(purpose, planted, needles.PASSAGE, "retrieval") as sequence:
                take(sequence, planted)
                # The token after the last one of a passage is not part of it.
                judged = slice(needles.CUE, -1)
                for kind, passage in product(kinds, hidden):
                    passages[kind].append(acceptance(sequence, passage, *kind)[judged])
        for kind, budget in kinds:
            values = torch.stack(books[kind, budget])
            paper_books, paper_needles = TABLE_1.get(kind, (None, None))
            row: Row = {"cache": kind, "context": length, "entries": budget, "books": float(values.mean())}
            row |= {"needles": float(torch.stack(passages[kind, budget]).mean())}
            rows.append(row | {"paper_books": paper_books, "paper_needles": paper_needles})
    return rows
