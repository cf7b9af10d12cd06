"""What drafting and passes take apart from the systems of `bench offload`: what they are held against.

References take turns with the systems, just before them, so that what slows the machine slows both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack, closing
from statistics import mean, median
from typing import Any

import torch

from bench import attention
from bench.offload.cases import Sizes, System
from bench.offload.rows import steady
from bench.offload.text import Subject, Text
from cpu_kv import CpuLink, Link, PacedLink
from offload_rt.attention import choose_backend
from offload_rt.machine.measuring import CPU, compute_rate
from offload_rt.pace import RoundTimes
from offload_rt.planning.shapes import ModelShape

STREAM_FOR_DRAFTING = 2.0  # times what a draft takes alone
ATTENTION_REPEATS = 7
BALANCING_TURNS = 3
AHEAD, LATE = System(1), System(0)

Turn = dict[str, float]
"""What was measured in one turn of the references, as JSON values."""


class References:
    """The subject with its KV in place, and over the balanced link; on a CPU.

    Args:
        opened: closes both.

    Attributes:
        tokens: what plain decoding yields, with the KV in place.
    """

    def __init__(self, subject: Subject, shape: ModelShape, sizes: Sizes, opened: ExitStack) -> None:
        self._sizes = sizes
        # Random weights agree with nobody, and what was not guessed right is not drafted to its end.
        self._held = 1.0 if subject.synthetic else None
        self._kv_bytes = sizes.context * shape.token_bytes
        self._link = PacedLink(1e12)  # until it is balanced
        self._ratio = 1.0
        # Each by a prefill of its own: what is held against the tokens in place has its KV over a link.
        self._behind_link, self._in_place = (
            opened.enter_context(closing(Text(subject, link, sizes.config(AHEAD), sizes.room)))
            for link in (self._link, CpuLink())
        )
        self._behind_link.read()
        self._in_place.read()
        self.tokens = self._in_place.run(sizes.config(), sizes.new_tokens).tokens
        alone = steady(self._in_place.run(sizes.config(AHEAD), sizes.new_tokens).rounds)
        self._stream_ms = STREAM_FOR_DRAFTING * median(one.draft_ms for one in alone)

    def _over_link(self, system: System) -> Sequence[RoundTimes]:
        self._link.bytes_per_second = self._balanced_rate
        return self._behind_link.run(self._sizes.config(system), self._sizes.new_tokens, self._held).rounds

    def _balance(self) -> None:
        """Comes nearer to the link on which a pass takes as long as drafting beside it."""
        drafting = _drafting_ms(self._over_link(AHEAD))
        self._stream_ms = drafting or self._stream_ms  # 0: no pass was long enough to draft beside

    @property
    def _balanced_rate(self) -> float:
        return 1e3 * self._kv_bytes / self._stream_ms

    @property
    def rate(self) -> float:
        """Bytes a second of the links that are paced, by the last turn."""
        return self._balanced_rate / self._ratio

    def begin(self, ratio: float) -> None:
        """Begins a case, in which carrying the KV once takes `ratio` times as long as a draft beside it."""
        self._ratio = ratio
        # A shorter stream leaves less time beside it, in which a draft takes longer: until both are alike.
        for _ in range(BALANCING_TURNS):
            self._balance()

    def turn(self, link: Link) -> Turn:
        """Measures everything once, in ms, and paces `link` by it."""
        plain = self._in_place.run(self._sizes.config(), self._sizes.plain_tokens).rounds
        drafted = self._in_place.run(self._sizes.config(AHEAD), self._sizes.new_tokens).rounds
        late = steady(self._over_link(LATE))
        self._balance()
        if isinstance(link, PacedLink):
            link.bytes_per_second = self.rate
        return {
            # Of the paced link that followed from this turn.
            "rate_bytes_per_second": self.rate,
            # A token, while no pass runs; the processor has waited for a link before.
            "draft_token_ms": sum(one.draft_ms for one in late) / max(1, sum(one.proposed for one in late)),
            # With the KV in place: over the last token, and over it and a draft.
            "plain_pass_ms": median(one.pass_ms for one in plain[1:]),
            "pass_ms": median(one.pass_ms for one in steady(drafted)),
            # From a pass's logits, and the drafts made beside it, to the committed tokens.
            "verdict_ms": median(one.verdict_ms for one in late),
        }


def _drafting_ms(rounds: Sequence[RoundTimes]) -> float:
    """Mean of what a draft took that was begun beside a pass, where its outcome came true."""
    # The last rounds draft less: the text ends. What was left of a draft is finished in the next round.
    pairs = itertools.pairwise(rounds[1:-1])
    guessed = [before.ahead_ms + one.draft_ms for before, one in pairs if before.guessed]
    return mean(guessed or [one.ahead_ms for one in rounds])


def processor(shape: ModelShape, sizes: Sizes) -> dict[str, Any]:
    """What it does alone with one thread, as JSON values: what `prediction-accuracy` predicts from."""
    queries = tuple(sorted({shape.group * (1 + drafted) for drafted in (0, sizes.gamma // 2, sizes.gamma)}))
    sized = (shape.kv_heads, shape.head_dim)
    # The KV of all layers in one, so that no cache of the processor holds it.
    case = attention.AttentionCase((sized,), shape.layers * sizes.context, queries, ATTENTION_REPEATS)
    found = attention.measure(choose_backend(CPU), *sized, shape.dtype, case)
    return {
        "attention": [{"queries": one["queries"], "rate": one["gb_s"]} for one in found],
        "memory_rate": found[0]["read_gb_s"],
        "compute_rate": compute_rate(CPU, torch.float32, 128, 1024),
    }
