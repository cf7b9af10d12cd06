"""One text over a link, decoded again and again by several compositions, with all that happened recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from bench.offload.held import HeldVerifier, Hold
from cpu_kv import KeysValues, Link
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
class Run:
    """One continuation.

    Attributes:
        ms: from the first round's begin to the last one's end.
        spans, copies: what ran when; those of the time between `rounds[0].started` and the end.
        wait_ms: how long the host waited for copies.
    """

    tokens: list[int]
    ms: float
    rounds: list[RoundTimes]
    spans: list[Span]
    copies: list[CopyRecord]
    bytes_to_device: int
    bytes_to_host: int
    wait_ms: float


class EngineText:
    """A prompt whose KV is in the store, and what continues it.

    Args:
        link: is closed with the text. One that is no `RecordingLink` leaves `Run.copies` empty.
        config: its store and its retrieval hold for every composition that is run.
        new_tokens: at most so many are generated a run.
    """

    def __init__(
        self,
        target: CausalModel,
        draft: CausalModel | None,
        link: Link,
        config: Config,
        prompt: Sequence[int],
        new_tokens: int,
        shares: Shares = EVERYTHING_STREAMED,
    ) -> None:
        self.link = link
        self._device = target.device
        self._queries = torch.empty(0)  # of the prompt's last tokens
        self._engine = Engine(target, draft, [config], link)
        with ExitStack() as opened:
            opened.callback(self._engine.close)
            self._timeline = self._engine.timeline = Timeline()
            backend = choose_backend(target.device)
            shared = Shared(target, draft, self._engine.store, link, backend, self._timeline)
            # Not by `Engine.open`, which would prefill.
            self._session = Session(
                shared, self._engine.configs[0], prompt, self._continuation(new_tokens), shares
            )
            opened.callback(self._session.close)
            self._opened = opened.pop_all()
        self._records: RecordingLink | None = None
        if isinstance(link, RecordingLink):
            self._records = link
            link.record()

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers."""
        return self._session.full.layout.token_bytes

    def _continuation(self, new_tokens: int) -> Continuation:
        return Continuation(Sampling(Sampler(), GeneratorDraws(0, self._device)), new_tokens)

    def read_prompt(self) -> tuple[float, int]:
        """Prefills; returns ms, and bytes that went to the host."""
        self._session.prefill()
        self._queries = self._session.full.last_queries
        return self._session.prefill_ms, self._session.engine.counters.bytes_to_host

    def fill(self, seed: int = 0) -> None:
        """Fills the store with random KV in the place of a prefill: what is in it does not change how long
        anything takes."""
        full, tokens = self._session.full, self._session.prompt_tokens - 1
        layout = full.layout
        generator = torch.Generator(device=self._device).manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self._device, dtype=layout.dtype)

        def kv(_: int) -> KeysValues:
            shape = (layout.kv_heads, tokens, layout.head_dim)
            return drawn(*shape), drawn(*shape)

        self._take(kv)
        self._open(drawn(layout.layers, full.heads, LAST_QUERIES, layout.head_dim))

    @torch.inference_mode()
    def copy(self, other: EngineText) -> None:
        """Takes the same prompt from another text in the place of a prefill."""
        layout, tokens = self._session.full.layout, self._session.prompt_tokens - 1

        def kv(layer: int) -> KeysValues:
            shape = (layout.kv_heads, tokens, layout.head_dim)
            keys, values = (torch.empty(shape, dtype=layout.dtype, device=self._device) for _ in range(2))
            other._session.engine.read(layer, 0, tokens, (keys, values))
            return keys, values

        self._take(kv)
        self._open(other._queries)

    @torch.inference_mode()
    def _take(self, kv: Callable[[int], KeysValues]) -> None:
        full = self._session.full
        for layer in range(full.layout.layers):
            keys, values = kv(layer)
            if full.engine.link.in_place:
                full.sequence.append(layer, keys, values)
            else:
                full.engine.write_prompt(layer, keys, values)
                full.keep_resident(layer, keys, values)
                full.engine.flush()

    def _open(self, queries: Tensor) -> None:
        self._queries = queries
        self._session.full.finish_prefill(self._session.prompt_tokens - 1, queries)
        self._session.take_prompt()

    @torch.inference_mode()
    def refresh_ms(self) -> float:
        """ms to choose and copy the entries of the retrieved cache anew; 0 where none was composed."""
        full = self._session.full
        retrieved = [cache for cache in full.derived if isinstance(cache, RetrievedCache)]
        started = perf_counter()
        for cache in retrieved:
            cache.build(full.last_queries)
        return 1e3 * (perf_counter() - started)

    def run(self, config: Config, new_tokens: int, held: Hold | None = None) -> Run:
        """Continues the prompt greedily by a composition.

        Args:
            held: the acceptance is held by a synthetic verdict.
        """
        engine, session = self._engine, self._session
        session.rerun(engine.available(config), self._continuation(new_tokens))
        if held is not None:
            session.verifier = HeldVerifier(session.verifier, held)
        spans_before, counters = len(self._timeline.spans), session.engine.counters
        if self._records is not None:
            self._records.recorded()
        started = perf_counter()
        try:
            while not session.ended:
                (round,) = engine.step([session])
                if isinstance(round, Exception):
                    raise round
            ended = perf_counter()
        finally:
            engine.stop(session)  # the link would go on into a pass that nobody asks for
        copies = [] if self._records is None else self._records.recorded()
        return Run(
            session.tokens[session.prompt_tokens :],
            1e3 * (ended - started),
            session.rounds,
            self._timeline.spans[spans_before:],
            [copy for copy in copies if started <= copy.end and copy.start <= ended],
            counters.bytes_to_device,
            counters.bytes_to_host,
            counters.wait_ms,
        )

    def close(self) -> None:
        """Gives everything back, the link too. Idempotent."""
        self._opened.close()
