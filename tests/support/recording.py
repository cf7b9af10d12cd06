"""Captures graphs on a CPU as CUDA does: operations on addresses are recorded, Python is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload_rt.model.cuda_graphs import Results


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class OperationRecorder(TorchDispatchMode):
    """Records every operation on tensors, and runs them again into the same memory."""

    READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in self.READS:
            raise RuntimeError(f"{func._schema.name} waits for the device in a step that is captured")
        out = func(*args, **kwargs)
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        fresh = [result for result in results if _address(result) not in given]
        if fresh or func._schema.is_mutable:  # others are views
            self._operations.append((func, args, kwargs, fresh))
        return out

    def spoil(self) -> None:
        """Overwrites what was computed: a real capture computes nothing."""
        for *_, results in self._operations:
            for result in results:
                result.fill_(torch.nan if result.is_floating_point() else 0)

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, results in self._operations:
                found = func(*args, **kwargs)
                again = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
                for result, new in zip(results, again if results else (), strict=True):
                    result.copy_(new)


class RecordingCapture:
    """A `cuda_graphs.Capture` that records operations.

    Attributes:
        captured: number of captured steps.
        replayed: number of replays.
        fails: whether captures fail from now on.
    """

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0
        self.fails = False

    def __call__(self, step: Callable[[], Results]) -> tuple[Callable[[], object], Results]:
        recorder = OperationRecorder()
        with recorder:
            out = step()
        if self.fails:
            raise RuntimeError("no graph today\nand a second line")
        recorder.spoil()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            recorder.replay()

        return replay, out
