"""The plain forms of operators, in the place of kernels on the emulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def as_of_kernels(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the plain form with results that are contiguous, as those of kernels are."""

    def contiguous(*arguments: Any) -> Any:
        result = plain(*arguments)
        return tuple(one.contiguous() for one in result) if isinstance(result, tuple) else result

    return contiguous
