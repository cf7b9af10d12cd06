"""Passes that compute a fixed number of rows, so that a token has the same bits in every pass.

A library chooses the kernel of a product, and so the order in which a row is summed, by the number of rows;
torch does so for the mean in a norm. On a GPU a pass of one token takes as long as one of `PASS_ROWS`: both
wait for the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from offload_rt.attention.sums import Softmax
from offload_rt.caches.local import NO_LOCAL_STATE
from offload_rt.kernels.plane_products import OPERATOR
from offload_rt.kernels.sizes import PASS_ROWS
from offload_rt.model.attention_hook import AttentionPass, LocalPass
from offload_rt.system.device_copies import selection

if TYPE_CHECKING:
    from offload_rt.model.decoder import Decoder

_CHECKED_TOKENS = 100
"""Tokens of the check: more than `PASS_ROWS`, and no multiple."""


def compute_in_fixed_rows(
    model: Decoder,
    attention: AttentionPass,
    ids: Tensor,
    positions: Tensor,
    rows: Sequence[int],
    inputs: dict[int, Tensor],
) -> tuple[Tensor, Tensor]:
    """Does what `CausalModel.compute` does with all layers in turn, `PASS_ROWS` rows at a time.

    Args:
        inputs: see `Decoder.run`; of the wanted rows afterwards.

    Returns:
        Logits `[rows, vocabulary]`, and hidden states after the last layer `[rows, hidden_size]`.
    """
    count = len(ids)
    ids, positions = (_padded(one, 0) for one in (ids, positions))
    apart: AbstractContextManager[object] = _RowsApart() if len(ids) > PASS_ROWS else nullcontext()
    with apart:
        hidden = model.run(None, model.embed(ids), positions, _PaddedPass(attention, count), inputs=inputs)
        logits = model.logits(hidden)
    wanted = selection(rows, ids.device)
    inputs.update((layer, given[:, wanted]) for layer, given in inputs.items() if given.numel())
    return logits[wanted], hidden[0, wanted]


@torch.inference_mode()
def rows_are_alike(model: Decoder) -> bool:
    """Returns whether tokens have the same bits in one pass and in passes of some of them."""
    attention = OwnValues()
    ids = torch.arange(_CHECKED_TOKENS, device=model.device) * 7 % model.vocabulary
    positions = ids % model.max_positions
    together = compute_in_fixed_rows(model, attention, ids, positions, range(len(ids)), {})
    for some in (slice(0, 1), slice(3, 20), slice(PASS_ROWS - 1, None)):
        apart = compute_in_fixed_rows(model, attention, ids[some], positions[some], range(len(ids[some])), {})
        if not all(torch.equal(one[some], other) for one, other in zip(together, apart, strict=True)):
            return False
    return True


def _padded(tensor: Tensor, dim: int) -> Tensor:
    """Appends zeros until a dimension is a multiple of `PASS_ROWS`."""
    padding = [0, 0] * (tensor.dim() - dim)
    padding[-1] = -tensor.shape[dim] % PASS_ROWS
    return torch.nn.functional.pad(tensor, padding)


class _PaddedPass:
    """Attention of a padded pass: it computes the tokens, and returns zeros for the padding."""

    def __init__(self, attention: AttentionPass, count: int) -> None:
        self._attention, self._count = attention, count

    @property
    def local(self) -> LocalPass:
        return self._attention.local  # such layers are not computed here

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        queries, keys, values = (part[:, : self._count] for part in (queries, keys, values))
        with torch._C.DisableTorchFunction():
            return _padded(self._attention.attend(layer, queries, keys, values, softmax), 1)


class OwnValues:
    """Attention in which each token sees only itself, so that hidden states are those of first tokens."""

    local = NO_LOCAL_STATE

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        return values.repeat_interleave(len(queries) // len(values), dim=0)


_OVER_ROWS = (torch.nn.functional.linear, OPERATOR, torch.Tensor.mean, torch.mean)
"""The operations of dense layers (`dense_layers._Reference`) that sum."""


class _RowsApart(TorchFunctionMode):
    """Computes sums over rows `[1, tokens, …]` for `PASS_ROWS` tokens at a time."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func not in _OVER_ROWS or args[0].dim() < 3 or args[0].shape[1] <= PASS_ROWS:
            return func(*args, **given)
        return torch.cat([func(some, *args[1:], **given) for some in args[0].split(PASS_ROWS, dim=1)], dim=1)
