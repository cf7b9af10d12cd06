"""The placement of KV that makes a round shortest.

All KV lies in host memory. With a GPU the first tokens of every layer are kept there as well (resident), the
CPU attends the next ones where they lie, and the rest is streamed through the staging ring for every pass:
the same ranges of tokens in all layers. The first GPU computes; others keep KV, stream KV over links of their
own, and attend it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from offload_rt.config.draft_shape import DraftShape
from offload_rt.planning.cost_model import CostModel, RoundTime


def best_round(costs: CostModel) -> RoundTime:
    """Returns the round with the least time per token, of all drafts."""
    rounds = (_shortest_round(costs, drafted) for drafted in costs.request.drafts)
    return min(rounds, key=lambda round: round.ms_per_token)


def _shortest_round(costs: CostModel, drafted: DraftShape) -> RoundTime:
    """Returns the shortest round of any placement; shares that the config gives are kept.

    All ranges of tokens but the text's last end with a page.
    """
    request, draft = costs.request, costs.draft(drafted)
    context, page, resident = request.context, request.config.store.page, request.given_resident

    def at(resident: int, cpu: int) -> RoundTime:
        return costs.round(costs.verification(costs.memory.placement(resident, cpu), drafted), draft)

    capacity, *other_capacities = costs.memory.capacities or [0]
    if (cpu := request.given_cpu) is not None:
        if resident is None:
            resident = min(capacity, context - cpu)
            resident -= resident % page if cpu else 0
        return at(resident, min(cpu, context - resident))

    def unstreamed(resident: int) -> int:
        """Returns the tokens for the CPU, in whole pages, where GPUs keep all they can and none stream."""
        remaining = context - resident
        return min(remaining, -(-max(0, remaining - sum(other_capacities)) // page) * page)

    most_resident = capacity if resident is None else resident
    rounds = [at(most_resident, 0)]
    rounds += _lowest(range(page, context - most_resident, page), lambda cpu: at(most_resident, cpu))
    fewer = range(0, most_resident + 1, page) if resident is None else range(most_resident, most_resident + 1)
    rounds += _lowest(fewer, lambda resident: at(resident, unstreamed(resident)))
    return min(rounds, key=lambda round: round.ms)


def _lowest(places: range, at: Callable[[int], RoundTime]) -> list[RoundTime]:
    """Returns the shortest round along a line of shares.

    A longer share of the CPU makes some lanes of a pass longer and others shorter, all of them evenly, and a
    round is a sum of their maxima: there is one valley.
    """
    rises = bisect_left(places[:-1], True, key=lambda place: at(place).ms <= at(place + places.step).ms)
    return [at(place) for place in places[rises : rises + 1]]
