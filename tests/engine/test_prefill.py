"""Prefill leaves in the store what transformers itself computes, whatever the chunks, and moves it once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.tiny_models import ARCHITECTURES, byte_ids, tiny_target
from support.uneven_link import LateLink
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cpu_kv import CpuLink, Link, PacedLink, PagedKVStore, TransferEngine
from cpu_kv.sizes import PROMPT_WRITES
from offload_rt.attention.backends import TorchCpuBackend
from offload_rt.caches.full import FullCache
from offload_rt.caches.selection import LAST_QUERIES
from offload_rt.engine.prefill import prefill
from offload_rt.model.architecture import CACHE_ARGUMENT
from offload_rt.model.runner import CausalModel

TOLERANCE = 1e-4


@contextmanager
def empty_cache(model: CausalModel, link: Link, page: int = 16) -> Iterator[FullCache]:
    with PagedKVStore(model.kv_layout(page), slab_tokens=64) as store:
        sequence = store.new_sequence(chunk_size=8)
        engine = TransferEngine(sequence, link, segment_tokens=32, ring_buffers=2)
        try:
            yield FullCache(engine, TorchCpuBackend())
        finally:
            engine.close()
            link.close()


def reference(model: PreTrainedModel, tokens: list[int]) -> tuple[DynamicCache, Tensor]:
    """transformers' own KV and its last hidden state, `[1, tokens, hidden_size]` after the norm."""
    cache = DynamicCache()
    with torch.inference_mode():
        output = model.model(input_ids=torch.tensor([tokens]), use_cache=True, **{CACHE_ARGUMENT: cache})
    return cache, output.last_hidden_state


def check_store(cache: FullCache, expected: DynamicCache, length: int) -> None:
    assert cache.verified_length == length
    keys, values = cache.transfer.read(0, length).unbind(1)
    summaries = cache.sequence.summaries
    assert summaries is not None
    layers: list[Any] = expected.layers
    for number, layer in enumerate(layers):
        torch.testing.assert_close(keys[number], layer.keys[0], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(values[number], layer.values[0], rtol=0, atol=TOLERANCE)
        means = layer.keys[0, :, : length // 8 * 8].unflatten(1, (-1, 8)).mean(2)
        torch.testing.assert_close(summaries.means(number)[0], means, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("link", ["cpu", "paced"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_store_holds_transformers_kv(arch: str, link: str, outputs: bool) -> None:
    target = tiny_target(arch)
    model = CausalModel(target, arch)
    for length, chunk in ((1, 2048), (2, 1), (17, 16), (33, 5), (200, 64), (200, 2048)):
        tokens = byte_ids(length, start=length)
        kv, hidden = reference(target, tokens)
        made: Link = CpuLink() if link == "cpu" else PacedLink(1e9, latency_s=1e-4)
        with empty_cache(model, made) as cache:
            taken: list[tuple[int, Tensor]] = []

            def take(position: int, hidden: Tensor, taken: list[tuple[int, Tensor]] = taken) -> None:
                taken.append((position, hidden.clone()))

            prefill(model, cache, tokens, chunk, outputs=take if outputs else None)
            check_store(cache, kv, length)
            assert cache.last_queries is not None
            assert cache.last_queries.shape[:2] == (model.layers, model.heads)
            assert 1 <= cache.last_queries.shape[2] <= LAST_QUERIES
            if outputs:
                check_outputs(target, taken, hidden, 0)


def check_outputs(
    target: PreTrainedModel, taken: list[tuple[int, Tensor]], expected: Tensor, first: int
) -> None:
    """Every token from position `first` on was taken once, in order; `expected` is behind the final norm."""
    for position, hidden in taken:
        assert position == first
        first += hidden.shape[1]
        with torch.inference_mode():
            normed = target.model.norm(hidden)
        torch.testing.assert_close(normed, expected[:, position:first], rtol=0, atol=TOLERANCE)
    assert first == expected.shape[1]


@pytest.mark.parametrize("link", ["cpu", "paced"])
def test_outputs_behind_earlier_tokens_come_in_order(link: str) -> None:
    target, tokens = tiny_target("llama-gqa"), byte_ids(200)
    model, hidden = CausalModel(target, "tiny"), reference(target, tokens)[1]
    for earlier, chunk in ((1, 64), (37, 16), (130, 2048)):
        taken: list[tuple[int, Tensor]] = []

        def take(position: int, hidden: Tensor, taken: list[tuple[int, Tensor]] = taken) -> None:
            taken.append((position, hidden.clone()))

        with empty_cache(model, CpuLink() if link == "cpu" else PacedLink(1e9)) as cache:
            prefill(model, cache, tokens[:earlier], chunk)
            prefill(model, cache, tokens[earlier:], chunk, outputs=take)
        assert max(part.shape[1] for _, part in taken) <= chunk
        check_outputs(target, taken, hidden, earlier)


def test_chunks_begin_at_multiples_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """So chunks are computed alike, to the last bit, where those before them were: also in torch."""
    model, tokens = CausalModel(tiny_target("granite"), "tiny"), byte_ids(200)
    run_layer, begun = model.run_layer, list[int]()

    def run(layer: int, hidden: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        begun.append(int(positions[0]))
        return run_layer(layer, hidden, positions, *rest)

    monkeypatch.setattr(model, "run_layer", run)

    def read(*parts: list[int]) -> Tensor:
        begun.clear()
        with empty_cache(model, CpuLink()) as cache:
            for part in parts:
                prefill(model, cache, part, 32)
            return cache.transfer.read(0, len(tokens)).clone()

    whole = read(tokens)
    for first in (32, 96):
        assert torch.equal(read(tokens[:first], tokens[first:]), whole)
    read(tokens[:101], tokens[101:])
    assert {*begun} == {*range(0, 200, 32), 101}


def test_the_last_queries_are_those_of_the_last_tokens() -> None:
    target = tiny_target("llama-gqa")
    model = CausalModel(target, "tiny")
    tokens = byte_ids(40)
    with empty_cache(model, CpuLink()) as cache, empty_cache(model, CpuLink()) as other:
        prefill(model, cache, tokens, 64)
        prefill(model, other, tokens[:-1], 64)
        assert cache.last_queries is not None and other.last_queries is not None
        # Layer 0 sees nothing but its token and its position.
        whole, shorter = cache.last_queries[0], other.last_queries[0]
        torch.testing.assert_close(whole[:, :-1], shorter[:, 1:], rtol=0, atol=TOLERANCE)
        projected = target.model.layers[0].self_attn.q_proj(
            target.model.layers[0].input_layernorm(target.model.embed_tokens(torch.tensor(tokens[-1])))
        )
        norms = projected.view(model.heads, -1).norm(dim=-1)  # which rotation leaves as they are
        torch.testing.assert_close(whole[:, -1].norm(dim=-1), norms, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [7, 64, 2048])
def test_every_page_crosses_the_link_once(chunk: int) -> None:
    """The last one back too, in part: it is what passes attend on the device."""
    model = CausalModel(tiny_target("llama-gqa"), "tiny")
    with empty_cache(model, PacedLink(1e9)) as cache:
        prefill(model, cache, byte_ids(150), chunk)
        assert cache.transfer.counters.bytes_to_host == cache.layout.reserved_bytes(150)
        assert cache.transfer.counters.bytes_to_device == 150 % 16 * cache.layout.token_bytes


@contextmanager
def what_is_new() -> Iterator[None]:
    """`gc.get_objects` tells of what is made within alone."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_kv_bytes(head_dim: int) -> dict[int, int]:
    """Bytes of every live tensor of heads, by address."""
    found = {}
    for tensor in gc.get_objects():
        if type(tensor) is Tensor and tensor.ndim >= 3 and tensor.shape[-1] == head_dim:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def test_one_layer_is_on_the_device_at_a_time() -> None:
    """And what is being written of it, a few chunks at most, however late the link is."""
    model = CausalModel(tiny_target("llama-gqa", layers=5), "tiny")
    tokens, seen = byte_ids(512), []
    with empty_cache(model, LateLink(1e9)) as cache:
        cache.sequence.reserve(len(tokens))
        memory = [cache.sequence.memory(layer, 0, len(tokens)) for layer in range(model.layers)]
        gc.collect()  # what other tests have left would give its addresses to new tensors
        before = live_kv_bytes(model.head_dim)  # the store, which is the host's, and the tail

        def count(done: int, of: int) -> None:
            now = live_kv_bytes(model.head_dim)
            seen.append(sum(nbytes for address, nbytes in now.items() if address not in before))

        with what_is_new():
            prefill(model, cache, tokens, 32, count)
        del memory
    layer_bytes = len(tokens) * cache.layout.layer_token_bytes
    chunk_bytes = layer_bytes * 32 // len(tokens)
    assert len(seen) == 5 * 16
    most = layer_bytes + (PROMPT_WRITES + 2) * chunk_bytes  # with the chunk itself
    assert layer_bytes <= min(seen[:-1]) and max(seen) <= most


def test_progress_reaches_its_end_and_never_goes_back() -> None:
    model = CausalModel(tiny_target("llama"), "tiny")
    seen: list[tuple[int, int]] = []
    with empty_cache(model, CpuLink()) as cache:
        prefill(model, cache, byte_ids(50), 16, lambda done, of: seen.append((done, of)))
    assert [done for done, _ in seen] == [16, 32, 48, 50, 66, 82, 98, 100]
    assert {of for _, of in seen} == {100}


def test_a_prefill_needs_a_token() -> None:
    model = CausalModel(tiny_target("llama"), "tiny")
    with empty_cache(model, CpuLink()) as cache, pytest.raises(ValueError, match="at least one token"):
        prefill(model, cache, [], 16)
