"""Sizes that attention has a say in, without tensors: a plan needs them and no torch."""

from __future__ import annotations

import math
from typing import NamedTuple

from cpu_kv import KVSizes

MASKED_PAGE = 128
"""Keys among which the CUDA backends split attention under a mask."""

MOST_PACKED_QUERIES = 256
"""Most queries of a KV head for which a GPU unpacks pages in registers, for each tile of queries anew. For
more queries, pages are unpacked once."""
TILE = 16
"""Tokens of a page that a program attends to at a time on a GPU."""
_TILE_ROWS = {128: 64, 256: 32}
_FEWEST_ROWS = 16  # of a matrix product on tensor cores

PASS_ROWS = 96
"""Rows that a pass which verifies computes on a GPU, of one token or of many. Fewer take no less time: an RTX
4090 reads bfloat16 weights as long as it computes about 140 rows. A tree of 64 tokens and its root fit."""

SAMPLED_QUERIES = 4
"""Queries sampled per pass and head for attention mass. More choose no better chunks, and each costs its
sums."""

GROUP = 32
"""Tokens whose quantised keys share a zero and a step for each channel."""


def tile_rows(head_dim: int) -> int:
    """Returns the rows of queries that a program has on a GPU, be there few or many: more would spill."""
    return next((rows for widest, rows in _TILE_ROWS.items() if head_dim <= widest), _FEWEST_ROWS)


class QuantizedSize(NamedTuple):
    """Size of the memory for quantised entries: their number, whole groups, and bits of each."""

    entries: int
    bits: int

    def shapes(self, layout: KVSizes) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of key codes, key ranges, value codes and value ranges of all layers."""
        if layout.head_dim * self.bits % 8:
            raise ValueError(
                f"heads of {layout.head_dim} dimensions are no whole bytes of {self.bits} bits each"
            )
        every = layout.layers, layout.kv_heads
        codes = (*every, self.entries, layout.head_dim * self.bits // 8)
        return codes, (*every, self.entries // GROUP, 2, layout.head_dim), codes, (*every, self.entries, 2)

    def nbytes(self, layout: KVSizes) -> int:
        """Bytes of the entries: codes of 8 bits, and ranges of 16."""
        sizes = map(math.prod, self.shapes(layout))
        return sum(size * width for size, width in zip(sizes, (1, 2, 1, 2), strict=True))
