"""The decoding loop: propose, verify, commit, for every composition there is."""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import dataclass
from time import perf_counter

import torch

from offload_rt.drafting.base import Text
from offload_rt.drafting.verifier import Verifier
from offload_rt.governor import Governor
from offload_rt.schedule import Schedule


@dataclass(frozen=True)
class Token:
    """One generated token.

    Attributes:
        id: its number in the vocabulary.
        from_draft: it was proposed and accepted, not drawn by the target itself.
        ends: it is one of the stop tokens, the last token of the text.
    """

    id: int
    from_draft: bool
    ends: bool


def decode(
    schedule: Schedule,
    text: list[int],
    max_tokens: int,
    stop_tokens: Collection[int],
    governor: Governor,
) -> Generator[Token]:
    """Continues `text`, whose KV but for the last token's is in the verifier's cache, token by token.

    Appends to `text` what it yields, a round at a time. Ends after `max_tokens` tokens or with the first
    of `stop_tokens`, wherever in a draft it occurs.
    """
    verifier = schedule.verifier
    left = max_tokens

    def following(tokens: int) -> int:
        return min(governor.draft_count(), left - tokens - 1)

    governor.begin(len(text))
    while left > 0:
        started, fixed_ms = perf_counter(), _fixed_ms(verifier)
        length = len(text)
        count = governor.draft_count()
        with torch.inference_mode():
            result = schedule.round(Text(text), min(count, left - 1), following)
            tokens = result.tokens
            text += tokens
            verifier.drafter.settle(Text(text))
        ms = 1e3 * (perf_counter() - started)
        governor.observe(max(count, result.proposed), len(tokens), length, ms, _fixed_ms(verifier) - fixed_ms)
        for i, token in enumerate(tokens):
            ends = token in stop_tokens
            if ends:
                del text[length + i + 1 :]
            yield Token(token, i < result.accepted, ends)
            if ends:
                return
        left -= len(tokens)


def _fixed_ms(verifier: Verifier) -> float:
    return sum(level.fixed_ms for level in verifier.levels)
