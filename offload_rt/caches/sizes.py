"""Sizes of the caches and their buffers, in entries and bytes, without tensors: what a plan needs of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

from cpu_kv import ElementType, KVSizes
from cpu_kv.sizes import dtype_name
from offload_rt.config.schema import PageCode
from offload_rt.errors import UsageError
from offload_rt.kernels.sizes import GROUP, MASKED_PAGE, SAMPLED_QUERIES, QuantizedSize

Layout = TypeVar("Layout", bound=KVSizes)

LONGEST_HEAD_WINDOW = 4096
"""Most tokens of a draft head's window: its drafts hardly gain by more, and attention to them costs time."""
USUAL_HEAD_WINDOW = 2048
"""Tokens that EAGLE-3 heads are trained on, where the head is not known."""
SPECULATIVE_ENTRIES = 128
"""Slots behind the verified entries: for the longest draft and another one drafted ahead."""

VERIFIED_ROOM = 128
"""Verified tokens that a cache of quantised entries has room for between two refreshes."""

BYTES_PER_SCORE = 37
"""Bytes that `choose_chunks` needs at its peak for each score, counted on a CPU (36.4) and an H200."""

CHOOSING_BYTES = 2**26
"""Bytes that choosing on a device may need, for one layer at least."""

PORTION_BYTES = 2**25
"""Bytes of KV that are gathered at once."""

PENDING_BYTES = 2**26
"""Bytes of gathered KV that may be on their way from the host at a time, besides one portion."""

SHARED_PORTION = 64
"""Most verified tokens that a shared cache appends at once; then full pages are left to the store."""

MOST_POINTS = 8
"""Most lengths that a sequence with local layers can return to, and fewer where memory is short: each takes a
copy of what these layers keep."""


@dataclass(frozen=True)
class GpuTier:
    """Number of tokens per layer that another GPU attends.

    Attributes:
        resident_tokens: the first ones, kept on that GPU.
        streamed_tokens: the next ones, which cross its link in every pass.
    """

    resident_tokens: int = 0
    streamed_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.resident_tokens + self.streamed_tokens


@dataclass(frozen=True)
class Tiers:
    """Number of tokens per layer in each tier but the streamed one; multiples of the store's page.

    Attributes:
        resident_tokens: kept on the device.
        cpu_tokens: attended by the CPU, behind the resident ones.
        gpus: attended by other GPUs, in this order, behind those.
        packed: what stays on GPUs is packed as in the store.
    """

    resident_tokens: int = 0
    cpu_tokens: int = 0
    gpus: tuple[GpuTier, ...] = ()
    packed: bool = True


EVERYTHING_STREAMED = Tiers()


@dataclass(frozen=True)
class RetrievedSize:
    """Numbers of entries that a retrieved cache needs memory for.

    Attributes:
        unit: tokens of which a multiple is chosen: chunks, and whole groups where they are quantised.
        room: entries in full precision, but for speculative ones.
        quantized: size of the memory for the others; None: there are none.
    """

    unit: int
    room: int
    quantized: QuantizedSize | None

    @classmethod
    def of(cls, layout: KVSizes, budget: int, chunk: int, recent: int, bits: int) -> RetrievedSize:
        """Returns the sizes for the arguments of a `RetrievedCache`."""
        if bits == 16:
            return cls(chunk, budget, None)
        unit = math.lcm(chunk, GROUP)
        window = max(recent, min(layout.page_size - 1, budget // 2)) + chunk + unit
        return cls(unit, window + VERIFIED_ROOM, QuantizedSize(-(-budget // unit) * unit, bits))

    def nbytes(self, layout: KVSizes, means: int) -> int:
        """Bytes of a buffer, with so many means."""
        size = bounded_bytes(layout, means + self.room)
        return size + (self.quantized.nbytes(layout) if self.quantized else 0)

    def staging_bytes(self, layout: KVSizes) -> int:
        """Bytes of what is quantised next, once for all buffers."""
        return 2 * self.quantized.entries * layout.layer_token_bytes if self.quantized else 0


def bounded_bytes(layout: KVSizes, entries: int) -> int:
    """Bytes of one buffer of a bounded cache, with room for speculative entries behind so many."""
    return whole_pages(entries + SPECULATIVE_ENTRIES) * layout.token_bytes


def shared_bytes(layout: KVSizes) -> int:
    """Bytes of the buffer of a shared cache: the tokens behind its full pages."""
    return bounded_bytes(layout, layout.page_size + SHARED_PORTION)


def tail_bytes(layout: KVSizes, heads: int, queries: int) -> int:
    """Bytes for a page of committed tokens and a pass of so many, whose queries are kept too."""
    query_bytes = queries * layout.layers * heads * layout.head_dim * layout.dtype.itemsize
    return (layout.page_size + queries) * layout.token_bytes + query_bytes


def score_bytes(layout: KVSizes, heads: int, chunks: int) -> int:
    """Bytes of the attention scores of so many chunks, and for the mass that a pass keeps until its layer
    ends; float32."""
    return 4 * chunks * (layout.layers * layout.kv_heads + SAMPLED_QUERIES * heads)


def choosing_bytes(layers: int, heads: int, chunks: int, count: int, buffers: int) -> int:
    """Bytes that `choose_of_layers` needs on the device: its temporaries, the choice itself twice, and the
    chunks that each of some buffers holds."""
    portion = min(layers, layers_at_a_time(heads, chunks))
    return BYTES_PER_SCORE * portion * heads * chunks + (2 * 24 + 8 * buffers) * layers * heads * count


def layers_at_a_time(heads: int, chunks: int) -> int:
    """Number of layers whose chunks are chosen at once."""
    return max(1, CHOOSING_BYTES // (BYTES_PER_SCORE * heads * max(1, chunks)))


def gathering_bytes(layer_bytes: int) -> int:
    """Bytes on the device for gathering chunks, of so many bytes in a layer, to the entries of a cache."""
    return min(2 * layer_bytes, PENDING_BYTES + 2 * PORTION_BYTES)


def whole_pages(entries: int) -> int:
    """Returns the size of a buffer for so many entries, which masked attention on a GPU splits into pages."""
    return -(-entries // MASKED_PAGE) * MASKED_PAGE


def mean_slots_for(pages: int) -> int:
    """Returns slots for the means of `pages` pages, rounded up so that similar lengths share a buffer."""
    step = max(16, 1 << max(0, pages.bit_length() - 4))
    return -(-pages // step) * step


def stored_layout(layout: Layout, code: PageCode, *, over_link: bool, triton: bool = True) -> Layout:
    """Returns the layout in which the store keeps its pages.

    Args:
        layout: of the model's KV.
        code: `store.code`. `auto` packs pages that cross a link to a processor with a kernel that unpacks
            them: where they are attended in place, unpacking costs more than it saves.
        triton: the Triton kernels run on the GPUs, if there are any. Without them plain torch unpacks a page,
            in several times the time of attention over it.

    Raises:
        UsageError: `packed`, and such pages cannot be packed.
    """
    if code == "raw" or layout.packed or not layout.token_bytes:
        return layout
    if code == "auto":
        smaller = layout.packable and layout.packed_sizes.nbytes < layout.page_bytes
        return replace(layout, packed=over_link and triton and smaller)
    kind = dtype_name(layout.dtype)
    if kind != ElementType.BFLOAT16.value:
        raise UsageError(
            f"store.code = 'packed': packs only bfloat16, but the model's KV is {kind}: run it with --dtype"
            " bfloat16, or leave store.code at 'auto'"
        )
    if not layout.packable:
        raise UsageError(
            f"store.code = 'packed': a page has {layout.packed_sizes.values:,} values in rows of"
            f" {layout.head_dim}, too many or an odd number: use a smaller store.page, or store.code = 'raw'"
        )
    return replace(layout, packed=True)
