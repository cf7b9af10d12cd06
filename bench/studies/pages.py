"""`python -m bench pages`: bits of packed pages, rates of packing, and passes over a link."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.results import Row
from bench.studies.study import Part, Study, Subject, elapsed_ms
from cpu_kv import KVLayout, PacedLink, TransferCounters
from offload_rt.api.llm import LLM
from offload_rt.attention.backends import torch_threads
from offload_rt.attention.page_codec import machine_codec
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.sizes import stored_layout
from offload_rt.commands.prompts import built_in
from offload_rt.machine.measuring import CPU
from offload_rt.model.embedded import demo_model
from offload_rt.model.loading import load_model, load_tokenizer
from offload_rt.model.passes import PassInput
from offload_rt.text.tokenize import encode


@dataclass(frozen=True)
class Sizes:
    """Sizes of `pages`.

    Attributes:
        context: tokens of the demo's text that are read.
        rate: GB/s of the emulated link.
        queries: new tokens of the passes.
        turns: times that each form is measured, one after the other.
    """

    context: int = 16_384
    rate: float = 2.0
    queries: tuple[int, ...] = (1, 17)
    turns: int = 5


@dataclass(frozen=True)
class DemoPair(Subject):
    """The embedded models in bfloat16, and the tokens of the demo's text that they read."""

    models: dict[str, PreTrainedModel]
    prompt: list[int]

    @classmethod
    def opened(cls, arguments: argparse.Namespace, sizes: Sizes) -> DemoPair:
        models = {part: load_model(demo_model(part), CPU, torch.bfloat16) for part in ("target", "draft")}
        tokenizer = load_tokenizer(demo_model("target"))
        assert tokenizer is not None
        prompt = encode(tokenizer, built_in())[: sizes.context]
        return cls({"dtype": "bfloat16"}, sizes, models, prompt)

    def read(self, part: str, code: str) -> LLM:
        """Opens one of the models over a link, with the text read."""
        link = PacedLink(1e9 * self.sizes.rate)
        llm = LLM.from_models(self.models[part], config="plain", overrides={"store.code": code}, link=link)
        llm.read(self.prompt)
        return llm


def code(subject: DemoPair) -> Iterator[Row]:
    """Bits a value, escapes and rates of packing.

    Of the KV that a model has of the text. `escapes`: share of the values that the list of a page has. The
    rates are those of one core, in GB/s of unpacked values.
    """
    for part in subject.models:
        with subject.read(part, "raw") as llm:
            (sequence,) = llm.engine.sequences
            layout = stored_layout(llm.engine.store.layout, "packed", over_link=True)
            length = sequence.full.sequence.length // layout.page_size * layout.page_size
            layers = [
                torch.cat(
                    [
                        torch.stack([pages.side(0), pages.side(1)], 1)
                        for pages in sequence.full.sequence.views(layer, 0, length)
                    ]
                )
                for layer in range(layout.layers)
            ]
        yield {"model": part} | _packing(layout, layers, subject.sizes.turns)


def _packing(layout: KVLayout, layers: list[Tensor], turns: int) -> Row:
    """Packs the pages of all layers, and takes the time of the first one."""
    shape, codec = layout.packed_shape, machine_codec()
    packed = [codec.encode(shape, pages) for pages in layers]
    out, size = torch.empty_like(layers[0]), layers[0].nbytes
    return {
        "bits a value": 16 * layout.stored_share,
        "escapes": sum(int(shape.escapes(part)[:, 0].sum()) for part in packed)
        / sum(map(Tensor.numel, layers)),
        "pages unpacked": sum(int(shape.overflows(part).sum()) for part in packed),
        "pack GB/s": size / _ms(lambda: codec.encode(shape, layers[0]), turns) / 1e6,
        "unpack GB/s": size / _ms(lambda: codec.decode(shape, packed[0], out), turns) / 1e6,
    }


def passes(subject: DemoPair) -> Iterator[Row]:
    """Milliseconds of a verification over the link, and MB that cross it for each."""
    for queries in subject.sizes.queries:
        row: Row = {"queries": queries}
        with subject.read("target", "raw") as raw, subject.read("target", "packed") as packed:
            llms = {"raw": raw, "packed": packed}
            times: dict[str, list[float]] = {name: [] for name in llms}
            for _ in range(subject.sizes.turns):
                for name, llm in llms.items():
                    times[name].append(_pass_ms(llm, queries))
            for name, llm in llms.items():
                (sequence,) = llm.engine.sequences
                row |= {f"{name} ms": median(times[name]), f"{name} MB": _streamed(llm, queries) / 1e6}
                sequence.stop()
        yield row | {"share of bytes": row["packed MB"] / row["raw MB"]}


@torch.inference_mode()
def _pass_ms(llm: LLM, queries: int) -> float:
    (sequence,) = llm.engine.sequences
    full = sequence.full
    full.abandon()  # so that no pass finds its first segments there
    pass_input = PassInput(full, NewTokens.chain(queries), queries)
    return elapsed_ms(lambda: sequence.target.forward([pass_input]))


def _streamed(llm: LLM, queries: int) -> int:
    """Returns the bytes that a pass streams."""
    (sequence,) = llm.engine.sequences
    engine = sequence.full.transfer
    sequence.full.abandon()
    engine.counters = TransferCounters()
    _pass_ms(llm, queries)
    sequence.full.abandon()
    return engine.counters.bytes_to_device - engine.counters.bytes_abandoned


def _ms(work: Callable[[], object], turns: int) -> float:
    """Returns the time that one core takes."""
    with torch_threads(1):
        return median(elapsed_ms(work) for _ in range(turns))


STUDY = Study(
    note="Medians, for the embedded models in bfloat16 on the demo's text.",
    sizes=Sizes(),
    quick={"context": 2048, "turns": 1, "queries": (3,)},
    minutes=(3, 1),
    opened=DemoPair.opened,
    parts={"code": Part(code), "passes": Part(passes)},
)
