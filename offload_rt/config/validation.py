"""Checks of values that a user gives, whose errors name the key, the value and the rule."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from offload_rt.errors import UsageError, briefly


class InvalidValue(UsageError):
    """A configuration value outside what its key, `section.key`, allows."""

    def __init__(self, key: str, value: object, rule: str) -> None:
        self.key = key
        super().__init__(f"{key} = {shown(value)}: {rule}")


def require(allowed: bool, key: str, value: object, rule: str) -> None:
    """Raises InvalidValue unless `allowed`."""
    if not allowed:
        raise InvalidValue(key, value, rule)


_TYPES = {int: "an integer", bool: "true or false", str: "a string"}


def require_type(expected: Any, key: str, value: Any) -> None:
    """Raises InvalidValue where `value` is not of the annotated type or outside its bounds."""
    if get_origin(expected) is Literal:
        allowed = get_args(expected)
        matches = any(type(value) is type(choice) and value == choice for choice in allowed)  # true equals 1
        require(matches, key, value, f"must be one of {', '.join(map(str, allowed))}")
        return
    kind, *bounds = get_args(expected) or (expected,)
    # bool is a subclass of int, and `true` is no number of tokens.
    require(type(value) is kind, key, value, f"must be {_TYPES[kind]}")
    if kind is int and value.bit_length() > 63:
        raise InvalidValue(key, value, "must be a number of at most 63 bits")
    for least in bounds[:1]:
        require(value >= least, key, value, f"must be at least {least}")
    for limit in bounds[1:]:
        require(value <= limit, key, value, f"must be at most {limit}")


def shown(value: object) -> str:
    """Returns `value` as it would be written in TOML, where that is simple."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return briefly(value)
    return repr(list(value) if isinstance(value, tuple) else value)


def nearest(word: str, words: Iterable[str]) -> str:
    """Returns the end of an error about an unknown word: the nearest known one and the whole list."""
    words = list(words)
    close = difflib.get_close_matches(word, words, n=1)
    guess = f"; did you mean {close[0]}?" if close else ";"
    return f"{guess} there are {', '.join(words)}"
