"""Models whose weights are quantised in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offload_rt.errors import UsageError
from offload_rt.kernels.planes import PlaneLinear, WeightPlanes
from offload_rt.model.quantization import INT8, NF4

_PACKED_ROWS = 32  # a multiple of which bitsandbytes needs on a processor with bfloat16 products


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
            linear: Any = layer.Linear8bitLt(columns, rows, bias=False, threshold=0.0, **options)
        else:
            options = {"compress_statistics": True, "quant_type": NF4}
            linear = layer.Linear4bit(columns, rows, bias=False, compute_dtype=weight.dtype, **options)
    parameter = layer.Int8Params if name == INT8 else layer.Params4bit
    linear.weight = parameter(weight, requires_grad=False, **options)
    quantized: nn.Module = linear.to(weight.device).eval()
    return quantized


def quiet_bitsandbytes() -> None:
    """Lets bitsandbytes log errors only: it warns at each 8-bit product of another dtype than float16."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


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


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor | WeightPlanes]]:
    """Yields the names and tensors of all weights of a module, quantised or not.

    Buffers that checkpoints hold are weights too: gptqmodel's matrices, the biases of routers. Those in
    two planes are one weight of a linear layer.
    """
    seen = set[int]()
    for path, part in module.named_modules():
        if isinstance(part, PlaneLinear):
            yield f"{path}.weight" if path else "weight", part.planes
        for name, parameter in part.named_parameters(path, recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter
    for path, part in module.named_modules():
        if not isinstance(part, PlaneLinear):
            yield from _own_buffers(path, part)


def _own_buffers(path: str, part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in part.named_buffers(path, recurse=False):
        if name.rpartition(".")[2] not in part._non_persistent_buffers_set:
            yield name, buffer


def stored_bytes(module: nn.Module) -> int:
    """Returns the bytes of all weights of a module as they lie in memory."""
    buffers = (buffer for part in module.modules() for _, buffer in _own_buffers("", part))
    return sum(tensor.nbytes for tensor in (*module.parameters(), *buffers, *bitsandbytes_scales(module)))


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
