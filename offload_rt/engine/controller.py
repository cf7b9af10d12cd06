"""How much to draft, when to step down, what to draft ahead: the only reader of clocks and of acceptance.

A verification costs hardly more for many tokens than for one, but the chance that the last of them is
accepted falls with each. `ShapeChoice` picks what yields the most tokens a second. Speculation that yields
fewer than plain decoding steps down to it for a while, then tries again, with longer breaks each time
(`StepDown`); where it is not expected to pay (a short text), decoding begins with such a break.

Costs are measured, or nominal (`costs.py`) where no clock may decide: a seed repeats its tokens only if what
is drawn does not depend on time. Time never decides more than that: whether drawing *begins*. What has been
drawn is used, since its cost depends on its tokens. Whatever several ranks must agree on is decided here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, fmean, linear_regression, median

from offload_rt.drafting.base import Round
from offload_rt.drafting.expectations import LATER_CHOICES
from offload_rt.drafting.shapes import CHAIN, DraftShape
from offload_rt.drafting.verifier import Verifier
from offload_rt.model.scheduler import BackgroundPass

WINDOW = 8  # rounds that are judged together
CLEAR_WINDOW = 4  # rounds after which a clear loss is enough
CLEAR_MARGIN = 1.5  # what a clear loss is
YIELDS = 24  # rounds from which it is known how many tokens one yields
CHECKS = 4  # plain rounds that a loss is checked against
FIRST_BREAK = 64  # tokens of plain decoding after the first verdict against speculation
FORESEEN_BREAK = 256  # where it was not expected to pay at all
LONGEST_BREAK = 1024
MARGIN = 1.03  # how much dearer speculation must be before it stops: noise is no reason

MEMORY = 32  # rounds that costs are fitted to

FORGETTING = 0.95  # of what was accepted, a verification
PRIOR_TOKENS = 10.0  # weight of the usual acceptance against that of the text


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
        nominal_ms: what the round's passes cost at nominal rates.
        guessed: whether the verdict was an outcome that had been drafted for; None where none had.
        asked: how deep a draft was wanted; 0: the round was to be plain.
        proposed, accepted: tokens.
        drawn: levels of drafts that were drawn, for this round and ahead.
    """

    started: float
    ms: float
    draft_ms: float
    pass_ms: float
    ahead_ms: float
    verdict_ms: float
    nominal_ms: float
    guessed: bool | None
    asked: int
    proposed: int
    accepted: int
    drawn: int


class SpeculationController:
    """Sets the pace of one text.

    Args:
        verifier: the composition, for what it costs at nominal rates and usually yields.
        shape: what is drafted; its depth is 0 where that is chosen as it runs.
        ahead: outcomes of a pass that are drafted for at most, while it runs in the background.
        step_down: False keeps drafting whatever it costs.
        clock: whether measured times may decide.

    Attributes:
        acceptance: of drafted tokens, by what has been seen of the text.
        breaks: in which speculation is given up for a while.
    """

    def __init__(
        self,
        verifier: Verifier,
        shape: DraftShape | None,
        *,
        ahead: int = 0,
        step_down: bool = True,
        clock: bool = True,
    ) -> None:
        self.ahead = ahead
        self.acceptance = RunningAcceptance(verifier.drafter.expected_acceptance)
        shapes = [CHAIN] if shape is None else shape.candidates()
        self._choice = ShapeChoice(verifier, shapes, self.acceptance, ahead=clock and ahead > 0)
        self._verifier = verifier
        self._clock = clock
        self.breaks = StepDown(verifier, watches=step_down and shape is not None, clock=clock)
        self._best: DraftShape | None = None
        self._length = 0
        self._rounds = 0

    def begin(self, length: int) -> None:
        """A text of `length` tokens is about to be continued."""
        self._length = length
        self.breaks.begin(length, self._wanted())

    def _wanted(self) -> DraftShape:
        """What to draft where speculation pays: the same all through a round, so chosen once."""
        if self._best is None:
            self._best = self._choice.best(self._length)
        return self._best

    def shape(self, room: int) -> DraftShape:
        """What to draft in the next round, at most `room` tokens deep; of no depth for a plain one."""
        if self.breaks.plain():
            return CHAIN
        wanted = self._wanted()
        return wanted.deep(max(0, min(wanted.depth, room)), self.acceptance.rates)

    def outcomes(self, length: int) -> int:
        """Outcomes of a pass over a text of `length` tokens to draft for while it runs.

        As many as are over with the pass by nominal rates, where the clock may not end drafting then.
        """
        if self._clock or not self.ahead:
            return self.ahead
        shape = self._wanted()
        pass_ms = self._verifier.nominal_pass_ms(length, shape.size)
        draft_ms = self._verifier.drafter.nominal_draft_ms(length, shape)
        return min(self.ahead, int(pass_ms / draft_ms)) if draft_ms > 0.0 else self.ahead

    def over(self, running: BackgroundPass) -> bool:
        """Whether a pass is over, so that no more drafts for its outcomes are begun."""
        return self._clock and running.done

    def observe(self, length: int, round: Round, times: RoundTimes) -> None:
        """A round below a text of `length` tokens is over."""
        self._rounds += 1
        self._length, self._best = length, None
        self.acceptance.observe(round.tries)
        self.breaks.observe(length, len(round.tokens), times)
        # The first round pays for memory that is touched for the first time.
        if self._clock and self._rounds > 1:
            self._choice.observe(length, times)


class RunningAcceptance:
    """The chance that a drafted token is accepted where those before it were, by what has been seen.

    A verification rejects one token of a chain at most; those behind it were never judged.

    Args:
        usual: of eldest children, before anything has been seen.
    """

    def __init__(self, usual: float) -> None:
        rates = (usual, *LATER_CHOICES)
        self._counts = [(PRIOR_TOKENS * rate, PRIOR_TOKENS * (1.0 - rate)) for rate in rates]

    @property
    def rate(self) -> float:
        """Of eldest children; in [0, 1]."""
        return self.rates[0]

    @property
    def rates(self) -> tuple[float, ...]:
        """Of eldest children, of second ones where the eldest was rejected, and so on."""
        return tuple(accepted / (accepted + rejected) for accepted, rejected in self._counts)

    def observe(self, tries: Sequence[tuple[int, int]]) -> None:
        """A verification accepted and rejected so many eldest children, second ones, …"""
        for rank, (accepted, rejected) in enumerate(tries[: len(self._counts)]):
            if accepted or rejected:
                stood, fell = self._counts[rank]
                self._counts[rank] = (FORGETTING * stood + accepted, FORGETTING * fell + rejected)


class ShapeChoice:
    """Chooses the shape of a draft, round by round.

    Args:
        verifier: for costs of passes and drafts by their shapes.
        ahead: drafts are made while the pass before runs, where its outcome is guessed.
    """

    def __init__(
        self,
        verifier: Verifier,
        shapes: Sequence[DraftShape],
        acceptance: RunningAcceptance,
        *,
        ahead: bool = False,
    ) -> None:
        self._verifier = verifier
        self._shapes = shapes
        self._acceptance = acceptance
        self._ahead = ahead
        self._passes: deque[tuple[float, float]] = deque(maxlen=MEMORY)  # nominal, measured
        self._drafts: deque[tuple[float, float]] = deque(maxlen=MEMORY)

    def best(self, length: int) -> DraftShape:
        """What to draft below a text of `length` tokens."""
        if len(self._shapes) == 1:
            return self._shapes[0]
        rates = self._acceptance.rates
        measured_ms = _fitted(self._passes, self._verifier.nominal_pass_ms(length, 0))
        # A draft is steps of one cost each: its time is proportional to its depth.
        draft_ratio = _ratio(self._drafts)

        def tokens_per_ms(shape: DraftShape) -> float:
            pass_ms = measured_ms(self._verifier.nominal_pass_ms(length, shape.size))
            draft_ms = draft_ratio * self._verifier.drafter.nominal_draft_ms(length, shape)
            round_ms = pass_ms + draft_ms
            if self._ahead and shape.kind == "chain":  # what may follow a tree is not guessed
                guessed = rates[0] ** (shape.depth + 1)
                round_ms = guessed * max(pass_ms, draft_ms) + (1.0 - guessed) * round_ms
            return shape.expected_tokens(rates) / round_ms

        return max(self._shapes, key=tokens_per_ms)

    def observe(self, length: int, times: RoundTimes) -> None:
        """A round below a text of `length` tokens is over."""
        if len(self._shapes) == 1:
            return
        nominal = self._verifier.nominal_pass_ms(length, times.proposed)
        self._passes.append((nominal, times.pass_ms + times.verdict_ms))
        nominal = self._verifier.drafter.nominal_draft_ms(length, self._shapes[0].deep(times.drawn))
        if nominal > 0.0:  # looking up costs nothing by its shapes: nothing to compare with
            self._drafts.append((nominal, times.draft_ms + times.ahead_ms))


def _ratio(observed: deque[tuple[float, float]]) -> float:
    """Measured over nominal."""
    nominal = sum(nominal for nominal, _ in observed)
    return sum(ms for _, ms in observed) / nominal if nominal else 1.0


def _fitted(observed: deque[tuple[float, float]], plain: float) -> Callable[[float], float]:
    """What a pass of a nominal cost takes: a line through the measured ones, as its plain part and what its
    queries add may be off by different factors.

    A plain pass, off by the factor of all, counts as one more: it decides where the measured ones are alike.
    """
    ratio = _ratio(observed)
    try:
        slope, fixed = linear_regression(*zip(*observed, (plain, ratio * plain), strict=True))
    except StatisticsError:  # all of one cost
        slope, fixed = ratio, 0.0
    return lambda nominal: max(fixed + slope * nominal, 0.1 * ratio * nominal)


class StepDown:
    """Whether the next round is plain, because speculation does not pay.

    A clock is noisy: other work slows a few rounds, or all of them for a while. So the slowest quarter of the
    judged rounds does not count, what rounds yield is taken from more of them, and a loss is checked against
    plain rounds of the same moment before speculation is given up.

    Args:
        watches: False: never.
        clock: whether rounds are judged by measured time, or by their nominal costs.

    Attributes:
        steps_down: how often speculation was given up.
        plain_tokens: decoded in breaks.
    """

    def __init__(self, verifier: Verifier, *, watches: bool, clock: bool) -> None:
        self.steps_down = 0
        self.plain_tokens = 0
        self._verifier = verifier
        self._watches = watches
        self._clock = clock
        self._plain_ms: deque[float] = deque(maxlen=WINDOW)
        self._judged: list[float] = []  # ms of rounds
        self._yields: deque[int] = deque(maxlen=YIELDS)
        self._rounds = 0
        self._checks = 0  # plain rounds to go before a loss is believed
        self._break = FIRST_BREAK
        self._break_left = 0

    def begin(self, length: int, shape: DraftShape) -> None:
        """A text of `length` tokens is about to be continued, with such drafts."""
        if not self._watches:
            return
        verifier = self._verifier
        nominal = verifier.nominal_round_ms(length, shape) / verifier.expected_tokens(shape.depth)
        if nominal > verifier.nominal_pass_ms(length, 0):
            self._break = FORESEEN_BREAK
            self._step_down()

    def _step_down(self, tokens: int = 0) -> None:
        """Begins a break, of which so many tokens are decoded already."""
        self.steps_down += 1
        self.plain_tokens += tokens
        self._break_left = self._break - tokens
        self._break = min(2 * self._break, LONGEST_BREAK)
        self._judged.clear()
        self._yields.clear()

    def plain(self) -> bool:
        """Whether the next round is plain."""
        # Where the clock decides, the second round is plain, to know its cost; the first one warms up.
        # It may have been drafted ahead of, and what has been drafted is used: then it is the third.
        probing = self._watches and self._clock and self._rounds > 0 and not self._plain_ms
        return probing or self._checks > 0 or self._break_left > 0

    def observe(self, length: int, tokens: int, times: RoundTimes) -> None:
        """A round below a text of `length` tokens yielded `tokens`."""
        self._rounds += 1
        if not self._watches:
            return
        if times.asked == times.proposed == 0:
            self._plain_ms.append(times.ms)
            if self._break_left > 0:
                self._break_left = max(0, self._break_left - tokens)
                self.plain_tokens += tokens
            elif self._checks > 0:
                self._checks -= 1
                if self._checks == 0 and self._loses(length):
                    self._step_down(CHECKS)
        elif self._rounds > 1:  # the first round pays for memory that is touched for the first time
            self._judged.append(times.ms if self._clock else times.nominal_ms)
            self._yields.append(tokens)
            if self._checks == 0 and len(self._judged) in (CLEAR_WINDOW, WINDOW):
                self._judge(length)
        if self._checks == 0 and len(self._judged) >= WINDOW:
            self._judged.clear()

    def _judge(self, length: int) -> None:
        if not self._loses(length):
            if len(self._judged) == WINDOW:
                self._break = FIRST_BREAK
        elif self._clock:
            self._checks = CHECKS
            self._plain_ms.clear()
        else:
            self._step_down()

    def _loses(self, length: int) -> bool:
        """Whether the judged rounds take longer a token than plain ones."""
        quicker = sorted(self._judged)[: len(self._judged) - len(self._judged) // 4]
        plain = median(self._plain_ms) if self._clock else self._verifier.nominal_pass_ms(length, 0)
        margin = MARGIN if len(self._judged) >= WINDOW else CLEAR_MARGIN
        return fmean(quicker) > margin * plain * fmean(self._yields)
