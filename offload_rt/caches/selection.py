"""What a retrieved cache chooses chunks by: their mean keys, or what they have been attended to."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cpu_kv import chunk_scores
from offload_rt.attention import attend_weighed, choose_backend, fold, merge
from offload_rt.caches.attended import AttendedChunks
from offload_rt.caches.full import LAST_QUERIES, FullCache
from offload_rt.host import Arriving

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


class ByAttention(AttendedChunks):
    """What verifications have attended to; the newest queries of the prompt to begin with.

    It costs a pass a few sums, where mean keys cost a refresh a product; and it sees a chunk that one token
    makes worth holding, which a mean hides.
    """

    def __init__(self, source: FullCache, chunk: int, decay: float, pages: int) -> None:
        super().__init__(source.layout, source.device, chunk, decay, pages)
        self._source = source
        source.attended = self

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
