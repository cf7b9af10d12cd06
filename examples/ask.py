"""Asks questions about a document that is read once: `python examples/ask.py book.epub`."""

import sys

from offload_rt import LLM
from offload_rt.text.documents import read_document

if len(sys.argv) < 2:
    sys.exit("usage: python examples/ask.py FILE")
text = read_document(sys.argv[1], print)  # prints what of the document cannot be read

with LLM() as llm:
    book = llm.read([{"role": "user", "content": text}])
    for question in ("Who is Ahab?", "And Starbuck?"):
        answer = book.ask(question, temperature=0, max_tokens=32)  # the second one sees the first
        read = answer.timings.prefill_tokens
        print(f"{question} {answer.text.strip()!r}, {read} tokens read in {answer.timings.prefill_ms:.0f} ms")
