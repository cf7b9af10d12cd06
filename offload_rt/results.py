"""Input and output of a generation: sampling parameters, token events and results."""

from __future__ import annotations

import numbers
import operator
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from offload_rt.config import nearest
from offload_rt.errors import UsageError, briefly
from offload_rt.json_grammar import checked_schema
from offload_rt.sampling import Sampler

MOST_ALTERNATIVES = 20
"""Most tokens whose log probabilities are reported in the place of one."""

FinishReason = Literal["length", "eos", "stop", "interrupted", "error"]


def integer(name: str, value: object) -> int:
    """Returns `value` as an int. Raises UsageError, which names it, unless it is one of at most 64 bits."""
    with suppress(TypeError):
        if not isinstance(value, bool):
            found = operator.index(value)  # type: ignore[arg-type]
            if (bits := found.bit_length()) > 64:  # Python refuses to write very long ones in messages
                raise UsageError(f"{name} is out of range: it has {bits} bits, of 64 at most")
            return found
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
    return len(prompt) > 0 and all(isinstance(one, Sequence) or getattr(one, "ndim", 0) for one in prompt)


def token_ids(prompt: object) -> list[int]:
    """Returns token IDs from a sequence of integers, or from a tensor or an array of one dimension.

    Raises:
        UsageError: `prompt` is neither; names the value and says what to pass.
    """
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        kind = type(prompt).__name__
        raise UsageError(f'prompt is a {kind}: give the token IDs in it, prompt["input_ids"]')
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(given, Sequence):
        kind = type(prompt).__name__
        raise UsageError(f"prompt {briefly(prompt)} is of type {kind}: give a text (str) or token IDs")
    return [integer(f"prompt token {at}", token) for at, token in enumerate(given)]


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
    """

    max_tokens: int = 256
    stop: str | Sequence[str] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    json_schema: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        integers, optional = ("top_k", "max_tokens", "seed", "logprobs"), ("seed", "logprobs")
        for name in dict.fromkeys((*(one.name for one in fields(Sampler)), *integers)):
            value = getattr(self, name)
            if value is not None or name not in optional:
                read = integer if name in integers else number
                object.__setattr__(self, name, read(name.replace("_", "-"), value))
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

    def seeded(self) -> SamplingParams:
        """Returns parameters with a seed, drawn where none is given."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def _stop_strings(stop: object) -> tuple[str, ...]:
    """Returns stop strings as a tuple. Raises UsageError for what is none."""
    if isinstance(stop, bytes) or not isinstance(stop, Collection):
        raise UsageError(f"stop must be a string or a sequence of strings, got {briefly(stop)}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in strings:
        if not isinstance(text, str):
            raise UsageError(f"a stop string must be a str, got {briefly(text)}")
        if not text:
            raise UsageError("a stop string is empty: leave it out")
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


@dataclass(frozen=True)
class TokenEvent:
    """A generated token.

    Attributes:
        text: the text that became certain with this token; may be empty, or that of several tokens.
        from_draft: a draft proposed the token, and it was accepted.
        logprob: log probability of the token by the model's own logits, before penalties and temperature;
            None where `SamplingParams.logprobs` asks for none.
        alternatives: the likeliest tokens in its place with their log probabilities, the likeliest first.
    """

    token: int
    text: str
    from_draft: bool
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Timings:
    """Token counts, and times in ms: of the prompt, of generation, and of drafts proposed to the target."""

    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    predicted_per_second: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0


@dataclass(frozen=True)
class LevelStatistics:
    """Statistics of one level: passes, tokens proposed to the next level, and tokens accepted there.

    The last level is the target over its full cache, which proposes nothing. `ms` is the level's own time.
    """

    name: str
    rounds: int
    proposed: int
    accepted: int
    ms: float


@dataclass(frozen=True)
class Transfer:
    """Bytes that crossed the link during generation; 0 where the KV is attended in place, on a CPU.

    `bytes_abandoned` is the part of `bytes_to_device` that was sent ahead for a pass that did not come.
    """

    bytes_to_device: int = 0
    bytes_to_host: int = 0
    bytes_abandoned: int = 0
    wait_ms: float = 0.0


@dataclass(frozen=True)
class MemoryStatistics:
    """Bytes: KV in the store and reserved for it, and the peaks of the process on host and device."""

    kv_bytes: int = 0
    kv_reserved_bytes: int = 0
    host_peak_bytes: int = 0
    device_peak_bytes: int = 0


@dataclass(frozen=True)
class GenerationResult:
    """A generated text with its statistics.

    Attributes:
        start: length of the context, in tokens, before this call's prompt: `Context.rewind` takes it.
        prompt_tokens: length of the context when generation began, the prompt included.
        tokens: generated token IDs, an end-of-text token included.
        text: their text, up to a stop string; marks of thoughts are in it.
        thoughts: the thoughts in the text, without marks; empty where the model wrote none.
        answer: the text without its thoughts.
        levels: the composition's levels, the cheapest first, the target over its full cache last.
        plain_tokens: number of tokens decoded without drafts because speculation was slower.
        error: why the text ended, where `finish_reason` is "error".
        logprobs: log probability of each token, see `TokenEvent`; None where they were not asked for.
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
    levels: list[LevelStatistics]
    transfer: Transfer
    memory: MemoryStatistics
    plain_tokens: int = 0
    notices: list[str] = field(default_factory=list)
    error: str | None = None
    logprobs: list[float] | None = None
    thoughts: str = ""
    answer: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the values that `offload-rt generate --json` writes."""
        values = asdict(self)
        del (
            values["start"],
            values["plain_tokens"],
            values["notices"],
            values["error"],
            values["transfer"]["bytes_abandoned"],
        )
        if self.logprobs is None:
            del values["logprobs"]
        if not self.thoughts:
            del values["thoughts"], values["answer"]
        for level in values["levels"]:
            del level["rounds"]
        return values
