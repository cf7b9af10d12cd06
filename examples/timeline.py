"""Prints what ran when in one round over an emulated link: `python examples/timeline.py book.txt`."""

import sys
from pathlib import Path

import torch

from cpu_kv import PacedLink
from offload_rt import LLM, SamplingParams
from offload_rt.model.embedded import demo_model
from offload_rt.model.loading import load_model, load_tokenizer
from offload_rt.system.timeline import Span, Timeline

if len(sys.argv) < 2:
    sys.exit("usage: python examples/timeline.py FILE")
text = Path(sys.argv[1]).read_text(encoding="utf-8")
params = SamplingParams(temperature=0, max_tokens=64)
pair = [load_model(demo_model(part), torch.device("cpu"), torch.float32) for part in ("target", "draft")]
link = PacedLink(bytes_per_second=1e9)

with LLM.from_models(*pair, load_tokenizer(demo_model("target")), "triforce", link=link) as llm:
    llm.engine.timeline = timeline = Timeline()
    book = llm.read(text)
    link.record()  # from here on, without the copies of the prefill
    result = book.generate(params=params)
    copies = link.recorded()
    book.rewind(result.prompt_tokens)
    plain = book.generate(params=params, config="plain")

passes = [span for span in timeline.spans if span.name == "verify"]
before, verified = passes[result.rounds // 2 - 1 :][:2]
spans = [
    *timeline.spans,
    *(Span("link", "to host" if one.to_host else "to device", one.start, one.end) for one in copies),
]
for span in sorted(spans, key=lambda span: span.start):
    if before.end < span.end and span.start < verified.end:  # the round lasts from verdict to verdict
        start, length = 1e3 * (span.start - before.end), 1e3 * (span.end - span.start)
        print(f"{start:8.2f} ms  {length:7.2f} ms  {span.lane:6} {span.name}")
print(f"tokens equal to plain decoding: {result.tokens == plain.tokens}")
