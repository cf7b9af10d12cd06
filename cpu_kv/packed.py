"""Lossless packed pages: bfloat16 keys and values in 12 bits, and a short list of those that need more.

Sign and mantissa of a bfloat16 value take 8 bits as they are. Its exponent takes 4: its distance from a base,
the exponent of the channel's largest value in the page less 14. Exponents below the base are escapes: their
code is 15, and the page lists them. A packed page has a fixed size, so consecutive ones are contiguous:

    escapes   int32 [words]                               their number, then position << 8 | exponent, rising
    bases     uint8 [2, kv_heads, head_dim]               of keys, then of values
    rows      uint8 [2, kv_heads, page_size, 3 * head_dim / 2]

A row holds the signs and mantissas of a token's channels, then its codes: byte `i` those of channels `i`
and, in its upper half, `i + head_dim / 2`. A position counts the values of the page in the order of
`KVLayout.pages_shape`. A page with more escapes than the list has room for cannot be packed.

The functions of `PageCodec` are plain torch, for any device: the reference of faster ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpu_kv.sizes import PackedSizes

ESCAPE = 15
VALUES_AT_A_TIME = 2**22


class PackedShape(PackedSizes):
    """The shape of a page of one layer, with views of the parts of its packed form."""

    def escapes(self, packed: Tensor) -> Tensor:
        """Returns a view of the lists of escapes, int32 `[pages, words]`."""
        return packed[:, : self.bases_at].view(torch.int32)

    def bases(self, packed: Tensor) -> Tensor:
        """Returns a view of the bases, `[pages, 2, kv_heads, head_dim]`."""
        sizes = (2, self.kv_heads, self.head_dim)
        bases: Tensor = packed[:, self.bases_at : self.rows_at].unflatten(1, sizes)
        return bases

    def rows(self, packed: Tensor) -> Tensor:
        """Returns a view of the rows, `[pages, 2, kv_heads, page_size, row_bytes]`."""
        sizes = (2, self.kv_heads, self.page_size, self.row_bytes)
        rows: Tensor = packed[:, self.rows_at : self.rows_end].unflatten(1, sizes)
        return rows

    def overflows(self, packed: Tensor) -> Tensor:
        """Returns which pages have more escapes than their list holds, `[pages]`."""
        return self.escapes(packed)[:, 0] > self.capacity


class PageCodec:
    """Packs and unpacks pages. Nothing waits for a device.

    Packed pages are uint8 `[pages, PackedShape.nbytes]`.
    """

    def encode(self, shape: PackedShape, pages: Tensor) -> Tensor:
        """Returns pages in packed form.

        A page that `PackedShape.overflows` is not whole in this form.

        Args:
            pages: bfloat16 `[pages, 2, kv_heads, page_size, head_dim]`.
        """
        packed = pages.new_empty(len(pages), shape.nbytes, dtype=torch.uint8)
        step = max(1, VALUES_AT_A_TIME // shape.values)
        for part, out in zip(pages.split(step), packed.split(step), strict=True):
            _encode(shape, part, out)
        return packed

    def decode(self, shape: PackedShape, packed: Tensor, out: Tensor, first_side: int = 0) -> None:
        """Unpacks pages.

        Args:
            out: output, bfloat16 `[pages, sides, kv_heads, page_size, head_dim]`.
            first_side: 0: keys come first; 1: `out` has only values.
        """
        step = max(1, VALUES_AT_A_TIME // shape.values)
        for part, destination in zip(packed.split(step), out.split(step), strict=True):
            sides = slice(first_side, first_side + out.shape[1])
            rows, bases = shape.rows(part)[:, sides], shape.bases(part)[:, sides, :, None]
            bits = _bits(rows, bases)
            _restore_escapes(shape.escapes(part), bits.flatten(1), first_side * shape.values // 2)
            destination.copy_(bits.view(torch.bfloat16))

    def take(
        self,
        shape: PackedShape,
        packed: Tensor,
        side: int,
        page: Tensor,
        head: Tensor,
        token: Tensor,
        out: Tensor,
    ) -> None:
        """Unpacks runs of tokens, each of one page and head.

        Args:
            side: 0: of the keys; 1: of the values.
            page, head, token: of each run, int64.
            out: output, contiguous, `[runs, n, head_dim]`: tokens `token` .. `token + n` of each run.
        """
        tokens = token[:, None] + torch.arange(out.shape[1], device=token.device)
        pages, heads = page[:, None], head[:, None]
        rows = shape.rows(packed)[pages, side, heads, tokens]
        bits = _bits(rows, shape.bases(packed)[page, side, head][:, None])
        first = ((side * shape.kv_heads + head) * shape.page_size + token) * shape.head_dim
        _restore_escapes(shape.escapes(packed)[page], bits.flatten(1), first[:, None])
        out.copy_(bits.view(torch.bfloat16))


def _encode(shape: PackedShape, pages: Tensor, out: Tensor) -> None:
    bits = pages.contiguous().view(torch.int16).to(torch.int32)
    exponents = (bits >> 7) & 255
    bases = (exponents.amax(3) - ESCAPE + 1).clamp(min=0)
    codes = exponents - bases[:, :, :, None]
    escaped = codes < 0
    codes = codes.masked_fill(escaped, ESCAPE)
    half = shape.head_dim // 2
    out.zero_()
    rows = shape.rows(out)
    rows[..., : shape.head_dim] = ((bits >> 8) & 128) | (bits & 127)
    rows[..., shape.head_dim :] = codes[..., :half] | (codes[..., half:] << 4)
    shape.bases(out).copy_(bases)
    # Every escape to its place in the list, all other values and those beyond its end to a last one.
    escaped = escaped.flatten(1)
    number = escaped.cumsum(1, dtype=torch.int64)
    place = torch.where(escaped & (number <= shape.capacity), number, shape.words)
    entries = (torch.arange(shape.values, device=pages.device, dtype=torch.int32) << 8) | exponents.flatten(1)
    lists = torch.zeros(len(pages), shape.words + 1, dtype=torch.int32, device=pages.device)
    lists.scatter_(1, place, entries)
    lists[:, 0] = number[:, -1]
    shape.escapes(out).copy_(lists[:, : shape.words])


def _bits(rows: Tensor, bases: Tensor) -> Tensor:
    """Returns the int16 bits of rows `[…, row_bytes]` with bases `[…, head_dim]`, without escapes."""
    dim = bases.shape[-1]
    exact, codes = rows[..., :dim].to(torch.int32), rows[..., dim:].to(torch.int32)
    exponents = torch.cat([codes & 15, codes >> 4], dim=-1) + bases
    bits = ((exact & 128) << 8) | ((exponents & 255) << 7) | (exact & 127)
    return bits.to(torch.int16)


def _restore_escapes(lists: Tensor, bits: Tensor, first: int | Tensor) -> None:
    """Gives values of pages their exponents from the pages' lists.

    Args:
        lists: see `PackedShape.escapes`.
        bits: updated in place, `[n, values]`.
        first: position of the first value, for all pages or `[n, 1]`.
    """
    place, at = torch.arange(lists.shape[1], device=lists.device), (lists >> 8) - first
    valid = (place > 0) & (place <= lists[:, :1]) & (at >= 0) & (at < bits.shape[1])
    # A column more, for what is to be left out.
    wide = torch.cat([bits, bits.new_zeros(len(bits), 1)], dim=1)
    at = torch.where(valid, at, bits.shape[1]).to(torch.int64)
    sign_and_mantissa = wide.gather(1, at).to(torch.int32) & 0x807F
    wide.scatter_(1, at, (sign_and_mantissa | ((lists & 255) << 7)).to(torch.int16))
    bits.copy_(wide[:, :-1])
