"""Experts in 4 bits: transformers keeps those of a layer in two tensors, which bitsandbytes leaves alone.

Each expert's matrices are quantised by themselves, as `--quantize nf4` quantises linear layers. The module of
the experts stays what its architecture says, with its gates and biases; its products are taken here, as an
implementation of transformers' `ExpertsInterface`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from offload_rt.model.quantization import GATES, GATHERED_PAIRS, MOST_PAIRS, NF4, WITH_EXPERTS

_IMPLEMENTATION = "offload_rt-4bit"
"""Name of the products below among transformers' implementations of experts."""


class QuantizedMatrices(nn.Module):
    """One matrix for each expert of a layer, in NF4 with quantised scales.

    Attributes:
        shape: `(out, in)` of a matrix.
        packed: `[experts, out * in / 2]`, two weights in a byte.
        scales: `[experts, out * in / 64]` in 8 bits: `scale_scales` and `scale_offsets` expand them.
        levels, scale_levels: the 16 and 256 values that numbers of 4 and 8 bits stand for.
    """

    packed: Tensor
    scales: Tensor
    scale_scales: Tensor
    scale_offsets: Tensor
    levels: Tensor
    scale_levels: Tensor

    def __init__(self, matrices: Tensor, transposed: bool) -> None:
        """Quantises the matrices of all experts, one by one.

        Args:
            matrices: `[experts, out, in]`, or `[experts, in, out]` where they are transposed.
        """
        super().__init__()
        from bitsandbytes.functional import quantize_4bit  # not in every installation

        parts: list[tuple[Tensor, ...]] = []
        for matrix in matrices.mT if transposed else matrices:
            packed, state = quantize_4bit(matrix.contiguous(), compress_statistics=True, quant_type=NF4)
            nested = state.state2
            parts.append((packed.view(-1), state.absmax, nested.absmax, state.offset))
        self.shape, self._blocks = tuple(state.shape), (state.blocksize, nested.blocksize)
        names = ("packed", "scales", "scale_scales", "scale_offsets")
        for name, tensors in zip(names, zip(*parts, strict=True), strict=True):
            self.register_buffer(name, torch.stack(tensors))
        self.register_buffer("levels", state.code)
        self.register_buffer("scale_levels", nested.code)

    def matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Returns the matrix `[out, in]` of an expert, expanded."""
        from bitsandbytes.functional import dequantize_4bit

        parts = (self.packed, self.scales, self.scale_scales, self.scale_offsets)
        packed, *scales = (part[expert] for part in parts)
        expanded: Tensor = dequantize_4bit(packed.view(-1, 1), self._state(dtype, *scales))
        return expanded

    def each(self, inputs: Tensor, experts: Tensor) -> Tensor:
        """Returns the products `[pairs, out]` of inputs with the matrices of experts, pair by pair.

        No product sees another one's input. The host does not wait for the device: the weights of
        `GATHERED_PAIRS` pairs at a time are gathered there.

        Args:
            inputs: `[pairs, in]`.
            experts: a number for each, `[pairs]`.
        """
        from bitsandbytes import matmul_4bit

        parts, products = (self.packed, self.scales, self.scale_scales, self.scale_offsets), list[Tensor]()
        for rows, chosen in zip(inputs.split(GATHERED_PAIRS), experts.split(GATHERED_PAIRS), strict=True):
            gathered = (part[chosen] for part in parts)
            for row, packed, *scales in zip(rows.split(1), *gathered, strict=True):
                state = self._state(inputs.dtype, *scales)
                products.append(matmul_4bit(row, packed.view(-1, 1), state))
        return torch.cat(products)

    def expanded(self, inputs: Tensor, expert: int) -> Tensor:
        """Returns the products `[rows, out]` of inputs `[rows, in]` with the expanded matrix of an expert."""
        return nn.functional.linear(inputs, self.matrix(expert, inputs.dtype))

    def _state(self, dtype: torch.dtype, scales: Tensor, scale_scales: Tensor, offset: Tensor) -> Any:
        """Returns what bitsandbytes needs to know of one matrix."""
        from bitsandbytes.functional import QuantState

        block, scale_block = self._blocks
        nested = QuantState(scale_scales, code=self.scale_levels, blocksize=scale_block, dtype=torch.float32)
        return QuantState(
            scales,
            shape=self.shape,
            code=self.levels,
            blocksize=block,
            quant_type=NF4,
            dtype=dtype,
            offset=offset,
            state2=nested,
        )


def _matrix_names(experts: Any) -> tuple[str, ...]:
    """Returns the names of the tensors with the matrices of all experts, in the order of the products.

    There are none where the module does not compute as transformers' interface for experts says.
    """
    gated = getattr(experts, "has_gate", None)
    return () if gated is None else ("gate_up_proj" if gated else "up_proj", "down_proj")


def fused_experts(module: nn.Module) -> bool:
    """Returns whether a module, not yet quantised, has the matrices of experts in tensors of its own."""
    return type(module).__name__.endswith("Experts") and any(
        parameter.dim() == 3 for parameter in module.parameters(recurse=False)
    )


def unknown_experts(model: nn.Module) -> str | None:
    """Returns why the experts of a model cannot be quantised, in one line; None where they can be."""
    for path, module in model.named_modules():
        fused = {name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3}
        if fused_experts(module) and fused != set(_matrix_names(module)):
            return (
                f"{path} ({type(module).__name__}) does not compute as transformers' interface for experts"
                f" says, so that it cannot be quantized to {NF4}; leave --quantize out"
            )
    return None


def compute_experts(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Returns the output `[tokens, hidden_size]` of quantised experts; it is the forward of their module.

    Up to `MOST_PAIRS` pairs of a token and an expert are multiplied one by one: no bit of a token depends on
    another token, and the host does not wait for the device. In larger passes the tokens of an expert share
    its products, and the host waits for their numbers.

    Args:
        experts: the module, whose matrices are `QuantizedMatrices`.
        hidden_states: `[tokens, hidden_size]`.
        top_k_index, top_k_weights: the experts of each token, `[tokens, chosen]`.
    """
    chosen, numbers, weights = top_k_index.shape[-1], top_k_index.flatten(), top_k_weights.reshape(-1, 1)
    if len(numbers) <= MOST_PAIRS:
        inputs = hidden_states.repeat_interleave(chosen, dim=0)
        weighted: Tensor = _outputs(experts, QuantizedMatrices.each, inputs, numbers) * weights
        return weighted.view(-1, chosen, weighted.shape[-1]).sum(dim=1).to(hidden_states.dtype)
    output = torch.zeros_like(hidden_states, dtype=torch.float32)
    counts = numbers.bincount(minlength=experts.num_experts).tolist()
    for expert, pairs in enumerate(numbers.argsort().split(counts)):
        if len(pairs):
            rows = pairs // chosen
            outputs = _outputs(experts, QuantizedMatrices.expanded, hidden_states[rows], expert)
            output.index_add_(0, rows, (outputs * weights[pairs]).float())
    return output.to(hidden_states.dtype)


def _outputs(
    experts: Any,
    multiply: Callable[[QuantizedMatrices, Tensor, Any], Tensor],
    inputs: Tensor,
    numbers: Tensor | int,
) -> Tensor:
    """Returns the unweighted outputs `[rows, hidden_size]` of experts.

    Args:
        multiply: a method of `QuantizedMatrices`, which takes inputs and `numbers`.
        inputs: `[rows, hidden_size]`.
        numbers: of the experts, `[rows]`, or of one.
    """
    up, down = _matrix_names(experts)

    def product(name: str, inputs: Tensor) -> Tensor:
        output = multiply(getattr(experts, name), inputs, numbers)
        return output + getattr(experts, f"{name}_bias")[numbers] if experts.has_bias else output

    inner = product(up, inputs)
    outer = product(down, experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner))
    return experts.post_expert_norm(outer) if experts.has_post_expert_norm else outer


ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, compute_experts)


class ExpertsConfig(BitsAndBytesConfig):
    """How transformers is to quantise linear layers and experts to NF4 as a checkpoint loads."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Takes the dtype that products are computed in."""
        options = {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
        initialize: Any = super().__init__  # which has no types
        initialize(load_in_4bit=True, bnb_4bit_quant_type=NF4, **options)
        method: Any = WITH_EXPERTS  # by which transformers finds the class below
        self.quant_method = method


@register_quantizer(WITH_EXPERTS)
class _ExpertsQuantizer(Bnb4BitHfQuantizer):
    """Quantises linear layers as transformers does, and experts, a tensor at a time.

    Attributes:
        misshapen: tensors of experts that have other shapes in the files than by the config.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.misshapen: set[str] = set()

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return self.of_experts(model, param_name) or super().param_needs_quantization(
            model, param_name, **kwargs
        )

    def of_experts(self, model: PreTrainedModel, param_name: str) -> bool:
        """Returns whether a parameter has the matrices of experts that are to be quantised."""
        if param_name in self.misshapen:
            return False
        module, name = get_module_from_name(model, param_name)
        return name in _matrix_names(module) and should_convert_module(
            param_name.rpartition(".")[0], self.modules_to_not_convert
        )

    @staticmethod
    def get_modules_to_not_convert(*arguments: Any, **options: Any) -> list[str]:
        return [*Bnb4BitHfQuantizer.get_modules_to_not_convert(*arguments, **options), *GATES]

    def get_quantize_ops(self) -> ConversionOps:
        linear: Any = super().get_quantize_ops  # which has no types
        return _Quantize(self, linear())

    def _process_model_before_weight_loading(  # type: ignore[override]  # as in the class above it
        self, model: PreTrainedModel, device_map: Any, **kwargs: Any
    ) -> None:
        if (reason := unknown_experts(model)) is not None:
            raise ValueError(reason)
        super()._process_model_before_weight_loading(model, device_map, **kwargs)
        if any(map(fused_experts, model.modules())):
            model.set_experts_implementation(_IMPLEMENTATION)


class _Quantize(ConversionOps):
    """Quantises a tensor of a checkpoint, that of experts to a module in the place of its parameter."""

    def __init__(self, quantizer: _ExpertsQuantizer, linear: ConversionOps) -> None:
        self._quantizer, self._linear = quantizer, linear

    def convert(self, input_dict: dict[str, Any], *arguments: Any, **options: Any) -> dict[str, Any]:
        result, model = dict[str, Any](), options["model"]
        for path, given in input_dict.items():
            if not self._quantizer.of_experts(model, path):
                result |= self._linear.convert({path: given}, *arguments, **options)
                continue
            experts, name = get_module_from_name(model, path)
            weights: Tensor = given[0] if isinstance(given, list) else given
            expected = getattr(experts, name)
            if weights.shape != expected.shape:  # which transformers reports
                self._quantizer.misshapen.add(path)
                result[path] = weights
                continue
            delattr(experts, name)
            setattr(experts, name, QuantizedMatrices(weights.to(expected.dtype), experts.is_transposed))
            experts._is_hf_initialized = True  # its weights have been read
            options["missing_keys"].discard(path)
        return result
