"""How a context is shared out between GPU, CPU and link: the shares that make a round shortest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from offload_rt.planning.placement import Placement, resident_capacity, ring_fits
from offload_rt.planning.prediction import Predictor
from offload_rt.planning.times import PassTime, RoundTime

EXTRA_RING_BUFFERS = 3  # beyond the config's, where a deeper ring makes a round shorter


def rounds(predictor: Predictor) -> Iterator[RoundTime]:
    """The best round for each depth of the ring, draft length and number of outcomes drafted for."""
    request = predictor.request
    gamma, longest = request.config.speculation.gamma2, request.longest_draft
    first = request.config.store.ring_buffers
    for ring in range(first, first + (0 if request.in_place else EXTRA_RING_BUFFERS) + 1):
        if not ring_fits(request, ring):
            return
        for count in range(gamma or 1, longest + 1) if longest else (0,):
            shares = Shares(predictor, ring, count)
            yield from (shares.best(outcomes) for outcomes in predictor.outcomes)


class Shares:
    """Rounds with one ring and one draft length, by how many tokens lie or are attended where.

    All ranges of tokens but the text's last end with a page.

    Args:
        ring: buffers of the staging ring.
        gamma: tokens drafted.
    """

    def __init__(self, predictor: Predictor, ring: int, gamma: int) -> None:
        self._predictor, self._request = predictor, predictor.request
        self._ring, self._gamma = ring, gamma
        self._draft = predictor.draft(gamma)
        self._passes: dict[tuple[int, int], PassTime] = {}

    def best(self, outcomes: int) -> RoundTime:
        """The shortest round that is drafted ahead for `outcomes` verdicts; given shares are kept.

        A longer share of the CPU makes some lanes of a pass longer and others shorter, all of them convexly,
        and a round is a sum of their maxima: along each line of shares there is one valley.
        """
        request, page = self._request, self._request.config.store.page
        context, resident, cpu = request.context, request.given_resident, request.given_cpu
        if request.in_place:
            return self.round(0, context, outcomes)
        capacity = resident_capacity(request, self._ring) if resident is None else resident
        if cpu is not None:
            if resident is None:
                capacity = min(capacity, context - cpu)
                capacity -= capacity % page if cpu else 0
            return self.round(capacity, min(cpu, context - capacity), outcomes)
        found = [self.round(capacity, 0, outcomes)]
        if streaming := range(1, -(-(context - capacity) // page)):
            found.append(_lowest(streaming, lambda pages: self.round(capacity, pages * page, outcomes)))
        if resident is not None:
            found.append(self.round(resident, context - resident, outcomes))
        else:  # nothing is streamed
            pages = range(capacity // page + 1)
            found.append(_lowest(pages, lambda n: self.round(n * page, context - n * page, outcomes)))
        return min(found, key=_ms)

    def round(self, resident: int, cpu: int, outcomes: int) -> RoundTime:
        """A round with `resident` tokens on the GPU and `cpu` tokens attended by the CPU."""
        request = self._request
        if (resident, cpu) not in self._passes:
            streamed, segment = request.context - resident - cpu, request.config.store.segment_tokens
            placement = Placement(resident, cpu, streamed, self._ring, segment, request.target)
            self._passes[resident, cpu] = self._predictor.verification(placement, self._gamma)
        return self._predictor.round(self._passes[resident, cpu], self._draft, outcomes)


def _ms(found: RoundTime) -> float:
    return found.ms


def _lowest(places: range, at: Callable[[int], RoundTime]) -> RoundTime:
    """The shortest round along a line with one valley."""
    rises = bisect_left(places[:-1], True, key=lambda place: at(place).ms <= at(place + 1).ms)
    return at(places[rises])
