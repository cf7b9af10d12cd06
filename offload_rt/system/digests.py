"""Digests, which are equal where contents are, and checksums, which find damaged ones."""

from __future__ import annotations

import hashlib
import zlib

Content = str | bytes | memoryview


def digest(*parts: Content, digits: int) -> str:
    """Returns the first hexadecimal digits of the SHA-256 of all parts, one after the other."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode() if isinstance(part, str) else part)
    return whole.hexdigest()[:digits]


def checksum(*parts: bytes | memoryview) -> int:
    """Returns the CRC-32 of all parts, one after the other; a core takes one of 1 to 3 GB a second."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value
