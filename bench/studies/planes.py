"""`python -m bench planes`: passes of layers whose weights are in two planes, beside plain weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bench.results import Row
from bench.studies.study import Part, Study, Subject, elapsed_ms
from offload_rt.kernels.planes import draft_plane_alone
from offload_rt.model.fixed_rows import OwnValues
from offload_rt.model.plane_weights import SplitWeights
from offload_rt.model.quantized_weights import stored_bytes
from offload_rt.model.runner import CausalModel


@dataclass(frozen=True)
class Sizes:
    """Sizes of `planes`: those of the layers of TinyLlama-1.1B.

    Attributes:
        layers: more than the processor's cache holds.
        rows: tokens of the passes.
        turns: times that each form is measured, one after the other.
    """

    layers: int = 6
    hidden: int = 2048
    intermediate: int = 5632
    heads: int = 32
    kv_heads: int = 4
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    turns: int = 15


@dataclass(frozen=True)
class Models(Subject):
    """Two models with the same random weights, one of them in planes."""

    plain: CausalModel
    split: CausalModel
    split_s: float

    @classmethod
    def opened(cls, arguments: argparse.Namespace, sizes: Sizes) -> Models:
        def made() -> PreTrainedModel:
            torch.manual_seed(0)
            config = LlamaConfig(
                hidden_size=sizes.hidden,
                intermediate_size=sizes.intermediate,
                num_hidden_layers=sizes.layers,
                num_attention_heads=sizes.heads,
                num_key_value_heads=sizes.kv_heads,
                vocab_size=256,
                dtype=torch.bfloat16,
            )
            model: Any = LlamaForCausalLM(config)  # whose `to` is not typed
            converted: PreTrainedModel = model.to(torch.bfloat16)
            return converted

        plain, split = made(), made()
        split_s = elapsed_ms(lambda: SplitWeights(split)) / 1e3
        models = CausalModel(plain, "plain"), CausalModel(split, "in planes")
        return cls({"dtype": "bfloat16"}, sizes, *models, split_s)


@torch.inference_mode()
def passes(subject: Models) -> Iterator[Row]:
    """Time of a layer by the rows of a pass.

    Of its dense parts, in ms, with random weights of TinyLlama's shapes: `plain` as they were loaded, `both`
    from both planes as a verification, `draft` from the draft plane.
    """
    sizes = subject.sizes
    for rows in sizes.rows:
        hidden = torch.randn(1, rows, sizes.hidden).to(torch.bfloat16)
        positions = torch.arange(rows)

        forms = {"plain": (subject.plain, False), "both": (subject.split, False)}
        forms["draft"] = (subject.split, True)
        turns = [
            [_layer_ms(*form, hidden, positions) for form in forms.values()] for _ in range(sizes.turns + 1)
        ]
        plain, both, draft = map(median, zip(*turns[1:], strict=True))
        yield {
            "rows": rows,
            "plain": plain,
            "both": both,
            "draft": draft,
            "both_over_plain": both / plain,
            "draft_over_plain": draft / plain,
        }


def _layer_ms(model: CausalModel, draft: bool, hidden: Tensor, positions: Tensor) -> float:
    # Without attention over other tokens, so that the rest of a layer is measured.
    with draft_plane_alone(draft):
        ms = elapsed_ms(lambda: model.run(None, hidden, positions, OwnValues()))
    return ms / model.layers


def memory(subject: Models) -> Iterator[Row]:
    """Memory, and time to split."""
    weights = sum(
        part.weight.numel()
        for part in subject.plain.module.model.layers.modules()
        if isinstance(part, torch.nn.Linear)
    )
    whole, split = (stored_bytes(model.module.model.layers) for model in (subject.plain, subject.split))
    yield {"weights": weights, "bits_per_weight": 16 * split / whole, "split_s": subject.split_s}


STUDY = Study(
    note="Medians, the forms in turns.",
    sizes=Sizes(),
    quick={"layers": 2, "turns": 3},
    minutes=(1, 1),
    opened=Models.opened,
    parts={"passes": Part(passes), "memory": Part(memory)},
)
