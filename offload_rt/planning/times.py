"""Times of a pass over the full cache and of a round, in ms."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload_rt.planning.placement import Placement


@dataclass(frozen=True)
class Work:
    """ms of a processor: reading and computing, and launching operations."""

    busy_ms: float = 0.0
    launch_ms: float = 0.0

    @property
    def ms(self) -> float:
        return self.busy_ms + self.launch_ms

    def __add__(self, other: Work) -> Work:
        return Work(self.busy_ms + other.busy_ms, self.launch_ms + other.launch_ms)

    def __mul__(self, count: float) -> Work:
        return Work(count * self.busy_ms, count * self.launch_ms)


@dataclass(frozen=True)
class Refresh:
    """ms of a refresh of the retrieved cache."""

    work: Work  # of the processor that decodes
    scoring: float  # the host reads scores or mean keys of all chunks, in a thread of its own
    link: float  # of sending all entries


@dataclass(frozen=True)
class PassTime:
    """ms of one pass over the full cache, lane by lane; without a GPU there is only the processor's lane."""

    placement: Placement
    gamma: int  # drafted tokens that the pass verifies
    dense: Work  # the processor's work besides attention over the context
    attention: float  # of that processor, over its share of the context
    link: float = 0.0  # until the last streamed segment is attended
    cpu_attention: float = 0.0  # until the CPU's share of the last layer is merged
    host_memory: float = 0.0  # links and CPU read what they send and attend, at the memory's rate
    link_ahead: float = 0.0  # how much of `link` may happen before the pass, into the ring
    host_memory_ahead: float = 0.0  # and of `host_memory`

    @property
    def processor(self) -> float:
        return self.dense.ms + self.attention

    @property
    def ms(self) -> float:
        return max(self.link, self.cpu_attention, self.host_memory, self.processor)

    def after(self, waited: float) -> float:
        """ms of the pass where the link had `waited` ms before it to fill the ring."""
        link, memory = self.link - self.link_ahead, self.host_memory - self.host_memory_ahead
        return max(link, self.cpu_attention, memory, self.processor, self.ms - waited)

    def refreshing(self, refresh: Refresh, cpu_share: float) -> PassTime:
        """The same pass while the retrieved cache takes its entries from it.

        Args:
            cpu_share: of the context, attended by the CPU: the entries from there cross the link apart.
        """
        work = refresh.work
        # The link goes on meanwhile, and waits for no more than one layer's work.
        waited = work.ms / self.placement.shape.layers if self.link else 0.0
        return replace(
            self,
            dense=self.dense + work,
            link=self.link + waited + cpu_share * refresh.link,
            cpu_attention=self.cpu_attention + work.ms if self.cpu_attention else 0.0,
            host_memory=self.host_memory + refresh.scoring,
        )


@dataclass(frozen=True)
class RoundTime:
    """An expected round."""

    verification: PassTime
    draft: Work  # all drafting for it
    ms: float
    tokens: float  # expected, the verifier's own among them
    outcomes: int  # how many verdicts are drafted for ahead of time
    hit_rate: float  # share of rounds whose verdict is among them
    drafting: float  # ms from the start of a pass until the first of these drafts is done
    refresh_share: float  # share of rounds whose pass refreshes the retrieved cache
    refresh_ms: float  # how much longer such a round takes

    @property
    def gamma(self) -> int:
        return self.verification.gamma

    @property
    def ms_per_token(self) -> float:
        return self.ms / self.tokens
