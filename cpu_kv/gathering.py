"""Gathers scattered chunks out of slabs, for ``SequenceKV.gather_chunks``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpu_kv.layout import KeysValues, KVLayout

Source = tuple[Tensor, int, int]
"""A run: memory (``KVLayout.pages_shape``), its page where the run begins, and the sequence's page there."""


def gather_units(
    layout: KVLayout,
    sources: Sequence[Source],
    length: int,
    units: Tensor,
    unit_tokens: int,
    out: KeysValues,
) -> None:
    """Copy the units ``units`` ``[kv_heads, m]`` of ``unit_tokens`` consecutive tokens each to ``out``.

    ``sources`` lie in token order and hold ``length`` tokens. Errors are those of ``gather_chunks``.
    """
    _check(layout, units, unit_tokens, length, out)
    if units.numel() == 0:
        return
    width = unit_tokens * layout.head_dim
    if len(sources) == 1:
        table = sources[0][0].view(-1, width)
        for result, rows in zip(out, _rows(sources[0], units, unit_tokens), strict=True):
            if result.is_contiguous():
                torch.index_select(table, 0, rows.flatten(), out=result.view(-1, width))
            else:
                result.copy_(table.index_select(0, rows.flatten()).view(result.shape))
        return
    gathered = torch.empty(2, units.numel(), width, dtype=layout.dtype)
    starts = torch.tensor([start * (layout.page_size // unit_tokens) for _, _, start in sources])
    source_of = torch.bucketize(units, starts, right=True) - 1
    for number, source in enumerate(sources):
        places = (source_of.flatten() == number).nonzero().flatten()
        table = source[0].view(-1, width)
        for side, rows in zip(gathered, _rows(source, units, unit_tokens), strict=True):
            side.index_copy_(0, places, table.index_select(0, rows.flatten()[places]))
    for result, side in zip(out, gathered, strict=True):
        result.copy_(side.view(result.shape))


def _rows(source: Source, units: Tensor, unit_tokens: int) -> tuple[Tensor, Tensor]:
    """Where the keys and the values of ``units`` lie in the memory of ``source``, counted in units."""
    memory, first, start = source
    _, _, heads, page_size, _ = memory.shape
    per_page = page_size // unit_tokens
    pages = units // per_page + first - start
    keys = (pages * 2 * heads + torch.arange(heads)[:, None]) * per_page + units % per_page
    return keys, keys + heads * per_page


def _check(layout: KVLayout, units: Tensor, unit_tokens: int, length: int, out: KeysValues) -> None:
    if layout.page_size % unit_tokens:
        raise ValueError(f"units of {unit_tokens} tokens may cross pages of {layout.page_size}")
    if units.dim() != 2 or units.shape[0] != layout.kv_heads or units.device.type != "cpu":
        raise ValueError(
            f"indices must be [{layout.kv_heads}, n] on the CPU, not {list(units.shape)} on {units.device}"
        )
    shape = (layout.kv_heads, units.shape[1] * unit_tokens, layout.head_dim)
    for tensor in out:
        if tensor.shape != shape or tensor.dtype != layout.dtype or tensor.device.type != "cpu":
            raise ValueError(
                f"out must be {list(shape)} {layout.dtype} on the CPU, "
                f"not {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )
    if units.numel() > 0:
        lowest, highest = (int(bound) for bound in torch.aminmax(units))
        if lowest < 0 or highest >= length // unit_tokens:
            raise ValueError(
                f"indices {lowest} to {highest} are not all among the {length // unit_tokens} present "
                f"({length} tokens in units of {unit_tokens})"
            )
