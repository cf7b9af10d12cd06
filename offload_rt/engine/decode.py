"""The only loop: one round of a text, for every composition there is.

Why drafting ahead changes no output distribution. A draft is made for a guessed outcome: the tokens that the
verification may yield. Its tokens are drawn, with random numbers of their own, from what it reports. It is
used if the verdict is that outcome, which depends on the draft being verified and on the verdict's own random
numbers, but on nothing that was drawn ahead. And a draft of the right outcome is never thrown away, however
long it took: what has been drawn of it is kept, and the rest is drawn after the verdict.
"""

from __future__ import annotations

from time import perf_counter

from offload_rt.drafting.base import Outcome, Proposal, Round
from offload_rt.drafting.verifier import Verifier
from offload_rt.engine.controller import RoundTimes
from offload_rt.engine.sequence import TokenSequence
from offload_rt.model.scheduler import AwaitPass, BackgroundPass, StartPass, Work
from offload_rt.rejection_sampling import Draft


def decode_step(text: TokenSequence) -> Work[Round]:
    """Propose, begin, draft ahead, verdict, commit: one round of a text.

    The link needs no scheduling here: when a pass begins, the full cache opens the stream of the next one, so
    that the copies go on the moment the staging ring has room.
    """
    verifier, pace, view = text.verifier, text.controller, text.view
    started, nominal_ms = perf_counter(), _nominal_ms(verifier)

    shape = pace.shape(text.room - 1)
    proposal = text.ready or verifier.drafter.proposal(view, shape)
    text.ready, resumed = None, _depth(proposal.draft())
    with text.timeline.span("draft", "draft"):
        draft = yield from proposal.complete()
    drafted = perf_counter()

    outcomes = pace.outcomes(len(view)) if len(draft) else 0
    if outcomes:
        text.full.catch_up()  # afterwards drafting needs nothing of what the pass uses
    verification = verifier.verification(view, draft)
    running: BackgroundPass = yield StartPass(verification, text.full)

    ahead = yield from draft_ahead(text, proposal, running, outcomes)
    made = perf_counter()
    output = yield AwaitPass(running)

    both = perf_counter()
    round = yield from verifier.verdict(draft, verification.input, output)
    text.ready = ahead.get(tuple(round.tokens))
    verifier.stats.ms += running.ms / running.sequences
    done = perf_counter()
    times = RoundTimes(
        started=started,
        ms=1e3 * (done - started),
        draft_ms=1e3 * (drafted - started),
        pass_ms=running.ms,
        ahead_ms=1e3 * (made - drafted) if ahead else 0.0,
        verdict_ms=1e3 * (done - both),
        nominal_ms=_nominal_ms(verifier) - nominal_ms,
        guessed=text.ready is not None if ahead else None,
        asked=shape.depth,
        proposed=round.proposed,
        accepted=round.accepted,
        drawn=_depth(draft) - resumed + sum(_depth(one.draft()) for one in ahead.values()),
    )
    text.extend(round, times)
    return round


def draft_ahead(
    text: TokenSequence, proposal: Proposal, running: BackgroundPass, most: int
) -> Work[dict[Outcome, Proposal]]:
    """Drafts the next round while a pass runs, until it is over, for `most` of its outcomes."""
    verifier, pace, view = text.verifier, text.controller, text.view
    made: dict[Outcome, Proposal] = {}
    if not (most and pace.shape(text.room - 2).depth) or pace.over(running):
        return made
    with text.timeline.span("draft", "ahead"):
        for outcome in (yield from proposal.outcomes(most, pace.acceptance.rate)):
            shape = pace.shape(text.room - len(outcome) - 1)
            if not shape.depth:
                continue
            if pace.over(running):
                break
            made[outcome] = verifier.drafter.proposal(view.extended(outcome), shape)
            while not pace.over(running) and (yield from made[outcome].step()):
                pass
    return made


def _depth(draft: Draft) -> int:
    """Of what was drawn."""
    return max(draft.tree.depths[: len(draft) - draft.found], default=0)


def _nominal_ms(verifier: Verifier) -> float:
    return sum(level.nominal_ms for level in verifier.levels)
