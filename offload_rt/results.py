"""What a user gives to a generation and what comes back: parameters, events, results."""

from __future__ import annotations

import numbers
import operator
import reprlib
import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from offload_rt.errors import UsageError
from offload_rt.sampling import Sampler

FinishReason = Literal["length", "eos", "stop", "interrupted", "error"]


def whole_number(name: str, value: object) -> int:
    """`value` as an int; UsageError, which names it, where it is none (True is none either)."""
    with suppress(TypeError):
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    raise UsageError(f"{name} {reprlib.repr(value)} is no whole number")


def number(name: str, value: object) -> float:
    """`value` as a float; UsageError, which names it, where it is no number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UsageError(f"{name} {reprlib.repr(value)} is no number")
    return float(value)


def is_batch(prompt: object) -> bool:
    """Whether it is a list of prompts, and not one: all of its entries are texts or sequences."""
    if not isinstance(prompt, list | tuple):
        return getattr(prompt, "ndim", 1) == 2
    return len(prompt) > 0 and all(isinstance(one, Sequence) or getattr(one, "ndim", 0) for one in prompt)


def token_ids(prompt: object) -> list[int]:
    """Token ids from a sequence of whole numbers, or from a tensor or an array of one dimension.

    Raises:
        UsageError: it is neither; names the value.
    """
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(given, Sequence):
        kind = type(prompt).__name__
        raise UsageError(f"prompt {reprlib.repr(prompt)} is of type {kind}: give a text (str) or token ids")
    return [whole_number(f"prompt token {at}:", token) for at, token in enumerate(given)]


@dataclass(frozen=True)
class SamplingParams(Sampler):
    """How to draw tokens (`temperature`, `top_p` and `top_k`, see `Sampler`) and when to stop.

    Attributes:
        max_tokens: generate at most so many.
        stop: strings that end the text where they begin.
        seed: repeats the same tokens on the same machine, where the same shares of the KV lie in the same
            places and the retrieved cache is refreshed in the same way (what is planned follows the memory
            that is free); None: one is drawn, and the result tells it.
        ignore_eos: do not stop at the model's end-of-text tokens.
    """

    max_tokens: int = 256
    stop: Sequence[str] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "top_k", "max_tokens", "seed"):
            value = getattr(self, name)
            if name != "seed" or value is not None:
                read = number if name in ("temperature", "top_p") else whole_number
                object.__setattr__(self, name, read(name.replace("_", "-"), value))
        super().__post_init__()
        if self.max_tokens < 1:
            raise UsageError(f"max-tokens {self.max_tokens} is out of range: use 1 or more")
        if isinstance(self.stop, str | bytes) or not isinstance(self.stop, Collection):
            raise UsageError(f"stop {self.stop!r} must be a sequence of strings")
        object.__setattr__(self, "stop", tuple(self.stop))
        for text in self.stop:
            if not isinstance(text, str):
                raise UsageError(f"stop string {text!r} is no string (str)")
            if not text:
                raise UsageError("a stop string is empty: leave it out")
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore-eos {self.ignore_eos!r} must be True or False")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UsageError(f"seed {self.seed} is out of range: use 0 to {2**63 - 1}")

    def seeded(self) -> SamplingParams:
        """With a seed that is drawn where none is given."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def check_params(params: object) -> None:
    """Raises UsageError for what are no `SamplingParams`."""
    if not isinstance(params, SamplingParams):
        remedy = "give SamplingParams, a list of them to a list of prompts"
        raise UsageError(f"params {reprlib.repr(params)}: {remedy}")


@dataclass(frozen=True)
class TokenEvent:
    """One token as it is made. `text` is what became certain with it: it may be empty, or reach back."""

    token: int
    text: str
    from_draft: bool


@dataclass(frozen=True)
class Timings:
    """Tokens and times in ms: `prompt` is what was read, `draft_n` what was proposed to the target."""

    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    predicted_per_second: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0


@dataclass(frozen=True)
class Level:
    """What one level did: its passes, the tokens it proposed to the next level and those accepted there.

    The last level is the target over its full cache, which proposes nothing. `ms` is the level's own time.
    """

    name: str
    rounds: int
    proposed: int
    accepted: int
    ms: float


@dataclass(frozen=True)
class Transfer:
    """What crossed the link while this text was made; nothing does where the store is attended in place.

    `bytes_abandoned`: the part of `bytes_to_device` that was sent ahead for a pass which did not come.
    """

    bytes_to_device: int = 0
    bytes_to_host: int = 0
    bytes_abandoned: int = 0
    wait_ms: float = 0.0


@dataclass(frozen=True)
class Memory:
    """Bytes: KV in the store and reserved for it, and the peaks of the process on host and device."""

    kv_bytes: int = 0
    kv_reserved_bytes: int = 0
    host_peak_bytes: int = 0
    device_peak_bytes: int = 0


@dataclass(frozen=True)
class GenerationResult:
    """A text and how it came about.

    Attributes:
        start: length of the context, in tokens, before this call's prompt: `Context.rewind` takes it.
        prompt_tokens: length of the context when generation began, the prompt included.
        tokens: generated ids, an end-of-text token included.
        text: their text, up to a stop string.
        levels: the composition's levels, the cheapest first, the target over its full cache last.
        plain_tokens: decoded without drafts because speculation did not pay.
        error: what went wrong, where the text ended with an error.
    """

    model: str
    draft: str | None
    config: str
    device: str
    dtype: str
    seed: int | None
    start: int
    prompt_tokens: int
    tokens: list[int]
    text: str
    finish_reason: FinishReason
    timings: Timings
    rounds: int
    levels: list[Level]
    transfer: Transfer
    memory: Memory
    plain_tokens: int = 0
    notices: list[str] = field(default_factory=list)
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `offload-rt generate --json` writes them."""
        values = asdict(self)
        del (
            values["start"],
            values["plain_tokens"],
            values["notices"],
            values["error"],
            values["transfer"]["bytes_abandoned"],
        )
        for level in values["levels"]:
            del level["rounds"]
        return values
