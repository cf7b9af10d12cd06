"""One text over a link, decoded again and again by several compositions, with all that happened recorded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from bench.offload.held import HeldVerifier, Hold
from cpu_kv import Link
from cpu_kv.link import CopyRecord, RecordingLink
from offload_rt.attention import choose_backend
from offload_rt.caches.full import LAST_QUERIES
from offload_rt.caches.places import EVERYTHING_STREAMED, Shares
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.config import Config
from offload_rt.drafting.verifier import Sampling
from offload_rt.engine import Engine
from offload_rt.model import CausalModel
from offload_rt.pace import RoundTimes
from offload_rt.sampling import GeneratorDraws, Sampler
from offload_rt.session import Continuation, Session, Shared
from offload_rt.timeline import Span, Timeline


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

    @classmethod
    def random(cls, target: CausalModel, context: int) -> Subject:
        """Tokens drawn at random, the same ones each time, over random KV."""
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(target.vocabulary, (context,), generator=generator).tolist()
        return cls(target, None, prompt, random_kv=True)


@dataclass(frozen=True)
class Run:
    """One continuation.

    Attributes:
        ms: from the first round's begin to the last one's end.
        spans, copies: what ran when; those of the time between `rounds[0].started` and the end.
    """

    tokens: list[int]
    ms: float
    rounds: list[RoundTimes]
    spans: list[Span]
    copies: list[CopyRecord]
    bytes_to_device: int = 0


class Text:
    """A prompt whose KV is in the store, and what continues it.

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
        target, draft = subject.target, subject.draft
        self.link = link
        self._random_kv = subject.random_kv
        self._device = target.device
        self._engine = engine = Engine(target, draft, [config], link)
        with ExitStack() as opened:
            opened.callback(engine.close)
            self._timeline = engine.timeline = Timeline()
            backend = choose_backend(target.device)
            shared = Shared(target, draft, engine.store, link, backend, self._timeline)
            continuation = self._continuation(new_tokens)
            self._session = Session(shared, engine.configs[0], subject.prompt, continuation, shares)
            opened.callback(self._session.close)
            if isinstance(link, RecordingLink):
                link.record()
            self._opened = opened.pop_all()

    def _continuation(self, new_tokens: int) -> Continuation:
        return Continuation(Sampling(Sampler(), GeneratorDraws(0, self._device)), new_tokens)

    def read(self) -> float:
        """Takes the prompt, or random KV in its place; returns ms of its prefill."""
        if self._random_kv:
            self._fill()
            return 0.0
        return self.prefill()

    def prefill(self) -> float:
        """Takes the prompt; returns ms."""
        self._session.prefill()
        return self._session.prefill_ms

    @torch.inference_mode()
    def _fill(self) -> None:
        # What is in it does not change how long anything takes.
        full, tokens = self._session.full, self._session.prompt_tokens - 1
        layout = full.layout
        generator = torch.Generator(device=self._device).manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self._device, dtype=layout.dtype)

        for layer in range(layout.layers):
            keys, values = (drawn(layout.kv_heads, tokens, layout.head_dim) for _ in range(2))
            if self.link.in_place:
                full.sequence.append(layer, keys, values)
            else:
                full.engine.write_prompt(layer, keys, values)
                full.keep_resident(layer, keys, values)
                full.engine.flush()
        full.finish_prefill(tokens, drawn(layout.layers, full.heads, LAST_QUERIES, layout.head_dim))
        self._session.take_prompt()

    def run(self, config: Config, new_tokens: int, held: Hold | None = None) -> Run:
        """Continues the prompt greedily by a composition.

        Args:
            held: the acceptance is held by a synthetic verdict.
        """
        session, link = self._session, self.link
        session.rerun(self._engine.available(config), self._continuation(new_tokens))
        if held is not None:
            session.verifier = HeldVerifier(session.verifier, held)
        self._timeline.spans.clear()
        if isinstance(link, RecordingLink):
            link.recorded()
        started = perf_counter()
        try:
            while not session.ended:
                (round,) = self._engine.step([session])
                if isinstance(round, Exception):
                    raise round
            ended = perf_counter()
        finally:
            session.stop()  # the link would go on into a pass that nobody asks for
        copies = link.recorded() if isinstance(link, RecordingLink) else []
        return Run(
            session.tokens[session.prompt_tokens :],
            1e3 * (ended - started),
            session.rounds,
            list(self._timeline.spans),
            [copy for copy in copies if started <= copy.end and copy.start <= ended],
            session.engine.counters.bytes_to_device,
        )

    @torch.inference_mode()
    def refresh_ms(self) -> float:
        """ms to choose and copy the entries of the retrieved cache anew; 0 where the last run had none."""
        full, started = self._session.full, perf_counter()
        for cache in full.derived:
            if isinstance(cache, RetrievedCache):
                cache.build(full.last_queries)
        return 1e3 * (perf_counter() - started)

    def close(self) -> None:
        """Gives everything back, the link too. Idempotent."""
        self._opened.close()
