"""Drafts over tokens spread evenly over the context: `python examples/cache_policy.py book.txt`."""

import sys
from pathlib import Path

import torch

from offload_rt import LLM, SamplingParams
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.sizes import bounded_bytes
from offload_rt.drafting.levels.models import ModelLevel

SPREAD, RECENT = 128, 128


class StridedCache(BoundedCache):
    """Keeps `SPREAD` tokens spread evenly over the context, and the last `RECENT` ones."""

    def __init__(self, source, pool):
        super().__init__(source.layout, source.device, SPREAD + RECENT, source.backend, pool)
        self._source = source

    def build(self, queries):
        """Takes the entries from the full cache, which has read a prompt."""
        self.speculative.clear()
        self.entries = self._oldest = 0
        length = self._source.verified_length
        recent = max(0, length - RECENT)
        spread = sorted({recent * at // SPREAD for at in range(SPREAD)} if recent else ())
        read = self._source.transfer.read
        kept = [*(read(at, at + 1) for at in spread), read(recent, length)]
        self.append_verified(torch.cat(kept, dim=3))  # [layers, 2, kv_heads, tokens, head_dim]
        self.verified_length = length  # it stands for all of them

    def victims(self, count):
        """Newly verified tokens overwrite the oldest recent ones."""
        slots = [SPREAD + (self._oldest + at) % RECENT for at in range(count)]
        self._oldest += count
        return slots


class StridedLevel(ModelLevel):
    """The target over a strided cache."""

    name, rank, of_target = "target:strided", 55, True

    def entries(self, sizes):
        return SPREAD + RECENT

    def memory(self, sizes):
        return {"strided_cache": bounded_bytes(sizes.target.layout(1), self.entries(sizes))}

    def cache(self, model, resources):
        return StridedCache(resources.source, resources.shared.pool)


if len(sys.argv) < 2:
    sys.exit("usage: python examples/cache_policy.py FILE")
text = Path(sys.argv[1]).read_text(encoding="utf-8")
params = SamplingParams(temperature=0, max_tokens=64)
overrides = {"speculation.levels": ["target:strided"], "speculation.step_down": False}  # drafts always

with LLM(config="streaming", overrides=overrides) as llm:
    book = llm.read(text)
    result = book.generate(params=params)
    book.rewind(result.prompt_tokens)
    plain = book.generate(params=params, config="plain")

strided = result.levels[0]
print(f"{strided.name}: {strided.accepted} of {strided.proposed} drafted tokens accepted")
print(f"tokens equal to plain decoding: {result.tokens == plain.tokens}")
