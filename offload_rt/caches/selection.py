"""What a retrieved cache chooses chunks by: their mean keys, or what they have been attended to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offload_rt.attention import attend_weighed, choose_backend, fold, merge
from offload_rt.caches.full import LAST_QUERIES, FullCache
from offload_rt.host import Arriving
from offload_rt.weighing import attended_mass

DECAY = 0.8
"""Of what a verification attended to, after the next one. Measured: 0.5 to 0.9 differ little."""

Scores = Callable[[int], Tensor]
"""Of a layer's chunks, `[kv_heads, chunks]` float32 in host memory; may be asked for in any thread."""


class ByMeanKeys:
    """The newest queries' attention to the mean key of each chunk (TriForce, section 4.1)."""

    def __init__(self, source: FullCache) -> None:
        if source.sequence.summaries is None:
            raise ValueError("this sequence keeps no chunk summaries")
        self._source, self._summaries = source, source.sequence.summaries

    def restart(self, queries: Tensor) -> None:
        """Nothing to do: it knows nothing but what is asked."""

    def asked(self, queries: Tensor) -> Scores:
        """The scores now, by `queries` of the newest verified tokens, `[layers, heads, tokens, head_dim]`.

        Nothing here waits for the device.
        """
        arriving = Arriving(queries[:, :, -LAST_QUERIES:].contiguous())

        def scores(layer: int) -> Tensor:
            # On the host, where the mean keys are: sending them would cost a share of what the link carries.
            asking = fold(arriving.wait()[layer], self._source.layout.kv_heads)
            return chunk_scores(asking, self._summaries.means(layer)[0], self._source.scale)

        return scores


class ByAttention:
    """What verifications have attended to; the newest queries of the prompt to begin with.

    Weights of chunks, summed over some queries of each pass; what passes saw before counts less. Accumulated
    as in H2O (arXiv 2306.14048), from verifications as in SpecAttn (arXiv 2602.07223). The newest tokens,
    which no stream covers yet, are left out. It costs a pass a few sums, where mean keys cost a refresh a
    product; and it sees a chunk that one token makes worth holding, which a mean hides.

    Args:
        chunk: tokens of a chunk.
        decay: what is left of a pass's share after another one; 1: all of it.
        pages: what the text may come to.

    Attributes:
        scores: `[layers, kv_heads, chunks]` float32 on the device, of all those pages.
    """

    def __init__(self, source: FullCache, chunk: int, decay: float, pages: int) -> None:
        self.chunk = chunk
        self._source = source
        self._decay = decay
        # Once: it is read and written in several threads, on a GPU in streams of their own.
        layout, chunks = source.layout, pages * source.layout.page_size // chunk
        self.scores = torch.zeros(layout.layers, layout.kv_heads, chunks, device=source.device)
        self._parts: list[tuple[int, Tensor, Tensor]] = []  # first token, lse, units
        source.attended = self

    def reset(self) -> None:
        self.scores.zero_()
        self.drop_layer()

    def drop_layer(self) -> None:
        self._parts.clear()

    def add(self, start: int, lse: Tensor, units: Tensor) -> None:
        self._parts.append((start, lse, units))

    def end_layer(self, layer: int, lse: Tensor) -> None:
        scores = self.scores[layer].mul_(self._decay)
        for start, part_lse, units in self._parts:
            first = start // self.chunk
            scores[:, first : first + units.shape[2]] += attended_mass(units, part_lse, lse)
        self._parts.clear()

    def restart(self, queries: Tensor) -> None:
        """The text begins anew, with its prompt in the full cache; `queries` are of its last tokens."""
        source, device = self._source, self._source.device
        end = source.verified_length // source.layout.page_size * source.layout.page_size
        self.reset()
        source.engine.flush()
        asking = queries[:, :, -LAST_QUERIES:].cpu()
        backend = choose_backend(asking.device)  # where the store is
        for layer in range(source.layout.layers):
            seen, at = [], 0
            for keys, values in source.sequence.views(layer, 0, end):
                out, lse, units = attend_weighed(
                    backend, asking[layer], keys, values, source.scale, self.chunk
                )
                self.add(at, lse.to(device), units.to(device))
                seen.append((out, lse))
                at += len(keys) * keys.shape[2]
            if seen:
                self.end_layer(layer, merge(seen)[1].to(device))

    def asked(self, queries: Tensor) -> Scores:
        """The scores now. Nothing here waits for the device."""
        arriving = Arriving(self.scores)
        return lambda layer: arriving.wait()[layer]


Selection = ByMeanKeys | ByAttention
"""Scores the chunks of a text."""


def chunk_scores(queries: Tensor, summaries: Tensor, scale: float) -> Tensor:
    """Attention of the queries to each chunk's mean key (TriForce, section 4.1).

    Args:
        queries: `[kv_heads, folded_query, head_dim]`.
        summaries: `[kv_heads, chunks, head_dim]`.

    Returns:
        Float32 `[kv_heads, chunks]`, the mean over the queries of the softmax over the chunks.
    """
    scores = torch.empty(summaries.shape[:2], dtype=torch.float32, device=summaries.device)
    # One head after the other: a float32 copy of all mean keys would leave the processor's caches.
    for asked, keys, score in zip(queries, summaries, scores, strict=True):
        weights = (scale * (asked.float() @ keys.float().mT)).softmax(dim=-1)
        torch.mean(weights, dim=0, out=score)
    return scores


def expecting(scores: Tensor) -> Tensor:
    """Scores of chunks `[kv_heads, chunks]` as the next tokens may give them: attention moves on.

    What copies or quotes reads on, so a chunk is worth holding when the one before it was attended to: it
    gets half of that one's score.
    """
    return torch.nn.functional.pad(scores[:, :-1] / 2, (1, 0)) + scores


def retrieval(scores: Tensor, count: int, first: int = 1) -> Tensor:
    """The `count` chunks with the highest scores, without the `first` ones, which are kept anyway.

    From scores `[kv_heads, chunks]` to chunk numbers `[kv_heads, count]`, falling in score; of equals (as
    float32) the lower number comes first.
    """
    scores = scores[:, first:]
    # topk promises nothing about ties, and a stable sort is five times as slow: so each score becomes an
    # integer that no other one equals. Floats are in the order of their bits, negative ones turned around;
    # zero is added to make -0.0 and 0.0 the same. Among equals the lower number is larger.
    bits = (scores.float() + 0.0).view(torch.int32)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    number = torch.arange(scores.shape[1], device=scores.device)
    return (rising * 2**32 - number).topk(count, dim=1).indices + first
