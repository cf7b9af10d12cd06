"""What the tokens of a pass see of the newest tokens of a sequence, which no full page holds yet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TailView:
    """How the tokens of a pass, the queries, see a tail of committed and pending tokens.

    Attributes:
        page: tokens of a page of the store. The tail begins with a page.
        count: number of queries.
        shared: number of committed tokens, which every query sees.
        paths: the rows behind these that each query sees, in the order of the sequence, `[queries, longest]`
            int32 on the device; None: each sees all up to itself.
        lengths: number of tokens that each query sees, shared ones included, `[queries]` int32.
    """

    page: int
    count: int
    shared: int = 0
    paths: Tensor | None = None
    lengths: Tensor | None = None
