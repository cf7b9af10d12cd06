"""How long passes, drafts, rounds and the prefill take, from a machine's figures.

A pass over the full cache has lanes that run side by side: the links, the CPU's attention, the GPU that
computes, the attention of other GPUs, and the host memory that links and CPU both read. The slowest sets the
pace. Without a GPU the CPU does everything, one thing after another. All times are in ms, all sizes in bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from offload_rt.config import DRAFT_STREAMING, HEAD, SOURCES, TARGET_RETRIEVED, TARGET_SHARED
from offload_rt.drafting.shapes import DraftShape
from offload_rt.expectations import LATER_CHOICES, expected_tokens
from offload_rt.machine.hardware import AttentionRate, Gpu, Host
from offload_rt.planning.placement import SCORE_BYTES, Placement, PlanRequest
from offload_rt.planning.shapes import ModelShape, head_shape

GRAPH_LAUNCH_SHARE = 0.1  # of launching one by one, where a step is a CUDA graph
EXCHANGE_MS = 0.04  # a layer: what goes to the CPU or another GPU and comes back, besides the bytes
# Of rejections, those whose token is the draft's runner-up. The demo pair, greedy at 16K tokens of three
# books: 49 of 68 where the target drafted over retrieved KV, 129 of 358 where the small model did.
RUNNER_UP_HITS = 0.5
MOST_OUTCOMES = 4  # that are drafted ahead for
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
    drafted: DraftShape  # that the pass verifies
    dense: Work  # the processor's work besides attention over the context
    attention: float  # of that processor, over its share of the context
    link: float = 0.0  # of the links: until the last streamed segment is attended
    cpu_attention: float = 0.0  # until the CPU's share of the last layer is merged
    other_gpus: float = 0.0  # until the slowest one's
    host_memory: float = 0.0  # links and CPU read what they send and attend, at the memory's rate
    link_ahead: float = 0.0  # how much of `link` may happen before the pass, into the ring
    host_memory_ahead: float = 0.0  # and of `host_memory`

    @property
    def gamma(self) -> int:
        """Tokens of the draft."""
        return self.drafted.size

    @property
    def processor(self) -> float:
        return self.dense.ms + self.attention

    @property
    def ms(self) -> float:
        return max(self.link, self.cpu_attention, self.other_gpus, self.host_memory, self.processor)

    def after(self, waited: float) -> float:
        """ms of the pass where the link had `waited` ms before it to fill the ring."""
        link, memory = self.link - self.link_ahead, self.host_memory - self.host_memory_ahead
        others = max(self.cpu_attention, self.other_gpus, self.processor)
        return max(link, others, memory, self.ms - waited)

    def refreshing(self, refresh: Refresh, apart: float) -> PassTime:
        """The same pass while the retrieved cache takes its entries from it.

        Args:
            apart: share of the context that CPU and other GPUs attend: its entries cross the link apart.
        """
        work = refresh.work
        # The link goes on meanwhile, and waits for no more than one layer's work.
        waited = work.ms / self.placement.shape.layers if self.link else 0.0
        return replace(
            self,
            dense=self.dense + work,
            link=self.link + waited + apart * refresh.link,
            cpu_attention=self.cpu_attention + work.ms if self.cpu_attention else 0.0,
            other_gpus=self.other_gpus + work.ms if self.other_gpus else 0.0,
            host_memory=self.host_memory + refresh.scoring,
        )


@dataclass(frozen=True)
class RoundTime:
    """An expected round."""

    verification: PassTime
    draft: Work  # all drafting for it
    ms: float
    tokens: float  # expected, the verifier's own among them
    chances: tuple[float, ...]  # of the verdicts that are drafted for ahead of time
    refresh_share: float  # share of rounds whose pass refreshes the retrieved cache
    refresh_ms: float  # how much longer such a round takes

    @property
    def ms_per_token(self) -> float:
        return self.ms / self.tokens


@functools.lru_cache(maxsize=1024)
def outcome_chances(acceptance: float, gamma: int) -> tuple[float, ...]:
    """Chances of the verdicts that can be guessed, the likeliest first.

    One is that all tokens are accepted and the next one is the drafter's own: α^γ·α. The others are
    rejections at the first, second … token, α^j·(1−α) each, where the runner-up is guessed.
    """
    rejected = (acceptance**place * (1 - acceptance) * RUNNER_UP_HITS for place in range(gamma))
    return tuple(sorted((acceptance ** (gamma + 1), *rejected), reverse=True))


def attention_rate(measured: Sequence[AttentionRate], queries: int) -> float:
    """GB/s of KV at `queries` a key head: linear between measurements, as 1/queries beyond the last."""
    for low, high in pairwise(measured):
        if queries < high.queries:
            share = max(0, queries - low.queries) / (high.queries - low.queries)
            return low.rate + share * (high.rate - low.rate)
    most = measured[-1]
    return most.rate * most.queries / max(queries, most.queries)


class Predictor:
    """Times of what a request runs."""

    gpu: Gpu  # where there is one

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.config = request, request.config
        self.target, self.host = request.target, request.hardware.host
        self.processor: Gpu | Host = self.host  # what decodes
        if not request.in_place:
            self.processor = self.gpu = request.hardware.gpus[0]

    def outcomes(self, drafted: DraftShape) -> range:
        """For how many verdicts on such a draft one may draft ahead of time; 0 alone where for none."""
        levels = self.request.levels
        # What may follow a tree is not guessed, nor what a source finds.
        guessed = drafted.kind == "chain" and levels and levels[-1] not in SOURCES
        ahead = self.config.offload.ahead if guessed and not self.request.in_place else 0
        return range(1, 1 + min(ahead, MOST_OUTCOMES)) if ahead else range(1)

    def step(self, shape: ModelShape, queries: int, entries: int = 0, graph: bool = False) -> Work:
        """A model over `queries` tokens and a bounded cache of `entries`, perhaps launched as one `graph`."""
        flops, kv_bytes = 2 * queries * shape.step_parameters, entries * shape.token_bytes
        if self.request.in_place:
            products = max(self.host.read_ms(shape.step_bytes), self.host.compute_ms(flops))
            attention = self._cpu_attention(shape, entries, queries)
            return Work(products + attention, shape.layers * self.host.launch_ms)
        gpu, elsewhere = self.gpu, self.request.elsewhere if shape is self.target else 0
        busy = max(gpu.read_ms(shape.step_bytes + kv_bytes), gpu.compute_ms(flops)) + elsewhere * EXCHANGE_MS
        launching = GRAPH_LAUNCH_SHARE if graph and not elsewhere else 1
        return Work(busy, shape.layers * gpu.launch_ms * launching)

    def draft(self, shape: DraftShape) -> Work:
        """Drafting for the full cache, through all levels below it."""
        levels = self.request.levels
        if len(levels) == 1 and levels[0] not in SOURCES:  # several nodes a step
            return self._level_step(levels[0], shape.per_pass) * shape.depth
        token = Work()  # of a level, whose steps verify what the level below it drafts
        for index, level in enumerate(levels):
            below = self.request.speculation.gamma1 if index else 0
            if level not in SOURCES:
                step = self._level_step(level, below + 1) + token * below
                token = step * (1 / self._step_tokens(index))
        return token * shape.size

    def _step_tokens(self, index: int) -> float:
        """Tokens that a step of a level is expected to yield."""
        if index == 0:
            return 1.0
        below = self.request.levels[index - 1]
        return expected_tokens(self.request.acceptance(below), self.request.speculation.gamma1)

    def _level_step(self, level: str, queries: int) -> Work:
        """A pass of one level's model over its own cache."""
        request, kept = self.request, self.config.draft
        if level == HEAD:
            return self.step(head_shape(self.target), queries)
        if level == TARGET_SHARED:  # the CPU attends to all of the text
            over_text = self._cpu_attention(self.target, request.context, queries)
            if not request.in_place:
                over_text /= self.host.attention_beside_link
                over_text += self.target.layers * self._exchange_ms(queries)
            return self.step(self.target, queries) + Work(over_text)
        shape = request.draft if level == DRAFT_STREAMING else None
        entries = request.retrieved_entries if level == TARGET_RETRIEVED else kept.sinks + kept.window
        return self.step(shape or self.target, queries, min(entries, request.context), graph=True)

    def dense(self, queries: int) -> Work:
        """The target's work in a pass of `queries` tokens, besides attention over the context."""
        return self.step(self.target, queries)

    def head_ms(self, dense: Work) -> float:
        """Of `dense`, the output head behind the last layer."""
        return self.target.embedding_parameters / self.target.step_parameters * dense.busy_ms

    def verification(self, placement: Placement, drafted: DraftShape) -> PassTime:
        """A pass over the full cache with a draft behind the last token."""
        host, queries = self.host, drafted.size + 1
        dense = self.dense(queries)
        if self.request.in_place:
            return PassTime(placement, drafted, dense, self._attention(self.request.context, queries))
        link = link_ahead = memory_ahead = cpu = others = memory = 0.0
        if placement.streamed_bytes:
            link, link_ahead, memory_ahead = self._link_lane(placement, dense, queries)
        if placement.cpu_tokens:
            beside_link = host.attention_beside_link if placement.streamed_bytes else 1.0
            attending = self._cpu_attention(self.target, placement.cpu_tokens, queries) / beside_link
            cpu = dense.ms + attending + self.target.layers * self._exchange_ms(queries)
        for card, gpu in zip(placement.cards, self.request.other_gpus, strict=True):
            if card.tokens:
                attending = self._gpu_attention(gpu, card.tokens, queries)
                others = max(others, dense.ms + attending + self.target.layers * self._exchange_ms(queries))
        if moved := placement.streamed_bytes + placement.cpu_attended_bytes:
            memory = host.read_ms(moved) + self._dense_layer(dense)
        own = self._attention(placement.resident_tokens + placement.streamed_tokens, queries)
        return PassTime(placement, drafted, dense, own, link, cpu, others, memory, link_ahead, memory_ahead)

    def _dense_layer(self, dense: Work) -> float:
        return (dense.ms - self.head_ms(dense)) / self.target.layers

    def _link_lane(self, placement: Placement, dense: Work, queries: int) -> tuple[float, float, float]:
        """`link`, `link_ahead` and `host_memory_ahead` of a pass."""
        # Links that stream shares of their rates fill their rings as one link would fill one ring.
        over_links = placement.streamed_tokens, *(card.streamed_tokens for card in placement.cards)
        gpus = [gpu for gpu, tokens in zip(self.request.hardware.gpus, over_links, strict=True) if tokens]
        host, layers, ring = self.host, self.target.layers, placement.ring_buffers * len(gpus)
        layer, layer_bytes = self._dense_layer(dense), placement.streamed_bytes / layers
        beside_attention = host.link_beside_attention if placement.cpu_tokens else 1.0
        rate = sum(gpu.to_device_rate for gpu in gpus) * 1e6 * beside_attention
        segment_bytes = placement.segment_tokens * self.target.layer_token_bytes
        # A layer's segments are attended only once its queries are there. Meanwhile the link fills what is
        # left of the ring, while one buffer is being read.
        meanwhile = min(layer_bytes, (ring - len(gpus)) * segment_bytes)
        link = max(layers * layer_bytes / rate + layer, layers * (layer + (layer_bytes - meanwhile) / rate))
        # Before the pass every buffer may be filled, with one of a layer's segments. A full ring stands still
        # until its first buffer is read, and the output head comes behind the last segment.
        segments = sum(-(-tokens // placement.segment_tokens) for tokens in over_links)
        filled = ring * layer_bytes / segments
        segment = self._attention(min(placement.segment_tokens, max(over_links)), queries)
        edges = self.head_ms(dense) + 2 * segment / layers
        link += max(0.0, edges - filled / rate)
        # However much is there already, each layer has to be computed.
        link_ahead = max(0.0, min(filled / rate - edges, link - dense.ms - layer))
        filled_bytes = min(filled, placement.streamed_bytes)
        return link, link_ahead, max(0.0, host.read_ms(filled_bytes) - edges)

    def _attention(self, tokens: int, queries: int) -> float:
        """The processor that decodes over `tokens` of the context, wherever they come from."""
        if self.request.in_place:
            return self._cpu_attention(self.target, tokens, queries)
        return self._gpu_attention(self.gpu, tokens, queries)

    def _gpu_attention(self, gpu: Gpu, tokens: int, queries: int) -> float:
        flops = self.target.layers * self.target.attention_flops * tokens * queries
        return max(gpu.read_ms(tokens * self.target.token_bytes), gpu.compute_ms(flops))

    def _cpu_attention(self, shape: ModelShape, tokens: int, queries: int) -> float:
        rate = attention_rate(self.host.attention, queries * shape.group)
        return tokens * shape.token_bytes / rate / 1e6

    def _exchange_ms(self, queries: int) -> float:
        """A layer's queries on their way to the CPU or another GPU, results and log-sum-exp back."""
        target, gpu = self.target, self.gpu
        rows = queries * target.heads
        sent, received = rows * target.head_dim * target.dtype.itemsize, 4 * rows
        return EXCHANGE_MS + sent / gpu.to_host_rate / 1e6 + (sent + received) / gpu.to_device_rate / 1e6

    def refresh(self) -> Refresh:
        """A refresh of the retrieved cache: scores or mean keys are read, entries are read and written."""
        retrieval, target = self.config.retrieval, self.target
        chunk_bytes = target.layers * target.kv_heads * SCORE_BYTES
        if retrieval.select == "mean_keys":
            chunk_bytes = target.token_bytes // 2
        scoring = self.host.read_ms(self.request.context // retrieval.chunk * chunk_bytes)
        entries = retrieval.budget * target.token_bytes
        copying = 2 * self.processor.read_ms(entries)
        if self.request.in_place:
            return Refresh(Work(copying, target.layers * self.host.launch_ms), scoring, 0.0)
        return Refresh(Work(copying), scoring, entries / self.gpu.to_device_rate / 1e6)

    def refresh_share(self, tokens: float) -> float:
        """Of passes that yield `tokens` each, those that refresh the retrieved cache."""
        request, retrieval = self.request, self.config.retrieval
        # How often acceptance falls too low is not known beforehand.
        if not request.retrieves or retrieval.refresh.kind == "acceptance":
            return 0.0
        # Nothing is chosen while everything is held.
        held = max(0, retrieval.budget - request.context) / max(1, request.new_tokens)
        return max(0.0, 1 - held) / max(1, math.ceil(retrieval.refresh.value / tokens))

    def round(self, verification: PassTime, draft: Work, outcomes: int) -> RoundTime:
        """A round that is drafted while the pass before it runs, for `outcomes` of that pass's verdicts.

        The likeliest comes first, until the pass is over. Drafting for fewer can be better: a verdict whose
        draft has only begun waits longer than one without.
        """
        request, drafted = self.request, verification.drafted
        acceptance = request.acceptance(request.levels[-1]) if request.levels else 0.0
        tokens = drafted.expected_tokens((acceptance, *LATER_CHOICES))
        chances = outcome_chances(acceptance, drafted.depth)[: outcomes if drafted.depth else 0]
        ms = self.round_ms(verification, draft, chances)
        share, longer = self.refresh_share(tokens), 0.0
        if share:
            refresh = self.refresh()
            if request.refreshes_from_stream:
                placement = verification.placement
                apart = placement.cpu_tokens + sum(card.tokens for card in placement.cards)
                refreshing = verification.refreshing(refresh, apart / request.context)
                longer = self.round_ms(refreshing, draft, chances) - ms
            else:  # between two passes
                longer = refresh.work.ms + refresh.scoring + refresh.link
        return RoundTime(verification, draft, ms + share * longer, tokens, chances, share, longer)

    def round_ms(self, verification: PassTime, draft: Work, chances: Sequence[float]) -> float:
        """A round that is drafted ahead for verdicts of such chances; without a refresh."""
        if not chances:
            return verification.after(draft.ms) + draft.ms
        # A verdict that was not drafted for waits for the step under way (a pass or round of the level that
        # drafts), and then for its own draft.
        step = draft.ms * min(1.0, self._step_tokens(len(self.request.levels) - 1) / verification.gamma)
        late = draft.ms + step / 2
        ms = (1 - sum(chances)) * (verification.after(late) + late)
        busy = self.busy_ms(verification)
        for number, chance in enumerate(chances, 1):
            ms += chance * max(verification.ms, busy + number * draft.ms)
        return ms

    def busy_ms(self, verification: PassTime) -> float:
        """What a pass takes from drafting beside it.

        The GPU is counted as if it attended all of the context, so that no plan looks better for attending
        less of it there.
        """
        busy = verification.dense.busy_ms + self._attention(self.request.context, verification.gamma + 1)
        if TARGET_SHARED in self.request.levels:  # drafting waits for the CPU, which has a share of the pass
            busy = max(busy, verification.cpu_attention)
        return busy

    def bottleneck(self, best: RoundTime) -> str:
        """What would have to become faster first for a shorter round."""
        verification, draft, dense = best.verification, best.draft, best.verification.dense
        drafted = draft.ms + (self.busy_ms(verification) if best.chances else 0.0)
        if self.request.in_place:
            lanes = {
                "cpu attention": verification.attention,
                "cpu compute": dense.busy_ms,
                "draft": draft.busy_ms,
                "launch": dense.launch_ms + draft.launch_ms,
            }
        elif drafted > verification.ms:
            return "launch" if draft.launch_ms > draft.busy_ms else "draft"
        else:
            launches = dense.launch_ms > dense.busy_ms + verification.attention
            lanes = {
                "link": verification.link,
                "cpu attention": verification.cpu_attention,
                "other gpus": verification.other_gpus,
                "host memory": verification.host_memory,
                "launch" if launches else "gpu compute": verification.processor,
            }
        return max(lanes, key=lambda lane: lanes[lane])

    def prefill_ms(self) -> float:
        """Reading the prompt, layer by layer; meanwhile its KV crosses the links to the host."""
        target, tokens = self.target, self.request.context
        products = 2 * (target.step_parameters - target.embedding_parameters) * tokens
        # Causal: half of all pairs. Of the last layer only the KV is needed.
        attention = (target.layers - 1) * target.attention_flops * tokens**2 / 2
        attention /= PREFILL_ATTENTION_SHARE["cpu" if self.request.in_place else "gpu"]
        computing = self.processor.compute_ms(products + attention)
        launching = -(-tokens // self.config.prefill.chunk) * target.layers * self.processor.launch_ms
        if self.request.in_place:
            return computing + launching
        sent = self.request.elsewhere * tokens * target.hidden * target.dtype.itemsize
        computing += sent / self.gpu.to_host_rate / 1e6 + sent / self.gpu.to_device_rate / 1e6
        writing = tokens * target.token_bytes / self.gpu.to_host_rate / 1e6
        return max(computing, writing, launching)
