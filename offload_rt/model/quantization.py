"""Quantised weights: how a checkpoint states them, what they take in memory, and how they are loaded.

A pass may hold tokens of several sequences, and drafted tokens beside verified ones. A model is therefore
loaded so that no token's activations are rounded by what other tokens are in its pass: see
docs/quantization.md.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.import_utils import is_kernels_available, is_triton_available

from offload_rt.errors import UsageError, first_line
from offload_rt.installation import install_extra
from offload_rt.settings import NO_QUANTIZATION

NF4, INT8, MXFP4 = "nf4", "int8", "mxfp4"
_NF4_BLOCK, _SCALE_BLOCK = 64, 256
"""Weights that share a scale in bitsandbytes' 4-bit formats, and scales that share one in turn."""
_PACKED_ROWS = 32  # a multiple of which bitsandbytes needs on a processor with bfloat16 products
_MXFP4_BITS = 4 + 8 / 32  # blocks of 32 weights share a scale of 8 bits
PACKED_MXFP4 = "stay packed only with the packages kernels and triton, on a GPU of compute capability 7.5"
"""What transformers needs to multiply with experts in MXFP4."""
_PACKAGES = {
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
        experts: it is the weights of experts that are quantised, and not those of linear layers.
        notice: a line for the user; empty for none.
    """

    name: str
    method: str
    bits: float | None
    skipped: tuple[str, ...] = ("lm_head",)
    experts: bool = False
    notice: str = ""

    @classmethod
    def named(cls, name: str) -> Quantization:
        """Returns a quantisation by its name, nf4 or int8. Raises UsageError for another one."""
        if name == NF4:  # with quantised scales: 1.4 GiB less for 32 billion weights
            return cls(NF4, "bitsandbytes", _four_bits(nested=True))
        if name == INT8:
            return cls(INT8, "bitsandbytes", 8.0)
        raise UsageError(f"quantize {name!r} is unknown: use {NO_QUANTIZATION}, {NF4} or {INT8}")

    @classmethod
    def find(
        cls, config: PretrainedConfig, name: str, quantize: str = NO_QUANTIZATION
    ) -> Quantization | None:
        """Returns the quantisation of a checkpoint, or the one that `quantize` asks for; None: there is none.

        Args:
            name: of the model, in messages.

        Raises:
            UsageError: the checkpoint's is not supported, or it has one and `quantize` names another.
        """
        stated = _stated(config)
        if stated is None:
            return None if quantize == NO_QUANTIZATION else cls.named(quantize)
        method = _method(stated)
        if quantize != NO_QUANTIZATION:
            raise UsageError(
                f"model {name}: its weights are quantized already ({method}); leave --quantize out, or give"
                " a checkpoint in bfloat16 or float16"
            )
        reader = _READERS.get(method)
        if reader is None:
            raise UsageError(
                f"model {name}: its weights are quantized ({method}), which is not supported; give its"
                f" checkpoint in bfloat16 or float16, perhaps with --quantize {NF4}"
            )
        try:
            return reader(stated)
        except (AttributeError, TypeError, ValueError) as error:  # values of other types than the format's
            raise UsageError(
                f"model {name}: the quantization_config of its config.json cannot be read:"
                f" {first_line(error)}; download it again"
            ) from error

    @classmethod
    def installed(
        cls, config: PretrainedConfig, name: str, quantize: str = NO_QUANTIZATION
    ) -> Quantization | None:
        """Returns what `find` does. Raises UsageError, too, where a package is missing that it needs."""
        found = cls.find(config, name, quantize)
        if found is not None and (missing := found.missing_packages):
            raise UsageError(
                f"model {name}: {found.name} weights need {' and '.join(missing)}:"
                f" {install_extra(_PACKAGES[found.method][1])}"
            )
        return found

    @property
    def missing_packages(self) -> list[str]:
        """Modules that the format needs and that are not installed."""
        return [module for module in _PACKAGES[self.method][0] if find_spec(module) is None]

    def covers(self, path: str, module: nn.Module) -> bool:
        """Returns whether the matrices of a module, not yet quantised, are kept quantised in memory."""
        if self.bits is None or not should_convert_module(path, list(self.skipped)):
            return False
        return path.endswith(".experts") if self.experts else type(module) is nn.Linear

    def nbytes(self, weights: int) -> int:
        """Returns the bytes of so many quantised weights."""
        assert self.bits is not None
        return ceil(weights * self.bits / 8)

    def quantized_weights(self, model: nn.Module, prefix: str = "") -> int:
        """Returns how many weights of a model that is not quantised yet, or of a part of it, it covers.

        Args:
            prefix: path of the part, with a full stop behind it.
        """
        return sum(
            parameter.numel()
            for path, module in model.named_modules()
            if self.covers(prefix + path, module)
            for parameter in module.parameters(recurse=False)
            if parameter.dim() == (3 if self.experts else 2)
        )

    def prepare(
        self, config: PretrainedConfig, dtype: torch.dtype | None, device: torch.device
    ) -> dict[str, Any]:
        """Returns arguments of `from_pretrained`; sets what the config states to what the runtime can keep.

        Args:
            dtype: of the model; None: as its config says.
            device: where the model is quantised.
        """
        quiet_bitsandbytes()
        options: dict[str, Any] = {"device_map": {"": device}}
        stated = _stated(config)
        if stated is None:
            kind = dtype or (config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32)
            return options | {"quantization_config": _bitsandbytes_config(self.name, kind)}
        stated = copy.deepcopy(stated)
        if self.name == INT8:
            stated["llm_int8_threshold"] = 0.0
        elif self.method == "bitsandbytes" and dtype is not None:
            stated["bnb_4bit_compute_dtype"] = str(dtype).removeprefix("torch.")
        if self.bits is None:
            stated["dequantize"] = True
        for group in stated.get("config_groups", {}).values():
            group["input_activations"] = group["output_activations"] = None
        if stated.get("kv_cache_scheme"):
            stated["kv_cache_scheme"] = None
        config.quantization_config = stated
        return options

    def cast_others(self, model: PreTrainedModel, dtype: torch.dtype | None) -> None:
        """Casts weights that are not quantised: transformers leaves those of some formats as stored.

        Args:
            dtype: of the model; None: as its config says.
        """
        wanted = dtype or model.config.dtype
        if (self.method != "bitsandbytes" and self.bits is not None) or not isinstance(wanted, torch.dtype):
            return
        kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
        for path, parameter in model.named_parameters():
            if parameter.is_floating_point() and not any(part in path for part in kept):
                parameter.data = parameter.data.to(wanted)


def _stated(config: PretrainedConfig) -> dict[str, Any] | None:
    """Returns the quantisation that a config states, as a dict."""
    stated: Any = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if not stated:
        return None
    return dict(stated) if isinstance(stated, Mapping) else stated.to_dict()


def _method(stated: Mapping[str, Any]) -> str:
    method = stated.get("quant_method")
    if method is None and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
        return "bitsandbytes"
    return str(getattr(method, "value", method) or "unknown method")


def _four_bits(nested: bool) -> float:
    """Returns the bits of a weight in bitsandbytes' 4-bit formats; `nested`: scales are quantised, too."""
    return 4 + (8 + 32 / _SCALE_BLOCK if nested else 32) / _NF4_BLOCK


# Readers of what a config states, by the quantisation method.


def _skipped(stated: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Returns the modules that a config leaves alone; the head where it names none."""
    named = stated.get(key)
    if named is not None and not (isinstance(named, list | tuple) and all(type(one) is str for one in named)):
        raise ValueError(f"{key} is no list of names")
    return ("lm_head",) if named is None else tuple(named)


def _read_bitsandbytes(stated: Mapping[str, Any]) -> Quantization:
    skipped = _skipped(stated, "llm_int8_skip_modules")
    if stated.get("load_in_8bit") or stated.get("_load_in_8bit"):
        notice = ""
        if threshold := stated.get("llm_int8_threshold", 6.0):
            notice = (
                f"llm_int8_threshold is 0 instead of {threshold:g}: outlier columns are chosen over all"
                " tokens of a pass, so that a token would depend on what else is in it"
            )
        return Quantization(INT8, "bitsandbytes", 8.0, skipped, notice=notice)
    kind = str(stated.get("bnb_4bit_quant_type", "fp4"))
    if kind not in (NF4, "fp4"):
        raise ValueError(f"bnb_4bit_quant_type is {kind!r}, and bitsandbytes has nf4 and fp4")
    computes_in = str(stated.get("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")
    if not isinstance(getattr(torch, computes_in, None), torch.dtype):
        raise ValueError(f"bnb_4bit_compute_dtype is {computes_in!r}, which is no data type of torch")
    bits = _four_bits(bool(stated.get("bnb_4bit_use_double_quant")))
    return Quantization(kind, "bitsandbytes", bits, skipped)


def _read_grouped(method: str, stated: Mapping[str, Any]) -> Quantization:
    """GPTQ and AWQ: a group of weights shares a scale of 16 bits and a zero point."""
    bits, group = int(stated.get("bits", 4)), int(stated.get("group_size", 128))
    skipped = _skipped(stated, "modules_to_not_convert") if stated.get("modules_to_not_convert") else ()
    skipped += () if stated.get("lm_head") else ("lm_head",)
    return Quantization(method, method, bits + ((16 + bits) / group if group > 0 else 0.0), skipped)


def _read_expanded(method: str, stated: Mapping[str, Any]) -> Quantization:
    """FP8, and all formats of compressed-tensors: transformers multiplies with expanded weights."""
    groups = stated.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    formats = {f"{one.get('type', 'int')}{one.get('num_bits', '')}" for one in weights}
    name = f"{method} ({', '.join(sorted(formats))})" if formats else method
    notice = f"{name} weights are expanded to the model's dtype as they load"
    if any(group.get("input_activations") for group in groups.values()) or method == "fp8":
        notice += ", and activations are not quantized"
    return Quantization(name, method, None, (), notice=notice)


def _read_mxfp4(stated: Mapping[str, Any]) -> Quantization:
    skipped = _skipped(stated, "modules_to_not_convert")
    triton = is_triton_available("3.4.0" if torch.cuda.is_available() else "3.5.0")
    if is_kernels_available() and triton and _capability() >= (7, 5):
        return replace(packed_mxfp4(), skipped=skipped, notice="")
    notice = f"mxfp4 weights are expanded to the model's dtype as they load, as they {PACKED_MXFP4}"
    return Quantization(MXFP4, MXFP4, None, skipped, experts=True, notice=notice)


def packed_mxfp4() -> Quantization:
    """Returns the quantisation of published checkpoints of gpt-oss, where they stay packed."""
    notice = f"mxfp4 weights {PACKED_MXFP4}; else they are expanded to four times as much"
    return Quantization(MXFP4, MXFP4, _MXFP4_BITS, experts=True, notice=notice)


def _capability() -> tuple[int, int]:
    """Returns the compute capability of the GPU; there is no limit on a CPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (99, 0)


_READERS = {
    "bitsandbytes": _read_bitsandbytes,
    "gptq": lambda stated: _read_grouped("gptq", stated),
    "awq": lambda stated: _read_grouped("awq", stated),
    "fp8": lambda stated: _read_expanded("fp8", stated),
    "compressed-tensors": lambda stated: _read_expanded("compressed-tensors", stated),
    MXFP4: _read_mxfp4,
}


def _bitsandbytes_config(name: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Returns how transformers is to quantise a checkpoint as it loads."""
    if name == INT8:  # without outlier columns, which are chosen over all tokens of a pass
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=NF4,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def quantized_linear(name: str, weight: Tensor) -> nn.Module:
    """Returns a linear layer without bias, quantised as `--quantize` does it.

    Args:
        name: nf4 or int8.
        weight: `[out, in]`, in the dtype that is computed in.
    """
    quiet_bitsandbytes()
    import bitsandbytes  # not in every installation

    (rows, columns), layer = weight.shape, bitsandbytes.nn
    options: dict[str, Any] = {"has_fp16_weights": False}
    with torch.device("meta"):  # weights of their own would be drawn
        if name == INT8:
            made: Any = layer.Linear8bitLt(columns, rows, bias=False, threshold=0.0, **options)
        else:
            options = {"compress_statistics": True, "quant_type": NF4}
            made = layer.Linear4bit(columns, rows, bias=False, compute_dtype=weight.dtype, **options)
    parameter = layer.Int8Params if name == INT8 else layer.Params4bit
    made.weight = parameter(weight, requires_grad=False, **options)
    quantized: nn.Module = made.to(weight.device).eval()
    return quantized


def quiet_bitsandbytes() -> None:
    """Lets bitsandbytes log errors only: it warns at each 8-bit product of another dtype than float16."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


# Models whose weights are quantised in memory.


def refuse_dependent_rows(model: PreTrainedModel, name: str) -> None:
    """Refuses a loaded model in which a token depends on what other tokens are in its pass.

    Raises:
        UsageError: says how to load it; or its quantisation is not supported.
    """
    Quantization.find(model.config, name)
    for path, module in model.named_modules():
        if getattr(getattr(module, "state", None), "threshold", 0.0) > 0:
            raise UsageError(
                f"model {name}: {path} chooses outlier columns over all tokens of a pass, so that a token"
                " would depend on what else is in it: load it with llm_int8_threshold=0"
            )
        activations = getattr(getattr(module, "quantization_scheme", None), "input_activations", None)
        if activations is not None and activations.dynamic is True and activations.strategy == "tensor":
            raise UsageError(
                f"model {name}: {path} rounds activations with one scale for all tokens of a pass, so that a"
                " token would depend on what else is in it: load it with dequantize=True"
            )


def check_sizes(model: PreTrainedModel, name: str) -> None:
    """Refuses a model with matrices that bitsandbytes cannot pack for this processor.

    Raises:
        UsageError: names the first one.
    """
    for path, module in model.named_modules():
        if not getattr(module, "support_avx512bf16_for_cpu", False) or module.weight.device.type != "cpu":
            continue
        rows, columns = int(module.out_features), int(module.in_features)
        if not hasattr(module.weight, "blocksize"):
            raise UsageError(
                f"model {name}: config.json says that its weights have 4 bits, and {path} is unquantized;"
                " give the checkpoint that belongs to that file"
            )
        if rows % _PACKED_ROWS or columns % module.weight.blocksize:
            raise UsageError(
                f"model {name}: {path} is [{rows}, {columns}], and a 4-bit matrix needs a multiple of"
                f" {_PACKED_ROWS} rows and of {module.weight.blocksize} columns on this processor; give a"
                " checkpoint in bfloat16 or float16"
            )


def move_scales(model: nn.Module) -> None:
    """Brings the scales of 8-bit weights to where these are: moving a module leaves them behind."""
    for part in model.modules():
        weight: Any = getattr(part, "weight", None)
        if getattr(weight, "SCB", None) is not None:
            weight.CB, weight.SCB = weight.data, weight.SCB.to(weight.device)


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and tensors of all weights of a module, quantised or not.

    Buffers that checkpoints hold are weights too: gptqmodel's matrices, the biases of routers.
    """
    yield from module.named_parameters()
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set:
                yield name, buffer


def stored_bytes(module: nn.Module) -> int:
    """Returns the bytes of all weights of a module as they lie in memory."""
    return sum(
        one.nbytes for one in (*(weight for _, weight in named_weights(module)), *bitsandbytes_scales(module))
    )


def bitsandbytes_scales(module: nn.Module) -> Iterator[Tensor]:
    """Yields the scales that bitsandbytes keeps beside its parameters."""
    for part in module.modules():
        weight = getattr(part, "weight", None)
        yield from _state_tensors(getattr(weight, "quant_state", None))
        scales = getattr(getattr(part, "state", None), "SCB", None)
        scales = getattr(weight, "SCB", None) if scales is None else scales
        if scales is not None:
            yield scales


def _state_tensors(state: Any) -> Iterator[Tensor]:
    if state is None:
        return
    yield state.absmax
    yield from _state_tensors(getattr(state, "state2", None))
