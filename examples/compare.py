"""Compares TriForce with plain decoding on a text file: `python examples/compare.py book.txt`."""

import sys
from pathlib import Path

from offload_rt import LLM, SamplingParams

if len(sys.argv) < 2:
    sys.exit("usage: python examples/compare.py FILE")
prompt = Path(sys.argv[1]).read_text(encoding="utf-8")
params = SamplingParams(temperature=0, max_tokens=64)

with LLM(config="triforce") as llm:
    book = llm.read(prompt)
    result = book.generate(params=params)
    book.rewind(result.prompt_tokens)
    plain = book.generate(params=params, config="plain")  # over the KV that is already in memory

ratio = result.timings.tokens_per_second / plain.timings.tokens_per_second
print(f"{ratio:.2f} times as fast as plain decoding; tokens equal: {result.tokens == plain.tokens}")
