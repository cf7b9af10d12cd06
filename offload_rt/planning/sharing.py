"""How a context is shared out between GPU, CPU and link: the shares that make a round shortest."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator

from offload_rt.planning.placement import PlanRequest, resident_capacity, ring_fits
from offload_rt.planning.prediction import Predictor
from offload_rt.planning.times import PassTime, RoundTime

EXTRA_RING_BUFFERS = 3  # beyond the config's, where a deeper ring makes a round shorter

FEW_PAGES = 48  # of a share: every number of them is tried


def best_rounds(predictor: Predictor) -> Iterator[RoundTime]:
    """The shortest round for each depth of the ring, draft length and number of outcomes drafted for."""
    request = predictor.request
    gamma, longest = request.config.speculation.gamma2, request.longest_draft
    first = request.config.store.ring_buffers
    for ring in range(first, first + (0 if request.in_place else EXTRA_RING_BUFFERS) + 1):
        if not ring_fits(request, ring):
            return
        for count in range(gamma or 1, longest + 1) if longest else (0,):
            yield from _best_shares(predictor, ring, count)


def _best_shares(predictor: Predictor, ring: int, gamma: int) -> Iterator[RoundTime]:
    """The shortest round for each number of outcomes drafted for."""
    request, draft = predictor.request, predictor.draft(gamma)
    capacity = resident_capacity(request, ring)

    @functools.cache
    def verification(resident: int, cpu: int) -> PassTime:
        return predictor.verification(request.placement(resident, cpu, ring), gamma)

    def shortest(outcomes: int) -> RoundTime:
        def at(resident: int, cpu: int) -> RoundTime:
            return predictor.round(verification(resident, cpu), draft, outcomes)

        return min(_candidates(request, capacity, at), key=lambda found: found.ms)

    return map(shortest, predictor.outcomes)


def _candidates(
    request: PlanRequest, capacity: int, at: Callable[[int, int], RoundTime]
) -> Iterator[RoundTime]:
    """Rounds of which one is the shortest; shares that the config gives are kept.

    A longer share of the CPU makes some lanes of a pass longer and others shorter, all of them convexly, and
    a round is a sum of their maxima: along each line of shares there is one valley. All ranges of tokens but
    the text's last end with a page.

    Args:
        at: the round with so many tokens resident, and so many attended by the CPU.
    """
    context, page = request.context, request.config.store.page
    resident, cpu = request.given_resident, request.given_cpu
    if request.in_place:
        yield at(0, context)
    elif cpu is not None:
        if resident is None:
            resident = min(capacity, context - cpu)
            resident -= resident % page if cpu else 0
        yield at(resident, min(cpu, context - resident))
    else:
        most = capacity if resident is None else resident
        yield at(most, 0)
        yield from _lowest(range(1, -(-(context - most) // page)), lambda pages: at(most, pages * page))
        # Nothing is streamed.
        if resident is not None:
            yield at(resident, context - resident)
        else:
            pages = range(capacity // page + 1)
            yield from _lowest(pages, lambda n: at(n * page, context - n * page))


def _lowest(places: range, at: Callable[[int], RoundTime]) -> Iterator[RoundTime]:
    """The shortest round along a line with one valley; where segments are few, there may be more."""
    if len(places) <= FEW_PAGES:
        yield from map(at, places)
    else:
        yield at(places[bisect_left(places[:-1], True, key=lambda n: at(n).ms <= at(n + 1).ms)])
