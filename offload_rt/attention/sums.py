"""The exact sum of attention over disjoint segments of keys.

Attention over a long context is a sum over segments, wherever they lie: partial results combine exactly
through their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cpu_kv import KVPages, PlainPages
from offload_rt.attention.backends import AttentionBackend, StartedTail, Total, fold, unfold
from offload_rt.attention.mass import MassRange, Sample
from offload_rt.kernels.quantized import QuantizedLayer
from offload_rt.kernels.tail import TailView


class Softmax(NamedTuple):
    """How a layer turns scores into weights.

    Attributes:
        scale: factor on the scores.
        sinks: a logit for each head that takes a share of the weights and adds nothing, `[heads]`; or None.
    """

    scale: float
    sinks: Tensor | None = None


class AttentionSum:
    """Attention of one layer's queries over segments that are added one after the other.

    Sums in float32 or wider.

    Args:
        queries: `[heads, n, head_dim]`.
        kv_heads: number of key heads of the segments.
        chunk: tokens per chunk for attention mass; None: no mass is taken.

    Attributes:
        lse: log-sum-exp of everything added so far, `[kv_heads, folded_query]`; None: nothing was added.
        mass: attention mass of the ranges that were tracked or added with it.
        sample: the queries whose attention mass is taken.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        queries: Tensor,
        kv_heads: int,
        scale: float,
        chunk: int | None = None,
    ) -> None:
        self.mass: list[MassRange] = []
        self.sample = Sample.of(queries.shape[1])
        self._backend = backend
        self._queries = fold(queries, kv_heads)
        self._heads = len(queries)
        self._scale = scale
        self._chunk = chunk
        self._total: Total | None = None
        self._tail: StartedTail | None = None

    @property
    def lse(self) -> Tensor | None:
        return None if self._total is None else self._total[1]

    def attend(self, pages: KVPages, mask: Tensor | None = None) -> None:
        """Adds attention over a segment.

        Args:
            mask: from `folded_mask`; None: every key is seen.
        """
        self._total = self._backend.add(self._total, self._queries, pages, self._scale, mask)

    def begin_tail(self, tail: PlainPages, mask: Tensor | None, view: TailView) -> None:
        """Starts attention over a tail, which `end_tail` adds; see `AttentionBackend.begin_tail`."""
        self._tail = self._backend.begin_tail(self._queries, tail, self._scale, mask, view)

    def end_tail(self) -> None:
        """Adds the tail, behind all other segments, as in the sequence."""
        assert self._tail is not None
        self._total = self._tail.add(self._total)

    def attend_prompt(self, tail: PlainPages, view: TailView, before: Iterable[KVPages]) -> None:
        """Adds attention of many queries in order over segments, and over a tail behind them.

        Args:
            before: each segment is valid until the next one.
        """
        add = partial(
            self._backend.add_prompt, queries=self._queries, tail=tail, scale=self._scale, view=view
        )
        if self._backend.tails_first:
            self._total = add(self._total)
        for segment in before:
            self.attend(segment)
        if not self._backend.tails_first:
            self._total = add(self._total)

    def attend_quantized(self, layer: QuantizedLayer, count: Tensor | None = None) -> None:
        """Adds attention over the first `count` tokens of quantised keys and values; None: all of them."""
        self._total = self._backend.add_quantized(self._total, self._queries, layer, self._scale, count)

    def track_mass(self, start: int, end: int) -> None:
        """Starts a range of tokens, whole chunks, that `attend_tracked` fills with attention mass."""
        if self._chunk is not None and end > start:
            sampled = self._queries.shape[1] // self.sample.period * self.sample.count
            shape = (len(self._queries), sampled, (end - start) // self._chunk)
            mass = torch.empty(shape, device=self._queries.device)
            reference = self.lse
            if reference is None and self._tail is not None:
                reference = self._tail.reference
            self.mass.append(MassRange(start // self._chunk, self._chunk, mass, reference))

    def attend_tracked(self, pages: KVPages) -> None:
        """Adds attention over the next segment of the range."""
        if self._chunk is None:
            return self.attend(pages)
        tracked = self.mass[-1]
        if tracked.reference is None and len(pages) > 1 and self._backend.wants_reference(pages):
            # The first page brings a reference; the mass of the others is then taken with their attention.
            self.attend_tracked(pages[:1])
            pages = pages[1:]
        mass, reference = tracked.next_segment(pages.tokens), tracked.reference
        self._total = self._backend.add_with_mass(
            self._total, self._queries, pages, self._scale, self.sample, mass, reference
        )
        if reference is None:
            tracked.reference = self.lse
        return None

    def add(self, out: Tensor, lse: Tensor, mass: Tensor | None = None, *, start: int = 0) -> None:
        """Adds attention that was computed elsewhere, over the tokens from position `start` on.

        Args:
            out: `[heads, n, head_dim]`.
            lse: `[heads, n]`.
            mass: from `summed_mass`, relative to `lse`; None: no mass was taken.
        """
        heads = len(self._queries)
        folded = lse.reshape(heads, -1)
        self._total = self._backend.combined(self._total, fold(out, heads)[None], folded[None])
        if mass is not None and self._chunk is not None:
            self.mass.append(MassRange(start // self._chunk, self._chunk, mass, folded))

    def add_mass_to(self, scores: Tensor, decay: float) -> None:
        """Computes `scores = decay * scores + mass` for the chunks whose mass was taken, once all is added.

        Args:
            scores: updated in place, `[kv_heads, chunks]` float32, of all chunks of the layer.
        """
        assert self.lse is not None
        for one in self.mass:
            assert one.reference is not None
            part, every = scores[:, one.first : one.first + one.mass.shape[2]], self.sample
            self._backend.operators.add_mass_(
                part, one.mass, one.reference, self.lse, decay, every.period, every.step
            )

    def result(self, sinks: Tensor | None = None) -> Tensor:
        """Returns attention over everything added, `[heads, n, head_dim]` in the dtype of the queries.

        Args:
            sinks: see `Softmax`.
        """
        assert self._total is not None
        out = unfold(self._total[0], self._heads)
        if sinks is not None:
            lse = unfold(self._total[1], self._heads)
            out = out * torch.sigmoid(lse - sinks[:, None])[..., None]
        return out.to(self._queries.dtype)
