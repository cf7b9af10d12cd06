"""The exact sum of attention over disjoint segments of keys, wherever they lie.

Attention over a long context is a sum over segments: partial results combine exactly through their
log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload_rt.attention.backends import AttentionBackend, fold, unfold
from offload_rt.attention.mass import MassRange, Sample


class AttentionSum:
    """Attention of one layer's queries over segments that are added one after the other.

    Sums in float32 or wider.

    Args:
        queries: `[heads, n, head_dim]`.
        kv_heads: key heads of the segments.
        chunk: tokens of a chunk, where attention mass is wanted too.

    Attributes:
        lse: `[kv_heads, folded_query]`, log-sum-exp of all that was added; None: nothing was.
        mass: of the segments that were announced.
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
        self.lse: Tensor | None = None
        self.mass: list[MassRange] = []
        self.sample = Sample.of(queries.shape[1])
        self._backend = backend
        self._queries = fold(queries, kv_heads)
        self._heads = len(queries)
        self._scale = scale
        self._chunk = chunk
        self._out: Tensor | None = None

    def attend(self, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> None:
        """Adds a segment, `[pages, kv_heads, tokens, head_dim]`, or without pages.

        Args:
            mask: from `folded_mask`; None: every key is seen.
        """
        if keys.dim() == 3:
            keys, values = keys[None], values[None]
        self._combine(*self._backend.parts(self._queries, keys, values, self._scale, mask))

    def _combine(self, outs: Tensor, lses: Tensor) -> None:
        self._out, self.lse = self._backend.operators.combine(outs, lses, self._out, self.lse)

    def expect(self, start: int, end: int) -> None:
        """Announces segments of the tokens `start` .. `end`, whole chunks, whose attention mass is wanted."""
        if self._chunk is not None and end > start:
            sampled = self._queries.shape[1] // self.sample.period * self.sample.count
            shape = (len(self._queries), sampled, (end - start) // self._chunk)
            units = torch.empty(shape, device=self._queries.device)
            self.mass.append(MassRange(start // self._chunk, self._chunk, units, self.lse))

    def attend_expected(self, keys: Tensor, values: Tensor) -> None:
        """Adds the next of the segments that were announced, which has pages."""
        if self._chunk is None:
            return self.attend(keys, values)
        backend, mass = self._backend, self.mass[-1]
        outs, lses, units = backend.parts_with_units(
            self._queries, keys, values, self._scale, self.sample, self._chunk
        )
        if units is not None:
            self._combine(outs, lses)
            return mass.put(keys, units, lses[0], self.sample)
        operators, every = backend.operators, (self.sample.period, self.sample.step)
        if mass.reference is None or self._out is None:
            self._combine(outs, lses)
            mass.reference = self.lse
            operators.chunk_mass_(mass.next(keys), self._queries, keys, mass.reference, self._scale, *every)
            return None
        self._out, self.lse = operators.combine_with_mass_(
            *(mass.next(keys), outs, lses, self._out, self.lse),
            *(self._queries, keys, mass.reference, self._scale, *every),
        )
        return None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Adds attention over a segment that was computed elsewhere, as `result` and `lse` return it."""
        heads = len(self._queries)
        self._combine(fold(out, heads)[None], lse.reshape(1, heads, -1))

    def result(self) -> Tensor:
        """Attention over all that was added, `[heads, n, head_dim]` in the dtype of the queries."""
        assert self._out is not None
        return unfold(self._out, self._heads).to(self._queries.dtype)
