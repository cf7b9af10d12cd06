"""Chooses the draft shape, how many outcomes are drafted for, and when to fall back to plain decoding.

A verification takes hardly longer for many tokens than for one, but the chance that the last of them is
accepted falls with each. The controller picks the shape with the least time a token: predicted by the
planner, corrected by one measured ratio each for verification passes, for drafts and for drafts made ahead,
which share the processor with a pass. While speculation is slower than plain decoding it is switched off for
a while, and tried again after longer and longer breaks.

Measured time decides only whether drawing *begins*: what has been drawn is used, since its cost depends on
its tokens. Where random numbers are drawn no clock decides at all, because a seed repeats its tokens only if
what is drawn does not depend on time; there predictions and the acceptance of tokens decide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.config.priors import LATER_CHOICES
from offload_rt.drafting.base import Round
from offload_rt.model.work import BackgroundPass
from offload_rt.planning.sequence_costs import SequenceCosts

WINDOW = 8  # drafted rounds that are judged together
YIELDS = 24  # rounds that tell how many tokens one yields
CHECKS = 4  # plain rounds that a loss is checked against: a clock is noisy, and other work comes and goes
MARGIN = 1.03  # how much slower speculation must be before it is switched off
FIRST_BREAK = 64  # tokens of plain decoding
FORESEEN_BREAK = 256  # tokens of plain decoding where speculation is predicted to be slower
LONGEST_BREAK = 1024
MEMORY = 32  # latest rounds that a ratio of measured to predicted time comes from
FORGETTING = 0.95  # share of older verifications that counts after another one
PRIOR_TOKENS = 10.0  # weight of the usual acceptance against that of the sequence


@dataclass(frozen=True)
class RoundTimes:
    """Times of one round.

    Attributes:
        started: seconds of `clock.now`.
        ms: the whole round, from its draft to its verdict.
        draft_ms: drafting before the pass began; drafting ahead has spared the rest.
        pass_ms: from the start of the pass to its logits.
        ahead_ms: drafting ahead while the pass ran.
        verdict_ms: from the end of both to the committed tokens.
        guessed: a draft had been made ahead for the verdict; None: none was made for any outcome.
        depth: of the draft that the controller chose; 0: the round was to be plain.
        proposed, accepted: tokens.
        drawn_levels: levels of this round's draft that were drawn before the pass.
        drawn_ahead: levels that were drawn while the pass ran, each run of them with the number of outcomes
            that it was drawn for together.
    """

    started: float
    ms: float
    draft_ms: float
    pass_ms: float
    ahead_ms: float
    verdict_ms: float
    guessed: bool | None
    depth: int
    proposed: int
    accepted: int
    drawn_levels: int
    drawn_ahead: tuple[tuple[int, int], ...] = ()


class RunningAcceptance:
    """Chance that a drafted token is accepted where those before it were, by what has been seen.

    A verification rejects one token of a chain at most; those behind it were never judged.

    Args:
        usual: rate of eldest siblings, before anything has been seen.
    """

    def __init__(self, usual: float) -> None:
        rates = (usual, *LATER_CHOICES)
        self._counts = [(PRIOR_TOKENS * rate, PRIOR_TOKENS * (1.0 - rate)) for rate in rates]

    @property
    def rate(self) -> float:
        """Acceptance rate of eldest siblings."""
        return self.rates[0]

    @property
    def rates(self) -> tuple[float, ...]:
        """Acceptance rate by sibling rank, each where all elder siblings were rejected."""
        return tuple(accepted / (accepted + rejected) for accepted, rejected in self._counts)

    def observe(self, tries: Sequence[tuple[int, int]]) -> None:
        """Counts how many siblings of each rank a verification accepted and rejected."""
        for rank, (accepted, rejected) in enumerate(tries[: len(self._counts)]):
            if accepted or rejected:
                before, rejected_before = self._counts[rank]
                counts = FORGETTING * before + accepted, FORGETTING * rejected_before + rejected
                self._counts[rank] = counts


class SpeculationController:
    """Decides, round by round, what one sequence drafts.

    Args:
        costs: what passes and drafts are expected to take.
        shapes: to choose among; of depth 0 for plain decoding.
        acceptance: usual acceptance of drafted tokens.
        ahead: outcomes of a pass that are drafted for at most, while it runs in the background.
        step_down: False: keep drafting, however slow that is.
        clock: measured times may decide; False: predicted times alone.

    Attributes:
        acceptance: of drafted tokens, by what has been seen of the sequence.
        fallbacks: how often speculation was switched off.
        plain_tokens: tokens decoded while it was.
    """

    def __init__(
        self,
        costs: SequenceCosts,
        shapes: Sequence[DraftShape],
        acceptance: float,
        *,
        ahead: int = 0,
        step_down: bool = True,
        clock: bool = True,
    ) -> None:
        self.ahead = ahead
        self.acceptance = RunningAcceptance(acceptance)
        self.fallbacks = self.plain_tokens = 0
        self._costs = costs
        self._shapes = shapes
        self._clock = clock
        self._watches = step_down and any(shape.depth for shape in shapes)
        self._length = self._rounds = 0
        self._best: tuple[DraftShape, int] | None = None
        self._passes: deque[tuple[float, float]] = deque(maxlen=MEMORY)  # predicted, measured
        self._drafts: deque[tuple[float, float]] = deque(maxlen=MEMORY)
        self._drafts_ahead: deque[tuple[float, float]] = deque(maxlen=MEMORY)
        self._plain_ms: deque[float] = deque(maxlen=WINDOW)
        self._judged: list[float] = []  # ms of drafted rounds
        self._yields: deque[int] = deque(maxlen=YIELDS)
        self._break, self._break_left = FIRST_BREAK, 0
        self._checks = 0  # plain rounds to go before a loss is believed

    def begin(self, length: int) -> None:
        """Called before a sequence of `length` tokens is continued."""
        self._length = length
        shape, plain = self._choice()[0], self._costs.pass_ms(length, CHAIN)
        if self._watches and self._round(shape)[0] / shape.expected_tokens(self.acceptance.rates) > plain:
            self._break = FORESEEN_BREAK
            self._fall_back()

    def shape(self, room: int) -> DraftShape:
        """The shape of the next draft, at most `room` tokens deep; of depth 0 for a plain round."""
        # The second round is plain, to know its time; the first one warms up. It may have been drafted ahead,
        # and what has been drafted is used: then it is the third.
        probing = self._watches and self._clock and self._rounds > 0 and not self._plain_ms
        if probing or self._checks > 0 or self._break_left > 0:
            return CHAIN
        shape, _ = self._choice()
        return shape.deep(max(0, min(shape.depth, room)), self.acceptance.rates)

    @property
    def outcomes(self) -> int:
        """Number of outcomes of the next pass to draft for while it runs."""
        return self._choice()[1]

    def over(self, running: BackgroundPass) -> bool:
        """Returns whether a pass is over, so that no more drafts for its outcomes are begun."""
        return self._clock and running.done

    def observe(self, length: int, round: Round, times: RoundTimes) -> None:
        """Called after a round behind `length` tokens."""
        self._rounds += 1
        (shape, _), self._best, self._length = self._choice(), None, length
        self.acceptance.observe(round.tries)
        if times.depth == times.proposed == 0:
            self._observe_plain(len(round.tokens), times.ms)
            return
        if self._rounds == 1:
            return  # it pays for memory that is touched for the first time
        if self._clock:
            # Less may have been proposed than was wanted: nothing was found, or the draft was ready before.
            verified = CHAIN.deep(times.proposed)  # the cost of a pass depends only on the size
            self._passes.append((self._costs.pass_ms(length, verified), times.pass_ms + times.verdict_ms))
            drawn_shape = shape.deep(times.drawn_levels)
            self._drafts.append((self._costs.draft_ms(length, drawn_shape), times.draft_ms))
            ahead = (
                self._costs.ahead_ms(length, shape.deep(levels), outcomes)[-1]
                for levels, outcomes in times.drawn_ahead
            )
            self._drafts_ahead.append((sum(ahead), times.ahead_ms))
        self._judged.append(times.ms if self._clock else self._round(shape)[0])
        self._yields.append(len(round.tokens))
        if self._watches and self._checks == 0 and len(self._judged) >= WINDOW:
            self._judge()

    def _observe_plain(self, tokens: int, ms: float) -> None:
        self._plain_ms.append(ms)
        if self._break_left > 0:
            self._break_left = max(0, self._break_left - tokens)
            self.plain_tokens += tokens
        elif self._checks > 0:
            self._checks -= 1
            if self._checks == 0:
                if self._loses():
                    self._fall_back(CHECKS)
                self._judged.clear()

    def _judge(self) -> None:
        """Decides after a window of drafted rounds whether to go on drafting."""
        if not self._loses():
            self._break = FIRST_BREAK
            self._judged.clear()
        elif self._clock:
            self._checks = CHECKS  # against plain rounds of the same moment
            self._plain_ms.clear()
        else:
            self._fall_back()

    def _loses(self) -> bool:
        """Returns whether judged rounds, the slowest left out, took longer per token than plain ones."""
        quicker = sorted(self._judged)[: len(self._judged) - len(self._judged) // 4]
        plain = median(self._plain_ms) if self._clock else self._costs.pass_ms(self._length, CHAIN)
        return fmean(quicker) > MARGIN * plain * fmean(self._yields)

    def _fall_back(self, tokens: int = 0) -> None:
        """Begins a break of plain decoding, of which `tokens` are decoded already."""
        self.fallbacks += 1
        self.plain_tokens += tokens
        self._break_left = self._break - tokens
        self._break = min(2 * self._break, LONGEST_BREAK)
        self._judged.clear()
        self._yields.clear()

    def _choice(self) -> tuple[DraftShape, int]:
        """The shape with the least time a token, and the outcomes to draft for; chosen once a round."""
        if self._best is None:
            rates, rounds = self.acceptance.rates, [(shape, *self._round(shape)) for shape in self._shapes]
            shape, _, outcomes = min(rounds, key=lambda round: round[1] / round[0].expected_tokens(rates))
            self._best = shape, outcomes
        return self._best

    def _round(self, shape: DraftShape) -> tuple[float, int]:
        """Expected ms of a round with such drafts, and how many outcomes of its pass to draft for."""
        pass_ms = _ratio(self._passes) * self._costs.pass_ms(self._length, shape)
        draft_ms = _ratio(self._drafts) * self._costs.draft_ms(self._length, shape)
        best = pass_ms + draft_ms, 0
        if not shape.depth:
            return best
        chances, ratio = shape.outcome_chances(self.acceptance.rate), _ratio(self._drafts_ahead)
        for count in range(1, min(self.ahead, len(chances)) + 1):
            ready_ms = [ratio * ms for ms in self._costs.ahead_ms(self._length, shape, count)]
            ended = pass_ms if self._clock else max(pass_ms, ready_ms[-1])
            # A draft that is not complete when drafting ahead ends is continued behind the verdict.
            guessed = sum(
                chance * min(1.0, ended / ms if ms else 1.0)
                for chance, ms in zip(chances, ready_ms, strict=False)
            )
            best = min(
                best, (ended + (1.0 - guessed) * draft_ms, count), key=lambda choice: (choice[0], -choice[1])
            )
        return best


def _ratio(observed: deque[tuple[float, float]]) -> float:
    """Returns measured over predicted time; 1 where either is 0."""
    predicted, measured = sum(expected for expected, _ in observed), sum(ms for _, ms in observed)
    return measured / predicted if predicted and measured else 1.0
