"""A prompt that several configurations continue again and again, with recorded rounds and copies."""

from __future__ import annotations

from collections.abc import Sequence

from bench.rounds import Recorded, interval
from bench.synthetic_acceptance import hold_acceptance
from bench.systems import Prompt
from cpu_kv import Link
from cpu_kv.link import CopyRecord, RecordingLink
from offload_rt.config.schema import Config
from offload_rt.drafting.verifier import Sampling
from offload_rt.engine.engine import Engine
from offload_rt.engine.output import OutputProcessor, finish
from offload_rt.engine.results import GenerationResult
from offload_rt.engine.sequence import Continuation, TokenSequence
from offload_rt.model.runner import CausalModel
from offload_rt.sampling.params import SamplingParams
from offload_rt.sampling.sampler import GeneratorDraws, Sampler
from offload_rt.system.timeline import Timeline


class RecordedText:
    """A prompt of one sequence or several in an engine, which configurations continue in turn.

    Args:
        link, other_links: are closed with the text.
        config: its keys for store, prefill and kept means hold for every configuration.
        capacity: tokens of the longest sequence and its continuation together.
        notices: messages for the user, the models' own among them; the engine's are added.

    Attributes:
        notices: all of them.
    """

    def __init__(
        self,
        target: CausalModel,
        draft: CausalModel | None,
        link: Link,
        config: Config,
        capacity: int,
        notices: list[str] | None = None,
        other_links: Sequence[Link] = (),
    ) -> None:
        self._capacity, self.notices = capacity, [] if notices is None else notices
        self._engine = Engine(
            target, draft, [config], link, on_notice=self.notices.append, other_links=other_links
        )
        self._timeline = self._engine.timeline = Timeline()
        self._recording = link if isinstance(link, RecordingLink) else None
        self._prompt: Prompt = ()
        self.sequences: list[TokenSequence] = []
        self.close = self._engine.close

    @property
    def placement(self) -> dict[str, int]:
        """Tokens of a sequence in each tier; whole pages are streamed."""
        page, tiers = self._engine.store.layout.page_size, self.sequences[0].plan.tiers
        other_gpus = sum(gpu.tokens for gpu in tiers.gpus)
        tokens = {"resident_tokens": tiers.resident_tokens, "cpu_tokens": tiers.cpu_tokens}
        tokens |= {"other_gpus_tokens": other_gpus} if other_gpus else {}
        streamed = (len(self._prompt[0]) - 1) // page * page - sum(tokens.values())
        return tokens | {"streamed_tokens": max(0, streamed)}

    def _continuation(self, new_tokens: int) -> Continuation:
        draws = GeneratorDraws(0, self._engine.target.device)
        return Continuation(Sampling(Sampler(), draws), new_tokens)

    def prefill(self, prompt: Prompt) -> float:
        """Prefills a prompt, unless it is the previous one; returns ms of its prefill."""
        if prompt != self._prompt:
            while self.sequences:
                self._engine.close_sequence(self.sequences.pop())
            self._prompt = ()
            for remaining, text in zip(range(len(prompt), 0, -1), prompt, strict=True):
                room = self._capacity - len(text)
                self.sequences.append(self._engine.open(text, room, sequences=remaining))
                sequence = self.sequences[-1]
                self._engine.begin(sequence, sequence.plan, self._continuation(room))
            self._prompt = prompt
            self._ms = sum(sequence.prefill_ms for sequence in self.sequences)
            if self._recording is not None:
                self._recording.record()
        return self._ms

    def begin(self, config: Config, new_tokens: int = 1) -> float:
        """Rewinds to the end of the prompt; returns ms in which the caches of `config` were filled."""
        settings = self._engine.available(config)
        for sequence, prompt in zip(self.sequences, self._prompt, strict=True):
            self._engine.rewind(sequence, len(prompt))
            self._engine.begin(sequence, sequence.plan.adapted(settings), self._continuation(new_tokens))
        return sum(sequence.prefill_ms for sequence in self.sequences)

    def run(
        self, config: Config, new_tokens: int, acceptance: float | None = None
    ) -> tuple[list[GenerationResult], Recorded]:
        """Continues the prompt greedily; returns the results, and the rounds of the first sequence.

        Args:
            acceptance: the rate at which a synthetic rule holds acceptance; None: the acceptance is real.
        """
        self.begin(config, new_tokens)
        if acceptance is not None:
            for sequence in self.sequences:
                hold_acceptance(sequence.verifier, acceptance)
        self._timeline.spans.clear()
        self._copies()
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        writers = [
            OutputProcessor(self._engine, sequence, params, None, self.notices) for sequence in self.sequences
        ]
        try:
            finish(self._engine, writers)
            if failed := next((writer.error for writer in writers if writer.error), None):
                raise failed
        finally:
            for sequence in self.sequences:
                self._engine.stop(sequence)  # or the link would continue with the next pass
        rounds = self.sequences[0].rounds
        start, end = interval(rounds)
        copies = [copy for copy in self._copies() if start <= copy.end and copy.start <= end]
        recorded = Recorded(rounds, list(self._timeline.spans), copies)
        return [writer.result() for writer in writers], recorded

    def _copies(self) -> list[CopyRecord]:
        return self._recording.recorded() if self._recording is not None else []
