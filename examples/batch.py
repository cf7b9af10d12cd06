"""Continues several text files in one batch: `python examples/batch.py one.txt two.txt`."""

import sys
from pathlib import Path

from offload_rt import LLM, SamplingParams

if len(sys.argv) < 2:
    sys.exit("usage: python examples/batch.py FILE FILE")
prompts = [Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]]

with LLM() as llm:
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64))

for name, result in zip(sys.argv[1:], results, strict=True):
    print(f"{name}: {result.text!r}")
