"""Gathers scattered chunks out of slabs, for ``SequenceKV.gather_chunks``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpu_kv.layout import KVLayout

Source = tuple[Tensor, int, int]
"""A run: memory (``KVLayout.pages_shape``), its page where the run begins, and the sequence's page there."""


def gather_units(
    layout: KVLayout, sources: Sequence[Source], length: int, units: Tensor, unit_tokens: int, out: Tensor
) -> None:
    """Copy the units ``units`` ``[kv_heads, m]`` of ``unit_tokens`` consecutive tokens each to ``out``.

    ``sources`` lie in token order and hold ``length`` tokens. Errors are those of ``gather_chunks``.
    """
    _check(layout, units, unit_tokens, length, out)
    if units.numel() == 0:
        return
    per_page, width = layout.page_size // unit_tokens, unit_tokens * layout.head_dim
    starts = torch.tensor([start * per_page for _, _, start in sources])
    source_of = torch.bucketize(units, starts, right=True).flatten() - 1
    for number, (memory, first, start) in enumerate(sources):
        # Where keys and values lie in the memory, counted in units.
        pages = units // per_page + first - start
        heads = torch.arange(layout.kv_heads)[:, None]
        keys = ((pages * 2 * layout.kv_heads + heads) * per_page + units % per_page).flatten()
        table = memory.view(-1, width)
        for rows, side in zip((keys, keys + layout.kv_heads * per_page), out.view(2, -1, width), strict=True):
            if len(sources) == 1:
                torch.index_select(table, 0, rows, out=side)
            else:
                places = (source_of == number).nonzero().flatten()
                side.index_copy_(0, places, table.index_select(0, rows[places]))


def _check(layout: KVLayout, units: Tensor, unit_tokens: int, length: int, out: Tensor) -> None:
    if layout.page_size % unit_tokens:
        raise ValueError(f"units of {unit_tokens} tokens may cross pages of {layout.page_size}")
    if units.dim() != 2 or units.shape[0] != layout.kv_heads or units.device.type != "cpu":
        raise ValueError(
            f"indices must be [{layout.kv_heads}, n] on the CPU, not {list(units.shape)} on {units.device}"
        )
    shape = (2, layout.kv_heads, units.shape[1] * unit_tokens, layout.head_dim)
    if out.shape != shape or out.dtype != layout.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous, {list(shape)} {layout.dtype}, not {list(out.shape)} {out.dtype}"
        )
    if units.numel() > 0:
        lowest, highest = (int(bound) for bound in torch.aminmax(units))
        if lowest < 0 or highest >= length // unit_tokens:
            raise ValueError(
                f"indices {lowest} to {highest} are not all among the {length // unit_tokens} present "
                f"({length} tokens in units of {unit_tokens})"
            )
