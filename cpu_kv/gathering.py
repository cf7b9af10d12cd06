"""Gathers scattered tokens or chunks out of slabs, for ``SequenceKV.gather_chunks``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv.layout import KVLayout


@dataclass(frozen=True)
class UnitSource:
    """A run of a sequence: its pages from ``start`` on lie in ``memory`` from page ``first`` on.

    ``memory``: see ``KVLayout.pages_shape``.
    """

    memory: Tensor
    first: int
    start: int


def gather_units(
    layout: KVLayout,
    sources: Sequence[UnitSource],
    length: int,
    units: Tensor,
    unit_tokens: int,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Copy the units ``units`` ``[kv_heads, m]`` of ``unit_tokens`` consecutive tokens each.

    ``sources`` lie in token order and hold ``length`` tokens. Returns K and V
    ``[kv_heads, m * unit_tokens, head_dim]``, which are ``out`` if given. Raises ValueError for a unit that
    is not present as a whole and for tensors of the wrong shape, dtype or device.
    """
    _check_units(layout, units, unit_tokens, length)
    shape = (layout.kv_heads, units.shape[1] * unit_tokens, layout.head_dim)
    if out is None:
        memory = torch.empty(2, *shape, dtype=layout.dtype)
        out = (memory[0], memory[1])
    for tensor in out:
        if tensor.shape != shape or tensor.dtype != layout.dtype or tensor.device.type != "cpu":
            raise ValueError(
                f"out must be {list(shape)} {layout.dtype} on the CPU, "
                f"not {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )
    if units.numel() == 0:
        return out
    units = units.long()
    if layout.page_size % unit_tokens:
        # A unit may lie across two pages: move token by token.
        units = (units[:, :, None] * unit_tokens + torch.arange(unit_tokens)).flatten(1)
        unit_tokens = 1
    width = unit_tokens * layout.head_dim
    if len(sources) == 1:
        keys_rows, values_rows = _rows(sources[0], units, unit_tokens)
        table = sources[0].memory.view(-1, width)
        for result, rows in zip(out, (keys_rows, values_rows), strict=True):
            if result.is_contiguous():
                torch.index_select(table, 0, rows.flatten(), out=result.view(-1, width))
            else:
                result.copy_(table.index_select(0, rows.flatten()).view(shape))
        return out
    gathered = torch.empty(2, units.numel(), width, dtype=layout.dtype)
    starts = torch.tensor([source.start * (layout.page_size // unit_tokens) for source in sources])
    source_of = torch.bucketize(units, starts, right=True) - 1
    for number, source in enumerate(sources):
        places = (source_of.flatten() == number).nonzero().flatten()
        table = source.memory.view(-1, width)
        for side, rows in zip(gathered, _rows(source, units, unit_tokens), strict=True):
            side.index_copy_(0, places, table.index_select(0, rows.flatten()[places]))
    for result, side in zip(out, gathered, strict=True):
        result.copy_(side.view(shape))
    return out


def _rows(source: UnitSource, units: Tensor, unit_tokens: int) -> tuple[Tensor, Tensor]:
    """Where the keys and the values of ``units`` lie in the memory of ``source``, counted in units."""
    _, _, heads, page_size, _ = source.memory.shape
    per_page = page_size // unit_tokens
    pages = units // per_page + source.first - source.start
    keys = (pages * 2 * heads + torch.arange(heads)[:, None]) * per_page + units % per_page
    return keys, keys + heads * per_page


def _check_units(layout: KVLayout, units: Tensor, unit_tokens: int, length: int) -> None:
    if units.dim() != 2 or units.shape[0] != layout.kv_heads or units.device.type != "cpu":
        raise ValueError(
            f"indices must be [{layout.kv_heads}, n] on the CPU, not {list(units.shape)} on {units.device}"
        )
    if unit_tokens < 1:
        raise ValueError(f"chunk_size must be at least 1, not {unit_tokens}")
    if units.numel() > 0:
        lowest, highest = (int(bound) for bound in torch.aminmax(units))
        if lowest < 0 or highest >= length // unit_tokens:
            raise ValueError(
                f"indices {lowest} to {highest} are not all among the {length // unit_tokens} present "
                f"({length} tokens in units of {unit_tokens})"
            )
