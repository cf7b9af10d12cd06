"""How a context is shared out between GPU, CPU and link: the shares that make a round shortest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from offload_rt.planning.placement import Placement, resident_capacity, ring_fits
from offload_rt.planning.prediction import PassTime, Predictor, RoundTime

EXTRA_RING_BUFFERS = 3  # beyond the config's, where a deeper ring makes a round shorter

Choice = tuple[Placement, RoundTime]


def choices(predictor: Predictor) -> Iterator[Choice]:
    """The best shares for each depth of the ring, length of drafts and number of outcomes reckoned with."""
    request = predictor.request
    speculation, longest = request.config.speculation, request.longest_draft
    gammas = range(speculation.gamma2 if request.fixed_draft else 1, longest + 1) if longest else range(1)
    first = request.config.store.ring_buffers
    for ring in range(first, first + (0 if request.in_place else EXTRA_RING_BUFFERS) + 1):
        if not ring_fits(request, ring):
            return
        for gamma in gammas:
            shares = Shares(predictor, ring, gamma)
            yield from (shares.best(outcomes) for outcomes in predictor.outcomes)


class Shares:
    """Rounds with one ring and one length of drafts, by how many tokens lie or are attended where.

    All ranges of tokens but the text's last end with a page.

    Args:
        ring: buffers of the staging ring.
        gamma: tokens drafted.
    """

    def __init__(self, predictor: Predictor, ring: int, gamma: int) -> None:
        self._predictor = predictor
        self._request = predictor.request
        self._ring = ring
        self._gamma = gamma
        self._draft = predictor.draft(gamma)
        self._capacity = resident_capacity(predictor.request, ring)
        self._verifications: dict[tuple[int, int], tuple[Placement, PassTime]] = {}

    def best(self, outcomes: int) -> Choice:
        """The shares with the shortest round, where it is drafted ahead for `outcomes` verdicts.

        What the config gives is kept. A longer share of the CPU makes some lanes of a pass longer and others
        shorter, all linearly or at least convexly, and a round is a sum of their maxima: along each line of
        shares there is one valley.
        """
        request, page = self._request, self._request.config.store.page
        context, resident, cpu = request.context, request.given_resident, request.given_cpu
        if request.in_place:
            return self.round(0, context, outcomes)
        if cpu is not None:
            if resident is None:
                resident = min(self._capacity, context - cpu)
                resident -= resident % page if cpu else 0
            return self.round(resident, min(cpu, context - resident), outcomes)
        capacity = self._capacity if resident is None else resident
        found = [self.round(capacity, 0, outcomes)]
        streaming = range(1, -(-(context - capacity) // page))
        if streaming:
            found.append(_lowest(streaming, lambda pages: self.round(capacity, pages * page, outcomes)))
        if resident is not None:
            found.append(self.round(resident, context - resident, outcomes))
            return min(found, key=_round_ms)
        unstreamed = range(capacity // page + 1)
        found.append(
            _lowest(unstreamed, lambda pages: self.round(pages * page, context - pages * page, outcomes))
        )
        return min(found, key=_round_ms)

    def round(self, resident: int, cpu: int, outcomes: int) -> Choice:
        """A round with `resident` tokens on the GPU and `cpu` tokens attended by the CPU."""
        if (resident, cpu) not in self._verifications:
            request = self._request
            streamed, segment = request.context - resident - cpu, request.config.store.segment_tokens
            placement = Placement(resident, cpu, streamed, self._ring, segment, request.target)
            verification = self._predictor.verification(placement, self._gamma)
            self._verifications[resident, cpu] = placement, verification
        placement, verification = self._verifications[resident, cpu]
        return placement, self._predictor.round(self._gamma, verification, self._draft, outcomes)


def _round_ms(choice: Choice) -> float:
    return choice[1].ms


def _lowest(places: range, choice: Callable[[int], Choice]) -> Choice:
    """The choice with the shortest round along a line with one valley."""
    low, high = 0, len(places) - 1
    while low < high:
        middle = (low + high) // 2
        if _round_ms(choice(places[middle])) <= _round_ms(choice(places[middle + 1])):
            high = middle
        else:
            low = middle + 1
    return choice(places[low])
