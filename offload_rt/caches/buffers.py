"""Memory of bounded caches, kept from one text to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cpu_kv import KVLayout


@dataclass(eq=False)
class KVBuffer:
    """Keys and values of a bounded cache, `[layers, kv_heads, capacity, head_dim]` each.

    A recorded graph is bound to its addresses, and goes with it.
    """

    keys: Tensor
    values: Tensor

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def clear(self) -> None:
        """Zeros: what lies behind the entries is multiplied by zero, so it has to be finite."""
        self.keys.zero_()
        self.values.zero_()

    def grown(self, extra: int) -> KVBuffer:
        """A copy with room for so many more entries."""
        pad = (0, 0, 0, extra)
        with torch.inference_mode(False):  # as in `take`
            return KVBuffer(*(torch.nn.functional.pad(part, pad) for part in (self.keys, self.values)))


@dataclass
class BufferPool:
    """Buffers that a text has given back, for the next one: what was recorded over them stays right."""

    _free: list[KVBuffer] = field(default_factory=list)

    def take(self, layout: KVLayout, capacity: int, device: torch.device) -> KVBuffer:
        """A buffer of zeros."""
        shape = (layout.layers, layout.kv_heads, capacity, layout.head_dim)
        found = next((one for one in self._free if _fits(one.keys, shape, layout.dtype, device)), None)
        if found is None:
            self.drop_free()  # of other sizes: there need not be room for both
            with torch.inference_mode(False):  # else it were writable in that mode alone
                keys, values = (torch.empty(shape, dtype=layout.dtype, device=device) for _ in range(2))
            found = KVBuffer(keys, values)
        else:
            self._free.remove(found)
        found.clear()  # which touches it, too: later that would hold up a round
        return found

    @property
    def free_bytes(self) -> int:
        """Bytes of the buffers that no text uses."""
        return sum(one.keys.nbytes + one.values.nbytes for one in self._free)

    def give_back(self, buffer: KVBuffer) -> None:
        """Nothing that uses it may be enqueued any more but in the order of its next use."""
        self._free.append(buffer)

    def drop_free(self) -> None:
        """Lets go of what no text uses."""
        self._free.clear()


def _fits(keys: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return keys.shape == shape and keys.dtype == dtype and keys.device == device
