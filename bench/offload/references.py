"""What drafting and passes take apart from the systems of `bench offload`: what they are held against.

References take turns with the systems, just before them, so that what slows the machine slows both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch

from bench.offload.cases import Sizes, System
from bench.offload.held import Hold
from bench.offload.rows import draft_token_ms, steady
from bench.offload.text import Run, Subject, Text
from cpu_kv import CpuLink, Link, PacedLink
from offload_rt.attention import attend, choose_backend
from offload_rt.config import StoreConfig
from offload_rt.machine.hardware import AttentionRate
from offload_rt.machine.measuring import CPU, compute_rate, memory_rate
from offload_rt.model import CausalModel
from offload_rt.pace import RoundTimes

STREAM_FOR_DRAFTING = 2.0  # times what a draft takes alone
ATTENTION_REPEATS = 7
READ_BYTES = 2**28
AHEAD, LATE = System(1), System(0)


@dataclass(frozen=True)
class Turn:
    """What was measured in one turn of the references; in ms, medians over rounds or means of them.

    Attributes:
        rate_bytes_per_second: of the paced link that followed from it.
        draft_token_ms: to draft a token while no pass runs; the processor has waited for a link before.
        drafting_beside_ms: for one outcome, on a link on which a pass takes about as long as that.
        plain_pass_ms: a pass over the last token, with the KV in place.
        pass_ms: a pass over the last token and a draft, likewise.
        pass_beside_ms: the same while drafts are made, on a link without limit.
        refresh_ms: to choose and copy the entries of the retrieved cache anew.
        verdict_ms: from a pass's logits, and the drafts made beside it, to the committed tokens.
    """

    rate_bytes_per_second: float
    draft_token_ms: float
    drafting_beside_ms: float
    plain_pass_ms: float
    pass_ms: float
    pass_beside_ms: float
    refresh_ms: float
    verdict_ms: float


class References:
    """The subject with its KV in place, and over a link of any bandwidth; on a CPU.

    Attributes:
        attention: rates of `attention_rates`.
        tokens: what plain decoding yields, with the KV in place.
    """

    BALANCING_TURNS = 3
    NO_LIMIT = 1e12  # bytes a second

    def __init__(self, subject: Subject, sizes: Sizes) -> None:
        self.sizes = sizes
        self.attention = attention_rates(subject.target, sizes.context, sizes.gamma)
        # Random weights agree with nobody, and what was not guessed right is not drafted to its end.
        self._held = Hold(1.0) if subject.random_kv else None
        self._kv_bytes = sizes.context * subject.target.kv_layout().token_bytes
        self._link = PacedLink(self.NO_LIMIT)
        self._ratio = 1.0
        with ExitStack() as opened:
            # Each by a prefill of its own: what is held against the tokens in place has its KV over a link.
            self._over_link, self._in_place = (
                opened.enter_context(closing(Text(subject, link, sizes.config(AHEAD), sizes.room)))
                for link in (self._link, CpuLink())
            )
            for text in (self._over_link, self._in_place):
                text.read()
            self.tokens = self._in_place.run(sizes.config(), sizes.new_tokens).tokens
            self._stream_ms = STREAM_FOR_DRAFTING * sizes.gamma * draft_token_ms([self._run_in_place()])
            self.close = opened.pop_all().close

    def _run_in_place(self) -> Run:
        return self._in_place.run(self.sizes.config(AHEAD), self.sizes.new_tokens)

    def _run_over_link(self, system: System, rate: float) -> Sequence[RoundTimes]:
        self._link.bytes_per_second = rate
        return self._over_link.run(self.sizes.config(system), self.sizes.new_tokens, self._held).rounds

    def _balance(self) -> None:
        """Comes nearer to the link on which a pass takes as long as drafting beside it."""
        drafting = _drafting_ms(self._run_over_link(AHEAD, self._balanced_rate))
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
        for _ in range(self.BALANCING_TURNS):
            self._balance()

    def turn(self, link: Link) -> Turn:
        """Measures everything once, and paces `link` by it."""
        plain = self._in_place.run(self.sizes.config(), self.sizes.plain_tokens)
        composed = self._run_in_place()
        refresh_ms = self._in_place.refresh_ms()
        late = steady(self._run_over_link(LATE, self._balanced_rate))
        unlimited = self._run_over_link(AHEAD, self.NO_LIMIT)
        self._balance()
        if isinstance(link, PacedLink):
            link.bytes_per_second = self.rate
        return Turn(
            rate_bytes_per_second=self.rate,
            draft_token_ms=sum(one.draft_ms for one in late) / max(1, sum(one.proposed for one in late)),
            drafting_beside_ms=self._stream_ms,
            plain_pass_ms=median(one.pass_ms for one in plain.rounds[1:]),
            pass_ms=median(one.pass_ms for one in steady(composed.rounds)),
            pass_beside_ms=mean(one.pass_ms for one in unlimited[1:-2] or unlimited),
            refresh_ms=refresh_ms,
            verdict_ms=median(one.verdict_ms for one in late),
        )

    def processor(self) -> dict[str, Any]:
        """What it does alone with one thread, as JSON values: what `prediction-accuracy` predicts from."""
        return {
            "attention": self.attention,
            "memory_rate": memory_rate(CPU, READ_BYTES),
            "compute_rate": compute_rate(CPU, torch.float32, 128, 1024),
        }


def _drafting_ms(rounds: Sequence[RoundTimes]) -> float:
    """Mean of what a draft took that was begun beside a pass, where its outcome came true."""
    # The last rounds draft less: the text ends. What was left of a draft is finished in the next round.
    pairs = itertools.pairwise(rounds[1:-1])
    guessed = [before.ahead_ms + one.draft_ms for before, one in pairs if before.guessed]
    return mean(guessed or [one.ahead_ms for one in rounds])


@torch.inference_mode()
def attention_rates(model: CausalModel, context: int, gamma: int) -> list[dict[str, float]]:
    """GB/s at which KV of `context` tokens is attended by 1 query, by a draft of `gamma` tokens, and between.

    Layers take turns, as in a pass, so that no cache holds them. Values of `AttentionRate`, by the queries
    that a key head has.
    """
    queries = (1, 1 + gamma // 2, 1 + gamma)
    backend, group = choose_backend(model.device), model.heads // model.kv_heads
    layout = model.kv_layout(StoreConfig.page)
    shape = (model.layers, *layout.pages_shape(layout.pages(context)))
    pages = torch.randn(shape, dtype=model.dtype)
    spent: dict[int, list[float]] = {count: [] for count in queries}
    for turn in range(ATTENTION_REPEATS + 1):
        for count, times in spent.items():
            asked = torch.randn(model.heads, count, model.head_dim, dtype=model.dtype)
            started = perf_counter()
            for layer in range(model.layers):
                attend(backend, asked, pages[layer, :, 0], pages[layer, :, 1], model.head_dim**-0.5)
            times += [perf_counter() - started] if turn else []
    return [
        asdict(AttentionRate(count * group, pages.nbytes / median(times) / 1e9))
        for count, times in spent.items()
    ]
