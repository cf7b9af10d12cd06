"""Token IDs on the host, the device, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload_rt.system.device_copies import to_device


class Tokens:
    """Token IDs on the host, the device, or both.

    Tokens that are drawn on a device stay there until the host has to read something anyway (`arrive`).

    Args:
        known: the IDs, if the host has them.
        tensor: `[count]` int64, if the device has them.
        nan: 0-d bool on the device: whether the tokens were drawn from NaN logits.
        on_nan: called on arrival if `nan` is true; raises.
        parts: the tokens that these were joined from; see `joined`.

    Raises:
        ValueError: neither `known` nor `tensor` is given.
    """

    def __init__(
        self,
        known: Sequence[int] | None = None,
        tensor: Tensor | None = None,
        nan: Tensor | None = None,
        on_nan: Callable[[], None] | None = None,
        parts: Sequence[Tokens] = (),
    ) -> None:
        if known is None and tensor is None:
            raise ValueError("tokens need IDs on the host or a tensor on a device: both are None")
        self._known = None if known is None else list(known)
        self._tensor = tensor
        self._nan = nan
        self._on_nan = on_nan
        self._parts = parts

    @classmethod
    def joined(cls, parts: Sequence[Tokens]) -> Tokens:
        """Concatenates tokens; when the whole arrives, so does each part."""
        if len(parts) == 1:
            return parts[0]
        if all(part.arrived for part in parts):
            return cls([token for part in parts for token in part.known])
        device = next(part._tensor.device for part in parts if part._tensor is not None)
        return cls(tensor=torch.cat([part.on(device) for part in parts]), parts=parts)

    def __len__(self) -> int:
        if self._known is not None:
            return len(self._known)
        assert self._tensor is not None
        return len(self._tensor)

    @property
    def arrived(self) -> bool:
        """Whether the host has the IDs."""
        return self._known is not None

    @property
    def known(self) -> list[int]:
        """The IDs on the host; RuntimeError before they have arrived."""
        if self._known is None:
            raise RuntimeError("these tokens are only on the device: read them first")
        return self._known

    def on(self, device: torch.device) -> Tensor:
        """Returns the IDs on `device`, `[count]`."""
        if self._tensor is None:
            self._tensor = to_device(self.known, device)
        return self._tensor

    def pending(self) -> list[Tensor]:
        """Tensors to read for `arrive`: none, or the IDs and whether any were drawn from NaN logits."""
        if self.arrived:
            return []
        assert self._tensor is not None
        probes = [nan for part in (self, *self._parts) if (nan := part._nan) is not None]
        return [self._tensor, *([torch.stack(probes).any()] if probes else [])]

    def arrive(self, copies: Sequence[Tensor]) -> None:
        """Takes the host copies of `pending`.

        Raises:
            NotANumber: the tokens were drawn from NaN logits.
        """
        if not copies:
            return
        self._take(copies[0].tolist())
        if len(copies) > 1 and bool(copies[1]):
            for part in (self, *self._parts):
                if part._on_nan is not None:
                    part._on_nan()

    def _take(self, ids: list[int]) -> None:
        self._known = ids
        start = 0
        for part in self._parts:
            part._take(ids[start : start + len(part)])
            start += len(part)
