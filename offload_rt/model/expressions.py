"""How tensors are computed, operation by operation: two computations are one if their expressions are equal.

Whether a module computes what a kernel computes cannot be told from results: a scale that grows with the
position, a clamp or a branch shows for some inputs only. Its operations show it for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from offload_rt.system.digests import digest

_COMMUTATIVE = (torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor)
# Shape, strides and type of the results of operations on the meta device, where many take 0.1 ms. Equal
# operations have equal ones, and the layers of a model consist of the same operations.
_RESULTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}


class Expressions(TorchDispatchMode):
    """Records how each tensor of a computation follows from named ones.

    Views are not operations: a view is the expression of its storage, with sizes, strides and offset. The
    computation may run on the meta device, where no operation takes time.

    Args:
        named: tensors that are given, by their names.

    Attributes:
        reads_values: an operation returned numbers rather than tensors, so that what follows may depend on
            the values of tensors.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads_values = False
        self._of_storage: dict[int, str] = {}
        self._live_tensors: list[Tensor] = []  # so that no storage takes the place of another one
        for name, tensor in named.items():
            self.name(name, tensor)

    def name(self, name: str, tensor: Tensor) -> Tensor:
        """Names a tensor that is given, and returns it."""
        self._set(tensor, name)
        return tensor

    def of(self, tensor: Tensor) -> str:
        """Returns the expression of a tensor."""
        key = tensor.untyped_storage()._cdata
        if key not in self._of_storage:  # a constant, made before the recording
            self._set(tensor, f"constant {tensor.dtype} {tensor.tolist() if tensor.is_cpu else key}")
        shape = tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype
        return f"{self._of_storage[key]} {shape}"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs, options = self._described(args), self._described(sorted((kwargs or {}).items()))
        if func in _COMMUTATIVE:
            inputs.sort(key=str)
        operation = digest(f"{func} {inputs} {options}", digits=64)
        if operation in _RESULTS:
            shape, strides, dtype = _RESULTS[operation]
            return self.name(operation, torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
        storages = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs or {}))}
        out = func(*args, **kwargs or {})
        results = _tensors(out)
        self.reads_values |= not results
        for number, tensor in enumerate(results):
            if tensor.untyped_storage()._cdata not in storages or func._schema.is_mutable:
                self._set(tensor, f"{operation} {number}" if number else operation)
                if out is tensor and tensor.is_meta and not func._schema.is_mutable:
                    _RESULTS[operation] = tuple(tensor.shape), tensor.stride(), tensor.dtype
        return out

    def _described(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self.of(argument)
        return [*map(self._described, argument)] if isinstance(argument, list | tuple) else argument

    def _set(self, tensor: Tensor, expression: str) -> None:
        self._of_storage[tensor.untyped_storage()._cdata] = expression
        self._live_tensors.append(tensor)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for part in tree for tensor in _tensors(part)]


def on_meta(module: nn.Module) -> dict[str, Tensor]:
    """Returns tensors without memory in place of a module's weights and buffers (for `functional_call`)."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
