"""The checks of `python -m bench gpu` of kernels, packed pages, the link and temporaries, at real shapes.

What losslessness depends on comes first: attention beside float64, and pages bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from statistics import median

import torch
from torch import Tensor

from bench.cases import ON_CUDA
from bench.gpu_checks import ALLOWED_ERROR, HEAD_DIM, MIB, Subject, exact, largest_error
from bench.random_models import random_model, random_prompt
from bench.recorded_text import RecordedText
from bench.results import Row
from cpu_kv import (
    CudaLink,
    KVLayout,
    PackedPages,
    PagedKVStore,
    PlainPages,
    SlabAllocator,
    TransferEngine,
    head_major,
)
from cpu_kv.packed import PackedShape
from offload_rt.attention.backends import fold
from offload_rt.attention.cuda_backends import ByQueryBackend, TorchCudaBackend, use_triton
from offload_rt.attention.mass import Sample
from offload_rt.attention.page_codec import machine_codec
from offload_rt.caches.selection import NONE, choose_of_layers
from offload_rt.drafting.levels.configs import load_config
from offload_rt.kernels import operators
from offload_rt.kernels.quantize import quantize
from offload_rt.kernels.quantized import QuantizedKV
from offload_rt.model.runner import open_runner
from offload_rt.text.tokenize import common_beginning

SHAPES = {"llama2-7b": (32, 32), "llama3.1-8b": (32, 8)}
"""Heads and key heads."""
PAGE, CHUNK, LAYERS = 256, 8, 32
SLOWEST_PIECES = 0.9  # of the rate of copies in one piece
FEWEST_EQUAL = 16  # tokens; behind them two logits of bfloat16 may be nearly tied


def random_kv(*shape: int, device: torch.device, escapes: bool = False) -> Tensor:
    """Values as of KV in bfloat16; with `escapes`, some are far below their channel's largest."""
    x = torch.randn(*shape, device=device)
    if escapes:
        x = torch.where(torch.rand_like(x) < 1e-3, x * 2.0**-40, x)
    return x.to(torch.bfloat16)


def milliseconds(subject: Subject, work: Callable[[], object], launches: int = 20) -> float:
    """Median ms of `work`, launched so often in a row that the device, not the host, is timed."""
    work()
    times = list[float]()
    for _ in range(subject.sizes.repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(launches):
            work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / launches)
    return max(median(times), 1e-6)  # of the clock of an emulated device


@torch.inference_mode()
def kernels(subject: Subject) -> Iterator[Row]:
    """Compares merged attention, attention mass and quantised attention with float64, at real shapes."""
    if why := use_triton():
        yield {"failed": f"Triton kernels: {why}"}
        return
    for shape, (heads, kv_heads) in SHAPES.items():
        for queries in (1, 8, 24):
            worst, gb_s, torch_gb_s = _attention_and_mass(subject, heads, kv_heads, queries)
            name = f"{shape}_q{queries}"
            yield {f"{name}_off": worst, f"{name}_gb_s": gb_s, f"{name}_torch_gb_s": torch_gb_s}
            if not worst < ALLOWED_ERROR:  # NaN is not
                yield {"failed": f"{shape}, {queries} queries: attention or its mass is {worst:.2g} off"}
        for bits in (8, 4):
            worst, gb_s = _quantized(subject, heads, kv_heads, bits)
            yield {f"{shape}_{bits}bit_off": worst, f"{shape}_{bits}bit_gb_s": gb_s}
            if not worst < ALLOWED_ERROR:
                yield {"failed": f"{shape}, {bits} bits: quantised attention is {worst:.2g} off"}


def _attention_and_mass(
    subject: Subject, heads: int, kv_heads: int, count: int
) -> tuple[float, float, float]:
    """Returns the largest error, and GB/s of keys and values, by our kernel and by torch's."""
    device, scale, sample = subject.device, HEAD_DIM**-0.5, Sample.of(count)
    queries = fold(random_kv(heads, count, HEAD_DIM, device=device), kv_heads)
    both = random_kv(subject.sizes.pages * 8 // kv_heads, 2, kv_heads, PAGE, HEAD_DIM, device=device)
    keys, values = both[:, 0], both[:, 1]
    fast, backend = TorchCudaBackend(), ByQueryBackend()
    before = backend.add(None, queries, PlainPages(keys[:1], values[:1]), scale)
    lse = before[1].contiguous()
    chunks = len(keys) * PAGE // CHUNK
    rows = heads // kv_heads * len(range(0, sample.period, sample.step))
    mass = torch.full((kv_heads, rows, chunks + 3), torch.nan, device=device)[:, :, 1:-2]
    every = sample.period, sample.step
    pair = backend.add_with_mass(before, queries, PlainPages(keys, values), scale, sample, mass, lse)
    worst = 0.0
    for head in range(0, kv_heads, max(1, kv_heads // 4)):  # float64, a few heads at a time
        text = [head_major(side)[head] for side in (keys, values)]
        both_keys, both_values = (
            torch.cat([part, side[0, head]])[None] for part, side in zip(text, (keys, values), strict=True)
        )
        expected = exact(queries[head : head + 1], both_keys, both_values, scale)
        sampled = operators.sampled_rows(queries, *every)[head].double() @ text[0].double().T * scale
        shift = operators.sampled_rows(lse, *every)[head].double()[:, None]
        expected_mass = (sampled - shift).exp().unflatten(-1, (-1, CHUNK)).sum(-1)
        results = (*(tensor[head : head + 1] for tensor in pair), mass[head])
        worst = max(worst, largest_error(results, (*expected, expected_mass)))
    taken = (
        milliseconds(subject, partial(one.parts, queries, keys, values, scale, None))
        for one in (backend, fast)
    )
    ours, torchs = (both.nbytes / ms / 1e6 for ms in taken)
    return worst, ours, torchs


def _quantized(subject: Subject, heads: int, kv_heads: int, bits: int) -> tuple[float, float]:
    """Returns the largest error beside the plain form, and GB/s of codes and ranges."""
    from offload_rt.kernels import triton_operators

    device, tokens = subject.device, subject.sizes.quantized_entries
    layout = KVLayout(1, kv_heads, HEAD_DIM, torch.bfloat16)
    layer = QuantizedKV.empty(layout, tokens, bits, device).layer(0)
    quantize(layer, *random_kv(2, kv_heads, tokens, HEAD_DIM, device=device))
    queries = fold(random_kv(heads, 4, HEAD_DIM, device=device), kv_heads)
    entries = torch.tensor(tokens - 40, device=device)

    def attend() -> tuple[Tensor, Tensor]:
        merged = triton_operators.attend_quantized(queries, *layer, entries, HEAD_DIM**-0.5)
        return triton_operators.combine(*merged)

    expected = operators.combine(*operators.attend_quantized(queries, *layer, entries, HEAD_DIM**-0.5))
    worst = largest_error(attend(), expected)
    return worst, sum(tensor.nbytes for tensor in layer) / milliseconds(subject, attend) / 1e6


@torch.inference_mode()
def packed_pages(subject: Subject) -> Iterator[Row]:
    """Packs and unpacks pages bit by bit, by kernels, and through store, link and ring; fails on any bit.

    Attends to them as they are, with 17 queries, and compares with float64.
    """
    device, codec = subject.device, machine_codec()
    for name, (heads, kv_heads) in SHAPES.items():
        shape, count = PackedShape(kv_heads, PAGE, HEAD_DIM), subject.sizes.pages * 8 // kv_heads
        values = random_kv(count, 2, kv_heads, PAGE, HEAD_DIM, device=device, escapes=True)
        packed = codec.encode(shape, values)
        unpacked, side = (torch.full_like(part, torch.nan) for part in (values, values[:, 1:].contiguous()))
        unpack, pack = partial(codec.decode, shape, packed, unpacked), partial(codec.encode, shape, values)
        unpack()
        codec.decode(shape, packed, side, 1)
        same = torch.equal(_bits(unpacked), _bits(values)) and torch.equal(_bits(side), _bits(values[:, 1:]))
        same &= torch.equal(packed.cpu(), codec.encode(shape, values.cpu()))
        moved, prompts = values.nbytes + packed.nbytes, LAYERS * 2**17 / (count * PAGE)
        yield {f"{name}_unpack_gb_s": moved / milliseconds(subject, unpack) / 1e6}
        yield {f"{name}_pack_s_of_128k_tokens": prompts * milliseconds(subject, pack) / 1e3}
        if not same:
            yield {"failed": f"{name}: pages are packed or unpacked to other bits"}
        queries = fold(random_kv(heads, 17, HEAD_DIM, device=device), kv_heads)
        yield from _packed_attention(subject, name, queries, values)
    yield from _through_the_ring(subject)


def _packed_attention(subject: Subject, name: str, queries: Tensor, pages: Tensor) -> Iterator[Row]:
    """Yields the error of attention over packed pages, its GB/s, and its time by that over raw pages."""
    backend, scale = ByQueryBackend(), HEAD_DIM**-0.5
    shape = PackedShape(pages.shape[2], PAGE, HEAD_DIM)
    packed = machine_codec().encode(shape, pages)
    forms = PackedPages(packed, shape, machine_codec()), PlainPages.of(pages)
    attend, attend_raw = (partial(backend.add, None, queries, form, scale) for form in forms)
    results, worst = attend(), 0.0
    if not all(map(torch.equal, results, attend_raw())):
        yield {"failed": f"{name}: attention has other bits over packed pages than over plain ones"}
    for head in range(0, len(queries), max(1, len(queries) // 4)):  # float64, a few heads at a time
        keys, values = (head_major(pages[:, side])[head, None] for side in range(2))
        expected = exact(queries[head : head + 1], keys, values, scale)
        worst = max(worst, largest_error([result[head : head + 1] for result in results], expected))
    ms = milliseconds(subject, attend)
    yield {f"{name}_packed_off": worst, f"{name}_packed_gb_s": packed.nbytes / ms / 1e6}
    yield {f"{name}_packed_over_raw": ms / milliseconds(subject, attend_raw)}
    if not worst < ALLOWED_ERROR:
        yield {"failed": f"{name}: attention over packed pages is {worst:.2g} off"}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


def _through_the_ring(subject: Subject) -> Iterator[Row]:
    """Writes a prompt to the store, and streams it back: compares it, then times it."""
    device, tokens = subject.device, subject.sizes.ring_pages * PAGE + 100
    layout = KVLayout(2, 8, HEAD_DIM, torch.bfloat16, PAGE, packed=True)
    kv = random_kv(2, 2, 8, tokens, HEAD_DIM, device=device, escapes=True)
    unlike = torch.rand(kv[0, :, :, 2 * PAGE : 3 * PAGE].shape, device=device) < 0.5
    kv[0, :, :, 2 * PAGE : 3 * PAGE] *= torch.where(unlike, 2.0**-60, 1.0).to(kv.dtype)  # cannot be packed
    whole = tokens // PAGE * PAGE
    with (
        closing(PagedKVStore(layout, pin=True, codec=machine_codec())) as store,
        closing(CudaLink(device)) as link,
    ):
        sequence = store.new_sequence()
        sequence.reserve(tokens)
        with closing(TransferEngine(sequence, link, segment_tokens=16 * 1024, ring_buffers=3)) as engine:
            for layer in range(2):
                for start in range(0, tokens, 2048):
                    engine.write_prompt(layer, *kv[layer, :, :, start : start + 2048])
            engine.flush()

            def streamed(check: bool) -> bool:
                equal, stream = True, engine.stream(whole)
                for layer in range(2):
                    at = 0
                    for segment in stream.segments(layer):
                        if check:
                            arrived = torch.stack(segment.head_major())
                            equal &= torch.equal(arrived, kv[layer, :, :, at : at + segment.tokens])
                        at += segment.tokens
                    equal &= at == whole
                engine.finish_compute()
                return equal

            if not all(streamed(check=True) for _ in range(3)):
                yield {"failed": "pages that crossed the link and the ring have other bits"}
            began = time.perf_counter()
            for _ in range(subject.sizes.repeats):
                streamed(check=False)
            seconds = (time.perf_counter() - began) / subject.sizes.repeats
            yield {"ring_gb_s": 2 * layout.layer_bytes(whole) / seconds / 1e9}


@torch.inference_mode()
def link_rates(subject: Subject) -> Iterator[Row]:
    """Times page-locked copies in one piece, in pieces as streams are copied, and beside products."""
    device, size = subject.device, subject.sizes.copied_bytes
    with closing(SlabAllocator(True)) as slabs, closing(CudaLink(device)) as link:
        on_host = slabs.allocate((size,), torch.uint8).result()
        on_device = torch.empty(size, dtype=torch.uint8, device=device)
        square = torch.randn(*2 * [subject.sizes.product], device=device, dtype=torch.bfloat16)
        whole = milliseconds(subject, lambda: on_device.copy_(on_host, non_blocking=True), 4)

        def pieces(products: int = 0) -> float:
            torch.cuda.synchronize(device)
            for _ in range(products):
                torch.mm(square, square)
            began = time.perf_counter()
            for _ in range(4):
                link.copy([(on_device, on_host)])
            link.copy([(on_device, on_host)]).synchronize()
            return 5 * size / (time.perf_counter() - began) / 1e9

        rate, alone, beside = size / whole / 1e6, pieces(), pieces(products=100)
        torch.cuda.synchronize(device)
        yield {"one_piece_gb_s": rate, "pieces_gb_s": alone, "beside_products_gb_s": beside}
        if alone < SLOWEST_PIECES * rate:
            yield {"failed": f"copies in pieces reach {alone:.1f} of {rate:.1f} GB/s"}


@torch.inference_mode()
def temporaries(subject: Subject) -> Iterator[Row]:
    """Measures the temporary memory of choosing and quantising at the size of Llama-2-7B and 127K tokens."""
    device, heads = subject.device, SHAPES["llama2-7b"][1]
    chunks, tokens = subject.sizes.chunks, subject.sizes.quantized_entries
    scores = torch.rand(LAYERS, heads, chunks, device=device)
    slot_chunks = torch.full((LAYERS, heads, tokens // CHUNK), NONE, device=device)
    layer = QuantizedKV.empty(KVLayout(1, heads, HEAD_DIM, torch.bfloat16), tokens, 8, device).layer(0)
    keys, values = random_kv(2, heads, tokens, HEAD_DIM, device=device)
    works: dict[str, Callable[[], object]] = {
        "choose": partial(choose_of_layers, scores, slot_chunks),
        "quantise": partial(quantize, layer, keys, values),
    }
    for name, work in works.items():
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        yield {f"{name}_mib": peak / MIB, f"{name}_ms": milliseconds(subject, work, 3)}


PLACEMENTS: dict[str, dict[str, object]] = {
    "resident": {"offload.resident_tokens": 2**20, "offload.cpu_tokens": 0, "store.code": "raw"},
    "streamed": {"offload.resident_tokens": 0, "offload.cpu_tokens": 0},
    "from store": {"offload.resident_tokens": 0, "offload.cpu_tokens": 0, "offload.refresh_from": "store"},
    "on the CPU": {"offload.resident_tokens": 0, "offload.cpu_tokens": 2048},
    "all tiers": {"offload.resident_tokens": 512, "offload.cpu_tokens": 512},
}


def equal_tokens(subject: Subject) -> Iterator[Row]:
    """Compares greedy tokens of five placements, with drafts and without; fails where they differ early."""
    device, sizes = subject.device, subject.sizes
    prompt, generated, notices = (
        random_prompt(1000, sizes.tokens_context),
        dict[str, list[int]](),
        list[str](),
    )
    keys: dict[str, object] = {**ON_CUDA, "store.segment_bytes": 2**20, "speculation.gamma2": 6}
    keys |= {"retrieval.budget": 512, "retrieval.recent": 64}
    whole = sizes.tokens_context // PAGE * PAGE
    for name, overrides in PLACEMENTS.items():
        placement = {
            key: min(value, whole) if type(value) is int else value for key, value in overrides.items()
        }
        model = random_model("tiny", torch.device("cpu"), torch.bfloat16)  # the same weights each time
        target = open_runner(torch.nn.Module.to(model, device), "tiny", notices.append)
        room = sizes.tokens_context + sizes.new_tokens + CHUNK
        config = load_config("retrieval", keys | placement)
        with closing(RecordedText(target, None, CudaLink(device), config, room)) as text:
            text.prefill([prompt])
            for system in ("retrieval", "plain"):
                (result,), _ = text.run(load_config(system, keys | placement), sizes.new_tokens)
                generated[f"{name}, {system}"] = result.tokens
    base = generated["resident, plain"]
    for name, tokens in generated.items():
        equal = common_beginning(base, tokens)
        yield {f"{name}": equal}
        if equal < min(FEWEST_EQUAL, len(base)):
            yield {"failed": f"{name}: token {equal} differs from plain decoding over resident KV"}
    yield from ({"failed": f"graphs: {notice}"} for notice in notices)
