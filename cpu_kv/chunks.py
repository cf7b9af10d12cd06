"""Mean keys and values of chunks of a sequence, which retrieval uses in place of every single token."""

from __future__ import annotations

import torch
from torch import Tensor

from cpu_kv.layout import KVLayout
from cpu_kv.views import KVPages, head_major


class ChunkMeans:
    """Mean keys of each full chunk of one sequence (TriForce, section 4.1), and on request mean values.

    A chunk is `chunk_size` consecutive tokens; the first chunk starts at token 0, and a chunk never crosses
    a page boundary. Sums are taken in float32, and the means are stored in the layout's dtype, layer by
    layer.

    Args:
        chunk_size: tokens per chunk.
        values: whether to keep mean values too.
    """

    def __init__(self, layout: KVLayout, chunk_size: int, *, values: bool = False):
        self.layout = layout
        self.chunk_size = chunk_size
        self._sides = 2 if values else 1
        self._means = [self._storage(0) for _ in range(layout.layers)]
        self._counts = [0] * layout.layers

    def means(self, layer: int) -> Tensor:
        """Returns a view of the means, valid until the next append.

        Returns:
            `[sides, kv_heads, chunks, head_dim]`: 1 side for keys only, 2 for keys and values.
        """
        return self._means[layer][:, :, : self._counts[layer]]

    def reserve(self, tokens: int) -> None:
        """Allocates memory for the chunks of `tokens` tokens in every layer."""
        for layer in range(self.layout.layers):
            self._grow(layer, tokens // self.chunk_size)

    def same_kind(self, other: ChunkMeans) -> bool:
        """True if both keep the same means, each of its sequence."""
        return (self.chunk_size, self._sides) == (other.chunk_size, other._sides)

    def begin_with(self, other: ChunkMeans, length: int) -> None:
        """Takes the means of the first `length` tokens from another sequence's of the same kind."""
        full = length // self.chunk_size
        for layer in range(self.layout.layers):
            self._grow(layer, full)
            self._means[layer][:, :, :full] = other.means(layer)[:, :, :full]
            self._counts[layer] = full

    def missing_range(self, layer: int, length: int) -> tuple[int, int]:
        """Returns the range of tokens whose chunks are full at `length` tokens but have no mean yet."""
        full = max(length // self.chunk_size, self._counts[layer])
        return self._counts[layer] * self.chunk_size, full * self.chunk_size

    def extend(self, layer: int, pages: KVPages) -> None:
        """Adds the means of the next tokens, in whole chunks."""
        count = self._counts[layer]
        full = count + pages.tokens // self.chunk_size
        if full > self._means[layer].shape[2]:
            self._grow(layer, max(full, 2 * count))
        for side, means in enumerate(self._means[layer]):
            chunks = pages.side(side).unflatten(2, (-1, self.chunk_size))
            means[:, count:full] = head_major(chunks.mean(dim=3, dtype=torch.float32))
        self._counts[layer] = full

    def cut(self, layer: int, length: int) -> None:
        """Drops the means of a layer's chunks that are not full at `length` tokens."""
        self._counts[layer] = min(self._counts[layer], length // self.chunk_size)

    def truncate(self, length: int) -> None:
        """Drops the means of chunks that are no longer full at `length` tokens."""
        for layer in range(len(self._counts)):
            self.cut(layer, length)

    def _storage(self, chunks: int) -> Tensor:
        shape = (self._sides, self.layout.kv_heads, chunks, self.layout.head_dim)
        with torch.inference_mode(False):  # a tensor made in inference mode is read-only outside of it
            return torch.empty(shape, dtype=self.layout.dtype)

    def _grow(self, layer: int, chunks: int) -> None:
        if chunks > self._means[layer].shape[2]:
            storage = self._storage(chunks)
            storage[:, :, : self._counts[layer]] = self.means(layer)
            self._means[layer] = storage
