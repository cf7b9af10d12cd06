"""The store against plain tensors: a state machine appends to, truncates, forks and closes sequences."""

from __future__ import annotations

import mmap
import sys
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from emulated.gpu import GPUS
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from cpu_kv import KVLayout, KVPages, PackedPages, PagedKVStore, PlainPages, SequenceKV, pinned
from cpu_kv.pages import PagePool

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32, page_size=4)
SHARES = st.integers(0, 20).map(lambda share: share / 20)  # floats are mostly 0, 1 or next to them
EMPTY = torch.zeros(2, 2, 0, 4)


def joined(pieces: list[KVPages]) -> Tensor:
    """Keys and values of some pieces, `[2, kv_heads, tokens, head_dim]`."""
    whole = [torch.stack(piece.head_major()) for piece in pieces]
    return torch.cat([EMPTY.to(whole[0].dtype) if whole else EMPTY, *whole], dim=2)


def means_of(kv: Tensor, size: int) -> Tensor:
    """Means of the full chunks of `[sides, kv_heads, tokens, head_dim]`."""
    full = kv.shape[2] // size
    chunks: Tensor = kv[:, :, : full * size].unflatten(2, (full, size))
    return chunks.mean(dim=3, dtype=torch.float32).to(kv.dtype)


def page_at(pages: KVPages, page: int = 0) -> int:
    """Where a page of views lies."""
    return (pages.data if isinstance(pages, PackedPages) else pages.side(0))[page].data_ptr()


class StoreMachine(RuleBasedStateMachine):
    """Three sequences of one store; `plain` holds `[2, kv_heads, tokens, head_dim]` of each layer of each."""

    @initialize(
        sizes=st.sampled_from([(1, 1), (3, 1), (3, 3), (4, 2), (4, 4), (8, 2), (8, 4)]),
        slab_tokens=st.sampled_from([1, 10, 32]),
        packed=st.booleans(),
    )
    def open(self, sizes: tuple[int, int], slab_tokens: int, packed: bool) -> None:
        (page, chunk), dtype = sizes, torch.bfloat16 if packed else torch.float32
        self.layout = KVLayout(2, kv_heads=2, head_dim=4, dtype=dtype, page_size=page, packed=packed)
        self.store = PagedKVStore(self.layout, slab_tokens=slab_tokens)
        self.random = torch.Generator().manual_seed(1)
        self.chunks = [chunk] * 3
        self.sequences = [self.store.new_sequence(chunk, page_means=True) for _ in range(3)]
        self.empty = EMPTY.to(dtype)
        self.plain = [[self.empty, self.empty] for _ in range(3)]
        for layer in range(2):  # for forks: by single appends layers seldom get many tokens in common
            self.append(0, layer, 25, False)

    def drawn(self, *sizes: int) -> Tensor:
        """Values, and sometimes so many small ones among them that pages cannot be packed."""
        often = 0.5 * (torch.rand(1, generator=self.random) > 0.7)
        small = torch.rand(sizes, generator=self.random) < often
        values = torch.randn(sizes, generator=self.random)
        return torch.where(small, values * 2.0**-40, values).to(self.layout.dtype)

    @rule(
        who=st.integers(0, 2),
        layer=st.integers(0, 1),
        tokens=st.integers(1, 7) | st.integers(1, 40),
        inference=st.booleans(),
    )
    def append(self, who: int, layer: int, tokens: int, inference: bool) -> None:
        """In any mode: the last write-back of an engine may be counted outside inference mode."""
        kv = self.drawn(2, 2, tokens, 4).requires_grad_(not inference)
        with torch.inference_mode() if inference else nullcontext():
            self.sequences[who].append(layer, kv[0], kv[1])
        self.plain[who][layer] = torch.cat([self.plain[who][layer], kv.detach()], dim=2)

    @rule(who=st.integers(0, 2), share=SHARES)
    def truncate(self, who: int, share: float) -> None:
        length = round(share * self.sequences[who].length)
        self.sequences[who].truncate(length)
        self.plain[who] = [kv[:, :, :length] for kv in self.plain[who]]

    @rule(who=st.integers(0, 2), tokens=st.integers(0, 60))
    def reserve(self, who: int, tokens: int) -> None:
        self.sequences[who].reserve(tokens)
        assert self.sequences[who].reserved_tokens >= tokens

    @rule(
        who=st.integers(0, 2),
        source=st.integers(0, 2),
        share=SHARES,
        same=st.booleans(),
        cut=st.none() | SHARES,
        tokens=st.integers(1, 3),
    )
    def fork(self, who: int, source: int, share: float, same: bool, cut: float | None, tokens: int) -> None:
        """Also in its own place, and with means of other chunks; then one of both is cut and goes on."""
        length, old = round(share * self.sequences[source].length), self.sequences[who]
        chunk = self.chunks[source] if same else self.layout.page_size
        self.sequences[who] = self.sequences[source].fork(length, chunk, page_means=True)
        self.chunks[who] = chunk
        old.close()
        self.plain[who] = [kv[:, :, :length] for kv in self.plain[source]]
        if cut is not None:
            going_on = who if same else source
            self.truncate(going_on, cut)
            for layer in range(2):
                self.append(going_on, layer, tokens, False)

    @rule(who=st.integers(0, 2), layer=st.integers(0, 1), tokens=st.integers(1, 30))
    def write_behind(self, who: int, layer: int, tokens: int) -> None:
        """As an engine writes a prompt: whole pages behind the full ones, the last one's end too."""
        sequence, page = self.sequences[who], self.layout.page_size
        start = sequence.layer_length(layer)
        if start % page:
            return
        pages = self.drawn(*self.layout.pages_shape(self.layout.pages(tokens)))
        whole = tokens // page if self.layout.packed else len(pages)
        end = start + whole * page
        stored = pages[:whole]
        if self.layout.packed:
            stored = self.store.codec.encode(self.layout.packed_shape, stored)
        places = sequence.memory(layer, start, end, write=True)
        for place, part in zip(places, stored.view(-1).split([one.numel() for one in places]), strict=True):
            place.copy_(part)
        for at in [*sequence.overflowing(layer, start, end), *([end] if whole < len(pages) else [])]:
            sequence.open_page(layer, at).copy_(pages[(at - start) // page])
        sequence.advance(layer, tokens)
        written = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]
        self.plain[who][layer] = torch.cat([self.plain[who][layer], written], dim=2)

    @rule(who=st.integers(0, 2))
    def reopen(self, who: int) -> None:
        self.sequences[who].close()
        self.sequences[who] = self.store.new_sequence(self.chunks[who], page_means=True)
        self.plain[who] = [self.empty, self.empty]

    @invariant()
    def everything_is_there(self) -> None:
        for sequence, layers, chunk in zip(self.sequences, self.plain, self.chunks, strict=True):
            assert sequence.summaries is not None and sequence.page_means is not None
            assert sequence.length == min(kv.shape[2] for kv in layers)
            for layer, kv in enumerate(layers):
                tokens = kv.shape[2]
                assert sequence.layer_length(layer) == tokens
                start, end = sorted(torch.randint(0, tokens + 1, (2,), generator=self.random).tolist())
                for first, last in ((0, tokens), (start, end)):
                    pieces = sequence.views(layer, first, last)
                    assert torch.equal(joined(pieces), kv[:, :, first:last])
                    assert not any(pages.side(0).requires_grad for pages in pieces)
                torch.testing.assert_close(sequence.summaries.means(layer), means_of(kv[:1], chunk))
                pages = means_of(kv, self.layout.page_size)
                torch.testing.assert_close(sequence.page_means.means(layer), pages)
                self.full_pages_are_packed(sequence, layer)
        parts = [part for one in self.sequences for layer in range(2) for part in one.views(layer)]
        of_pages = {page_at(part, page): part.page_tokens for part in parts for page in range(len(part))}
        used = sum(map(self.layout.layer_bytes, of_pages.values()))
        assert self.store.used_bytes == used
        if not self.layout.packed:  # a packed page that was cut counts as one that is not packed
            assert used <= self.store.reserved_bytes

    def full_pages_are_packed(self, sequence: SequenceKV, layer: int) -> None:
        """Those that can be."""
        shape, page = self.layout.packed_shape, self.layout.page_size
        for pages in sequence.views(layer) if self.layout.packed else ():
            if isinstance(pages, PlainPages) and pages.page_tokens == page:
                whole = torch.stack([pages.keys, pages.values], 1)
                assert shape.overflows(self.store.codec.encode(shape, whole)).all()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for sequence in self.sequences:
                sequence.close()
            reserved, one = self.store.reserved_bytes, self.store.new_sequence()
            tokens = reserved // (2 * self.layout.page_bytes) * self.layout.page_size
            one.reserve(tokens)
            assert self.store.reserved_bytes == reserved, "every page is free again, and once"
            one.append(0, *self.drawn(2, 2, tokens, 4))
            self.store.close()
            assert self.store.reserved_bytes == 0


StoreMachine.TestCase.settings = settings(
    derandomize=True, deadline=None, max_examples=50, stateful_step_count=16
)
TestStore = StoreMachine.TestCase


def filled(store: PagedKVStore, tokens: int) -> SequenceKV:
    sequence = store.new_sequence()
    for layer in range(store.layout.layers):
        sequence.append(layer, *torch.randn(2, 2, tokens, 4))
    return sequence


@pytest.mark.parametrize(("kv_heads", "tokens"), [(32, 4096), (8, 16_384)])
def test_segments_are_sized_in_bytes(kv_heads: int, tokens: int) -> None:
    """Those of Llama-2-7B and Llama-3.1-8B; a short sequence has two at least."""
    layout = KVLayout(32, kv_heads, 128, torch.bfloat16, page_size=256)
    assert layout.segment_tokens(2**26, 131_072) == tokens
    assert layout.segment_tokens(2**26, 4096) == 2048 and layout.segment_tokens(2**26, 300) == 256


def test_views_are_the_store_itself() -> None:
    with PagedKVStore(LAYOUT, slab_tokens=8) as store:
        sequence = filled(store, 5)
        sequence.append(1, *torch.zeros(2, 2, 5, 4))  # tokens 8 and 9 lie in a second slab
        first, second = sequence.views(1)  # two whole pages, and half a page
        first.plain().keys[0, 0, 2, 1] = second.plain().keys[0, 0, 1, 1] = 77.0
        pages = torch.cat(sequence.memory(1, 0, 12)).view(LAYOUT.pages_shape(3))
        assert pages[0, 0, 0, 2, 1] == pages[2, 0, 0, 1, 1] == 77.0
        assert 77.0 not in sequence.views(0)[0].side(0)


def test_views_are_those_of_the_pages_that_a_truncated_sequence_has_now() -> None:
    with PagedKVStore(LAYOUT, slab_tokens=8) as store:
        first, second = filled(store, 8), filled(store, 4)
        assert page_at(first.views(0, 0, 8)[0]) == page_at(first.views(0, 0, 8)[0])
        first.truncate(4)
        taken = torch.ones(2, 2, 4, 4)
        second.append(0, *taken)  # to the page that was given back
        first.append(0, *-taken)
        assert joined(first.views(0, 0, 8))[:, :, 4:].eq(-1).all()
        assert joined(second.views(0, 0, 8))[:, :, 4:].eq(1).all()


def test_a_reserved_sequence_is_one_run_and_pages_are_used_again() -> None:
    with PagedKVStore(LAYOUT, slab_tokens=8) as store:
        sequence = store.new_sequence()
        sequence.reserve(50)
        reserved = store.reserved_bytes
        assert reserved == LAYOUT.reserved_bytes(50) == 52 * 2 * 2 * 2 * 4 * 4, "52 tokens of two layers"
        for _ in range(5):
            sequence.append(0, torch.ones(2, 10, 4), torch.ones(2, 10, 4))
        assert [one.side(0).shape for one in sequence.views(0)] == [(12, 2, 4, 4), (1, 2, 2, 4)]
        start = page_at(sequence.views(0)[0])
        sequence.append(1, torch.ones(2, 9, 4), torch.ones(2, 9, 4))
        sequence.truncate(9)  # keeps three pages of thirteen
        second = filled(store, 40)
        assert page_at(second.views(0)[0]) == start + 3 * LAYOUT.page_bytes
        sequence.close()
        second.close()
        third = filled(store, 52)  # the lowest pages first: one run again
        assert len(third.views(0)) == 1 and page_at(third.views(0)[0]) == start
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
        assert torch.equal(joined([PlainPages.of(pages)]), joined(sequence.views(0, 4, 32)))
        halves = [2 * piece.nbytes // LAYOUT.page_bytes for piece in pieces]
        assert halves == [1, 3, 2, 3, 3, 2, 3, 1], "slabs of four pages"
        assert all(piece.is_contiguous() for piece in pieces)


@settings(derandomize=True, deadline=None)
@given(page=st.integers(1, 9), pages=st.integers(1, 5), ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_tokens_of_pages_by_head(page: int, pages: int, ends: tuple[float, float]) -> None:
    memory = torch.arange(pages * 2 * 3 * page * 2).view(pages, 2, 3, page, 2)
    heads = memory.permute(1, 2, 0, 3, 4).flatten(2, 3)
    start, end = sorted(round(share * pages * page) for share in ends)
    assert torch.equal(torch.stack(PlainPages.of(memory).head_major(start, end)), heads[:, :, start:end])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_of_half_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=2, dtype=dtype, page_size=256)
    with PagedKVStore(layout) as store:
        sequence = store.new_sequence(chunk_size=256)
        keys = torch.randn(1, 512, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
        sequence.append(0, keys, keys)
        assert sequence.summaries is not None
        assert torch.equal(sequence.summaries.means(0), means_of(keys[None].float(), 256).to(dtype))


def test_means_do_not_move_at_every_append() -> None:
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
            assert seen[-1].nbytes * 2 == LAYOUT.means_bytes(100, 2, False), "of one layer of two"
            assert LAYOUT.means_bytes(100, 2, True) == 2 * LAYOUT.means_bytes(100, 2, False), (
                "and of 25 pages"
            )


def test_forks_share_whole_pages_and_copy_what_is_cut() -> None:
    with PagedKVStore(LAYOUT, slab_tokens=8) as store:
        book = filled(store, 22)
        used = store.used_bytes
        branches = [book.fork(length, chunk_size=2) for length in (22, 20, 3, 0)]
        assert [branch.length for branch in branches] == [22, 20, 3, 0]
        assert store.used_bytes == used + (2 + 0 + 3) * LAYOUT.token_bytes
        assert page_at(branches[1].views(0)[0]) == page_at(book.views(0)[0])
        kept = joined(book.views(0))
        book.close()
        assert torch.equal(joined(branches[0].views(0)), kept), "pages live as long as one of their owners"
        branches[1].truncate(13)  # into the fourth page, which the first branch has too
        branches[1].append(0, *torch.zeros(2, 2, 5, 4))
        assert torch.equal(joined(branches[0].views(0)), kept)
        for branch in branches:
            branch.close()
        assert store.used_bytes == 0
        reserved = store.reserved_bytes
        assert filled(store, reserved // LAYOUT.token_bytes).length and store.reserved_bytes == reserved


def test_the_size_of_the_kv_may_be_asked_from_any_thread() -> None:
    """Metrics of a server ask for it while sequences come and go."""
    interval = sys.getswitchinterval()

    def fork() -> None:
        for _ in range(100):
            for one in [book.fork(20) for _ in range(20)]:
                one.close()

    with PagedKVStore(LAYOUT) as store:
        book = filled(store, 20)
        forking = threading.Thread(target=fork)
        sys.setswitchinterval(1e-6)
        try:
            forking.start()
            while forking.is_alive():
                assert store.used_bytes <= 21 * 20 * LAYOUT.token_bytes
        finally:
            sys.setswitchinterval(interval)
            forking.join()
        assert store.used_bytes == 20 * LAYOUT.token_bytes


def test_an_interrupt_gives_no_page_to_two_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back, interrupts = PagePool.give_back, [KeyboardInterrupt()]

    def interrupted(pool: PagePool, *page: Any) -> None:
        give_back(pool, *page)
        if interrupts:
            raise interrupts.pop()

    with PagedKVStore(LAYOUT, slab_tokens=32) as store:
        one, other = store.new_sequence(), store.new_sequence()
        for sequence in (one, other, one, other):  # pages by turns
            sequence.append(0, *torch.ones(2, 2, 4, 4))
        monkeypatch.setattr(PagePool, "give_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            other.close()
        other.close()
        store.new_sequence().append(0, *torch.zeros(2, 2, 16, 4))
        assert torch.equal(joined(one.views(0)), torch.ones(2, 2, 8, 4))


def test_errors_name_what_is_wrong() -> None:
    store = PagedKVStore(LAYOUT)
    sequence, other, good = filled(store, 10), filled(store, 10), torch.ones(2, 3, 4)
    for use, message in (
        (lambda: sequence.append(0, good.double(), good), "float64"),
        (lambda: sequence.append(0, torch.ones(3, 3, 4), good), r"\[3, 3, 4\]"),
        (lambda: sequence.append(0, good, good[:, :2]), "values have 2"),
        (lambda: sequence.views(2), "layer 2"),
        (lambda: sequence.views(0, 4, 11), "10 are present"),
        (lambda: sequence.truncate(11), "cannot truncate to 11"),
        (lambda: sequence.fork(11), "cannot fork 11 tokens: 10 are present"),
        (lambda: sequence.advance(0, 10_000), "cannot advance"),
        (lambda: sequence.memory(0, 4, 9), "tokens 4 to 9 are not whole pages of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    for _ in range(2):
        other.close()
    with pytest.raises(RuntimeError, match="sequence is closed"):
        other.views(0)
    for _ in range(2):
        store.close()
    for use in (store.new_sequence, lambda: sequence.views(0), lambda: sequence.reserve(5)):
        with pytest.raises(RuntimeError, match="store is closed"):
            use()


def test_lack_of_memory_leaves_a_usable_store(monkeypatch: pytest.MonkeyPatch) -> None:
    make = mmap.mmap

    def small(file: int, length: int, flags: int) -> mmap.mmap:
        if length > 2 * mmap.PAGESIZE:
            raise OSError("too large")
        return make(file, length, flags=flags)

    monkeypatch.setattr(mmap, "mmap", small)
    with PagedKVStore(LAYOUT, slab_tokens=16) as store:
        greedy = store.new_sequence()
        greedy.reserve(200)
        for layer in (1, 0, 1):
            with pytest.raises(MemoryError, match="no memory for 200 more tokens of KV"):
                greedy.append(layer, torch.ones(2, 3, 4), torch.ones(2, 3, 4))
        greedy.close()
        assert store.reserved_bytes == 0
        assert filled(store, 10).length == 10


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
            assert views is not None
            sides = [[one.side(side) for one in views] for side in range(2)]
            assert all(part.device == device for side in sides for part in side)
            found = [
                torch.cat([part.transpose(0, 1).flatten(1, 2) + 0 for part in side], 1) for side in sides
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


PACKED = KVLayout(layers=2, kv_heads=2, head_dim=4, dtype=torch.bfloat16, page_size=8, packed=True)


def test_a_sequence_that_is_cut_within_a_packed_page_goes_on() -> None:
    kv = torch.randn(2, 2, 2, 30, 4, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    with PagedKVStore(PACKED) as store:
        sequence = store.new_sequence()
        for layer in range(2):
            sequence.append(layer, *kv[layer, :, :, :24])
        forms = [[type(pages) for pages in sequence.views(0, *ends)] for ends in ((0, 24), (3, 19))]
        assert forms == [[PackedPages], [PlainPages, PackedPages, PlainPages]], "what is cut is unpacked"
        sequence.truncate(19)
        for layer in range(2):
            assert torch.equal(joined(sequence.views(layer)), kv[layer, :, :, :19])
            sequence.append(layer, *kv[layer, :, :, 19:21])
            sequence.append(layer, *kv[layer, :, :, 21:])
            assert torch.equal(joined(sequence.views(layer)), kv[layer])
            assert [type(pages) for pages in sequence.views(layer)] == [PackedPages, PlainPages]


def test_pages_that_are_written_whole_replace_what_was_there() -> None:
    """As where an engine failed to write a page of a prompt, and writes it again as a full one."""
    pages = torch.randn(PACKED.pages_shape(2), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    with PagedKVStore(PACKED) as store:
        sequence = store.new_sequence()
        sequence.open_page(0, 8).fill_(7.0)
        (place,) = sequence.memory(0, 0, 16, write=True)
        place.copy_(store.codec.encode(PACKED.packed_shape, pages).view(-1))
        sequence.advance(0, 16)
        assert torch.equal(joined(sequence.views(0)), pages.permute(1, 2, 0, 3, 4).flatten(2, 3))
