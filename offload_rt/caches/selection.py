"""What a retrieved cache chooses chunks by: their mean keys, or the attention mass that they have got."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cpu_kv import ChunkMeans, KVLayout, SequenceKV
from offload_rt.attention.backends import AttentionBackend, choose_backend, fold
from offload_rt.attention.mass import MassRange, Sample
from offload_rt.attention.sums import AttentionSum
from offload_rt.host import PendingRead

LAST_QUERIES = 8
"""How many of the newest tokens' queries choose what the retrieved cache keeps."""

DECAY = 0.8
"""What is left of the mass of one verification after the next one. Measured: 0.5 to 0.9 differ little."""

Scores = Callable[[int], Tensor]
"""Returns the scores of a layer's chunks, `[kv_heads, chunks]` float32 on the host; thread-safe."""


class MeanKeyScores:
    """The newest queries' attention to the mean key of each chunk (TriForce, section 4.1).

    Args:
        summaries: mean keys of the chunks, kept by the store.
    """

    def __init__(self, layout: KVLayout, summaries: ChunkMeans | None) -> None:
        if summaries is None:
            raise ValueError("this sequence keeps no chunk summaries")
        self._kv_heads, self._summaries = layout.kv_heads, summaries

    def restart(self, queries: Tensor, sequence: SequenceKV, end: int, scale: float) -> None:
        """Does nothing: nothing is known but what is asked."""

    def now(self, queries: Tensor, scale: float) -> Scores:
        """Returns the scores by `queries` of the newest verified tokens, `[layers, heads, tokens, head_dim]`.

        Nothing here waits for the device.
        """
        pending = PendingRead(queries[:, :, -LAST_QUERIES:].contiguous())

        def scores(layer: int) -> Tensor:
            # On the host, where the mean keys are: sending them would cost a share of what the link carries.
            asking = fold(pending.wait()[layer], self._kv_heads)
            return chunk_scores(asking, self._summaries.means(layer)[0], scale)

        return scores


class AttentionScores:
    """Attention mass of verifications, summed up; to begin with, that of the prompt's newest queries.

    Mass of earlier passes counts less. Accumulated as in H2O (arXiv 2306.14048), from verifications as in
    SpecAttn (arXiv 2602.07223). The newest tokens, which no stream covers yet, are left out. It costs a pass
    a few sums, where mean keys cost a refresh a product; and it finds a chunk that one token makes worth
    holding, which a mean hides.

    Args:
        chunk: tokens of a chunk.
        decay: what is left of a pass's mass after another pass; 1: all of it.
        pages: what the text may come to.

    Attributes:
        values: `[layers, kv_heads, chunks]` float32 on the device, of all those pages.
    """

    def __init__(self, layout: KVLayout, device: torch.device, chunk: int, decay: float, pages: int) -> None:
        self.chunk = chunk
        self._layout = layout
        self._decay = decay
        # Once: they are read and written in several threads, on a GPU in streams of their own.
        self.values = torch.zeros(
            layout.layers, layout.kv_heads, pages * layout.page_size // chunk, device=device
        )

    def add(
        self, backend: AttentionBackend, layer: int, ranges: Sequence[MassRange], lse: Tensor, sample: Sample
    ) -> None:
        """Adds the mass of a pass over one layer.

        Args:
            lse: `[kv_heads, folded_query]`, of all that its queries attended to.
        """
        for one in ranges:
            assert one.reference is not None
            scores = self.values[layer, :, one.first : one.first + one.mass.shape[2]]
            every = (sample.period, sample.step)
            backend.operators.add_mass_(scores, one.mass, one.reference, lse, self._decay, *every)

    def restart(self, queries: Tensor, sequence: SequenceKV, end: int, scale: float) -> None:
        """Starts over with a text whose first `end` tokens, whole pages, are in the store.

        Args:
            queries: of its last tokens, `[layers, heads, tokens, head_dim]`.
        """
        self.values.zero_()
        asking = queries[:, :, -LAST_QUERIES:].cpu()
        backend = choose_backend(asking.device)  # where the store is
        for layer in range(self._layout.layers if end else 0):
            total = AttentionSum(backend, asking[layer], self._layout.kv_heads, scale, self.chunk)
            total.track_mass(0, end)
            for segment in sequence.views(layer, 0, end):
                total.attend_tracked(*segment)
            assert total.lse is not None
            scores = torch.zeros(self.values.shape[1], end // self.chunk)
            (mass,) = total.mass
            assert mass.reference is not None
            every = (total.sample.period, total.sample.step)
            backend.operators.add_mass_(scores, mass.mass, mass.reference, total.lse, 1.0, *every)
            self.values[layer, :, : end // self.chunk] = scores.to(self.values.device)

    def now(self, queries: Tensor, scale: float) -> Scores:
        """Returns the scores as they are. Nothing here waits for the device."""
        pending = PendingRead(self.values)
        return lambda layer: pending.wait()[layer]


Selection = MeanKeyScores | AttentionScores
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
    """Scores of chunks `[…, chunks]` as the next tokens may give them: attention moves on.

    What copies or quotes reads on, so a chunk is worth holding when the one before it was attended to: it
    gets half of that one's score.
    """
    return torch.nn.functional.pad(scores[..., :-1] / 2, (1, 0)) + scores


def chosen_chunks(scores: Tensor, count: int) -> Tensor:
    """Chooses `count` chunks for each KV head: the first one, and those that the next tokens may attend to
    most.

    Args:
        scores: `[…, kv_heads, chunks]`.

    Returns:
        `[…, 3, kv_heads * count]` int64: rising numbers, their heads, and their places there, in falling
        score.
    """
    best = retrieval(expecting(scores), count - 1)
    chunks = torch.cat([best.new_zeros(*best.shape[:-1], 1), best], dim=-1)
    numbers, order = chunks.flatten(-2).sort(dim=-1, stable=True)
    return torch.stack([numbers, order // count, order % count], dim=-2)


def retrieval(scores: Tensor, count: int, first: int = 1) -> Tensor:
    """The `count` chunks with the highest scores, without the `first` ones, which are kept anyway.

    From scores `[…, chunks]` to chunk numbers `[…, count]`, falling in score; of equals (as float32) the
    lower number comes first.
    """
    scores = scores[..., first:]
    # topk promises nothing about ties, and a stable sort is five times as slow: so each score becomes an
    # integer that no other one equals. Floats are in the order of their bits, negative ones turned around;
    # zero is added to make -0.0 and 0.0 the same. Among equals the lower number is larger.
    bits = (scores.float() + 0.0).view(torch.int32)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    number = torch.arange(scores.shape[-1], device=scores.device)
    return (rising * 2**32 - number).topk(count, dim=-1).indices + first
