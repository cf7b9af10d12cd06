"""Scores by which a retrieved cache chooses chunks: by their mean keys, or by the attention mass they get."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from cpu_kv import KVLayout
from offload_rt.attention.backends import fold
from offload_rt.attention.selector import choose_backend
from offload_rt.attention.sums import AttentionSum
from offload_rt.caches.base import CacheSource
from offload_rt.caches.sizes import layers_at_a_time
from offload_rt.system.device_copies import PendingRead

NONE = -1
"""The number of no chunk, in slots that hold none."""
NO_MORE = 2**31
"""A chunk number after all others, where fewer chunks were chosen."""

PREFERENCE = 2.0
"""Factor on the scores of chunks that are held, where others cross a link. On 12 passages of 8K tokens of
three books, decoded greedily by the demo target with 512 tokens retrieved every 32, refreshes replaced 0.40,
0.26, 0.23 and 0.19 of the chunks with factors of 1, 1.5, 2 and 4; 0.863, 0.866, 0.864 and 0.861 of the
drafted tokens were accepted. Teacher forced, refreshed every 8 tokens, acceptance was 0.9347 with 1 and
0.9336 with 2. Drafts of 12 on 12 passages of four books, refreshed every round or every 32 tokens, gave 10.23
tokens per round with 1 and 10.39 with 2 over 512 retrieved tokens, and 11.91 with either over 2,048."""

LAST_QUERIES = 8
"""Number of newest tokens whose queries score the chunks."""

DECAY = 0.8
"""Factor on older attention mass in each verification. Measured: 0.5 to 0.9 differ little."""

Scores = Callable[[int], Tensor]
"""Returns the scores of a layer's chunks, `[kv_heads, chunks]` float32 on the host; thread-safe."""


class Selection(ABC):
    """Scores the chunks of a sequence.

    Attributes:
        mass_chunk: tokens per chunk of the attention mass that it needs; None: it needs none.
        device: where its scores are.
    """

    mass_chunk: int | None = None
    device = torch.device("cpu")

    def add(self, layer: int, total: AttentionSum) -> None:  # noqa: B027
        """Adds the attention mass of a pass over one layer."""

    def reset(  # noqa: B027
        self, queries: Tensor, source: CacheSource, end: int
    ) -> None:
        """Starts over with the sequence of a source; its first `end` tokens, whole pages, are in the store.

        Args:
            queries: of its last tokens, `[layers, heads, tokens, head_dim]`.
        """

    @abstractmethod
    def scores(self, queries: Tensor, scale: float) -> Scores:
        """Returns the scores as they are now, without waiting for the device.

        Args:
            queries: of the newest verified tokens, `[layers, heads, tokens, head_dim]`.
        """


class MeanKeyScores(Selection):
    """The newest queries' attention to the mean key of each chunk (TriForce, section 4.1).

    Args:
        source: its store keeps the mean keys.
    """

    def __init__(self, source: CacheSource) -> None:
        if source.sequence.summaries is None:
            raise ValueError("this sequence keeps no chunk summaries")
        self._kv_heads, self._layers = source.layout.kv_heads, source.layers
        self._summaries = source.sequence.summaries

    def scores(self, queries: Tensor, scale: float) -> Scores:
        pending = PendingRead(queries[:, :, -LAST_QUERIES:].contiguous())

        def scores(layer: int) -> Tensor:
            # On the host, where the mean keys are: sending them would cost a share of the link.
            newest = fold(pending.wait()[layer], self._kv_heads)
            return chunk_scores(newest, self._summaries.means(self._layers[layer])[0], scale)

        return scores


class AttentionScores(Selection):
    """Decayed attention mass of the verifications so far, starting with that of the prompt's last queries.

    Accumulated as in H2O (arXiv 2306.14048), from verifications as in SpecAttn (arXiv 2602.07223). Tokens of
    the tail are left out. It costs a pass a few sums, where mean keys cost a refresh a matrix product; and it
    finds a chunk in which a single token matters, which a mean hides.

    Args:
        chunk: tokens per chunk.
        decay: factor on older mass in each pass; 1 keeps all of it.
        pages: most pages that the sequence may grow to.

    Attributes:
        values: the scores, `[layers, kv_heads, chunks]` float32 on the device, for all those pages.
    """

    def __init__(self, layout: KVLayout, device: torch.device, chunk: int, decay: float, pages: int) -> None:
        self.mass_chunk: int = chunk
        self._layout = layout
        self.device = device
        self._decay = decay
        # Allocated once: several threads read and write it, on a GPU in streams of their own.
        self.values = torch.zeros(
            layout.layers, layout.kv_heads, pages * layout.page_size // chunk, device=device
        )

    def add(self, layer: int, total: AttentionSum) -> None:
        total.add_mass_to(self.values[layer], self._decay)

    def reset(self, queries: Tensor, source: CacheSource, end: int) -> None:
        self.values.zero_()
        newest = queries[:, :, -LAST_QUERIES:].cpu()
        backend = choose_backend(newest.device)  # where the store is
        for layer, source_layer in enumerate(source.layers if end else ()):
            total = AttentionSum(backend, newest[layer], self._layout.kv_heads, source.scale, self.mass_chunk)
            total.track_mass(0, end)
            for segment in source.sequence.views(source_layer, 0, end):
                total.attend_tracked(segment)
            scores = torch.zeros(self.values.shape[1], end // self.mass_chunk)
            total.add_mass_to(scores, 1.0)
            self.values[layer, :, : end // self.mass_chunk] = scores.to(self.values.device)

    def scores(self, queries: Tensor, scale: float) -> Scores:
        pending = PendingRead(self.values)
        return lambda layer: pending.wait()[layer]


def chunk_scores(queries: Tensor, summaries: Tensor, scale: float) -> Tensor:
    """Computes the queries' attention to each chunk's mean key (TriForce, section 4.1).

    Args:
        queries: `[kv_heads, folded_query, head_dim]`.
        summaries: mean keys, `[kv_heads, chunks, head_dim]`.

    Returns:
        The mean over the queries of the softmax over the chunks, `[kv_heads, chunks]` float32.
    """
    scores = torch.empty(summaries.shape[:2], dtype=torch.float32, device=summaries.device)
    # Head by head: a float32 copy of all mean keys would not fit the processor's caches.
    for query, keys, score in zip(queries, summaries, scores, strict=True):
        weights = (scale * (query.float() @ keys.float().mT)).softmax(dim=-1)
        torch.mean(weights, dim=0, out=score)
    return scores


def with_successors(scores: Tensor) -> Tensor:
    """Adds half of the score of the chunk before to each chunk's, `[…, chunks]`.

    Text that is copied or quoted is read on, so the chunk after one with much attention is worth keeping.
    """
    return torch.nn.functional.pad(scores[..., :-1] / 2, (1, 0)) + scores


def choose_chunks(scores: Tensor, slot_chunks: Tensor, preference: float) -> Tensor:
    """Chooses a chunk for each slot of each KV head: the first one, and those with the highest scores.

    A chunk that is chosen again keeps its slot. The others go to the slots that are left, in falling score.

    Args:
        scores: `[…, kv_heads, chunks]`.
        slot_chunks: the chunk in each slot, `[…, kv_heads, slots]` int64, or `NONE`; is updated.
        preference: factor on the scores of chunks that have a slot already.

    Returns:
        The chunks that had no slot, `[…, 3, kv_heads * slots]` int64: chunk numbers (rising), their heads,
        and their slots. Behind the last one numbers are `NO_MORE`.
    """
    chunks, count = scores.shape[-1], slot_chunks.shape[-1]
    # Of a slot without a chunk, the place behind all chunks is read and written.
    place = torch.where((slot_chunks < 0) | (slot_chunks >= chunks), chunks, slot_chunks)
    marks = scores.new_zeros(*scores.shape[:-1], chunks + 1, dtype=torch.bool)
    present = marks.scatter(-1, place, True)[..., :chunks]
    best = top_chunks(with_successors(scores) * torch.where(present, preference, 1.0), count - 1)
    chosen = torch.cat([best.new_zeros(*best.shape[:-1], 1), best], dim=-1)
    stays = marks.scatter(-1, chosen, True).gather(-1, place)
    unchanged = marks.scatter(-1, place.where(stays, chunks), True).gather(-1, chosen)
    slots = stays.to(torch.uint8).argsort(dim=-1, stable=True)
    new = chosen.gather(-1, unchanged.to(torch.uint8).argsort(dim=-1, stable=True))
    filled = torch.arange(count, device=slot_chunks.device) < (~unchanged).sum(-1, keepdim=True)
    slot_chunks.copy_(slot_chunks.scatter(-1, slots, new.where(filled, slot_chunks.gather(-1, slots))))
    numbers, order = new.where(filled, NO_MORE).flatten(-2).sort(dim=-1, stable=True)
    return torch.stack([numbers, order // count, slots.flatten(-2).gather(-1, order)], dim=-2)


def choose_of_layers(scores: Tensor, slot_chunks: Tensor) -> Tensor:
    """Does `choose_chunks` with `PREFERENCE` for all layers, in portions that take little memory each.

    Args:
        scores: `[layers, kv_heads, chunks]`.
        slot_chunks: `[layers, kv_heads, slots]`.
    """
    _, heads, chunks = scores.shape
    portion = layers_at_a_time(heads, chunks)
    pairs = zip(scores.split(portion), slot_chunks.split(portion), strict=True)
    return torch.cat([choose_chunks(*pair, PREFERENCE) for pair in pairs])


def top_chunks(scores: Tensor, count: int, first: int = 1) -> Tensor:
    """Returns the numbers of the `count` chunks with the highest scores among those from `first` on.

    Args:
        scores: `[…, chunks]`.

    Returns:
        `[…, count]`, falling in score; of equal scores (as float32) the lower number comes first.
    """
    scores = scores[..., first:]
    # topk does not define the order of ties, and a stable sort is five times slower. So scores are made
    # distinct integers: floats sort like their bits, with negative ones inverted; adding zero makes -0.0
    # equal to 0.0; among equal scores the lower number gets the larger integer.
    bits = (scores.float() + 0.0).view(torch.int32)
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    number = torch.arange(scores.shape[-1], device=scores.device)
    return (rising * 2**32 - number).topk(count, dim=-1).indices + first
