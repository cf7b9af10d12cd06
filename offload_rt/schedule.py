"""What runs when: a verification streams in a thread of its own, and the next round is drafted meanwhile.

The link itself needs no scheduling here: the full cache opens the stream of pass i+1 when pass i begins, so
that the copies go on the moment the staging ring has room.

Why drafting ahead changes no law. A draft is made for a guessed outcome: the tokens that the verification
may yield. Its tokens are drawn, with random numbers of their own, from the laws that it reports. It is used
if the verdict is that outcome, which depends on the draft being verified and on the verdict's own random
numbers, but on nothing that was drawn ahead. And a draft of the right outcome is never thrown away, however
long it took: what has been drawn of it is kept, and the rest is drawn after the verdict. Time decides only
whether drawing *begins* before the verdict; where a seed is to repeat its tokens, not even that.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import torch

from cpu_kv import CopyFailed, TransferStalled
from offload_rt.caches.full import FullCache, PassCancelled
from offload_rt.draft_length import DraftLength
from offload_rt.drafting.base import Proposal, Text
from offload_rt.drafting.verifier import Pass, Round, Verifier
from offload_rt.timeline import NO_TIMELINE, Timeline
from offload_rt.verification import Draft


@dataclass(frozen=True)
class RoundTimes:
    """One round.

    Attributes:
        started: seconds of `time.perf_counter`.
        ms: the whole round, from its draft to its verdict.
        draft_ms: drafting before the pass began; what drafting ahead has spared is not in it.
        pass_ms: from the pass's begin to its logits.
        ahead_ms: drafting ahead while the pass ran.
        verdict_ms: from the end of both to the committed tokens.
        guessed: whether the verdict was an outcome that had been drafted for; None where none had.
        proposed, accepted: tokens.
    """

    started: float
    ms: float
    draft_ms: float
    pass_ms: float
    ahead_ms: float
    verdict_ms: float
    guessed: bool | None
    proposed: int
    accepted: int


class PassLane:
    """A thread in which passes of the full cache run, with a stream of high priority on a GPU.

    Compute that was enqueued before `start` comes before the pass, and a pass whose future is done is done
    on the device too.
    """

    def __init__(self, full: FullCache, timeline: Timeline = NO_TIMELINE) -> None:
        self._full = full
        self._timeline = timeline
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload_rt-pass")
        self._closed = False
        self._stream = torch.cuda.Stream(full.device, priority=-1) if full.device.type == "cuda" else None

    def start(self, begin: Callable[[], Pass], *, drafting: bool) -> Future[Pass]:
        """Runs `begin`, which is a pass up to its logits.

        Args:
            drafting: drafts are made meanwhile. Else no derived cache is read, and none has to catch up.
        """
        if self._closed:
            raise PassCancelled("this text was given up: another one was begun, or its LLM closed")
        if drafting:
            self._full.catch_up()  # afterwards drafting needs nothing of what the pass uses
        fence = None
        if self._stream is not None:
            fence = torch.cuda.Event()
            fence.record(torch.cuda.current_stream(self._full.device))
        return self._thread.submit(self._run, begin, fence)

    def _run(self, begin: Callable[[], Pass], fence: torch.cuda.Event | None) -> Pass:
        with self._timeline.span("pass", "verify"):
            if self._stream is None or fence is None:
                return begin()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(fence)
                try:
                    result = begin()
                except BaseException:
                    # What it has enqueued still uses memory that is let go now.
                    with suppress(CopyFailed, TransferStalled):
                        self._full.engine.finish_compute()
                    raise
                self._full.engine.finish_compute()
            return result

    def give_up(self) -> None:
        """Ends a pass that nobody will ask for, if one runs; none can be run over this text afterwards."""
        if self._closed:
            return
        self._full.cancel()
        # Behind whatever the thread does, also what an interrupt kept its starter from knowing of.
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Waits for the thread and lets it go. Idempotent."""
        self._closed = True
        self._thread.shutdown(wait=True)


class Schedule:
    """Runs rounds of a verifier.

    Args:
        lane: where passes run; None: here, one thing after another.
        ahead: outcomes of a pass that are drafted for at most, while it runs in its lane.
        length: told what passes and drafts take.
        clock: whether time may decide which outcomes are drafted for: not where a seed must repeat its
            tokens.
    """

    def __init__(
        self,
        verifier: Verifier,
        lane: PassLane | None = None,
        ahead: int = 0,
        length: DraftLength | None = None,
        *,
        clock: bool = True,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self.verifier = verifier
        self.rounds: list[RoundTimes] = []  # so far
        self._lane = lane
        self._ahead = ahead
        self._length = length
        self._drawn = 0  # tokens drafted in this round, used or not, and how long it took
        self._drawing_ms = 0.0
        self._clock = clock
        self._timeline = timeline
        self._made: dict[tuple[int, ...], Proposal] = {}  # by the outcome, as tokens behind the text
        self._ready: tuple[int, Proposal] | None = None  # made for the text of this length

    def round(self, text: Text, count: int, following: Callable[[int], int]) -> Round:
        """One verification of about `count` drafted tokens below the last token of `text`.

        Args:
            following: how many tokens to draft in the next round, if this one yields so many.
        """
        started = perf_counter()
        self._drawn, self._drawing_ms = 0, 0.0
        draft = self._draft(text, count)
        drafted = perf_counter()
        if self._lane is None:
            with self._timeline.span("pass", "verify"):
                begun = self.verifier.begin(text, draft)
            ahead_ms, ended = 0.0, perf_counter()
        else:
            begun, ahead_ms, ended = self._overlapped(self._lane, text, draft, following)
        both = perf_counter()
        result = self.verifier.verdict(text, begun)
        done = perf_counter()
        times = RoundTimes(
            started=started,
            ms=1e3 * (done - started),
            draft_ms=1e3 * (drafted - started),
            pass_ms=1e3 * (ended - drafted),
            ahead_ms=ahead_ms,
            verdict_ms=1e3 * (done - both),
            guessed=self._settle(text, result),
            proposed=result.proposed,
            accepted=result.accepted,
        )
        self.verifier.stats.ms += times.pass_ms + times.verdict_ms
        if self._length is not None and self.rounds:
            # The first round pays for memory that is touched for the first time.
            self._length.observe_pass(len(text), times.proposed, times.pass_ms + times.verdict_ms)
            self._length.observe_draft(len(text), self._drawn, self._drawing_ms)
        self.rounds.append(times)
        return result

    def _draft(self, text: Text, count: int) -> Draft:
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] == len(text):
            # Used whatever is thought of drafting by now: its cost depends on its tokens.
            return self._drawing("finish", ready[1])
        if count <= 0:
            return Draft()
        started = perf_counter()
        with self._timeline.span("draft", "draft"):
            draft = self.verifier.drafter.propose(text, count)
        self._count_drawn(len(draft.tokens), started)
        return draft

    def _drawing(self, name: str, proposal: Proposal, over: Callable[[], bool] | None = None) -> Draft:
        """Draws a draft to its end, or until `over` says so between two steps."""
        started, before = perf_counter(), len(proposal.draft().tokens)
        with self._timeline.span("draft", name):
            while not (over is not None and over()) and proposal.step():
                pass
        draft = proposal.draft()
        self._count_drawn(len(draft.tokens) - before, started)
        return draft

    def _count_drawn(self, tokens: int, started: float) -> None:
        self._drawn += tokens
        self._drawing_ms += 1e3 * (perf_counter() - started)

    def _overlapped(
        self, lane: PassLane, text: Text, draft: Draft, following: Callable[[int], int]
    ) -> tuple[Pass, float, float]:
        """The pass, how long was drafted ahead meanwhile in ms, and when the pass ended."""
        ends: list[float] = []
        drafting = self._ahead > 0 and bool(draft.tokens)
        try:
            begun = lane.start(lambda: self.verifier.begin(text, draft), drafting=drafting)
            begun.add_done_callback(lambda _: ends.append(perf_counter()))
            started = perf_counter()
            if drafting:
                self._draft_ahead(text, draft, begun, following)
            ahead_ms = 1e3 * (perf_counter() - started)
            result = begun.result()
        except BaseException:
            lane.give_up()
            raise
        return result, ahead_ms, ends[0] if ends else perf_counter()

    def _draft_ahead(
        self, text: Text, draft: Draft, begun: Future[Pass], following: Callable[[int], int]
    ) -> None:
        if self._over(begun) or following(1) <= 0:
            return
        verifier = self.verifier
        with self._timeline.span("draft", "outcomes"):
            outcomes = verifier.drafter.outcomes(text, draft, self._ahead, verifier.acceptance)
        for outcome in outcomes:
            count = following(len(outcome))
            if count <= 0:
                continue
            if self._over(begun):
                return
            proposal = verifier.drafter.proposal(text.extended(outcome), count)
            self._made[outcome] = proposal
            self._drawing("ahead", proposal, lambda: self._over(begun))

    def _over(self, begun: Future[Pass]) -> bool:
        return self._clock and begun.done()

    def _settle(self, text: Text, result: Round) -> bool | None:
        made, self._made = self._made, {}
        if not made:
            return None
        proposal = made.get(tuple(result.tokens))
        if proposal is not None:
            self._ready = (len(text) + len(result.tokens), proposal)
        return proposal is not None
