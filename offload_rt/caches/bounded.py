"""A cache of bounded size: verified entries, and behind them the speculative ones.

Keys carry their rotation, so the order of entries means nothing to attention: a new entry may stand
where an old one stood. Speculative entries are kept apart at the end and become verified entries only in
`settle` or `adopt`; taking them back never loses anything.

A pass attends to as many entries as there are, or, after `fix`, to the whole buffer under a mask: then its
shapes depend on nothing but the number of new tokens, and what differs from pass to pass is one number on
the device, as a CUDA graph needs it. Whatever lies behind the entries is hidden, and finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload_rt.attention import AttentionBackend, attend
from offload_rt.caches.base import NewTokens
from offload_rt.host import to_device


@dataclass(frozen=True)
class _Frame:
    """Where a pass's new tokens go, and what they see.

    Attributes:
        slots: their entries.
        stop: entries that are attended to.
        mask: additive `[count, stop]`; None: everything is seen.
    """

    slots: slice | Tensor
    stop: int
    mask: Tensor | None


SPECULATIVE_ENTRIES = 128
"""Room behind the verified entries: for the longest draft, and another one that is drafted ahead of it."""


class BoundedCache(ABC):
    """Verified entries `[0, entries)`, speculative ones behind; one buffer for all layers.

    Attributes:
        keys, values: `[layers, kv_heads, capacity, head_dim]`.
        entries: how many verified entries there are; the same for every layer and head.
        verified_length: how many tokens of the text are verified.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        budget: int,
        backend: AttentionBackend,
    ) -> None:
        self.budget = budget
        self.entries = 0
        self.verified_length = 0
        self._speculative = 0
        self._backend = backend
        self._new: NewTokens | None = None
        self._frame: _Frame | None = None
        shape = (layers, kv_heads, budget + SPECULATIVE_ENTRIES, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def length(self) -> int:
        return self.verified_length + self._speculative

    @property
    def end(self) -> int:
        """How many entries there are, speculative ones included: where a pass's new tokens go."""
        return self.entries + self._speculative

    def begin(self, new: NewTokens) -> None:
        self._new = new
        self._frame = None
        self._make_room(self.end + new.count)

    def fix(self, end: Tensor) -> None:
        """Makes the shapes of the pass that has begun those of every pass of as many tokens, in a chain.

        Args:
            end: 0-d int64 on the device, the value of `end`. Nothing else is different in another pass.
        """
        if self._new is None:
            raise RuntimeError("fix without a pass: call begin first")
        capacity = self.keys.shape[2]
        slots = end + torch.arange(self._new.count, device=self.keys.device)
        hidden = torch.arange(capacity, device=self.keys.device) > slots[:, None]
        wide = torch.promote_types(self.keys.dtype, torch.float32)
        mask = torch.zeros(hidden.shape, dtype=wide, device=self.keys.device)
        self._frame = _Frame(slots, capacity, mask.masked_fill_(hidden, -torch.inf))

    def _sliced(self, new: NewTokens) -> _Frame:
        start, stop = self.end, self.end + new.count
        if new.mask is None:
            return _Frame(slice(start, stop), stop, None)
        # Old entries are seen by every new token: a mask over all of them, one for all layers.
        mask = new.mask.new_zeros(new.count, stop)
        mask[:, start:] = new.mask
        return _Frame(slice(start, stop), stop, mask)

    def _make_room(self, needed: int) -> None:
        capacity = self.keys.shape[2]
        if needed <= capacity:
            return
        extra = max(needed - capacity, capacity // 4)
        pad = (0, 0, 0, extra)
        self.keys = torch.nn.functional.pad(self.keys, pad)
        self.values = torch.nn.functional.pad(self.values, pad)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if self._new is None:
            raise RuntimeError("attend without a pass: call begin first")
        if self._frame is None:
            self._frame = self._sliced(self._new)
        frame = self._frame
        layer_keys, layer_values = self.keys[layer], self.values[layer]
        layer_keys[:, frame.slots] = keys
        layer_values[:, frame.slots] = values
        out, _ = attend(
            self._backend,
            queries,
            layer_keys[:, : frame.stop],
            layer_values[:, : frame.stop],
            scale,
            frame.mask,
        )
        return out

    def commit(self, path: Sequence[int]) -> None:
        if self._new is None:
            raise RuntimeError("commit without a pass")
        start = self.end
        if list(path) != list(range(len(path))):
            kept = to_device(path, self.keys.device) + start
            stop = start + len(path)
            self.keys[:, :, start:stop] = self.keys[:, :, kept]
            self.values[:, :, start:stop] = self.values[:, :, kept]
        self._speculative += len(path)
        self._new = None

    def truncate(self, length: int) -> None:
        if not self.verified_length <= length <= self.length:
            raise ValueError(
                f"cannot truncate to {length}: tokens {self.verified_length} to {self.length} are speculative"
            )
        self._speculative = length - self.verified_length

    def settle(self) -> None:
        start, count = self.entries, self._speculative
        self._speculative = 0
        if count:
            # Cloned: the verified region that takes them may grow into where they stand.
            self._take(
                self.keys[:, :, start : start + count].clone(),
                self.values[:, :, start : start + count].clone(),
            )

    def _behind(self, count: int) -> tuple[Tensor, Tensor]:
        """Copies of the speculative entries behind the first `count` of them."""
        kept = slice(min(self.entries + count, self.end), self.end)
        return self.keys[:, :, kept].clone(), self.values[:, :, kept].clone()

    def _put_behind(self, keys: Tensor, values: Tensor) -> None:
        """Makes them the speculative entries."""
        start, self._speculative = self.entries, keys.shape[2]
        self._make_room(self.end)
        self.keys[:, :, start : self.end] = keys
        self.values[:, :, start : self.end] = values

    def _take(self, keys: Tensor, values: Tensor) -> None:
        """Adds verified tokens `[layers, kv_heads, tokens, head_dim]` that follow the verified ones."""
        count = keys.shape[2]
        if count > self.budget:
            raise ValueError(f"{count} tokens at once do not fit a cache of {self.budget} entries")
        appended = min(count, self.budget - self.entries)
        slots = list(range(self.entries, self.entries + appended))
        self.entries += appended
        slots += self._victims(count - appended)
        if slots == list(range(slots[0], slots[0] + count)):
            self.keys[:, :, slots[0] : slots[0] + count] = keys
            self.values[:, :, slots[0] : slots[0] + count] = values
        else:
            places = to_device(slots, self.keys.device)
            self.keys[:, :, places] = keys
            self.values[:, :, places] = values
        self.verified_length += count

    @abstractmethod
    def _victims(self, count: int) -> list[int]:
        """Slots of verified entries to overwrite, in the order of their new tokens."""
