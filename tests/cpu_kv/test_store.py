"""The store against plain tensors, under random appends, truncates and closes of several sequences."""

from __future__ import annotations

import pytest
import torch
from emulated_gpu import GPUS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpu_kv import KVLayout, PagedKVStore, SequenceKV, SlabAllocator, head_major, part_of, pinned

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32, page_size=4)


def empty(layout: KVLayout) -> Tensor:
    return torch.zeros(2, layout.kv_heads, 0, layout.head_dim, dtype=layout.dtype)


class PlainKV:
    """What a SequenceKV stands for: per layer, keys and values [2, kv_heads, tokens, head_dim]."""

    def __init__(self, layout: KVLayout):
        self.layers = [empty(layout) for _ in range(layout.layers)]

    def append(self, layer: int, kv: Tensor) -> None:
        self.layers[layer] = torch.cat([self.layers[layer], kv], dim=2)

    def truncate(self, length: int) -> None:
        self.layers = [kv[:, :, :length] for kv in self.layers]

    def length(self, layer: int) -> int:
        return self.layers[layer].shape[2]


def random_kv(generator: torch.Generator, layout: KVLayout, tokens: int) -> Tensor:
    shape = (2, layout.kv_heads, tokens, layout.head_dim)
    return torch.randn(shape, generator=generator).to(layout.dtype)


def joined(pieces: list[tuple[Tensor, Tensor]], layout: KVLayout) -> Tensor:
    heads = (torch.stack([head_major(side) for side in piece]) for piece in pieces)
    return torch.cat([empty(layout), *heads], dim=2)


def check_sequence(
    sequence: SequenceKV, plain: PlainKV, layout: KVLayout, chunk_size: int, generator: torch.Generator
) -> None:
    assert sequence.length == min(plain.length(layer) for layer in range(layout.layers))
    for layer, kv in enumerate(plain.layers):
        tokens = kv.shape[2]
        assert sequence.layer_length(layer) == tokens
        assert torch.equal(joined(sequence.views(layer), layout), kv)
        start, end = sorted(torch.randint(0, tokens + 1, (2,), generator=generator).tolist())
        assert torch.equal(joined(sequence.views(layer, start, end), layout), kv[:, :, start:end])
        full = tokens // chunk_size
        chunked = kv[:, :, : full * chunk_size].unflatten(2, (full, chunk_size))
        assert sequence.summaries is not None and sequence.page_means is not None
        torch.testing.assert_close(sequence.summaries.means(layer), chunked[:1].mean(dim=3))
        pages, page = tokens // layout.page_size, layout.page_size
        paged = kv[:, :, : pages * page].unflatten(2, (pages, page)).mean(dim=3)
        torch.testing.assert_close(sequence.page_means.means(layer), paged)


APPENDS = st.tuples(st.just("append"), st.integers(0, 2), st.integers(0, 1), st.integers(1, 40))
OPERATIONS = st.one_of(
    APPENDS,
    APPENDS.map(lambda append: (*append[:3], 1 + append[3] % 7)),  # several to a slab
    st.tuples(st.just("truncate"), st.integers(0, 2), st.floats(0, 1)),
    st.tuples(st.just("reserve"), st.integers(0, 2), st.integers(0, 60)),
    st.tuples(st.just("reopen"), st.integers(0, 2)),
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    operations=st.lists(OPERATIONS, min_size=1, max_size=16),
    sizes=st.sampled_from([(1, 1), (3, 1), (3, 3), (4, 2), (4, 4), (8, 2), (8, 4)]),
    slab_tokens=st.sampled_from([1, 10, 32]),
)
def test_store_equals_plain_tensors(
    operations: list[tuple], sizes: tuple[int, int], slab_tokens: int
) -> None:
    page_size, chunk_size = sizes
    layout = KVLayout(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32, page_size=page_size)
    generator = torch.Generator().manual_seed(1)
    with PagedKVStore(layout, slab_tokens=slab_tokens) as store:
        sequences = [store.new_sequence(chunk_size, page_means=True) for _ in range(3)]
        plains = [PlainKV(layout) for _ in range(3)]
        for name, who, *arguments in operations:
            sequence, plain = sequences[who], plains[who]
            if name == "append":
                layer, tokens = arguments
                kv = random_kv(generator, layout, tokens)
                sequence.append(layer, kv[0], kv[1])
                plain.append(layer, kv)
            elif name == "truncate":
                length = round(arguments[0] * sequence.length)
                sequence.truncate(length)
                plain.truncate(length)
            elif name == "reserve":
                sequence.reserve(arguments[0])
            else:
                sequence.close()
                sequences[who] = store.new_sequence(chunk_size, page_means=True)
                plains[who] = PlainKV(layout)
            for checked, expected in zip(sequences, plains, strict=True):
                check_sequence(checked, expected, layout, chunk_size, generator)
            tokens = sum(plain.length(layer) for plain in plains for layer in range(layout.layers))
            assert store.used_bytes == tokens * layout.layer_token_bytes <= store.reserved_bytes
    assert store.reserved_bytes == 0


def filled(store: PagedKVStore, tokens: int, seed: int = 0) -> SequenceKV:
    sequence = store.new_sequence()
    kv = random_kv(torch.Generator().manual_seed(seed), store.layout, tokens)
    for layer in range(store.layout.layers):
        sequence.append(layer, kv[0], kv[1])
    return sequence


@pytest.mark.parametrize(("kv_heads", "tokens"), [(32, 4096), (8, 16_384)])
def test_segments_are_sized_in_bytes(kv_heads: int, tokens: int) -> None:
    """Those of Llama-2-7B and Llama-3.1-8B; a short sequence has four at least."""
    layout = KVLayout(32, kv_heads, 128, torch.bfloat16, page_size=256)
    assert layout.segment_tokens(2**26, 131_072) == tokens
    assert layout.segment_tokens(2**26, 4096) == 1024 and layout.segment_tokens(2**26, 300) == 256


def test_views_are_the_store_itself() -> None:
    with PagedKVStore(LAYOUT, slab_tokens=8) as store:
        sequence = filled(store, 5)
        kv = random_kv(torch.Generator().manual_seed(1), LAYOUT, 5)
        sequence.append(1, kv[0], kv[1])  # tokens 8 and 9 lie in a second slab
        first, second = sequence.views(1)  # two whole pages, and half a page
        first[0][0, 0, 2, 1] = second[0][0, 0, 1, 1] = 77.0
        pages = torch.cat(sequence.memory(1, 0, 12)).view(LAYOUT.pages_shape(3))
        assert pages[0, 0, 0, 2, 1] == pages[2, 0, 0, 1, 1] == 77.0
        assert 77.0 not in sequence.views(0)[0][0]


def test_a_reserved_sequence_is_one_run() -> None:
    with PagedKVStore(LAYOUT, slab_tokens=8) as store:
        sequence = store.new_sequence()
        sequence.reserve(50)
        reserved = store.reserved_bytes
        assert reserved == LAYOUT.reserved_bytes(50)
        for _ in range(5):
            sequence.append(0, torch.ones(2, 10, 4), torch.ones(2, 10, 4))
        assert [keys.shape for keys, _ in sequence.views(0)] == [(12, 2, 4, 4), (1, 2, 2, 4)]
        assert store.reserved_bytes == reserved


def test_pages_lie_as_they_cross_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous, in order, and cut where the page-locked pieces of a slab meet."""
    monkeypatch.setattr(pinned, "PIECE_BYTES", 3 * LAYOUT.page_bytes // 2)
    with PagedKVStore(LAYOUT, slab_tokens=16) as store:
        sequence = filled(store, 16)
        for _ in range(2):  # 16 more, and two pages that are not present yet
            sequence.append(0, torch.ones(2, 8, 4), torch.ones(2, 8, 4))
        pieces = sequence.memory(0, 4, 40)
        pages = torch.cat(pieces).view(LAYOUT.pages_shape(9))[:7]
        expected = joined(sequence.views(0, 4, 32), LAYOUT)
        assert torch.equal(torch.stack([head_major(pages[:, side]) for side in range(2)]), expected)
        halves = [2 * piece.nbytes // LAYOUT.page_bytes for piece in pieces]
        assert halves == [1, 3, 2, 3, 3, 2, 3, 1], "slabs of four pages"
        assert all(piece.is_contiguous() for piece in pieces)
        with pytest.raises(ValueError, match="tokens 4 to 9 are not whole pages of 4"):
            sequence.memory(0, 4, 9)


@settings(derandomize=True, deadline=None)
@given(page=st.integers(1, 9), pages=st.integers(1, 5), ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_parts_of_pages_by_head(page: int, pages: int, ends: tuple[float, float]) -> None:
    memory = torch.arange(pages * 2 * 3 * page * 2).view(pages, 2, 3, page, 2)
    heads = memory.permute(1, 2, 0, 3, 4).flatten(2, 3)
    start, end = sorted(round(share * pages * page) for share in ends)
    for side in range(2):
        assert torch.equal(part_of(memory[:, side], start, end), heads[side, :, start:end])


def test_pages_of_two_slabs_are_never_one_run() -> None:
    with PagedKVStore(LAYOUT, slab_tokens=8) as store:
        first = filled(store, 4)  # page 0 of slab 0
        second = filled(store, 8, seed=1)  # page 1 of slab 0, page 0 of slab 1
        kept = [torch.stack(piece) for piece in second.views(0)]
        first.append(0, torch.ones(2, 4, 4), torch.ones(2, 4, 4))  # page 1 of slab 1
        assert len(first.views(0)) == 2
        assert torch.equal(first.views(0)[1][0], torch.ones(1, 2, 4, 4))
        assert all(torch.equal(old, torch.stack(new)) for old, new in zip(kept, second.views(0), strict=True))


def test_pages_are_used_again_after_truncate_and_close() -> None:
    with PagedKVStore(LAYOUT, slab_tokens=40) as store:
        first = filled(store, 40)
        reserved = store.reserved_bytes
        start = first.views(0)[0][0].data_ptr()
        first.truncate(9)  # keeps three pages of ten
        second = filled(store, 28, seed=1)
        assert store.reserved_bytes == reserved
        assert second.views(0)[0][0].data_ptr() == start + 3 * LAYOUT.page_bytes
        first.close()
        second.close()
        third = filled(store, 40, seed=2)
        assert store.reserved_bytes == reserved
        assert len(third.views(0)) == 1  # lowest first: one run again
        assert third.views(0)[0][0].data_ptr() == start


def test_nothing_of_the_graph_is_kept() -> None:
    with PagedKVStore(LAYOUT) as store:
        sequence = store.new_sequence()
        keys = torch.ones(2, 3, 4, requires_grad=True)
        sequence.append(0, keys, keys)
        assert not sequence.views(0)[0][0].requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_summaries_of_half_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=2, dtype=dtype, page_size=256)
    with PagedKVStore(layout) as store:
        sequence = store.new_sequence(chunk_size=256)
        keys = torch.randn(1, 512, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
        sequence.append(0, keys, keys)
        assert sequence.summaries is not None
        means = keys.float().unflatten(1, (2, 256)).mean(dim=2).to(dtype)
        assert sequence.summaries.means(0).dtype == dtype
        assert torch.equal(sequence.summaries.means(0)[0], means)


def test_summaries_do_not_move_at_every_append() -> None:
    with PagedKVStore(LAYOUT) as store:
        for reserved, storages in ((100, 1), (0, 8)):  # reserved for, or doubled: 1, 2, 4, .. 64
            sequence = store.new_sequence(chunk_size=2)
            assert sequence.summaries is not None
            sequence.reserve(reserved)
            seen: list[Tensor] = []  # held, so that no address is used twice
            for _ in range(50):
                sequence.append(0, torch.ones(2, 2, 4), torch.ones(2, 2, 4))
                seen.append(sequence.summaries.means(0))
            assert len({keys.data_ptr() for keys in seen}) <= storages


def test_summaries_are_written_in_any_mode() -> None:
    """A text grows in inference mode, and its last write-back may be counted outside, when it is closed."""
    with PagedKVStore(LAYOUT) as store:
        sequence = store.new_sequence(chunk_size=2)
        keys = torch.ones(2, 8, 4)
        with torch.inference_mode():  # room is doubled: for four chunks, of which three are there
            for tokens in (4, 2):
                sequence.append(0, keys[:, :tokens], keys[:, :tokens])
        sequence.append(0, keys[:, :2], keys[:, :2])
        assert sequence.summaries is not None and sequence.summaries.means(0).shape[2] == 4


def test_errors_name_what_is_wrong() -> None:
    with PagedKVStore(LAYOUT) as store:
        sequence = filled(store, 10)
        good = torch.ones(2, 3, 4)
        with pytest.raises(ValueError, match="float64"):
            sequence.append(0, good.double(), good)
        with pytest.raises(ValueError, match=r"\[3, 3, 4\]"):
            sequence.append(0, torch.ones(3, 3, 4), good)
        with pytest.raises(ValueError, match="values have 2"):
            sequence.append(0, good, good[:, :2])
        with pytest.raises(ValueError, match="layer 2"):
            sequence.views(2)
        with pytest.raises(ValueError, match="10 are present"):
            sequence.views(0, 4, 11)
        with pytest.raises(ValueError, match="cannot truncate to 11"):
            sequence.truncate(11)
        with pytest.raises(ValueError, match="cannot advance"):
            sequence.advance(0, 10_000)


def test_use_after_close() -> None:
    store = PagedKVStore(LAYOUT)
    sequence, other = filled(store, 10), filled(store, 10)
    other.close()
    other.close()
    with pytest.raises(RuntimeError, match="sequence is closed"):
        other.views(0)
    store.close()
    store.close()
    for use in (store.new_sequence, lambda: sequence.views(0), lambda: sequence.reserve(5)):
        with pytest.raises(RuntimeError, match="store is closed"):
            use()


def test_lack_of_memory_leaves_a_usable_store(monkeypatch: pytest.MonkeyPatch) -> None:
    make = SlabAllocator._make

    def make_small(self: SlabAllocator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if shape[0] > 25:
            raise MemoryError("too large")
        return make(self, shape, dtype)

    monkeypatch.setattr(SlabAllocator, "_make", make_small)
    with PagedKVStore(LAYOUT, slab_tokens=16) as store:
        greedy = store.new_sequence()
        greedy.reserve(200)
        for layer in (1, 0, 1):
            with pytest.raises(MemoryError):
                greedy.append(layer, torch.ones(2, 3, 4), torch.ones(2, 3, 4))
        greedy.close()
        assert store.reserved_bytes == 0
        modest = filled(store, 10)
        assert modest.length == 10


def test_byte_counts() -> None:
    layout = KVLayout(layers=3, kv_heads=4, head_dim=64, dtype=torch.bfloat16, page_size=16)
    assert layout.layer_token_bytes == 2 * 4 * 64 * 2
    assert layout.token_bytes == 3 * layout.layer_token_bytes
    assert layout.page_bytes == 16 * layout.layer_token_bytes
    assert [layout.pages(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert layout.reserved_bytes(17) == 32 * layout.token_bytes
    assert layout.means_bytes(17, None, False) == 0
    assert layout.means_bytes(17, 8, False) == 2 * layout.token_bytes // 2, "mean keys of chunks"
    assert layout.means_bytes(33, 8, True) == (4 + 2 * 2) * layout.token_bytes // 2, "of pages, values too"


@pytest.mark.gpu
@pytest.mark.parametrize("index", [0, 1])
def test_kernels_of_a_device_read_page_locked_kv_where_it_lies(index: int) -> None:
    if index >= torch.cuda.device_count():
        pytest.skip("needs a second device")
    device, kv = torch.device("cuda", index), torch.randn(2, 2, 2, 70, 8)
    layout = KVLayout(layers=2, kv_heads=2, head_dim=8, dtype=torch.float32, page_size=16)
    with PagedKVStore(layout, pin=True, slab_tokens=32) as store:
        sequence = store.new_sequence()
        for layer, (keys, values) in enumerate(kv):
            sequence.append(layer, keys, values)
        used = GPUS.counters.copies_to_device
        for layer in range(2):
            views = sequence.device_views(layer, 5, 66, device)
            assert views is not None and all(part.device == device for pair in views for part in pair)
            found = [
                torch.cat([part.transpose(0, 1).flatten(1, 2) + 0 for part in side], 1)
                for side in zip(*views, strict=True)
            ]
            torch.cuda.synchronize(device)
            assert all(
                torch.equal(one.cpu(), side[:, 5:66]) for one, side in zip(found, kv[layer], strict=True)
            )
        assert GPUS.counters.copies_to_device == used
        assert sequence.device_views(0, 5, 66, torch.device("cpu")) is None
        with pytest.raises(ValueError, match="70 are present"):
            sequence.device_views(0, 5, 71, device)
    with PagedKVStore(layout, pin=False) as store:
        sequence = store.new_sequence()
        sequence.append(0, *kv[0])
        assert sequence.device_views(0, 0, 70, device) is None
