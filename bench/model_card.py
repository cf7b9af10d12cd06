"""`python -m bench model-card`: whether a target behaves like a long-context model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from bench import inputs
from bench.acceptance import BY_ENTRIES, CACHES, HEAVY_HITTERS, small_caches
from bench.loss import loss
from bench.needles import needle
from bench.studies import Part, Study, size
from bench.texts import Texts, add_arguments


@dataclass(frozen=True)
class Sizes:
    """How much `model-card` measures; `shares` of a text that small caches hold, as divisors."""

    context: int = size(131072, "tokens of the longest prompt", inputs.count(1024), quick=8192)
    step: int = size(8192, "tokens whose loss is told together", inputs.count(1), quick=1024)
    positions: int = size(256, "that the acceptance is a mean of", inputs.count(8), quick=128)
    seed: int = size(0, "of the passages", inputs.count(0), metavar="S")
    shares: tuple[int, ...] = (32, 8)
    caches: tuple[str, ...] = tuple(name for name in CACHES if name != HEAVY_HITTERS)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Those at which small caches are compared."""
        return self.context // 4, self.context


MODEL_CARD = Study(
    name="model-card",
    about="loss along a long prompt, needle score, acceptance of small caches",
    note="Columns `paper` are the paper's figures, of another model.",
    sizes=Sizes,
    add_arguments=partial(add_arguments, draft=False),
    opened=Texts.opened,
    parts={"loss": Part(loss), "needle": Part(needle), "acceptance": Part(small_caches, BY_ENTRIES)},
)
