"""How long passes, drafts, rounds and a prefill take, from a machine's figures.

A pass over the full cache has lanes that run beside each other: the links, the CPU's attention, the GPUs,
and the host's memory that both links and CPU read. The slowest sets the pace. Without a GPU one processor
does everything, one thing after another.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

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
MOST_OUTCOMES = 4  # verdicts that are drafted ahead for
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
        link_ahead: how much of `link` and of `host_memory` may happen before the pass, into the ring.
    """

    link: float
    cpu_attention: float
    host_memory: float
    dense: Work
    attention: float
    busy_at_most: float
    in_place: bool
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
        outcomes: verdicts that were drafted ahead for; 0: none.
        hit_rate: share of rounds whose verdict was among them.
        drafting: ms of the processor that drafts, at most, with what it does for the pass meanwhile.
    """

    gamma: int
    verification: PassTime
    draft: Work
    ms: float
    tokens: float
    outcomes: int
    hit_rate: float
    drafting: float

    @property
    def ms_per_token(self) -> float:
        return self.ms / self.tokens


@functools.lru_cache(maxsize=1024)
def expected_tokens(acceptance: float, drafted: int) -> float:
    """Tokens of a round that drafts `drafted` ones: 1 + α + … + α^γ (arXiv 2211.17192, equation 1)."""
    return sum(acceptance**accepted for accepted in range(drafted + 1))


@functools.lru_cache(maxsize=1024)
def hit_rate(acceptance: float, gamma: int, outcomes: int) -> float:
    """Chance that a verdict is one of the `outcomes` likeliest.

    The first is that all is accepted and the token after it is the drafter's own: α^γ·α. The others are
    rejections at the first, second … token, α^j·(1−α) each, whose token is guessed from the runner-up.
    """
    rejected = sum(acceptance**place for place in range(min(outcomes - 1, gamma))) * (1 - acceptance)
    return float(acceptance ** (gamma + 1) + RUNNER_UP_HITS * rejected)


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
        """For how many verdicts a round may be drafted ahead."""
        ahead = self.request.drafts_ahead and self.request.levels and not self.request.in_place
        return range(MOST_OUTCOMES + 1 if ahead else 1)

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
        dense = self._dense(queries)
        if request.in_place:
            return self._verification_in_place(dense, queries)
        host, gpus, parts = request.hardware.host, request.hardware.gpus, request.parts
        cpu_bytes = placement.cpu_tokens * self._token_bytes
        streamed_bytes = placement.streamed_tokens * self._token_bytes
        both = cpu_bytes > 0 and streamed_bytes > 0
        # A layer's pages can be released only once its queries are there: meanwhile the link fills what is
        # left of the ring, and a buffer is being read.
        dense_layer = dense.ms / target.layers
        layer_bytes = streamed_bytes / target.layers / parts
        segment = placement.segment_tokens * self._layer_token_bytes / parts
        ahead_bytes = min(layer_bytes, (placement.ring_buffers - 1) * segment)
        link = ahead = 0.0
        if streamed_bytes:
            rate = min(gpu.to_device_rate for gpu in gpus) * 1e6
            rate *= host.link_beside_attention if both else 1.0
            layer = max(layer_bytes / rate, dense_layer + (layer_bytes - ahead_bytes) / rate)
            link = target.layers * layer + dense_layer
            # However much is there already, each layer has to be computed.
            ahead = min(ahead_bytes / rate, link - dense.ms - dense_layer)
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
            link_ahead=ahead,
            host_memory_ahead=parts * ahead_bytes / host.memory_rate / 1e6,
        )

    def _dense(self, queries: int) -> Work:
        """The target's work besides attention over the context."""
        if queries not in self._dense_work:
            self._dense_work[queries] = self.step(self._target, queries, 0, split=True, graphs=False)
        return self._dense_work[queries]

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
        """A round with `gamma` drafted tokens, drafted ahead for `outcomes` of the last one's verdicts."""
        acceptance = self.request.acceptance(self.request.levels[-1]) if self.request.levels else 0.0
        tokens = expected_tokens(acceptance, gamma)
        # While a draft is awaited, the link goes on as far as the ring has room.
        ms = max(verification.after_ring_filled, verification.ms - draft.ms) + draft.ms
        hits, drafting = 0.0, draft.ms
        if outcomes:
            hits = hit_rate(acceptance, gamma, outcomes)
            # The GPU works for the pass as well: reckoned with all of the context, so that no plan looks
            # better for attending less of it there.
            drafting = outcomes * draft.ms + verification.busy_at_most
            ms = hits * max(verification.ms, drafting) + (1 - hits) * ms
        return RoundTime(gamma, verification, draft, ms, tokens, outcomes, hits, drafting)

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
