"""Output of a generation, token events and results, and the scores of a prompt."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from offload_rt.text.tools import ToolCall

FinishReason = Literal["length", "eos", "stop", "interrupted", "error"]
Exactness = Literal["bits", "distribution"]
Alternatives = tuple[tuple[int, float], ...]
"""The likeliest tokens in a place with their log probabilities, the likeliest first."""


@dataclass(frozen=True)
class TokenEvent:
    """A generated token.

    Attributes:
        text: the text that became certain with this token; may be empty, or that of several tokens.
        from_draft: a draft proposed the token, and it was accepted.
        logprob: log probability of the token by the model's own logits, before penalties and temperature;
            None where `SamplingParams.logprobs` asks for none.
        alternatives: the likeliest tokens in its place.
    """

    token: int
    text: str
    from_draft: bool
    logprob: float | None = None
    alternatives: Alternatives = ()


@dataclass(frozen=True)
class Timings:
    """Token counts and measured times: of the prefill, of decoding, and of drafts that the target verified.

    Attributes:
        prefill_tokens: tokens of the prompt that were computed; others were there.
        new_tokens: generated tokens.
    """

    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    new_tokens: int = 0
    decode_ms: float = 0.0
    tokens_per_second: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


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
        answer: the text without its thoughts and its calls of tools.
        tool_calls: the calls of tools in the text, of those in `SamplingParams.tools`.
        levels: the composition's levels, the cheapest first, the target over its full cache last.
        plain_tokens: number of tokens decoded without drafts because speculation was slower.
        stop_string: the stop string that ended the text; None where none did.
        error: why the text ended, where `finish_reason` is "error".
        logprobs: log probability of each token, see `TokenEvent`; None where they were not asked for.
        exactness: what speculative decoding, batching and caching preserve. "bits": every bit of the logits
            and the KV of plain decoding behind the same text, where this installation has computed it with
            the same page size (on a GPU: behind the same KV); "distribution": all but their rounding, so
            that a near tie may fall otherwise.
        exactness_reason: what makes rounding depend on the other tokens of a pass; empty for "bits".
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
    exactness: Exactness
    plain_tokens: int = 0
    notices: list[str] = field(default_factory=list)
    stop_string: str | None = None
    error: str | None = None
    logprobs: list[float] | None = None
    thoughts: str = ""
    answer: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    exactness_reason: str = ""

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
        for name in ("logprobs", "stop_string"):
            if values[name] is None:
                del values[name]
        if not self.exactness_reason:
            del values["exactness_reason"]
        if not self.thoughts:
            del values["thoughts"], values["answer"]
        if not self.tool_calls:
            del values["tool_calls"]
        for level in values["levels"]:
            del level["rounds"]
        return values


@dataclass(frozen=True)
class PromptScore:
    """How likely a prompt is: the log probability of each token given those before it.

    They are natural logarithms by the model's own logits. All lists have an entry for every token of the
    prompt; those of tokens that were not scored, the first one among them, are None or empty.

    Attributes:
        tokens: token IDs of the prompt.
        logprobs: log probability of each token.
        greedy: whether each token is the likeliest one in its place, which greedy decoding chooses.
        alternatives: the likeliest tokens in the place of each.
    """

    tokens: list[int]
    logprobs: list[float | None]
    greedy: list[bool | None]
    alternatives: list[Alternatives]

    @property
    def scored(self) -> int:
        """Number of tokens that have a log probability."""
        return len(self.logprobs) - self.logprobs.count(None)

    @property
    def total(self) -> float:
        """Sum of the log probabilities: that of the scored tokens together, in nats."""
        return math.fsum(logprob for logprob in self.logprobs if logprob is not None)

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log probability per scored token; NaN where none was scored."""
        return math.exp(-self.total / self.scored) if self.scored else math.nan
