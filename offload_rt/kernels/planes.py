"""Weights in two planes, without loss: drafts read one of them, verifications both.

A bfloat16 weight is a sign and 15 bits that grow with its size. Of these, less the smallest that a row can
hold, 11 bits are kept: the upper seven with the sign in a byte of the draft plane, the lower four in half a
byte of the rest plane. So a row holds zero and weights down to 2**-16 of its largest one; others are listed.
A draft reads weights rounded to the middle of what the draft plane leaves open, with an error of at most
2**-4 of each, and those below, zero too, as 2**-16 of the largest. Both planes together are the weights, bit
by bit.

`csrc/planes.h` expands rows as products read them, and `WeightPlanes` is its reference.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from offload_rt.kernels.native import load_kernel

REST_BITS = 4
BLOCK = 64
"""Columns of a row whose rests are together: in the lower bits of a byte those of its first half."""
_NUMBERS = 2**11
"""Numbers that the two planes tell apart in a row; 0 stands for zero and for what is listed."""
_MOST_LISTED = 2**-7
"""Share of a matrix that is listed at most; such lists are read by one thread for a row."""
_EXPANDED = 2**22  # weights at a time
_SPLIT_ROWS = 256  # of a matrix at a time, as splitting takes several times the memory of the weights
_DRAFTING: ContextVar[bool] = ContextVar("drafting", default=False)


@contextmanager
def draft_plane_alone(alone: bool = True) -> Iterator[None]:
    """Lets products of this thread read the draft planes alone, where there are planes."""
    token = _DRAFTING.set(alone)
    try:
        yield
    finally:
        _DRAFTING.reset(token)


def reads_draft_plane_alone() -> bool:
    """Returns whether products of this thread read the draft planes alone."""
    return _DRAFTING.get()


@dataclass(frozen=True)
class WeightPlanes:
    """A matrix of bfloat16 weights in two planes.

    Attributes:
        codes: the draft plane, uint8 `[out, in]`.
        rests: the rest plane, uint8 `[out, in / 2]`; see `BLOCK`.
        lows: what is added to the numbers of a row, int16 `[out]`.
        starts: where the listed weights of each row start and end, int32 `[out + 1]`.
        columns: of the listed weights, int32 `[listed]`.
        listed: these, bfloat16 `[listed]`.
    """

    codes: Tensor
    rests: Tensor
    lows: Tensor
    starts: Tensor
    columns: Tensor
    listed: Tensor

    @staticmethod
    def may_split(weight: Tensor) -> bool:
        """Returns whether a matrix is bfloat16 in whole blocks."""
        return weight.dtype == torch.bfloat16 and weight.shape[1] % BLOCK == 0

    @classmethod
    def split(cls, weight: Tensor) -> WeightPlanes | None:
        """Splits a matrix; None: `may_split` does not hold, or too much of it would be listed.

        Args:
            weight: `[out, in]`.
        """
        if not cls.may_split(weight):
            return None
        most = int(_MOST_LISTED * weight.numel())
        if weight.device.type == "cpu" and (split := _native_split()) is not None:
            return split(weight.detach().contiguous(), most)
        parts: list[tuple[Tensor, ...]] = []
        for rows in weight.detach().split(_SPLIT_ROWS):
            parts.append(_split_rows(rows))
            most -= len(parts[-1][-1])
            if most < 0:
                return None
        codes, rests, lows, counts, columns, listed = map(torch.cat, zip(*parts, strict=True))
        return cls(codes, rests, lows, _starts(counts), columns, listed)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors, in order."""
        return tuple(vars(self).values())

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return self.codes.shape

    @property
    def draft_bytes(self) -> int:
        """Bytes that a product by the draft plane alone reads."""
        return self.codes.nbytes + self.lows.nbytes

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def finite(self) -> Tensor:
        """Whether all weights are, bool on the device: the size of another one lifts the low of its row."""
        return (self.lows <= 0x7F7F - (_NUMBERS - 1)).all()

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def expanded(self, *, draft: bool, start: int = 0, stop: int | None = None) -> Tensor:
        """Returns the weights `[out, in]` as drafts or as verifications read them.

        Args:
            start, stop: of the rows; None: to the last one.
        """
        outs, ins = self.shape
        stop = outs if stop is None else stop
        weights = torch.empty(stop - start, ins, dtype=self.dtype, device=self.device)
        some = max(1, _EXPANDED // ins)  # rows at a time, as that takes several times their memory
        for at in range(start, stop, some):
            part = slice(at, min(at + some, stop))
            out = weights[part.start - start : part.stop - start]
            _expand_rows(self.codes[part], self.rests[part], self.lows[part], draft, out)
        if not draft:
            starts = self.starts[start : stop + 1]
            listed = slice(int(starts[0]), int(starts[-1]))
            rows = torch.arange(stop - start, device=self.device).repeat_interleave(starts.diff())
            weights[rows, self.columns[listed].long()] = self.listed[listed]
        return weights


class PlaneLinear(nn.Module):
    """A linear layer whose weights are in two planes; its product is an operator, see `plane_products.py`.

    Attributes:
        planes: the weights.
        bias: as in the layer that it takes the place of.
    """

    bias: nn.Parameter | None

    def __init__(self, planes: WeightPlanes, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = planes.shape
        for name, part in vars(planes).items():
            self.register_buffer(name, part)
        self.register_parameter("bias", bias)

    codes: Tensor

    @property
    def planes(self) -> WeightPlanes:
        return WeightPlanes(**{field.name: getattr(self, field.name) for field in fields(WeightPlanes)})

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch.bfloat16

    @property
    def weight(self) -> Tensor:
        """The weights `[out, in]`, joined anew each time."""
        return self.planes.expanded(draft=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns `[…, out]` of inputs `[…, in]`."""
        product: Tensor = torch.ops.offload_rt.plane_product(
            inputs, self.planes.parts, self.bias, reads_draft_plane_alone()
        )
        return product


class _Split(ctypes.Structure):
    """`Split` of `planes.h`."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("outs", "ins", "threads")),
        *((name, ctypes.c_void_p) for name in ("codes", "rests", "lows", "counts")),
    ]


@functools.cache
def _native_split() -> Callable[[Tensor, int], WeightPlanes | None] | None:
    """Returns a function that splits a contiguous matrix of which so many weights may be listed."""
    if (kernel := load_kernel()) is None:
        return None
    split = kernel.function("split", _Split)
    list_them = kernel.function("list", _Split, ctypes.c_void_p, ctypes.c_void_p)

    def split_matrix(weight: Tensor, most: int) -> WeightPlanes | None:
        outs, ins = weight.shape
        codes, rests = (
            weight.new_empty(outs, ins, dtype=torch.uint8),
            weight.new_empty(outs, ins // 2, dtype=torch.uint8),
        )
        lows, counts = weight.new_empty(outs, dtype=torch.int16), weight.new_empty(outs, dtype=torch.int64)
        tensors = (one.data_ptr() for one in (codes, rests, lows, counts))
        call = ctypes.byref(_Split(weight.data_ptr(), outs, ins, torch.get_num_threads(), *tensors))
        split(call)
        if (total := int(counts.sum())) > most:
            return None
        columns, listed = weight.new_empty(total, dtype=torch.int32), weight.new_empty(total)
        list_them(call, columns.data_ptr(), listed.data_ptr())
        return WeightPlanes(codes, rests, lows, _starts(counts), columns, listed)

    return split_matrix


def _starts(counts: Tensor) -> Tensor:
    return nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def _expand_rows(codes: Tensor, rests: Tensor, lows: Tensor, draft: bool, out: Tensor) -> None:
    """Writes rows of weights, those that are listed as zero; see `WeightPlanes`."""
    numbers = (codes & 127).to(torch.int16) << REST_BITS
    signs = (codes & 128).to(torch.int16) << 8
    if draft:
        bits = numbers + (lows + 2 ** (REST_BITS - 1))[:, None]
    else:
        blocks = rests.unflatten(1, (-1, BLOCK // 2))
        numbers |= torch.cat((blocks & 15, blocks >> REST_BITS), dim=2).flatten(1)
        bits = (numbers + lows[:, None]) * (numbers != 0)
    out.view(torch.int16).copy_(signs | bits)


def _split_rows(rows: Tensor) -> tuple[Tensor, ...]:
    """Returns codes, rests, lows, numbers of listed weights by row, columns and listed weights."""
    bits = rows.contiguous().view(torch.int16)
    sizes = bits & 0x7FFF
    lows = (sizes.amax(dim=1, keepdim=True) - (_NUMBERS - 1)).clamp(min=0)
    numbers = (sizes - lows).clamp(min=0)
    listed = (numbers == 0) & (sizes != 0)
    codes = (bits >> 8 & 128 | numbers >> REST_BITS).to(torch.uint8)
    lower = (numbers & 15).to(torch.uint8).unflatten(1, (-1, 2, BLOCK // 2))
    rests = (lower[:, :, 0] | lower[:, :, 1] << REST_BITS).flatten(1)
    columns = listed.nonzero()[:, 1].to(torch.int32)
    return codes, rests, lows[:, 0], listed.sum(dim=1), columns, rows[listed]
