"""Drafted tokens that stay on the device until a verdict brings them to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, overload

from torch import Tensor


class DrawnTokens(Sequence[int]):
    """Tokens that were drawn one after the other on the device; the host need not know them yet.

    Who reads a verdict over them brings them along (`arrive`). A host that looks at them earlier waits.

    Args:
        tensor: `[count]`, on the device.
        nan: 0-d, on the device: some of the logits that they were drawn from are NaN.
        read: brings tensors to the host.
        on_nan: told the tokens where they were drawn from NaN; raises.
    """

    def __init__(
        self,
        tensor: Tensor,
        nan: Tensor,
        read: Callable[..., list[Tensor]],
        on_nan: Callable[[list[int]], NoReturn],
    ) -> None:
        self.tensor = tensor
        self.nan = nan
        self._read = read
        self._on_nan = on_nan
        self._known: list[int] | None = None

    @property
    def arrived(self) -> bool:
        """Whether the host knows them."""
        return self._known is not None

    def arrive(self, tokens: Tensor, nan: Tensor) -> None:
        """`tensor` and `nan` are on the host now.

        Raises:
            NotANumber: the tokens mean nothing.
        """
        self._known = tokens.tolist()
        if nan:
            self._on_nan(self._known)

    def __len__(self) -> int:
        return len(self.tensor)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if self._known is None:
            self.arrive(*self._read(self.tensor, self.nan))
        assert self._known is not None
        return self._known[at]
