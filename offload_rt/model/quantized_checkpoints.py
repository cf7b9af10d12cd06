"""Quantised checkpoints: how a config states it, and how they are loaded.

A pass may hold tokens of several sequences, and drafted tokens beside verified ones. A model is therefore
loaded so that no token's activations are rounded by what other tokens are in its pass: see
docs/quantization.md.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.import_utils import is_kernels_available, is_triton_available

from cpu_kv.sizes import dtype_name
from offload_rt.config.settings import NO_QUANTIZATION
from offload_rt.errors import UsageError, first_line
from offload_rt.model.quantization import (
    INT8,
    MXFP4,
    NF4,
    PACKED_MXFP4,
    WITH_EXPERTS,
    Quantization,
    four_bits,
    packed_mxfp4,
)
from offload_rt.model.quantized_experts import ExpertsConfig, fused_experts
from offload_rt.model.quantized_weights import quiet_bitsandbytes

NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts of a layer in a config."""


def stated_quantization(
    config: PretrainedConfig, name: str, quantize: str = NO_QUANTIZATION
) -> Quantization | None:
    """Returns the quantisation of a checkpoint, or the one that `quantize` asks for; None: there is none.

    Args:
        name: of the model, in messages.

    Raises:
        UsageError: the checkpoint's is not supported, or it has one and `quantize` names another.
    """
    stated = _stated(config)
    if stated is None:
        return None if quantize == NO_QUANTIZATION else Quantization.named(quantize)
    method = _method(stated)
    if quantize != NO_QUANTIZATION:
        raise UsageError(
            f"model {name}: its weights are quantized already ({method}); leave --quantize out, or give"
            " a checkpoint in bfloat16 or float16"
        )
    if method in ("gptq", "awq") and _mixture(config):
        raise UsageError(f"model {name}: {packed_experts(method)}")
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


def installed_quantization(
    config: PretrainedConfig, name: str, quantize: str = NO_QUANTIZATION
) -> Quantization | None:
    """Returns what `stated_quantization` does. Raises UsageError, too, where a package is missing for it."""
    quantization = stated_quantization(config, name, quantize)
    if quantization is not None:
        quantization.refuse_missing(name)
    return quantization


def quantized_weights(quantization: Quantization, model: nn.Module, prefix: str = "") -> int:
    """Returns how many weights of a model that is not quantised yet, or of a part of it, it covers.

    Args:
        prefix: path of the part, with a full stop behind it.
    """
    return sum(
        parameter.numel()
        for path, module in model.named_modules()
        if _covers(quantization, prefix + path, module)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == (2 if type(module) is nn.Linear else 3)
    )


def _covers(quantization: Quantization, path: str, module: nn.Module) -> bool:
    """Returns whether the matrices of a module, not yet quantised, are kept quantised in memory."""
    if quantization.bits is None or not should_convert_module(path, list(quantization.skipped)):
        return False
    if type(module) is nn.Linear:
        return quantization.linear
    return quantization.experts and fused_experts(module)


def load_options(
    quantization: Quantization, config: PretrainedConfig, dtype: torch.dtype | None, device: torch.device
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
        return options | {"quantization_config": _bitsandbytes_config(quantization.name, kind)}
    stated = copy.deepcopy(stated)
    if quantization.name == INT8:
        stated["llm_int8_threshold"] = 0.0
    elif quantization.method == "bitsandbytes" and dtype is not None:
        stated["bnb_4bit_compute_dtype"] = dtype_name(dtype)
    if quantization.bits is None:
        stated["dequantize"] = True
    for group in stated.get("config_groups", {}).values():
        group["input_activations"] = group["output_activations"] = None
    if stated.get("kv_cache_scheme"):
        stated["kv_cache_scheme"] = None
    config.quantization_config = stated
    return options


def cast_others(quantization: Quantization, model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Casts weights that are not quantised: transformers leaves those of some formats as stored.

    Args:
        dtype: of the model; None: as its config says.
    """
    target_dtype = dtype or model.config.dtype
    as_stored = quantization.method not in ("bitsandbytes", WITH_EXPERTS) and quantization.bits is not None
    if as_stored or not isinstance(target_dtype, torch.dtype):
        return
    float32_modules = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    for path, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in path for part in float32_modules):
            parameter.data = parameter.data.to(target_dtype)


def packed_experts(method: str) -> str:
    """Returns why a checkpoint whose experts are packed cannot be loaded, and what can be."""
    return (
        f"its experts are packed ({method}) one by one, and transformers multiplies with experts in one"
        f" tensor; give its checkpoint in bfloat16 or float16 with --quantize {NF4}"
    )


def _mixture(config: PretrainedConfig) -> bool:
    """Returns whether a config names experts."""
    text = config.get_text_config()
    numbers = [getattr(text, name, None) for name in NUMBERS_OF_EXPERTS]
    return any(type(number) is int and number > 1 for number in numbers)


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


# Readers of what a config states, by the quantisation method.


def _skipped(stated: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Returns the modules that a config leaves alone; the head where it names none."""
    named = stated.get(key)
    if named is not None and not (
        isinstance(named, list | tuple) and all(type(name) is str for name in named)
    ):
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
    computes_in = dtype_name(stated.get("bnb_4bit_compute_dtype") or "float32")
    if not isinstance(getattr(torch, computes_in, None), torch.dtype):
        raise ValueError(f"bnb_4bit_compute_dtype is {computes_in!r}, which is no data type of torch")
    bits = four_bits(bool(stated.get("bnb_4bit_use_double_quant")))
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
    formats = {f"{scheme.get('type', 'int')}{scheme.get('num_bits', '')}" for scheme in weights}
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
    return Quantization(MXFP4, MXFP4, None, skipped, linear=False, experts=True, notice=notice)


def _capability() -> tuple[int, int]:
    """Returns the compute capability of the GPU; there is no limit on a CPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (99, 0)


_READERS = {
    "bitsandbytes": _read_bitsandbytes,
    WITH_EXPERTS: lambda _: Quantization.named(NF4),
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
    return ExpertsConfig(dtype)


def refuse_dependent_rows(model: PreTrainedModel, name: str) -> None:
    """Refuses a loaded model in which a token depends on what other tokens are in its pass.

    Raises:
        UsageError: says how to load it; or its quantisation is not supported.
    """
    stated_quantization(model.config, name)
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
