"""The full KV cache in CPU memory: pages, slabs, copies. Knows nothing of models, tokens or drafts."""

from cpu_kv.chunks import ChunkMeans
from cpu_kv.cuda_link import CudaLink
from cpu_kv.layout import KeysValues, KVLayout, head_major, part_of
from cpu_kv.link import CopyFailed, CpuLink, Link, Ticket, TransferStalled
from cpu_kv.paced_link import PacedLink
from cpu_kv.pinned import PageLocking, SlabAllocator
from cpu_kv.store import PagedKVStore, SequenceKV
from cpu_kv.transfer import LayerStream, Sent, TransferCounters, TransferEngine

__all__ = [
    "ChunkMeans",
    "CopyFailed",
    "CpuLink",
    "CudaLink",
    "KVLayout",
    "KeysValues",
    "LayerStream",
    "Link",
    "PacedLink",
    "PageLocking",
    "PagedKVStore",
    "Sent",
    "SequenceKV",
    "SlabAllocator",
    "Ticket",
    "TransferCounters",
    "TransferEngine",
    "TransferStalled",
    "head_major",
    "part_of",
]
