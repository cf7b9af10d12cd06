"""The fingerprint of a model: another model with the same one can go on from its KV."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Fingerprint:
    """Describes a model as it was loaded.

    Attributes:
        layout: layers, KV heads and head dimension.
        rotary: rotary frequencies, in radians per position, and the factor on cosines and sines.
        tokenizer: digest of the vocabulary; None: unknown, as there is no tokenizer.
        weights: digest of architecture and weights.
    """

    layout: tuple[int, int, int]
    dtype: str
    rotary: tuple[float, ...]
    tokenizer: str | None
    weights: str

    def difference(self, other: Fingerprint) -> str | None:
        """Returns what the KV of `other` was computed by and this model has not; None: it fits."""
        if self.layout != other.layout:
            return f"another KV layout (layers, heads, head dimension {other.layout}, here {self.layout})"
        if self.dtype != other.dtype:
            return f"another dtype ({other.dtype}, here {self.dtype})"
        # Devices may compute frequencies that differ in the last bit.
        close = (math.isclose(*pair, rel_tol=1e-5) for pair in zip(self.rotary, other.rotary, strict=False))
        if len(self.rotary) != len(other.rotary) or not all(close):
            return "other rotary settings (rope scaling, or a sequence beyond longrope's original context)"
        if None not in (self.tokenizer, other.tokenizer) and self.tokenizer != other.tokenizer:
            return "another tokenizer"
        return None if self.weights == other.weights else "another model"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError, KeyError or TypeError for anything else."""
        stated: dict[str, Any] = json.loads(text)
        layers, heads, dim = stated.pop("layout")
        return cls(layout=(layers, heads, dim), rotary=tuple(map(float, stated.pop("rotary"))), **stated)
