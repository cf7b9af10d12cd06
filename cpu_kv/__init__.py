"""Paged KV cache in CPU memory, and the copies between it and a GPU; independent of models and drafts."""

TYPE_CHECKING = False  # true to type checkers
if TYPE_CHECKING:
    from cpu_kv.chunks import ChunkMeans
    from cpu_kv.cuda_link import CudaLink
    from cpu_kv.gathering import Gatherer, LayerGatherer, PendingCopy, TransferCounters
    from cpu_kv.kv_transfer import LayerStream, TransferEngine
    from cpu_kv.layout import KVLayout
    from cpu_kv.link import CopyFailed, CpuLink, Event, Link
    from cpu_kv.paced_link import PacedLink
    from cpu_kv.pinned import PageLocking, SlabAllocator
    from cpu_kv.sizes import ElementType, KVSizes
    from cpu_kv.store import PagedKVStore, SequenceKV
    from cpu_kv.views import KVPages, PackedPages, PlainPages, head_major

__all__ = [
    "ChunkMeans",
    "CopyFailed",
    "CpuLink",
    "CudaLink",
    "ElementType",
    "Event",
    "Gatherer",
    "KVLayout",
    "KVPages",
    "KVSizes",
    "LayerGatherer",
    "LayerStream",
    "Link",
    "PacedLink",
    "PackedPages",
    "PageLocking",
    "PagedKVStore",
    "PendingCopy",
    "PlainPages",
    "SequenceKV",
    "SlabAllocator",
    "TransferCounters",
    "TransferEngine",
    "head_major",
]

_MODULES = (
    "sizes",
    "layout",
    "views",
    "link",
    "chunks",
    "cuda_link",
    "paced_link",
    "pinned",
    "store",
    "gathering",
    "kv_transfer",
)


def __getattr__(name: str) -> object:
    """Imports what is first used: sizes need no torch, which takes a second to import."""
    if name in __all__:
        import importlib

        for module in _MODULES:
            loaded = importlib.import_module(f"cpu_kv.{module}")
            if name in vars(loaded):
                return vars(loaded)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
