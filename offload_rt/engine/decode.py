"""The decode step: one round of a sequence, for every composition.

Drafting ahead changes no output distribution. A draft is made for a guessed outcome, the tokens that the
verification may yield, and its tokens are drawn with random numbers of their own from what the draft reports.
It is used if the verdict is that outcome, which depends on the draft being verified and on the verdict's own
random numbers, but on nothing that was drawn ahead. A draft of the right outcome is never thrown away,
however long it took: what has been drawn of it is kept, and the rest is drawn after the verdict.
"""

from __future__ import annotations

from offload_rt.drafting.base import Outcome, Proposal, Round
from offload_rt.engine.controller import RoundTimes
from offload_rt.engine.sequence import TokenSequence
from offload_rt.model.work import AwaitPass, BackgroundPass, StartPass, Work
from offload_rt.sampling.rejection import Draft
from offload_rt.system import clock


def decode_step(sequence: TokenSequence) -> Work[Round]:
    """Propose, begin, draft ahead, verdict, commit: one round of a sequence.

    The link needs no scheduling here: when a pass begins, the full cache opens the stream of the next one, so
    that the copies go on the moment the staging ring has room.
    """
    verifier, controller, view = sequence.verifier, sequence.controller, sequence.view
    started = clock.now()

    shape = controller.shape(sequence.room - 1)
    proposal = sequence.next_proposal or verifier.drafter.proposal(view, shape)
    sequence.next_proposal, resumed_depth = None, _depth(proposal.draft())
    with sequence.timeline.span("draft", "draft"):
        draft = yield from proposal.complete()
    draft_end = clock.now()

    outcomes = controller.outcomes if len(draft) else 0
    if outcomes:
        sequence.full.catch_up()  # afterwards drafting needs nothing of what the pass uses
    verification = verifier.verification(view, draft)
    running: BackgroundPass = yield StartPass(verification, sequence.full)

    proposals, drawn_ahead = yield from draft_ahead(sequence, proposal, running, outcomes)
    ahead_end = clock.now()
    output = yield AwaitPass(running)

    pass_end = clock.now()
    round = yield from verifier.verdict(view, draft, verification.input, output)
    sequence.next_proposal = proposals.get(tuple(round.tokens))
    verifier.stats.ms += running.ms / running.sequences
    end = clock.now()
    times = RoundTimes(
        started=started,
        ms=1e3 * (end - started),
        draft_ms=1e3 * (draft_end - started),
        pass_ms=running.ms,
        ahead_ms=1e3 * (ahead_end - draft_end) if proposals else 0.0,
        verdict_ms=1e3 * (end - pass_end),
        guessed=sequence.next_proposal is not None if proposals else None,
        depth=shape.depth,
        proposed=round.proposed,
        accepted=round.accepted,
        drawn_levels=_depth(draft) - resumed_depth,
        drawn_ahead=drawn_ahead,
    )
    sequence.extend(round, times)
    return round


def draft_ahead(
    sequence: TokenSequence, proposal: Proposal, running: BackgroundPass, limit: int
) -> Work[tuple[dict[Outcome, Proposal], tuple[tuple[int, int], ...]]]:
    """Drafts the next round while a pass runs, for up to `limit` of its outcomes.

    Returns:
        The drafts, and the levels that were drawn for them (see `RoundTimes.drawn_ahead`).
    """
    verifier, controller, view = sequence.verifier, sequence.controller, sequence.view
    proposals, levels = dict[Outcome, Proposal](), list[tuple[int, int]]()
    if not (limit and controller.shape(sequence.room - 2).depth) or controller.over(running):
        return proposals, ()
    with sequence.timeline.span("draft", "ahead"):
        outcomes = yield from proposal.outcomes(limit, controller.acceptance.rate)
        shapes = {outcome: controller.shape(sequence.room - len(outcome) - 1) for outcome in outcomes}
        drafted = {outcome: shape for outcome, shape in shapes.items() if shape.depth}
        for drafts in verifier.drafter.ahead(view, drafted):
            if controller.over(running):
                break
            while not controller.over(running) and (yield from drafts.step()):
                pass
            drawn_now = drafts.proposals()
            proposals |= drawn_now
            levels.append((drafts.depth, len(drawn_now)))
    return proposals, tuple(levels)


def _depth(draft: Draft) -> int:
    """Returns the depth of what was drawn."""
    return max(draft.tree.depths[: len(draft) - draft.source_nodes], default=0)
