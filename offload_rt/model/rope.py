"""Stretches a model's rotary positions with YaRN (arXiv 2309.00071), as its config.json could."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload_rt.errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LARGEST_FACTOR = 1024
TRAINED_POSITIONS = {("qwen3", 40_960): 32_768}
"""Positions that a model was trained for, by its type and `max_position_embeddings`, where they differ:
Qwen3's include room for an answer, and its model card stretches 32,768."""


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of a model's rotary frequencies.

    Attributes:
        factor: how many times as many positions the model gets.
        original: positions that the model was trained for; None: as its config says.
    """

    factor: float
    original: int | None = None

    @classmethod
    def parse(cls, text: str) -> Yarn:
        """Parses `yarn:FACTOR` or `yarn:FACTOR:ORIGINAL`.

        Raises:
            UsageError: for anything else.
        """
        match = re.fullmatch(r"yarn:(\d{1,4}(?:\.\d{1,6})?)(?::(\d{1,9}))?", text)
        factor, original = (float(match[1]), match[2] and int(match[2])) if match else (0.0, None)
        if not 1 < factor <= LARGEST_FACTOR or original == 0:
            raise UsageError(
                f"rope {text[:40]!r}: write yarn:FACTOR, e.g. yarn:4, or yarn:FACTOR:POSITIONS with the"
                f" positions that the model was trained for; a factor is above 1, at most {LARGEST_FACTOR}"
            )
        return cls(factor, original or None)

    def trained(self, model_type: str, positions: int) -> int:
        """Returns the positions that a model was trained for; its config has `positions`."""
        return self.original or TRAINED_POSITIONS.get((model_type, positions), positions)

    def stretched(self, model_type: str, positions: int) -> int:
        """Returns the positions that a model gets; its config has `positions`."""
        return int(self.factor * self.trained(model_type, positions))

    def apply(self, config: PretrainedConfig, name: str) -> None:
        """Sets the rotary parameters and the number of positions in a model's config.

        Raises:
            UsageError: the config scales its frequencies already, or has no rotary frequencies.
        """
        text = config.get_text_config()
        parameters = getattr(text, "rope_parameters", None)
        if not parameters or any(isinstance(value, dict) for value in parameters.values()):
            raise UsageError(
                f"model {name}: its layers do not share rotary frequencies that --rope could scale"
            )
        if (kind := parameters.get("rope_type", "default")) != "default":
            raise UsageError(
                f"model {name}: its config.json scales its rotary frequencies already ({kind}), to"
                f" {text.max_position_embeddings} positions; leave --rope out"
            )
        limit = text.max_position_embeddings
        text.rope_parameters = {
            **parameters,
            "rope_type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self.trained(text.model_type, limit),
        }
        text.max_position_embeddings = self.stretched(text.model_type, limit)
