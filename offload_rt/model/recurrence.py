"""Sizes of a model's layers with a recurrent state, found by running them without weights and memory."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from offload_rt.caches.layer_kinds import LayerKinds
from offload_rt.errors import UsageError, first_line
from offload_rt.model.architecture import cache_argument
from offload_rt.model.layer_kinds import Recurrence

PROBED = torch.bfloat16
"""Data type in which a layer is tried, so that what it keeps in float32 all the same is seen."""
_KERNELS = re.compile("flash-linear-attention|causal[-_]conv1d|mamba[-_]ssm")
TOKENS = 256
"""Tokens of a trial: a whole number of the chunks in which mixers work."""


@contextmanager
def missing_kernels() -> Iterator[set[str]]:
    """Collects the packages whose kernels recurrent layers lack, in place of transformers' warnings of it.

    transformers warns once in a process, in the first pass of such a layer.
    """
    packages: set[str] = set()

    def quiet(record: logging.LogRecord) -> bool:
        packages.update(name.replace("_", "-") for name in _KERNELS.findall(record.getMessage()))
        return record.levelno >= logging.ERROR

    handlers = transformers_logging.get_logger("transformers").handlers
    for handler in handlers:
        handler.addFilter(quiet)
    try:
        yield packages
    finally:
        for handler in handlers:
            handler.removeFilter(quiet)


def recurrence_of(model: PreTrainedModel, kinds: LayerKinds, name: str) -> Recurrence | None:
    """Returns the sizes of a model's layers with a recurrent state; None where it has none.

    One mixer of each size runs over a few tokens on the meta device, and what its cache holds then is
    counted. It is that of a model made anew from the config, because `model` may be quantised.

    Raises:
        UsageError: a mixer does not run there.
    """
    if not kinds.recurrent:
        return None
    config = model.config.get_text_config()
    with torch.device("meta"):
        whole: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=PROBED)
    recurrences: dict[tuple[type, int], Recurrence] = {}
    for layer in kinds.recurrent:
        mixer = getattr(whole.model.layers[layer], kinds.kinds[layer].mixer)
        key = type(mixer), sum(parameter.numel() for parameter in mixer.parameters())
        if key in recurrences:
            continue
        try:
            recurrences[key] = _tried(mixer, layer, config)
        except Exception as error:  # each architecture has its own reasons
            fault = f"the size of the state of its layer {layer} ({type(mixer).__name__}) is unknown"
            raise UsageError(f"model {name}: {fault}: {first_line(error)}") from error
    return max(recurrences.values(), key=lambda recurrence: recurrence.state_bytes(PROBED))


def _tried(mixer: nn.Module, layer: int, config: Any) -> Recurrence:
    """Returns the sizes of one mixer on the meta device."""
    argument = cache_argument(mixer.forward)
    peaks = []
    for tokens in (TOKENS, 2 * TOKENS):
        cache: Any = DynamicCache(config=config)
        hidden = torch.empty(1, tokens, config.hidden_size, dtype=PROBED, device="meta")
        with torch.no_grad(), _plain_kernels(mixer), _Memory() as memory:
            mixer(hidden, **{argument: cache})
        peaks.append(memory.peak)
    cache_layer = cache.layers[layer]
    states = [*cache_layer.conv_states.values(), *cache_layer.recurrent_states.values()]
    numbers = Counter[bool]()
    for state in states:
        if state is not None:
            numbers[state.dtype == torch.float32] += state.numel()
    parameters = sum(parameter.numel() for parameter in mixer.parameters())
    return Recurrence(parameters, numbers[False], numbers[True], (peaks[1] - peaks[0]) // TOKENS)


@contextmanager
def _plain_kernels(mixer: nn.Module) -> Iterator[None]:
    """Lets a mixer use the functions of torch that its fused kernels, which need a GPU, stand for."""
    names = vars(sys.modules[type(mixer).__module__])
    fused = {
        name: value
        for name, value in names.items()
        if inspect.isfunction(value) and hasattr(value, "__wrapped__")
    }
    names.update({name: value.__wrapped__ for name, value in fused.items()})
    try:
        yield
    finally:
        names.update(fused)


class _Memory(TorchDispatchMode):
    """Counts the bytes of all tensors that operations made and that still exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._bytes = 0
        self._owners = Counter[int]()  # of each storage the tensors that share it
        self._inputs = set[int]()  # storages of weights and inputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._inputs |= {storage._cdata for storage in _storages((args, kwargs))} - self._owners.keys()
        result = func(*args, **kwargs)
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self._inputs:
                self._bytes += 0 if self._owners[key] else storage.nbytes()
                self._owners[key] += 1
                weakref.finalize(tensor, self._drop, key, storage.nbytes())
        self.peak = max(self.peak, self._bytes)
        return result

    def _drop(self, key: int, size: int) -> None:
        self._owners[key] -= 1
        if not self._owners[key]:
            del self._owners[key]
            self._bytes -= size


def _storages(arguments: object) -> Iterator[torch.UntypedStorage]:
    """Yields the storages of all tensors among the arguments of an operation."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, Tensor):
            yield leaf.untyped_storage()
