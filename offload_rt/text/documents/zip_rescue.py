"""What is left of a damaged zip archive, by the headers in front of its files instead of its directory."""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_HEADER = struct.Struct("<4s5H3L2H")
_SIGNATURE = re.compile(rb"PK(?:\x03\x04|\x01\x02|\x05\x06|\x07\x08)")
LONGEST_NAME = 4096
_STEP = 4096
"""Compressed bytes that are read at a time."""


class Rescued(NamedTuple):
    """A file in a damaged archive: where its header begins, its name, and its content up to the damage."""

    start: int
    name: str
    content: bytes


def rescued(data: bytes, limit: int) -> Iterator[Rescued]:
    """Yields the files of a zip archive in the order of their headers.

    Args:
        limit: bytes that all of them may have together.

    Raises:
        OverflowError: they have more.
    """
    at = 0
    while (start := data.find(b"PK\x03\x04", at)) >= 0 and len(data) >= start + _HEADER.size:
        _, _, flags, method, _, _, _, size, _, name_bytes, extra = _HEADER.unpack_from(data, start)
        body = start + _HEADER.size + name_bytes + extra
        name = data[start + _HEADER.size : start + _HEADER.size + name_bytes]
        content, at = b"", body
        if method == zipfile.ZIP_DEFLATED:
            content, at = _inflated(data, body, limit)
        elif method == zipfile.ZIP_STORED:
            if not size:  # it is stated behind the content
                end = _SIGNATURE.search(data, body)
                size = (end.start() if end else len(data)) - body
            content, at = data[body : body + size], body + size
        limit -= len(content)
        if limit < 0:
            raise OverflowError
        if not flags & 1:  # it is not encrypted
            yield Rescued(start, name.partition(b"\0")[0].decode("utf-8", "replace"), content)
        at = max(at, start + 4)


def _inflated(data: bytes, at: int, limit: int) -> tuple[bytes, int]:
    """Returns the content that is compressed at a place, up to damage, and where that ends."""
    inflater, content = zlib.decompressobj(wbits=-zlib.MAX_WBITS), bytearray()
    while at < len(data) and not inflater.eof:
        step, before = data[at : at + _STEP], inflater.copy()
        try:
            content += inflater.decompress(step)
        except zlib.error:
            with suppress(zlib.error):
                for byte in step:
                    at += 1
                    content += before.decompress(bytes([byte]))
            break
        at += len(step) - len(inflater.unused_data)
        if len(content) > limit:
            raise OverflowError
    return bytes(content), at


def rebuilt(data: bytes, limit: int) -> zipfile.ZipFile:
    """Returns a new archive of what is left of a damaged one; the last file of a name counts.

    Raises:
        OverflowError: see `rescued`.
    """
    files = {file.name: file.content for file in rescued(data, limit)}
    archive = zipfile.ZipFile(io.BytesIO(), "w")
    for name, content in files.items():
        if not 0 < len(name) <= LONGEST_NAME or name.endswith("/"):
            continue
        archive.writestr(name, content)
    return archive
