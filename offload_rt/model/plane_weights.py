"""Models whose linear layers are in two planes: drafts read half of each weight (`kernels/planes.py`)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offload_rt.errors import UsageError
from offload_rt.kernels import plane_products
from offload_rt.kernels.dense import Linear, NativeProduct, supports
from offload_rt.kernels.planes import BLOCK, PlaneLinear, WeightPlanes, draft_plane_alone
from offload_rt.model.attention_hook import open_count
from offload_rt.model.dense_layers import hooks_of

_IN_USE = "{} is in use by an LLM whose weights are whole; close that first, or set it to auto or off"
TRIAL_BYTES = 2**27
"""Bytes of the weights of a trial: more than a processor's cache holds."""
_TRIALS = 6
_GAIN = 0.85
"""Time of a draft's products, as a share of those with plain weights, below which weights are split: drafts
are accepted a little less often."""


class SplitWeights:
    """The linear layers of a model's decoder layers and its head, in planes until `join`.

    Those that cannot be split stay as they are (`WeightPlanes.split`), and so do those whose weights have
    another use, as a head's that are the embedding, and those with hooks.

    Args:
        model: a loaded transformers model; what is in planes already is left out.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.uses = 0
        self._places: list[tuple[nn.Module, str, nn.Linear]] = []
        try:
            for owner, name, linear in _linears(model):
                if (planes := WeightPlanes.split(linear.weight)) is None:
                    continue
                setattr(owner, name, PlaneLinear(planes, linear.bias))
                self._places.append((owner, name, linear))
                linear.weight.data = linear.weight.new_empty(0)
        except BaseException:
            self.join()
            raise

    @torch.inference_mode(False)
    @torch.no_grad()
    def join(self) -> None:
        """Gives the model its own modules and weights back."""
        while self._places:
            owner, name, linear = self._places[-1]
            joined: Tensor = getattr(owner, name).planes.expanded(draft=False)
            if not linear.weight.numel():
                linear.weight.data = joined.clone() if joined.is_inference() else joined
            setattr(owner, name, linear)
            self._places.pop()


_SPLIT: WeakKeyDictionary[PreTrainedModel, SplitWeights] = WeakKeyDictionary()
"""Models whose weights runners have split: they share them, and the last one joins them."""
_LOCK = threading.Lock()


def take_planes(model: PreTrainedModel, name: str, *, split: bool) -> SplitWeights | None:
    """Takes the planes of a model that a runner has opened, until `give_back`; None: it has none.

    Args:
        split: split its weights, unless they are.

    Raises:
        UsageError: another runner computes with the weights that would be split.
    """
    with _LOCK:
        found = _SPLIT.get(model)
        if found is None and not split:
            return None
        if found is None:
            if not in_planes(model) and open_count(model) > 1:
                raise UsageError(f"weights.planes = on: {_IN_USE.format(name)}")
            found = _SPLIT[model] = SplitWeights(model)
        found.uses += 1
        return found


def give_back(model: PreTrainedModel, planes: SplitWeights, *, join: bool) -> None:
    """Ends a use of planes.

    Args:
        join: the last use gives the model its weights back; else nobody needs them again.
    """
    with _LOCK:
        planes.uses -= 1
        if not planes.uses:
            del _SPLIT[model]
            if join:
                planes.join()


def splits(setting: str, model: PreTrainedModel, name: str, *, gain: bool) -> bool:
    """Returns whether the weights of a model are to be split.

    Args:
        setting: `weights.planes` of a config.
        gain: it is expected to gain, if the kernels are fast here.

    Raises:
        UsageError: `on`, and there is nothing to split, or it cannot be.
    """
    if setting == "off" or (setting == "auto" and not gain):
        return False
    if in_planes(model):
        return True
    some = any(WeightPlanes.may_split(linear.weight) for *_, linear in _linears(model))
    fault = plane_products.use_triton() if some and model.device.type == "cuda" else None
    in_use = open_count(model) > 0
    if setting == "auto":
        return some and not in_use and fault is None and _drafts_gain(model)
    if not some:
        raise UsageError(
            f"weights.planes = on: {name} has no linear layers with weights in bfloat16 whose width is a"
            f" multiple of {BLOCK}; load it with"
            " --dtype bfloat16 and without --quantize, or leave weights.planes at auto"
        )
    if in_use:
        raise UsageError(f"weights.planes = on: {_IN_USE.format(name)}")
    if fault is not None:
        raise UsageError(f"weights.planes = on: its kernels do not run here: {fault}; set it to auto or off")
    return True


@torch.inference_mode()
def _drafts_gain(model: PreTrainedModel) -> bool:
    """Returns whether products by the draft plane take less time, by a trial of some layers of a model."""
    some = list[nn.Linear]()
    for _, _, linear in _linears(model):
        if WeightPlanes.may_split(linear.weight):
            some.append(linear)
        if sum(linear.weight.nbytes for linear in some) >= TRIAL_BYTES:
            break
    else:
        return False  # whatever a cache holds is read fast enough
    planes = [WeightPlanes.split(linear.weight) for linear in some]
    drafting = [PlaneLinear(one, None) for one in planes if one is not None]
    if len(drafting) < len(some):
        return False
    inputs = [linear.weight.new_zeros(1, linear.in_features) for linear in some]

    def timed(products: Sequence[Callable[[Tensor], Tensor]]) -> float:
        start = time.perf_counter()
        for product, one in zip(products, inputs, strict=True):
            product(one)
        if one.is_cuda:
            torch.cuda.synchronize(one.device)
        return time.perf_counter() - start

    ways = [_product(linear) for linear in drafting], [_product(linear) for linear in some]
    with draft_plane_alone():
        times = [(timed(ways[0]), timed(ways[1])) for _ in range(_TRIALS)][1:]
    return median(draft / plain for draft, plain in times) < _GAIN


def _product(linear: Linear) -> Callable[[Tensor], Tensor]:
    """Returns what computes a product in passes: on a CPU the native library, where it can."""
    return NativeProduct(linear, None) if supports(linear, torch.bfloat16) else linear


def in_planes(model: nn.Module) -> bool:
    """Returns whether linear layers of a model are in planes."""
    return any(isinstance(part, PlaneLinear) for part in model.modules())


def _linears(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yields the linear layers to be split: their owners, their names there, and themselves."""
    body: Any = model.model
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for owner in (*(part for block in body.layers for part in block.modules()), model):
        for name, linear in [*owner.named_children()]:
            # A subclass may do more than multiply, and so may hooks.
            if type(linear) is nn.Linear and uses[id(linear.weight)] == 1 and not any(hooks_of(linear)):
                yield owner, name, linear
