"""The caching allocator of torch for CUDA, without memory: which segments it reserves for what is allocated.

Small requests, of up to 1 MiB, share segments of 2 MiB, those below 10 MiB segments of 20 MiB. Larger ones
have segments of their own, in whole 2 MiB. A stream keeps its free blocks; another stream gets new segments.
`c10/cuda/CUDACachingAllocator.cpp` does so, without its options.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

MIB = 2**20
ROUNDING = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
LARGE, LARGE_SEGMENT = 10 * MIB, 20 * MIB


@dataclass(eq=False)
class Block:
    """A part of a segment, `size` bytes from `at` on; `pool`: its stream, and whether blocks are small."""

    pool: tuple[Hashable, bool]
    segment: list[Block]
    at: int
    size: int
    free: bool = False


class CachingAllocator:
    """The segments of one device.

    Args:
        capacity: bytes that may be reserved.

    Attributes:
        reserved, peak: bytes of all segments, now and at most.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = self.peak = 0
        self._segments: list[list[Block]] = []
        self._lock = threading.Lock()
        self._returned: deque[Block] = deque()

    def free(self, block: Block) -> None:
        """Gives a block back, from any thread and from a finaliser."""
        self._returned.append(block)

    def allocate(self, size: int, stream: Hashable) -> Block | None:
        """Returns a block of at least `size` bytes; None: there is no memory for it."""
        with self._lock:
            self._take_back()
            return self._allocate(size, stream)

    def empty_cache(self) -> None:
        """Gives segments back of which nothing is allocated."""
        with self._lock:
            self._take_back()
            self._drop_unused()

    def _allocate(self, size: int, stream: Hashable) -> Block | None:
        size = max(ROUNDING, -(-size // ROUNDING) * ROUNDING)
        pool = stream, size <= SMALL
        fitting = [
            block
            for segment in self._segments
            for block in segment
            if block.free and block.pool == pool and block.size >= size
        ]
        block = min(fitting, key=lambda one: one.size) if fitting else self._new_segment(size, pool)
        if block is None:
            return None
        block.free = False
        rest = block.size - size
        if rest >= (ROUNDING if pool[1] else SMALL + ROUNDING):
            block.size = size
            other = Block(pool, block.segment, block.at + size, rest, free=True)
            block.segment.insert(block.segment.index(block) + 1, other)
        return block

    def _new_segment(self, size: int, pool: tuple[Hashable, bool]) -> Block | None:
        if pool[1]:
            total = SMALL_SEGMENT
        else:
            total = LARGE_SEGMENT if size < LARGE else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        if self.reserved + total > self.capacity:
            self._drop_unused()
        if self.reserved + total > self.capacity:
            return None
        self.reserved += total
        self.peak = max(self.peak, self.reserved)
        segment: list[Block] = []
        segment.append(Block(pool, segment, 0, total, free=True))
        self._segments.append(segment)
        return segment[0]

    def _take_back(self) -> None:
        while self._returned:
            self._join(self._returned.popleft())

    def _join(self, block: Block) -> None:
        """Gives a block back to its stream, joined with the free ones beside it."""
        block.free = True
        segment = block.segment
        at = segment.index(block)
        for other in (segment[at + 1 : at + 2], segment[at - 1 : at] if at else []):
            if other and other[0].free:
                first, second = sorted((block, other[0]), key=lambda one: one.at)
                first.size += second.size
                segment.remove(second)
                block = first

    def _drop_unused(self) -> None:
        unused = [segment for segment in self._segments if len(segment) == 1 and segment[0].free]
        self.reserved -= sum(segment[0].size for segment in unused)
        self._segments = [segment for segment in self._segments if segment not in unused]
