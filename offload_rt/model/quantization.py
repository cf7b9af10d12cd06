"""How the weights of a model may be quantised, and the bytes that they take then: what a plan needs to know.

How a checkpoint states it and is loaded is in `quantized_checkpoints`, the weights in memory in
`quantized_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil

from offload_rt.config.settings import NO_QUANTIZATION
from offload_rt.errors import UsageError
from offload_rt.system.installation import install_extra

NF4, INT8, MXFP4 = "nf4", "int8", "mxfp4"
_NF4_BLOCK, _SCALE_BLOCK = 64, 256
"""Weights that share a scale in bitsandbytes' 4-bit formats, and scales that share one in turn."""
_MXFP4_BITS = 4 + 8 / 32  # blocks of 32 weights share a scale of 8 bits
PACKED_MXFP4 = "stay packed only with the packages kernels and triton, on a GPU of compute capability 7.5"
"""What transformers needs to multiply with experts in MXFP4."""
WITH_EXPERTS = "bitsandbytes-experts"
"""Method of weights that bitsandbytes quantises as they load, those of experts included."""
GATES = ("shared_expert_gate",)
"""Linear layers with one output, which are left alone as routers are."""
MOST_PAIRS = 512
"""Most pairs of a token and an expert in a pass whose products read the expert's weights in 4 bits, pair by
pair: 64 tokens that choose 8 experts each. For more pairs, the weights of each expert are expanded once."""
GATHERED_PAIRS = 64
"""Pairs whose weights are gathered at a time."""
_PACKAGES = {
    WITH_EXPERTS: (("bitsandbytes", "accelerate"), "quantized"),
    "bitsandbytes": (("bitsandbytes", "accelerate"), "quantized"),
    "compressed-tensors": (("compressed_tensors", "accelerate"), "quantized"),
    "fp8": (("accelerate",), "quantized"),
    MXFP4: (("accelerate",), "quantized"),
    "gptq": (("gptqmodel", "optimum"), "gptq"),
    "awq": (("gptqmodel", "accelerate"), "gptq"),
}
"""By quantisation method of a config: the modules that transformers needs for it, and our extra with them."""


@dataclass(frozen=True)
class Quantization:
    """How the weights of a model are quantised in memory.

    Attributes:
        name: of the format, e.g. nf4.
        method: of the config, as transformers calls it.
        bits: of a quantised weight with its share of the scales; None: weights are expanded as they load.
        skipped: patterns of modules whose weights are left alone, as transformers matches them.
        linear: the weights of linear layers are quantised.
        experts: the weights of experts that share a tensor are.
        notice: a line for the user; empty for none.
    """

    name: str
    method: str
    bits: float | None
    skipped: tuple[str, ...] = ("lm_head",)
    linear: bool = True
    experts: bool = False
    notice: str = ""

    @classmethod
    def named(cls, name: str) -> Quantization:
        """Returns a quantisation by its name, nf4 or int8. Raises UsageError for another one."""
        if name == NF4:  # with quantised scales: 1.4 GiB less for 32 billion weights
            return cls(NF4, WITH_EXPERTS, four_bits(nested=True), ("lm_head", *GATES), experts=True)
        if name == INT8:
            return cls(INT8, "bitsandbytes", 8.0)
        raise UsageError(f"quantize {name!r} is unknown: use {NO_QUANTIZATION}, {NF4} or {INT8}")

    @property
    def missing_packages(self) -> list[str]:
        """Modules that the format needs and that are not installed."""
        return [module for module in _PACKAGES[self.method][0] if find_spec(module) is None]

    def refuse_missing(self, name: str) -> None:
        """Refuses to load a model, called `name`, where a package is missing. Raises UsageError."""
        if missing := self.missing_packages:
            raise UsageError(
                f"model {name}: {self.name} weights need {' and '.join(missing)}:"
                f" {install_extra(_PACKAGES[self.method][1])}"
            )

    def nbytes(self, weights: int) -> int:
        """Returns the bytes of so many quantised weights."""
        assert self.bits is not None
        return ceil(weights * self.bits / 8)


def four_bits(nested: bool) -> float:
    """Returns the bits of a weight in bitsandbytes' 4-bit formats; `nested`: scales are quantised, too."""
    return 4 + (8 + 32 / _SCALE_BLOCK if nested else 32) / _NF4_BLOCK


def packed_mxfp4() -> Quantization:
    """Returns the quantisation of published checkpoints of gpt-oss, where they stay packed."""
    notice = f"mxfp4 weights {PACKED_MXFP4}; else they are expanded to four times as much"
    return Quantization(MXFP4, MXFP4, _MXFP4_BITS, linear=False, experts=True, notice=notice)
