"""How long passes, drafts, rounds and a prefill take, from a machine's figures.

A pass over the full cache has lanes that run beside each other: the links, the CPU's attention, the GPUs,
and the host's memory that both links and CPU read. The slowest sets the pace. Without a GPU one processor
does everything, one thing after another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload_rt.config import DRAFT_STREAMING, LOOKUP, TARGET_STREAMING
from offload_rt.machine.hardware import AttentionRate
from offload_rt.planning.placement import Placement, PlanRequest
from offload_rt.planning.shapes import ModelShape

GRAPH_LAUNCH_SHARE = 0.1  # of launching one by one, where a step is a CUDA graph
EXCHANGE_MS = 0.04  # a layer: queries to the CPU and results back, besides their bytes
ALL_REDUCE_MS = 0.03  # a layer has two of them where heads are split over GPUs
# Of rejections, those whose token is the runner-up of the draft. The demo pair, greedy at 16K tokens of three
# books: 49 of 68 where the target drafted over retrieved KV, 129 of 358 where the small model did.
RUNNER_UP_HITS = 0.5
MOST_OUTCOMES = 4  # verdicts that are drafted ahead for, and reckoned with
PREFILL_ATTENTION_SHARE = {"gpu": 0.6, "cpu": 0.9}  # of the rate of matrix products


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

    def times(self, count: float) -> Work:
        """The same `count` times."""
        return Work(count * self.busy_ms, count * self.launch_ms)


@dataclass(frozen=True)
class Refresh:
    """ms of a refresh of the retrieved cache.

    Attributes:
        work: of the processor that decodes.
        scoring: in which the mean keys of all chunks are read on the host, by a thread of its own.
        link: in which all its entries would cross the link.
    """

    work: Work
    scoring: float = 0.0
    link: float = 0.0


@dataclass(frozen=True)
class PassTime:
    """ms of one pass over the full cache, lane by lane.

    Attributes:
        link: until the last streamed segment is attended.
        cpu_attention: until the CPU's share of the last layer is merged.
        host_memory: reading what links and CPU attend, at the rate of the host's memory.
        dense: the processor's work besides attention over the context.
        attention: of that processor over its share of the context.
        busy_at_most: of that processor, were all of the context its share.
        in_place: the lanes are one processor's, and add up.
        streamed_share, cpu_share: of the context, what crosses the links, and what the CPU attends.
        link_ahead: how much of `link` and of `host_memory` may happen before the pass, into the ring.
    """

    link: float
    cpu_attention: float
    host_memory: float
    dense: Work
    attention: float
    busy_at_most: float
    in_place: bool
    streamed_share: float = 0.0
    cpu_share: float = 0.0
    link_ahead: float = 0.0
    host_memory_ahead: float = 0.0

    @property
    def processor(self) -> float:
        return self.dense.ms + self.attention

    @property
    def ms(self) -> float:
        if self.in_place:
            return self.processor
        return max(self.link, self.cpu_attention, self.host_memory, self.processor)

    def refreshing(self, refresh: Refresh, layers: int) -> PassTime:
        """The same pass while the retrieved cache takes its entries from it."""
        work = refresh.work
        # All but one layer's work is done while the link goes on; what is wanted of the CPU's share is sent.
        waited = work.ms / layers if self.link else 0.0
        return replace(
            self,
            link=self.link + waited + self.cpu_share * refresh.link,
            cpu_attention=self.cpu_attention + work.ms if self.cpu_attention else 0.0,
            host_memory=self.host_memory + refresh.scoring,
            dense=self.dense + work,
            busy_at_most=self.busy_at_most + work.busy_ms,
        )

    @property
    def after_ring_filled(self) -> float:
        """ms where the ring was filled before the pass began."""
        link, memory = self.link - self.link_ahead, self.host_memory - self.host_memory_ahead
        return self.processor if self.in_place else max(link, self.cpu_attention, memory, self.processor)


@dataclass(frozen=True)
class RoundTime:
    """An expected round.

    Attributes:
        gamma: tokens drafted.
        tokens: expected, the verifier's own among them.
        outcomes: verdicts whose drafts, made ahead, are reckoned with; 0: none.
        hit_rate: share of rounds whose verdict was among them.
        drafting: ms until the first of these drafts is done, made beside a pass from its begin.
        refresh_share: of rounds, those whose pass refreshes the retrieved cache.
        refresh_ms: what such a round takes longer.
    """

    gamma: int
    verification: PassTime
    draft: Work
    ms: float
    tokens: float
    outcomes: int
    hit_rate: float
    drafting: float
    refresh_share: float
    refresh_ms: float

    @property
    def ms_per_token(self) -> float:
        return self.ms / self.tokens


@functools.lru_cache(maxsize=1024)
def expected_tokens(acceptance: float, drafted: int) -> float:
    """Tokens of a round that drafts `drafted` ones: 1 + α + … + α^γ (arXiv 2211.17192, equation 1)."""
    return sum(acceptance**accepted for accepted in range(drafted + 1))


@functools.lru_cache(maxsize=1024)
def outcome_chances(acceptance: float, gamma: int) -> tuple[float, ...]:
    """Chances of the verdicts that can be guessed, the likeliest first.

    One is that all is accepted and the token after it is the drafter's own: α^γ·α. The others are rejections
    at the first, second … token, α^j·(1−α) each, whose token is guessed from the runner-up.
    """
    rejected = (acceptance**place * (1 - acceptance) * RUNNER_UP_HITS for place in range(gamma))
    return tuple(sorted((acceptance ** (gamma + 1), *rejected), reverse=True))


def attention_rate(measured: Sequence[AttentionRate], queries: int) -> float:
    """GB/s of KV at `queries` a key head: linear between measurements, as 1/queries beyond the last."""
    first, last = measured[0], measured[-1]
    if queries <= first.queries:
        return first.rate
    if queries >= last.queries:
        return last.rate * last.queries / queries
    upper = next(index for index, rate in enumerate(measured) if rate.queries >= queries)
    low, high = measured[upper - 1], measured[upper]
    share = (queries - low.queries) / (high.queries - low.queries)
    return low.rate + share * (high.rate - low.rate)


def _late(verification: PassTime, waited: float) -> float:
    """ms of a round whose draft was awaited: meanwhile the link goes on as far as the ring has room."""
    return max(verification.after_ring_filled, verification.ms - waited) + waited


class Predictor:
    """Times of what a request runs; in ms."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self._target = request.target
        self._token_bytes = request.target.token_bytes
        self._layer_token_bytes = request.target.layer_token_bytes
        self._dense_work: dict[int, Work] = {}  # by queries: a plan asks for the same again and again

    def step(self, shape: ModelShape, queries: int, entries: int, *, split: bool, graphs: bool) -> Work:
        """A model over `queries` tokens and a bounded cache of `entries`.

        Args:
            split: over all GPUs; else the first one runs it.
            graphs: launched as one graph, on a GPU.
        """
        request, host = self.request, self.request.hardware.host
        flops = queries * shape.step_flops
        kv_bytes = entries * shape.token_bytes
        if request.in_place:
            weights = max(shape.step_bytes / host.memory_rate, flops / host.compute_rate)
            attention = kv_bytes / attention_rate(host.attention, queries * shape.group)
            return Work((weights + attention) / 1e6, shape.layers * host.launch_ms)
        parts = request.parts if split else 1
        slowest = Work()
        for gpu in request.hardware.gpus[:parts]:
            reading = (shape.step_bytes + kv_bytes) / parts / gpu.memory_rate / 1e6
            computing = flops / parts / gpu.compute_rate / 1e9
            launch = shape.layers * gpu.launch_ms * (GRAPH_LAUNCH_SHARE if graphs else 1)
            slowest = max(slowest, Work(max(reading, computing), launch), key=lambda work: work.ms)
        reducing = 2 * shape.layers * ALL_REDUCE_MS if parts > 1 else 0.0
        return Work(slowest.busy_ms + reducing, slowest.launch_ms)

    @property
    def outcomes(self) -> range:
        """Of how many verdicts the drafts made ahead may be reckoned with; 0 where none are."""
        request = self.request
        ahead = request.config.offload.ahead if request.levels and not request.in_place else 0
        return range(1, 1 + min(ahead, MOST_OUTCOMES)) if ahead else range(1)

    def draft(self, gamma: int) -> Work:
        """Drafting `gamma` tokens for the full cache through all levels below it."""
        return self._drafting(len(self.request.levels) - 1, gamma)

    def _drafting(self, index: int, count: int) -> Work:
        """`count` tokens of one level, which itself verifies what the level below it drafts."""
        if index < 0 or count == 0:
            return Work()
        request, level = self.request, self.request.levels[index]
        if level == LOOKUP:
            return Work()
        small = request.draft if level == DRAFT_STREAMING else None
        shape = small or self._target
        config = request.config
        streaming = config.draft.sinks + config.draft.window
        bounded = streaming if level in (DRAFT_STREAMING, TARGET_STREAMING) else config.retrieval.budget
        below = config.speculation.gamma1 if index > 0 else 0
        accepted = request.acceptance(request.levels[index - 1]) if index > 0 else 0.0
        entries = min(bounded, request.context)
        one = self.step(shape, below + 1, entries, split=small is None, graphs=request.graphs)
        return (one + self._drafting(index - 1, below)).times(count / expected_tokens(accepted, below))

    def verification(self, placement: Placement, gamma: int) -> PassTime:
        """A pass over the full cache with `gamma` drafted tokens behind the last one."""
        request, target = self.request, self._target
        queries = gamma + 1
        dense = self.dense(queries)
        if request.in_place:
            return self._verification_in_place(dense, queries)
        host, gpus, parts = request.hardware.host, request.hardware.gpus, request.parts
        cpu_bytes = placement.cpu_tokens * self._token_bytes
        streamed_bytes = placement.streamed_tokens * self._token_bytes
        both = cpu_bytes > 0 and streamed_bytes > 0
        # A layer's pages can be released only once its queries are there: meanwhile the link fills what is
        # left of the ring, and a buffer is being read.
        head = self.head_ms(dense)
        dense_layer = (dense.ms - head) / target.layers
        layer_bytes = streamed_bytes / target.layers / parts
        segment = placement.segment_tokens * self._layer_token_bytes / parts
        within = min(layer_bytes, (placement.ring_buffers - 1) * segment)
        # Before a pass begins, every buffer may be filled, with one of the segments of a layer.
        segments = max(1, -(-placement.streamed_tokens // placement.segment_tokens))
        before = placement.ring_buffers * layer_bytes / segments
        link = ahead = memory_ahead = 0.0
        if streamed_bytes:
            rate = min(gpu.to_device_rate for gpu in gpus) * 1e6
            rate *= host.link_beside_attention if both else 1.0
            waiting = target.layers * (dense_layer + (layer_bytes - within) / rate)
            link = max(target.layers * layer_bytes / rate + dense_layer, waiting)
            # A full ring stands still until its first buffer is read, and behind the last segment comes the
            # output head. However much is there already, each layer has to be computed.
            segment_tokens = min(placement.segment_tokens, placement.streamed_tokens)
            edges = head + 2 * self._gpu_attention(segment_tokens, queries) / target.layers
            link += max(0.0, edges - before / rate)  # longer than the ring lasts
            ahead = max(0.0, min(before / rate - edges, link - dense.ms - dense_layer))
            memory_ahead = max(0.0, min(parts * before, streamed_bytes) / host.memory_rate / 1e6 - edges)
        cpu = 0.0
        if cpu_bytes:
            rate = attention_rate(host.attention, queries * target.group)
            rate *= host.attention_beside_link if both else 1.0
            cpu = dense.ms + cpu_bytes / rate / 1e6 + target.layers * self._exchange_ms(queries)
        moved = streamed_bytes + cpu_bytes
        return PassTime(
            link=link,
            cpu_attention=cpu,
            host_memory=moved / host.memory_rate / 1e6 + (dense_layer if moved else 0.0),
            dense=dense,
            attention=self._gpu_attention(placement.resident_tokens + placement.streamed_tokens, queries),
            busy_at_most=dense.busy_ms + self._gpu_attention(request.context, queries),
            in_place=False,
            streamed_share=placement.streamed_tokens / request.context,
            cpu_share=placement.cpu_tokens / request.context,
            link_ahead=ahead,
            host_memory_ahead=memory_ahead,
        )

    def dense(self, queries: int) -> Work:
        """The target's work in a pass of `queries` tokens, besides attention over the context."""
        if queries not in self._dense_work:
            self._dense_work[queries] = self.step(self._target, queries, 0, split=True, graphs=False)
        return self._dense_work[queries]

    def head_ms(self, dense: Work) -> float:
        """Of `dense`, what comes behind the last layer."""
        target = self._target
        share = target.embedding_parameters / (target.embedding_parameters + target.body_parameters)
        return share * dense.busy_ms

    def refresh(self) -> Refresh:
        """A refresh of the retrieved cache: its mean keys are read, its entries are read and written."""
        request, host = self.request, self.request.hardware.host
        mean_keys = request.context // request.config.retrieval.chunk * self._token_bytes / 2
        entries = request.config.retrieval.budget * self._token_bytes
        scoring = mean_keys / host.memory_rate / 1e6
        if request.in_place:
            copying = 2 * entries / host.memory_rate / 1e6
            return Refresh(Work(scoring + copying, self._target.layers * host.launch_ms))
        memory_rate = min(gpu.memory_rate for gpu in request.hardware.gpus)
        link_rate = min(gpu.to_device_rate for gpu in request.hardware.gpus)
        own = entries / request.parts
        return Refresh(Work(2 * own / memory_rate / 1e6), scoring, own / link_rate / 1e6)

    def refresh_share(self, tokens: float) -> float:
        """Of passes that yield `tokens` each, those that refresh the retrieved cache."""
        retrieval = self.request.config.retrieval
        policy = retrieval.refresh
        if not self.request.retrieves or self.request.context <= retrieval.budget:
            return 0.0
        if policy.kind == "acceptance":
            return 0.0  # how often it falls too low is not known beforehand
        return 1 / max(1, math.ceil(policy.value / tokens))

    def _verification_in_place(self, dense: Work, queries: int) -> PassTime:
        host = self.request.hardware.host
        rate = attention_rate(host.attention, queries * self._target.group)
        attention = self.request.context * self._token_bytes / rate / 1e6
        busy = dense.busy_ms + attention
        return PassTime(0.0, attention, 0.0, dense, attention, busy, in_place=True)

    def _exchange_ms(self, queries: int) -> float:
        """A layer's queries on their way to the CPU, and its results with their log-sum-exp back."""
        target, gpus = self._target, self.request.hardware.gpus
        rows = queries * target.heads / len(gpus)
        sent, received = rows * target.head_dim * target.dtype.itemsize, 4 * rows
        return EXCHANGE_MS + max(
            sent / gpu.to_host_rate / 1e6 + (sent + received) / gpu.to_device_rate / 1e6 for gpu in gpus
        )

    def _gpu_attention(self, tokens: int, queries: int) -> float:
        """The GPUs over `tokens` of the context, wherever they came from."""
        target, parts = self._target, self.request.parts
        flops = target.layers * target.attention_flops * tokens * queries / parts
        kv_bytes = tokens * self._token_bytes / parts
        return max(
            max(kv_bytes / gpu.memory_rate / 1e6, flops / gpu.compute_rate / 1e9)
            for gpu in self.request.hardware.gpus
        )

    def round(self, gamma: int, verification: PassTime, draft: Work, outcomes: int) -> RoundTime:
        """A round with `gamma` drafted tokens, drafted ahead for `outcomes` of the last one's verdicts.

        One after the other, the likeliest first, until the pass is over. What is reckoned for a verdict that
        found its draft begun may be more than for one that did not: then fewer `outcomes` say what happens.
        """
        acceptance = self.request.acceptance(self.request.levels[-1]) if self.request.levels else 0.0
        tokens = expected_tokens(acceptance, gamma)
        outcomes = outcomes if gamma else 0
        chances = outcome_chances(acceptance, gamma)[:outcomes]
        share = self.refresh_share(tokens)
        ms, drafting = self._round_ms(gamma, verification, draft, chances)
        longer = 0.0
        if share:
            longer = self._refresh_ms(gamma, verification, draft, chances, ms)
        return RoundTime(
            gamma,
            verification,
            draft,
            ms + share * longer,
            tokens,
            outcomes,
            sum(chances),
            drafting,
            share,
            longer,
        )

    def _refresh_ms(
        self, gamma: int, verification: PassTime, draft: Work, chances: Sequence[float], ms: float
    ) -> float:
        """What a round with a refresh takes longer than one of `ms` without."""
        request, refresh = self.request, self.refresh()
        if request.in_place or not request.config.offload.refresh_from_stream:
            return refresh.work.ms + refresh.scoring + refresh.link  # gathered between two passes
        refreshing = verification.refreshing(refresh, self._target.layers)
        return self._round_ms(gamma, refreshing, draft, chances)[0] - ms

    def _round_ms(
        self, gamma: int, verification: PassTime, draft: Work, chances: Sequence[float]
    ) -> tuple[float, float]:
        """ms of a round, and until the first draft made ahead is done.

        Args:
            chances: of the verdicts that are drafted ahead for.
        """
        if not chances:
            return _late(verification, draft.ms), draft.ms
        beside = self.beside_drafting(verification)
        # A step of another draft that is under way is done first.
        ms = (1 - sum(chances)) * _late(beside, draft.ms + self.step_ms(gamma, draft) / 2)
        done = [self.drafted_ahead(beside, number * draft.ms) for number in range(1, len(chances) + 1)]
        for chance, drafted in zip(chances, done, strict=True):
            ms += chance * max(beside.ms, drafted)
        return ms, done[0]

    def beside_drafting(self, verification: PassTime) -> PassTime:
        """The same pass while drafts are made: it goes first."""
        return verification

    def drafted_ahead(self, verification: PassTime, drafting: float) -> float:
        """ms from a pass's begin until `drafting` ms of drafts are done, made beside it and after it.

        The GPU works for the pass as well: reckoned with all of the context, so that no plan looks better for
        attending less of it there.
        """
        return drafting + verification.busy_at_most

    def step_ms(self, gamma: int, draft: Work) -> float:
        """ms of one step of a draft of `gamma` tokens: a round of the level that drafts, or its one pass."""
        levels, speculation = self.request.levels, self.request.config.speculation
        if len(levels) < 2:
            return draft.ms / gamma
        yielded = expected_tokens(self.request.acceptance(levels[-2]), speculation.gamma1)
        return draft.ms * min(1.0, yielded / gamma)

    def bottleneck(self, best: RoundTime) -> str:
        """What would have to be faster first for a shorter round."""
        verification, draft, dense = best.verification, best.draft, best.verification.dense
        if self.request.in_place:
            lanes = {
                "cpu attention": verification.attention,
                "cpu compute": dense.busy_ms,
                "draft": draft.busy_ms,
                "launch": dense.launch_ms + draft.launch_ms,
            }
            return max(lanes, key=lambda name: lanes[name])
        if best.drafting > verification.ms:
            return "launch" if draft.launch_ms > draft.busy_ms else "draft"
        gpu = "launch" if dense.launch_ms > dense.busy_ms + verification.attention else "gpu compute"
        lanes = {
            "link": verification.link,
            "cpu attention": verification.cpu_attention,
            "host memory": verification.host_memory,
            gpu: verification.processor,
        }
        return max(lanes, key=lambda name: lanes[name])

    def prefill_ms(self) -> float:
        """Reading the prompt, layer by layer; its KV crosses the links to the host meanwhile."""
        request, target = self.request, self._target
        tokens, parts = request.context, request.parts
        products = 2 * target.body_parameters * tokens
        # Causal: half of all pairs; of the last layer only the KV is needed.
        attention = (target.layers - 1) * target.attention_flops * tokens**2 / 2
        host = request.hardware.host
        chunks = -(-tokens // request.config.prefill.chunk)
        if request.in_place:
            flops = products + attention / PREFILL_ATTENTION_SHARE["cpu"]
            return flops / host.compute_rate / 1e6 + chunks * target.layers * host.launch_ms
        slowest = 0.0
        for gpu in request.hardware.gpus:
            flops = (products + attention / PREFILL_ATTENTION_SHARE["gpu"]) / parts
            computing = flops / gpu.compute_rate / 1e9
            if parts > 1:
                exchanged = 2 * target.layers * tokens * target.hidden * target.dtype.itemsize
                computing += exchanged / gpu.to_host_rate / 1e6
            writing = tokens * self._token_bytes / parts / gpu.to_host_rate / 1e6
            launching = chunks * target.layers * gpu.launch_ms
            slowest = max(slowest, computing, writing, launching)
        return slowest
