"""Parameters of a generation, and checks of what a user gives."""

from __future__ import annotations

import numbers
import operator
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from offload_rt.config.validation import nearest
from offload_rt.errors import UsageError, briefly
from offload_rt.sampling.sampler import Sampler
from offload_rt.text.json_grammar import checked_schema
from offload_rt.text.tools import Tools

MOST_ALTERNATIVES = 20
"""Most tokens whose log probabilities are reported in the place of one."""
MOST_STOPS, LONGEST_STOP = 64, 4096
"""Most stop strings, and characters of one: every token is searched for all of them."""


def integer(name: str, value: object) -> int:
    """Returns `value` as an int. Raises UsageError, which names it, unless it is one of at most 64 bits."""
    with suppress(TypeError):
        if not isinstance(value, bool):
            number = operator.index(value)  # type: ignore[arg-type]
            if (bits := number.bit_length()) > 64:  # Python refuses to write very long ones in messages
                raise UsageError(f"{name} is out of range: it has {bits} bits, of 64 at most")
            return number
    raise UsageError(f"{name} must be an integer, got {briefly(value)}")


def number(name: str, value: object) -> float:
    """Returns `value` as a float. Raises UsageError, which names it, where it is no real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UsageError(f"{name} must be a number, got {briefly(value)}")
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"{name} is out of range: it is more than the largest float") from None


def is_batch(prompt: object) -> bool:
    """Returns whether `prompt` is a list of prompts: all of its entries are texts or sequences."""
    if not isinstance(prompt, list | tuple):
        return getattr(prompt, "ndim", 1) == 2
    return len(prompt) > 0 and all(isinstance(item, Sequence) or getattr(item, "ndim", 0) for item in prompt)


def token_ids(prompt: object) -> list[int]:
    """Returns token IDs from a sequence of integers, or from a tensor or an array of one dimension.

    Raises:
        UsageError: `prompt` is neither; names the value and says what to pass.
    """
    items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        kind = type(prompt).__name__
        raise UsageError(f'prompt is a {kind}: give the token IDs in it, prompt["input_ids"]')
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(items, Sequence):
        kind = type(prompt).__name__
        raise UsageError(f"prompt {briefly(prompt)} is of type {kind}: give a text (str) or token IDs")
    return [integer(f"prompt token {at}", token) for at, token in enumerate(items)]


@dataclass(frozen=True)
class SamplingParams(Sampler):
    """Parameters of sampling (see `Sampler`), of when to stop, and of what is reported.

    Attributes:
        max_tokens: most tokens to generate.
        stop: strings that end the text where they begin; one string, or a sequence of them.
        seed: repeats the same tokens on the same machine and plan (a plan depends on the memory that is
            free); None: one is drawn, and the result holds it.
        ignore_eos: do not stop at the model's end-of-text tokens.
        logprobs: report the log probability of each token, and so many of the likeliest ones in its place,
            0 to 20, before penalties and temperature; None: report none.
        json_schema: JSON schema that the text must fit, an object or its text; None: any text. A text that
            is cut by `max_tokens` or a stop string does not fit. Behind a prompt that opens thoughts, or
            where a channel must come first, it is the answer that fits, and thoughts take half the tokens
            at most.
        tools: what the text may call; None: it is never read as calls. Where calls are required, one is
            named, or a tool is strict, arguments are forced to fit their schemas. Beside a schema, the text
            is calls or fits it.
        thinking_budget: most tokens of thoughts, which are closed there; 0 closes them at once; None: any
            number, and half of `max_tokens` before JSON or calls that are forced.
    """

    max_tokens: int = 256
    stop: str | Sequence[str] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    json_schema: str | dict[str, Any] | None = None
    tools: Tools | None = None
    thinking_budget: int | None = None

    def __post_init__(self) -> None:
        integers = ("top_k", "max_tokens", "seed", "logprobs", "thinking_budget")
        optional = ("seed", "logprobs", "thinking_budget")
        for name in dict.fromkeys((*(field.name for field in fields(Sampler)), *integers)):
            value = getattr(self, name)
            if value is not None or name not in optional:
                convert = integer if name in integers else number
                object.__setattr__(self, name, convert(name.replace("_", "-"), value))
        super().__post_init__()
        if self.max_tokens < 1:
            raise UsageError(f"max-tokens {self.max_tokens} is out of range: use 1 or more")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore-eos {self.ignore_eos!r} must be True or False")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UsageError(f"seed {self.seed} is out of range: use 0 to {2**63 - 1}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_ALTERNATIVES:
            raise UsageError(f"logprobs {self.logprobs} is out of range: use 0 to {MOST_ALTERNATIVES}")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", checked_schema(self.json_schema))
        if self.thinking_budget is not None and self.thinking_budget < 0:
            raise UsageError(f"thinking-budget {self.thinking_budget} is out of range: use 0 or more")
        if self.tools is not None:
            if not isinstance(self.tools, Tools):
                raise UsageError(f"tools must be of type Tools, got {briefly(self.tools)}: see Tools.of")
            if self.tools.constrained:
                for tool in self.tools.callable:
                    checked_schema(tool.parameters, f"tool {tool.name}: its parameters")

    def seeded(self) -> SamplingParams:
        """Returns parameters with a seed, drawn where none is given."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def _stop_strings(stop: object) -> tuple[str, ...]:
    """Returns stop strings as a tuple. Raises UsageError for what is none."""
    if isinstance(stop, bytes) or not isinstance(stop, Collection):
        raise UsageError(f"stop must be a string or a sequence of strings, got {briefly(stop)}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MOST_STOPS:
        raise UsageError(f"{len(strings)} stop strings are given: use at most {MOST_STOPS}")
    for text in strings:
        if not isinstance(text, str):
            raise UsageError(f"a stop string must be a str, got {briefly(text)}")
        if not text:
            raise UsageError("a stop string is empty: leave it out")
        if len(text) > LONGEST_STOP:
            raise UsageError(f"a stop string has {len(text)} characters: use at most {LONGEST_STOP}")
    return strings


def with_changes(params: object, changes: Mapping[str, Any]) -> SamplingParams:
    """Returns `params` with other values of some fields.

    Raises:
        UsageError: `params` is not of type SamplingParams, or a field or a value is not valid.
    """
    if not isinstance(params, SamplingParams):
        remedy = "give SamplingParams, or for a list of prompts a list of them"
        raise UsageError(f"params {briefly(params)}: {remedy}")
    names = [field.name for field in fields(SamplingParams)]
    for name in changes:
        if name not in names:
            raise UsageError(f"unknown sampling parameter {name}{nearest(name, names)}")
    return replace(params, **changes) if changes else params
