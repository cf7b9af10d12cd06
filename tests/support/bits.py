"""Programs with a context, and the bits that the target computed in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import strategies as st
from torch import Tensor

from offload_rt import LLM, Context, SamplingParams
from offload_rt.engine.results import Exactness
from support.small_engine import PROMPT

LEVELS: dict[str, list[dict[str, object]]] = {
    "retrieved": [{"model": "target", "cache": "retrieved"}],
    "shared": [{"model": "target", "cache": "shared"}],
    "draft": [{"model": "draft", "cache": "streaming"}],
    "lookup": [{"model": "lookup", "cache": ""}],
}


def kv_of(context: Context, length: int) -> Tensor:
    """The KV of the first tokens, `[layers, 2, kv_heads, length, head_dim]`."""
    sequence = context._sequence
    sequence.transfer.flush()
    assert sequence.full.sequence.length >= length
    layers = range(sequence.full.layout.layers)
    pages = [sequence.full.sequence.views(layer, 0, length) for layer in layers]
    sides = [
        [torch.cat(side, dim=1) for side in zip(*(run.head_major() for run in runs), strict=True)]
        for runs in pages
    ]
    return torch.stack([torch.stack(layer) for layer in sides])


def drafting(levels: str, shape: str, depth: int) -> dict[str, object]:
    """The part of a config that says how is drafted."""
    shaped = [{**level, "draft": "chain" if levels == "lookup" else shape} for level in LEVELS[levels]]
    return {"speculation.levels": shaped, "speculation.gamma2": depth}


STEPS = st.tuples(st.sampled_from(["generate", "rewind", "append", "fork", "save"]), st.integers(1, 30))


@dataclass(frozen=True)
class Program:
    """What a program leaves: tokens, log probabilities and exactness of each text that it wrote, and KV."""

    tokens: list[int]
    logprobs: list[list[float] | None]
    exactness: set[Exactness]
    kv: Tensor


def run_program(llm: LLM, steps: Sequence[tuple[str, int]]) -> Program:
    """Reads 60 tokens, and does with their context what `steps` say."""
    with TemporaryDirectory() as folder:
        context, results = llm.read(PROMPT[:60]), []
        for step, count in steps:
            if step == "generate":
                results.append(context.generate((), SamplingParams(max_tokens=count, logprobs=0)))
            elif step == "rewind":
                context.rewind(max(1, len(context.tokens) - count))
            elif step == "append":
                context.append(PROMPT[count : 2 * count])
            elif step == "fork":
                context = context.fork()
            else:
                context.save(Path(folder) / "saved")
                context.close()
                context = llm.load(Path(folder) / "saved")
        logprobs, exactness = [one.logprobs for one in results], {one.exactness for one in results}
        return Program(context.tokens, logprobs, exactness, kv_of(context, len(context.tokens) - 1))
