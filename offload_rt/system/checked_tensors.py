"""Large safetensors files with checksums, written and read piece by piece at the disk's speed.

Nothing is copied on the way: what is written is taken from memory where it lies, and what is read goes where
it belongs. The last tensor, `checksums`, has the CRC-32 of the header and of each piece of the others.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch
from torch import Tensor

from offload_rt.system.checked_headers import CHECKSUMS, DTYPES, PIECE, CheckedHeader, cut, pieces_of
from offload_rt.system.digests import checksum

WORKERS = min(8, os.cpu_count() or 1)
"""Threads that read and take checksums, each as fast as a core takes them."""
_PENDING = 4 * WORKERS
_DTYPES: dict[str, torch.dtype] = {kind: getattr(torch, name) for kind, (name, _) in DTYPES.items()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Report = Callable[[int, int], object]
"""Called with the bytes done, and all."""
Places = Callable[[int, int], list[Tensor]]
"""Returns the memory of the bytes from `start` to `end` of a tensor: contiguous, together as long."""


@dataclass(frozen=True)
class Part:
    """A tensor to be written.

    Attributes:
        places: where its bytes are.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    places: Places

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Part:
        memory = as_bytes(tensor.contiguous())
        return cls(name, tensor.dtype, tuple(tensor.shape), lambda start, end: [memory[start:end]])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


def _views(places: Sequence[Tensor]) -> list[memoryview]:
    return [as_bytes(place).numpy().data for place in places if place.numel()]


def file_bytes(parts: Sequence[Part], about: Mapping[str, str], piece_bytes: int) -> int:
    """Returns the size of a file."""
    return (
        len(_header(parts, about, piece_bytes))
        + sum(part.nbytes for part in parts)
        + _checksums_bytes(parts, piece_bytes)
    )


def write_checked(
    file: BinaryIO, parts: Sequence[Part], about: Mapping[str, str], piece_bytes: int, report: Report
) -> None:
    """Writes tensors to a file that is open.

    Args:
        about: the metadata.
        piece_bytes: length of the pieces that have a checksum.

    Raises:
        OSError: it cannot be written.
    """
    header = _header(parts, about, piece_bytes)
    written, total = 0, sum(part.nbytes for part in parts)
    checksums, pending = [checksum(header)], deque[Future[int]]()
    file.write(header)
    with ThreadPoolExecutor(WORKERS) as pool:
        for part in parts:
            for start, end in cut(part.nbytes, piece_bytes):
                views = _views(part.places(start, end))
                pending.append(pool.submit(checksum, *views))
                for view in views:
                    file.write(view)
                written += end - start
                report(written, total)
                if len(pending) > _PENDING:
                    checksums.append(pending.popleft().result())
        checksums += [future.result() for future in pending]
    file.write(as_bytes(torch.tensor(checksums, dtype=torch.int64)).numpy().data)


def _checksums_bytes(parts: Sequence[Part], piece_bytes: int) -> int:
    return 8 * (1 + sum(pieces_of(part.nbytes, piece_bytes) for part in parts))


def _header(parts: Sequence[Part], about: Mapping[str, str], piece_bytes: int) -> bytes:
    """Returns the beginning of a safetensors file: the length of the JSON, and the JSON."""
    described: dict[str, Any] = {"__metadata__": {**about, PIECE: str(piece_bytes)}}
    at = 0
    count = _checksums_bytes(parts, piece_bytes) // 8
    for name, dtype, shape, size in (
        *((part.name, part.dtype, part.shape, part.nbytes) for part in parts),
        (CHECKSUMS, torch.int64, (count,), 8 * count),
    ):
        described[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    return len(text).to_bytes(8, "little") + text


class CheckedFile(CheckedHeader):
    """A file of `write_checked`, open for reading."""

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Returns dtype and shape of a tensor. Raises CorruptFile where it is missing."""
        kind, shape = self.form(name)
        return _DTYPES[kind], shape

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor."""
        kind, shape, start, end = self._described(name)
        tensor = torch.empty(shape, dtype=_DTYPES[kind])
        memory = as_bytes(tensor)
        for _ in self.fill(name, end - start, lambda first, last: [memory[first:last]]):
            pass
        return tensor

    def fill(self, name: str, size: int, places: Places) -> Iterator[tuple[int, list[Tensor]]]:
        """Reads the first `size` bytes of a tensor to where they belong, several pieces at a time.

        Yields the end of each piece and its places, in order, once it is there and its checksum is right.
        """
        _, _, begin, stop = self._described(name)
        pending = deque[tuple[int, list[Tensor], Future[None]]]()
        with ThreadPoolExecutor(WORKERS) as pool:
            for number, (start, end) in enumerate(cut(stop - begin, self.piece_bytes), self._first[name]):
                if start >= size:
                    break
                destinations = places(start, min(end, size))
                beyond = torch.empty(max(0, end - size), dtype=torch.uint8)  # belongs to the checksum
                future = pool.submit(self._read_piece, number, [*destinations, beyond], begin + start)
                pending.append((min(end, size), destinations, future))
                if len(pending) > _PENDING:
                    yield self._arrived(*pending.popleft())
            while pending:
                yield self._arrived(*pending.popleft())

    @staticmethod
    def _arrived(end: int, places: list[Tensor], future: Future[None]) -> tuple[int, list[Tensor]]:
        future.result()
        return end, places

    def _read_piece(self, number: int, places: Sequence[Tensor], offset: int) -> None:
        views = _views(places)
        self._read_into(list(views), offset)
        self._check_piece(number, checksum(*views), offset)
