"""Paged KV cache in CPU memory, and the copies between it and a GPU; independent of models and drafts."""

from cpu_kv.chunks import ChunkMeans
from cpu_kv.cuda_link import CudaLink
from cpu_kv.layout import KeysValues, KVLayout, cut_alike, head_major, part_of, parts_of_pages
from cpu_kv.link import CopyFailed, CpuLink, Event, Link
from cpu_kv.paced_link import PacedLink
from cpu_kv.pinned import PageLocking, SlabAllocator
from cpu_kv.store import PagedKVStore, SequenceKV
from cpu_kv.transfer import LayerStream, PendingCopy, TransferCounters, TransferEngine

__all__ = [
    "ChunkMeans",
    "CopyFailed",
    "CpuLink",
    "CudaLink",
    "Event",
    "KVLayout",
    "KeysValues",
    "LayerStream",
    "Link",
    "PacedLink",
    "PageLocking",
    "PagedKVStore",
    "PendingCopy",
    "SequenceKV",
    "SlabAllocator",
    "TransferCounters",
    "TransferEngine",
    "cut_alike",
    "head_major",
    "part_of",
    "parts_of_pages",
]
