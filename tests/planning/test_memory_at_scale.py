"""What choosing, gathering, quantising and a verdict need beside their results, at the size of Llama-2-7B.

A card is planned full, so that whatever is not counted ends in a lack of memory. The operators that run on a
GPU run on a CPU here: their temporaries are of the same sizes.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.allocation import peak_bytes

from cpu_kv import ElementType, KVLayout
from offload_rt.caches.selection import NONE, choose_of_layers
from offload_rt.caches.sizes import PORTION_BYTES, choosing_bytes, gathering_bytes
from offload_rt.drafting.verifier import lossless
from offload_rt.kernels import operators
from offload_rt.kernels.quantized import QuantizedKV
from offload_rt.model.named_shapes import find_shape
from offload_rt.planning.memory import verdict_bytes
from offload_rt.sampling.rejection import Draft
from offload_rt.sampling.sampler import GeneratorDraws, Sampler
from offload_rt.sampling.tokens import Tokens
from offload_rt.sampling.trees import Tree

LLAMA = find_shape("llama2-7b", ElementType.BFLOAT16)
CHUNK, BUDGET = 8, 16_384
TOKENS = 130_048
CPU = torch.device("cpu")
EVERYTHING = Sampler(0.6, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.1)


@pytest.mark.parametrize("layers", [1, 3])
def test_choosing_chunks(layers: int) -> None:
    """For the prompt, when none are held, and again."""
    chunks, count = TOKENS // CHUNK, BUDGET // CHUNK
    scores = torch.rand(layers, LLAMA.kv_heads, chunks)
    held = torch.full((layers, LLAMA.kv_heads, count), NONE)
    planned = choosing_bytes(layers, LLAMA.kv_heads, chunks, count, 1) - held.nbytes
    for _ in range(2):
        work = partial(choose_of_layers, scores, held)
        assert 0.5 * planned < peak_bytes(work, scores, held) <= planned
        scores = scores.flip(-1)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantising_entries(bits: int) -> None:
    """All of a layer after a prompt, and the chunks of a portion in a refresh, in plain torch."""
    heads, dim = 4, LLAMA.head_dim  # head by head: their number does not matter
    layer = QuantizedKV.empty(KVLayout(1, heads, dim, torch.bfloat16), BUDGET, bits, CPU).layer(0)
    sides = torch.randn(2, heads, BUDGET, dim).to(torch.bfloat16)
    planned = gathering_bytes(BUDGET * LLAMA.layer_token_bytes)
    if layer.shares_ranges:
        layer.share_ranges(sides[0])
        count = PORTION_BYTES // (2 * CHUNK * dim * 2)
        chunks = torch.randn(2, count, CHUNK, dim).to(torch.bfloat16)
        places = torch.arange(count) % heads, torch.arange(count) % (BUDGET // CHUNK)
        work = partial(operators.quantize_chunks_, chunks[0], chunks[1], *places, *layer)
        assert chunks.nbytes + peak_bytes(work, chunks, *places, *layer) <= planned
    else:
        work = partial(operators.quantize_, sides[0], sides[1], *layer)
        assert peak_bytes(work, sides, *layer) <= planned


@pytest.mark.parametrize(
    "sampler",
    [Sampler(0.0), Sampler(0.6), Sampler(0.6, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.1)],
)
def test_a_verdict(sampler: Sampler) -> None:
    rows = 24
    logits = torch.randn(rows, LLAMA.vocabulary).to(torch.bfloat16)
    probs = torch.rand(rows - 1, LLAMA.vocabulary)
    nodes = torch.arange(rows - 1)
    draft = Draft(Tokens(tensor=nodes), Tree(tuple(range(-1, rows - 2))), None if sampler.greedy else probs)
    generated = torch.zeros(rows, LLAMA.vocabulary, dtype=torch.int32)
    prompt = torch.zeros(LLAMA.vocabulary, dtype=torch.bool)

    def verdict() -> object:
        processed = sampler.penalised(logits, generated, prompt) if sampler.penalises else logits
        wanted = None if sampler.greedy else sampler.probs(processed)
        return lossless(draft, processed, wanted, GeneratorDraws(0))

    used = logits.nbytes + peak_bytes(verdict, logits, probs, generated, prompt, nodes)
    assert used + (0 if sampler.greedy else probs.nbytes) <= verdict_bytes(rows, LLAMA)
