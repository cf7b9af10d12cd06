"""What drafting and passes take apart from the systems of `bench offload`: what they are held against.

References take turns with the systems, just before them, so that what slows the machine slows both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean, median

from bench.offload.cases import Sizes
from bench.offload.engine import EngineText, Run
from bench.offload.held import Hold
from bench.offload.primitives import attention_rates
from bench.offload.rows import draft_token_ms, steady
from cpu_kv import CpuLink, Link, PacedLink
from offload_rt.config import Config
from offload_rt.model import CausalModel
from offload_rt.pace import RoundTimes

WARM_UP_TOKENS = 3  # times what a round drafts
STREAM_FOR_DRAFTING = 2.0  # times what a draft takes alone


@dataclass(frozen=True)
class Subject:
    """What is decoded.

    Attributes:
        prompt: tokens.
        random_kv: its KV is drawn at random in the place of a prefill.
    """

    target: CausalModel
    draft: CausalModel | None
    prompt: Sequence[int]
    random_kv: bool = False


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
    """The subject with its KV in place, and over links of two bandwidths; on a CPU.

    Attributes:
        attention: rates of `attention_rates`.
        prefill: ms of it over a link without limit, and bytes that went to the host.
        tokens: what plain decoding yields, with the KV in place.
    """

    BALANCING_TURNS = 3
    NO_LIMIT = 1e12  # bytes a second

    def __init__(self, subject: Subject, sizes: Sizes, composition: str) -> None:
        self.subject, self.sizes, self.composition = subject, sizes, composition
        self.attention = attention_rates(subject.target, sizes.context, sizes.gamma)
        self._plain, self._composed = sizes.config("plain"), sizes.config(composition)
        self._ahead, self._late = (sizes.config(composition, ahead=outcomes) for outcomes in (1, 0))
        # Random weights agree with nobody, and what was not guessed right is not drafted to its end.
        self._held = Hold(1.0) if subject.random_kv else None
        self._kv_bytes = sizes.context * subject.target.kv_layout().token_bytes
        self._link = PacedLink(self.NO_LIMIT)
        self._ratio = 1.0
        with ExitStack() as opened:
            self._over_link = self._opened_text(self._link)
            opened.callback(self._over_link.close)
            self.prefill = read(self._over_link, subject)
            self._in_place = self._opened_text(CpuLink())
            opened.callback(self._in_place.close)
            # By a prefill of its own: what is held against its tokens has its KV over a link.
            read(self._in_place, subject)
            self.tokens = self._in_place.run(self._plain, sizes.new_tokens).tokens
            token = draft_token_ms([self._run_in_place()])
            self._opened = opened.pop_all()
        self._stream_ms = STREAM_FOR_DRAFTING * sizes.gamma * token

    def _opened_text(self, link: Link) -> EngineText:
        subject, most = self.subject, room(self.sizes)
        return EngineText(subject.target, subject.draft, link, self._ahead, subject.prompt, most)

    def give(self, text: EngineText) -> None:
        """Gives another text the prompt's KV, in the place of a prefill."""
        text.copy(self._over_link)

    def _run_plain(self) -> Run:
        return self._in_place.run(self._plain, self.sizes.plain_tokens)

    def _run_in_place(self) -> Run:
        return self._in_place.run(self._composed, self.sizes.new_tokens)

    def _run_over_link(self, config: Config, rate: float) -> Run:
        self._link.bytes_per_second = rate
        return self._over_link.run(config, self.sizes.new_tokens, self._held)

    def _balance(self) -> None:
        """Comes nearer to the link on which a pass takes as long as drafting beside it."""
        drafting = _drafting_ms(self._run_over_link(self._ahead, self._balanced_rate).rounds)
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
        plain, composed = self._run_plain(), self._run_in_place()
        refresh = self._in_place.refresh_ms()
        late = steady(self._run_over_link(self._late, self._balanced_rate).rounds)
        unlimited = self._run_over_link(self._ahead, self.NO_LIMIT).rounds
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
            refresh_ms=refresh,
            verdict_ms=median(one.verdict_ms for one in late),
        )

    def close(self) -> None:
        """Gives their memory back."""
        self._opened.close()


def _drafting_ms(rounds: Sequence[RoundTimes]) -> float:
    """Mean of what a draft took that was begun beside a pass, where its outcome came true."""
    # The last rounds draft less: the text ends. What was left of a draft is finished in the next round.
    pairs = itertools.pairwise(rounds[1:-1])
    guessed = [before.ahead_ms + one.draft_ms for before, one in pairs if before.guessed]
    return mean(guessed or [one.ahead_ms for one in rounds])


def room(sizes: Sizes) -> int:
    """Tokens that a run may generate."""
    return max(sizes.new_tokens, sizes.plain_tokens, warm_up(sizes))


def warm_up(sizes: Sizes) -> int:
    """Tokens of a run that is not reported."""
    return WARM_UP_TOKENS * (sizes.gamma + 1)


def read(text: EngineText, subject: Subject) -> tuple[float, int]:
    """Takes the prompt; returns ms of its prefill, and bytes that went to the host."""
    if subject.random_kv:
        text.fill()
        return 0.0, 0
    return text.read_prompt()
