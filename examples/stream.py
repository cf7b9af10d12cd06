"""Prints the continuation of a text file, token by token: `python examples/stream.py book.txt`."""

import sys
from pathlib import Path

from offload_rt import LLM, SamplingParams

if len(sys.argv) < 2:
    sys.exit("usage: python examples/stream.py FILE")
prompt = Path(sys.argv[1]).read_text(encoding="utf-8")
params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64, seed=1)

with LLM() as llm:  # the embedded models; LLM("path/to/target", draft="path/to/draft") for your own
    stream = llm.stream(prompt, params)
    for event in stream:
        print(event.text, end="", flush=True)
    print(f"\n{stream.result.timings.tokens_per_second:.1f} tokens/s")
