"""The header of safetensors files with checksums, read and checked without torch; see `checked_tensors`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Self

from offload_rt.system.digests import checksum

CHECKSUMS = "checksums"
PIECE = "piece_bytes"
LONGEST_HEADER = 100_000_000
"""Bytes of a header, as safetensors limits it."""
DTYPES = {
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U8": ("uint8", 1),
}
"""Types of numbers as safetensors calls them: their names in torch, and their bytes."""
_MOST_VIEWS = os.sysconf("SC_IOV_MAX")  # of memory, that one read fills


class CorruptFile(Exception):
    """Raised for a file that is not as it was written; the message is the reason."""


def cut(size: int, piece: int) -> Iterator[tuple[int, int]]:
    """Yields the pieces of so many bytes."""
    return ((start, min(start + piece, size)) for start in range(0, size, piece))


def pieces_of(size: int, piece: int) -> int:
    """Returns their number."""
    return -(-size // piece)


class CheckedHeader:
    """A file of `checked_tensors.write_checked`, open for reading, with its header and without tensors.

    Attributes:
        about: the metadata.
        piece_bytes: length of the pieces that have a checksum.

    Raises:
        OSError: it cannot be read.
        CorruptFile: it is not as it was written, or another kind of file.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
            self.close()
            raise CorruptFile("its header cannot be read") from None
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._file).st_size
        length = int.from_bytes(self._bytes(0, 8), "little")
        if length > min(size - 8, LONGEST_HEADER):
            raise CorruptFile("its header is longer than the file")
        header = self._bytes(0, 8 + length)
        described: dict[str, Any] = json.loads(header[8:])
        self.about: dict[str, str] = described.pop("__metadata__")
        self.piece_bytes = int(self.about[PIECE])
        self._tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        self._first: dict[str, int] = {}  # number of the first checksum of a tensor
        end, pieces = 0, 1
        for name, description in described.items():
            kind, shape, before = description["dtype"], tuple(map(int, description["shape"])), end
            start, end = map(int, description["data_offsets"])
            byte_count = prod(shape) * DTYPES[kind][1]
            if (start, end) != (before, before + byte_count) or min(shape, default=0) < 0:
                raise CorruptFile(f"the size of {name} is wrong")
            self._tensors[name] = kind, shape, 8 + length + start, 8 + length + end
            self._first[name] = pieces
            pieces += pieces_of(byte_count, self.piece_bytes)
        if size != 8 + length + end:
            raise CorruptFile(f"it has {size} bytes instead of {8 + length + end}")
        *_, start, end = self._tensors[CHECKSUMS]
        self._checksums = memoryview(self._bytes(start, end)).cast("q").tolist()
        if len(self._checksums) != self._first[CHECKSUMS] or self.piece_bytes < 1:
            raise CorruptFile("its checksums are not complete")
        if self._checksums[0] != checksum(header):
            raise CorruptFile("the checksum of its header is wrong")

    def _bytes(self, start: int, end: int) -> bytes:
        data = bytearray(end - start)
        self._read_into([memoryview(data)], start)
        return bytes(data)

    def _read_into(self, views: list[memoryview], offset: int) -> None:
        while views:
            count = os.preadv(self._file, views[:_MOST_VIEWS], offset)
            if not count:
                raise CorruptFile("it is cut off")
            offset += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def form(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Returns the type of a tensor, as safetensors calls it, and its shape.

        Raises CorruptFile where it is missing.
        """
        return self._described(name)[:2]

    def integers(self, name: str) -> list[int]:
        """Returns the numbers of a tensor of 32-bit integers."""
        kind, _, begin, end = self._described(name)
        if kind != "I32":
            raise CorruptFile(f"{name} is of the type {kind} instead of I32")
        data = self._bytes(begin, end)
        for number, (start, stop) in enumerate(cut(len(data), self.piece_bytes), self._first[name]):
            self._check_piece(number, checksum(data[start:stop]), begin + start)
        return memoryview(data).cast("i").tolist()

    def _check_piece(self, number: int, checksum_found: int, offset: int) -> None:
        if checksum_found != self._checksums[number]:
            raise CorruptFile(f"a checksum is wrong, at byte {offset}")

    def _described(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        if name not in self._tensors:
            raise CorruptFile(f"{name} is missing")
        return self._tensors[name]

    def close(self) -> None:
        """Closes the file. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
