"""Which chunks to keep in a small cache. Pure functions, batched over kv heads.

Query heads that share a kv head, and all query tokens, are folded into one dimension ``grouped``. Where two
candidates are equal as float32, the one with the lower number is chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_scores(queries: Tensor, summaries: Tensor, scale: float) -> Tensor:
    """Attention of the queries to each chunk's mean key (TriForce, section 4.1).

    ``queries`` ``[kv_heads, grouped, head_dim]``, ``summaries`` ``[kv_heads, chunks, head_dim]``; returns
    float32 ``[kv_heads, chunks]``, the mean over the queries of the softmax over the chunks.
    """
    scores = torch.empty(summaries.shape[:2], dtype=torch.float32, device=summaries.device)
    # One head after the other: a float32 copy of all mean keys would leave the processor's caches.
    for asked, keys, score in zip(queries, summaries, scores, strict=True):
        weights = (scale * (asked.float() @ keys.float().mT)).softmax(dim=-1)
        torch.mean(weights, dim=0, out=score)
    return scores


def expecting(scores: Tensor) -> Tensor:
    """Scores of chunks ``[kv_heads, chunks]`` as the next tokens may give them: attention moves on.

    What copies or quotes reads on, so a chunk is worth holding when the one before it was attended to: it
    gets half of that one's score.
    """
    return torch.nn.functional.pad(scores[:, :-1] / 2, (1, 0)) + scores


def retrieval(scores: Tensor, count: int, first: int = 1) -> Tensor:
    """The ``count`` chunks with the highest scores, without the ``first`` ones, which are kept anyway.

    ``scores`` ``[kv_heads, chunks]``; returns chunk numbers ``[kv_heads, count]``, falling in score.
    """
    # topk promises nothing about ties, and a stable sort is five times as slow: so each score becomes an
    # integer that no other one equals. Floats are in the order of their bits, negative ones turned around;
    # zero is added to make -0.0 and 0.0 the same. Among equals the lower number is larger.
    scores = scores[:, first:]
    bits = (scores.float() + 0.0).view(torch.int32)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    number = torch.arange(scores.shape[1], device=scores.device)
    return (rising * 2**32 - number).topk(count, dim=1).indices + first
