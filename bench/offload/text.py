"""One text over a link, decoded again and again by several compositions, with all that happened recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.offload.held import HeldVerifier
from cpu_kv import Link
from cpu_kv.link import CopyRecord, RecordingLink
from offload_rt.caches.places import EVERYTHING_STREAMED, Shares
from offload_rt.config import Config
from offload_rt.drafting.verifier import Sampling
from offload_rt.engine import Engine
from offload_rt.model import CausalModel
from offload_rt.pace import RoundTimes
from offload_rt.sampling import GeneratorDraws, Sampler
from offload_rt.session import Continuation
from offload_rt.timeline import Span, Timeline

Interval = tuple[float, float]
"""Begin and end, in seconds."""


@dataclass(frozen=True)
class Subject:
    """What is decoded.

    Attributes:
        prompt: tokens.
        synthetic: weights and prompt are drawn at random.
    """

    target: CausalModel
    draft: CausalModel | None
    prompt: Sequence[int]
    synthetic: bool = False

    @classmethod
    def random(cls, target: CausalModel, context: int) -> Subject:
        """A prompt drawn at random, the same one each time."""
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(target.vocabulary, (context,), generator=generator).tolist()
        return cls(target, None, prompt, synthetic=True)


@dataclass(frozen=True)
class Run:
    """One continuation; `spans` and `copies` tell what ran when, from its first round to its last."""

    tokens: list[int]
    rounds: list[RoundTimes]
    spans: list[Span]
    copies: list[CopyRecord]


def interval(rounds: Sequence[RoundTimes]) -> Interval:
    """From the begin of the first round to the end of the last one."""
    return rounds[0].started, rounds[-1].started + rounds[-1].ms / 1e3


class Text:
    """A prompt over a link, and what continues it.

    Args:
        link: is closed with the text. One that is no `RecordingLink` leaves `Run.copies` empty.
        config: its store and its retrieval hold for every composition that is run.
        new_tokens: at most so many are generated a run.
        shares: not what a plan says, but these.
    """

    def __init__(
        self,
        subject: Subject,
        link: Link,
        config: Config,
        new_tokens: int,
        shares: Shares = EVERYTHING_STREAMED,
    ) -> None:
        self.link = link
        self._subject, self._new_tokens, self._shares = subject, new_tokens, shares
        self._engine = Engine(subject.target, subject.draft, [config], link)
        self._timeline = self._engine.timeline = Timeline()
        self.close = self._engine.close

    def _continuation(self, new_tokens: int) -> Continuation:
        return Continuation(Sampling(Sampler(), GeneratorDraws(0, self._subject.target.device)), new_tokens)

    def read(self) -> float:
        """Takes the prompt; returns ms of its prefill."""
        continuation = self._continuation(self._new_tokens)
        self._session = self._engine.open(self._subject.prompt, continuation, self._shares)
        if isinstance(self.link, RecordingLink):
            self.link.record()
        return self._session.prefill_ms

    def run(self, config: Config, new_tokens: int, held: float | None = None) -> Run:
        """Continues the prompt greedily by a composition.

        Args:
            held: at what a synthetic verdict holds the acceptance.
        """
        session = self._session
        session.rerun(self._engine.available(config), self._continuation(new_tokens))
        if held is not None:
            session.verifier = HeldVerifier(session.verifier, held)
        self._timeline.spans.clear()
        self._recorded()
        try:
            while not session.ended:
                (round,) = self._engine.step([session])
                if isinstance(round, Exception):
                    raise round
        finally:
            self._engine.stop(session)  # the link would go on into a pass that nobody asks for
        start, end = interval(session.rounds)
        copies = [copy for copy in self._recorded() if start <= copy.end and copy.start <= end]
        return Run(
            session.tokens[session.prompt_tokens :], session.rounds, list(self._timeline.spans), copies
        )

    def _recorded(self) -> list[CopyRecord]:
        return self.link.recorded() if isinstance(self.link, RecordingLink) else []
