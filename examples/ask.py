"""Asks several questions about a text that is read once: `python examples/ask.py book.txt`."""

import sys
from pathlib import Path

from offload_rt import LLM, SamplingParams

if len(sys.argv) < 2:
    sys.exit("usage: python examples/ask.py FILE")
text = Path(sys.argv[1]).read_text(encoding="utf-8")
params = SamplingParams(temperature=0, max_tokens=32)

with LLM() as llm:
    book = llm.read(text)
    for question in ("Who is Ahab?", "And Starbuck?"):
        answer = book.generate(f"\n\n{question}\n\n", params)
        print(f"{question} {answer.text.strip()!r}, {answer.timings.prompt_ms:.0f} ms to read the question")
        book.rewind(answer.start)  # the next question does not see this one
