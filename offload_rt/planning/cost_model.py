"""Predicts the times of passes, drafts, rounds and the prefill from a machine's figures.

A pass over the full cache has lanes that run side by side: the links, the CPU's attention, the GPU that
computes, the attention of other GPUs, and the host memory that links and CPU both read. The slowest decides.
Without a GPU the CPU does everything, one thing after another. All times are in ms, all sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from offload_rt.config.draft_shape import DraftShape
from offload_rt.config.priors import LATER_CHOICES, expected_tokens
from offload_rt.drafting.levels.base import Cost
from offload_rt.kernels.sizes import MOST_PACKED_QUERIES, PASS_ROWS, tile_rows
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.quantization import MOST_PAIRS, Quantization
from offload_rt.model.shape import PLANE_BITS, ModelShape
from offload_rt.planning.memory import MemoryBudget, Placement
from offload_rt.planning.request import PlanRequest
from offload_rt.system.hardware import AttentionRate, Gpu, ProductRate

GRAPH_LAUNCH_SHARE = 0.1
"""Time to launch a step as a CUDA graph, as a share of launching its kernels one by one."""
EXCHANGE_MS = 0.15
"""Time to send a layer's queries to the CPU or another GPU and to return the results: two threads wake, and
kernels cross the link between its copies. An estimate that no GPU has confirmed."""
LAYER_KERNELS = 45
"""Kernels of one decoder layer over a bounded cache: `launch_ms` is the time to launch that many."""
EXPERT_KERNELS = 14
"""Kernels of an expert in 4 bits whose weights are expanded: two products, what is around them."""
SEGMENT_CALLS = 14
"""CUDA calls for a streamed segment: two kernels that attend it, also where it is packed, four copies with a
kernel each, four calls for events."""
MASKED_ATTENTION_SHARE = 0.5
"""Share of the memory rate that masked attention reaches over a few thousand entries. An estimate."""
GATHER_SHARE = 0.7
"""Share of the link's rate at which a kernel gathers chunks from page-locked memory. An estimate."""
FUSED_ROWS = 64
"""Most rows whose products read quantised weights as they are stored, where none were measured; for more rows
weights are expanded first."""
PACKED_ATTENTION = 1.2
"""Time of the CPU's attention over packed pages, as a multiple of that over others. Measured on two cores:
1.1 to 1.35, most with few queries. Less is likely where more cores wait for memory."""
UNPACKING_KERNELS = 2
"""Kernels that unpack a segment, and put its pages side by side, for many queries."""
UNPACKING_SHARE = 0.8
"""Share of the memory rate at which a GPU unpacks pages to memory. An estimate."""
REGISTER_SHARE = 0.6
"""Share of the memory rate, and of the rate of products, at which a GPU attends to packed pages: it unpacks
them in registers. An estimate that no GPU has confirmed."""
PLANE_READS = {"gpu": (1.76, 1.18), "cpu": (2.0, 1.16)}
"""Bytes that take as long to read as a weight in two planes: from both, and from the draft plane. Measured on
two cores with AVX-512, of one token or two; for GPUs an estimate that none has confirmed."""
PACKING_SHARE = 0.15
"""Share of the memory rate at which a GPU packs the pages of a prompt: 0.3 s for those of Llama-2-7B at 127K
on an H200."""
STREAMING_SHARE = 0.98
"""Share of the link's rate that a stream reaches, which yields to small copies between its pieces."""
PIECES_COST = 0.03
"""Share of the time of a prefill that reading the prompt in pieces may take in addition."""
PREFILL_ATTENTION_SHARE = {"gpu": 0.6, "cpu": 0.9}
"""Rate of causal attention over a prompt, as a share of that of matrix products."""


@dataclass(frozen=True)
class PassTime:
    """Times in ms of one pass over the full cache by lane; without a GPU the processor's is the only lane."""

    placement: Placement
    shape: DraftShape  # the draft that the pass verifies
    dense: Cost  # the processor's work besides attention over the context
    attention: float  # of that processor, over its share of the context
    link: float = 0.0  # until the last streamed segment is attended
    cpu_attention: float = 0.0  # until the CPU's share of the last layer is merged
    other_gpus: float = 0.0  # until the share of the slowest other GPU is
    host_memory: float = 0.0  # links and CPU read what they send and attend, at the memory's rate
    link_ahead: float = 0.0  # of `link`, before the pass begins: all buffers but the last one read

    @property
    def gamma(self) -> int:
        """Tokens of the draft."""
        return self.shape.size

    @property
    def processor(self) -> float:
        return self.dense.ms + self.attention

    @property
    def ms(self) -> float:
        return self.after(0.0)

    def after(self, lead_ms: float) -> float:
        """Returns the time of the pass where the link had `lead_ms` before it to fill the ring."""
        link = self.link - min(lead_ms, self.link_ahead)
        return max(link, self.cpu_attention, self.other_gpus, self.host_memory, self.processor)


@dataclass(frozen=True)
class RoundTime:
    """An expected round."""

    verification: PassTime
    draft: Cost  # all drafting for it
    ms: float
    tokens: float  # expected, the verifier's own among them
    chances: tuple[float, ...]  # of the verdicts that are drafted for ahead of time
    refresh_share: float  # of rounds whose pass refreshes the retrieved cache
    refresh_ms: float  # how much longer such a round takes

    @property
    def ms_per_token(self) -> float:
        return self.ms / self.tokens


def attention_rate(measured: Sequence[AttentionRate], queries: int) -> float:
    """Returns GB/s of KV at `queries` per key head: linear between measurements, as 1/queries beyond them."""
    for low, high in pairwise(measured):
        if queries < high.queries:
            share = max(0, queries - low.queries) / (high.queries - low.queries)
            return low.rate + share * (high.rate - low.rate)
    last = measured[-1]
    return last.rate * last.queries / max(queries, last.queries)


def product_rates(
    measured: Sequence[ProductRate], quantization: Quantization | None
) -> Sequence[ProductRate]:
    """Returns the measured rates of a quantisation, by rising numbers of rows."""
    return [rate for rate in measured if quantization is not None and rate.quantization == quantization.name]


def product_rate(measured: Sequence[ProductRate], rows: int) -> float:
    """Returns billions of weights a second: times are linear between measurements, and beyond them."""
    times = [(measurement.rows, 1 / measurement.rate) for measurement in measured]
    for (fewer_rows, low), (more_rows, high) in pairwise(times):
        if rows <= more_rows:
            return 1 / (low + max(0, rows - fewer_rows) / (more_rows - fewer_rows) * (high - low))
    most_rows, longest = times[-1]
    return most_rows / rows / longest


class CostModel:
    """Predicts the times of passes, drafts and rounds of one request (a `levels.base.PassCosts`)."""

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.config = request, request.config
        self.memory = MemoryBudget(request)
        self.target, self.host = request.target, request.hardware.host
        self.processor = next(iter(request.hardware.gpus), self.host)  # what decodes
        self._ahead_ms: dict[tuple[DraftShape, int], list[float]] = {}

    def pass_cost(self, shape: ModelShape, queries: int, entries: int = 0, *, graph: bool = False) -> Cost:
        remote = self.memory.remote_mlps if shape.name == self.target.name else 0
        products = self._products(shape, queries)
        attending = self._attention(shape, entries, queries) + self._windows(shape, queries)
        if not self.request.in_place:
            attending /= MASKED_ATTENTION_SHARE
        states = self.processor.read_ms(2 * shape.state_bytes)  # read and written
        busy = products + attending + states + remote * EXCHANGE_MS
        graphed = graph and not (remote or self.request.in_place or shape.kinds.local)
        launching = self._launching(shape, queries)
        return Cost(busy, GRAPH_LAUNCH_SHARE * launching if graphed else launching)

    def pass_cost_on_two(self, shape: ModelShape, order: LayerOrder, queries: int, entries: int) -> Cost:
        # Two devices are no CUDA graph.
        whole = self.pass_cost(shape, queries, entries)
        first, second = self.request.hardware.gpus[:2]

        def block_ms(gpu: Gpu) -> float:
            weights = shape.attention_bytes
            products = max(gpu.read_ms(weights), gpu.compute_ms(2 * queries * weights / shape.dtype.itemsize))
            attending = self._gpu_attention(gpu, shape, entries, queries) / shape.paged_layers
            return products + attending / MASKED_ATTENTION_SHARE

        first_ms, second_ms, saved = block_ms(first), block_ms(second), 0.0
        experts = self._experts(shape, queries) / max(1, shape.expert_layers)
        mlp = first.read_ms(shape.mlp_bytes - shape.experts * shape.expert_bytes) + experts
        for group in order.groups:
            remote = len(order.remote.intersection(group))
            # The first device waits where its own layers of the group are done before the others arrive.
            beside = (len(group) - remote) * (first_ms + mlp)
            wait = max(0.0, EXCHANGE_MS + remote * second_ms - beside) if remote else 0.0
            saved += remote * first_ms - wait
        return Cost(whole.busy_ms - saved, whole.launch_ms)

    def _products(self, shape: ModelShape, rows: int) -> float:
        """Returns the ms of products of some rows with all weights of a shape."""
        processor, linear, experts = self.processor, shape.quantized_linear, self._experts(shape, rows)
        others = shape.step_parameters - shape.all_experts - linear
        if rates := product_rates(processor.products, shape.quantization):
            quantized_ms = linear / product_rate(rates, rows) / 1e6
            reading_ms = processor.read_ms(others * shape.dtype.itemsize)
            return experts + quantized_ms + max(reading_ms, processor.compute_ms(2 * rows * others))
        read = shape.step_bytes - shape.expert_layers * shape.experts * shape.expert_bytes
        if shape.planes:
            both, draft = PLANE_READS["cpu" if self.request.in_place else "gpu"]
            read += shape.split_parameters * ((draft if shape.draft_plane else both) - PLANE_BITS / 8)
        reading = processor.read_ms(read)
        expanding = self._expanding(shape, linear) if rows > FUSED_ROWS else 0.0
        return experts + expanding + max(reading, processor.compute_ms(2 * rows * (linear + others)))

    def _experts(self, shape: ModelShape, rows: int) -> float:
        """Returns the ms of products of some rows with the experts that they choose, in all layers.

        Quantised ones are gathered for each pair of a row and an expert; in large passes, they are expanded.
        """
        if not shape.experts:
            return 0.0
        size, pairs = shape.expert_bytes, rows * shape.chosen_experts
        read = shape.distinct_experts(rows) * size
        if shape.gathers_experts and pairs <= MOST_PAIRS:
            read = 3 * pairs * size
        elif shape.gathers_experts:
            weights = shape.expert_parameters / shape.experts
            read += 2 * shape.distinct_experts(rows) * weights * shape.dtype.itemsize
        flops = 2 * pairs * shape.expert_parameters / shape.experts
        computing = self.processor.compute_ms(shape.expert_layers * flops)
        return max(self.processor.read_ms(shape.expert_layers * read), computing)

    def _launching(self, shape: ModelShape, rows: int) -> float:
        """Returns the ms in which the kernels of a pass are launched one by one."""
        kernels: float = shape.layers * LAYER_KERNELS
        if shape.gathers_experts:
            pairs = rows * shape.chosen_experts
            of_layer = 2 * pairs if pairs <= MOST_PAIRS else EXPERT_KERNELS * shape.distinct_experts(rows)
            kernels += shape.expert_layers * of_layer
        return kernels / LAYER_KERNELS * self.processor.launch_ms

    def _expanding(self, shape: ModelShape, quantized: int) -> float:
        """Returns the ms in which so many quantised weights are expanded, and read again."""
        return self.processor.read_ms(2 * quantized * shape.dtype.itemsize)

    def host_attention_ms(self, tokens: int, queries: int) -> float:
        ms = self._store_attention(tokens, queries)
        if self.request.in_place:
            return ms
        return ms / self.host.attention_beside_link + self.target.paged_layers * EXCHANGE_MS

    def device_read_ms(self, size: float) -> float:
        return self.processor.read_ms(size)

    def host_read_ms(self, size: float) -> float:
        return self.host.read_ms(size)

    def gather_ms(self, size: float) -> float:
        gpus = self.request.hardware.gpus
        return size / (GATHER_SHARE * gpus[0].to_device_rate) / 1e6 if gpus else 0.0

    def draft(self, shape: DraftShape) -> Cost:
        """Returns the cost of a draft for the full cache, through all levels."""
        levels = self.request.levels
        if not shape.depth:
            return Cost()
        if len(levels) == 1:  # several nodes a step
            first = levels[0].pass_cost(self, shape.per_pass, first=True)
            return first + levels[0].pass_cost(self, shape.per_pass) * (shape.depth - 1)
        gamma, token = self.request.speculation.gamma1, Cost()
        yielded = 1.0  # tokens of a step of a level, which verifies what the level below it drafts
        for index, level in enumerate(levels):
            below = gamma if index else 0
            token = (level.pass_cost(self, below + 1) + token * below) * (1 / yielded)
            yielded = expected_tokens(level.acceptance(self.request), gamma)
        return token * shape.size

    def ahead_ms(self, shape: DraftShape, outcomes: int) -> list[float]:
        """Returns when drafts for several outcomes are there: all at once, if one level draws chains."""
        key = shape, outcomes
        if key not in self._ahead_ms:
            if len(self.request.levels) != 1 or shape.kind != "chain":
                draft = self.draft(shape).ms
                self._ahead_ms[key] = [count * draft for count in range(1, outcomes + 1)]
            else:
                level = self.request.levels[0]
                first, later = level.pass_cost(self, outcomes, first=True), level.pass_cost(self, outcomes)
                self._ahead_ms[key] = outcomes * [(first + later * (shape.depth - 1)).ms]
        return self._ahead_ms[key]

    def dense(self, queries: int) -> Cost:
        """Returns the cost of a target pass that verifies, without attention over the context.

        A GPU computes `PASS_ROWS` rows at a time where layers are dense.
        """
        target, cost = self.target, self.pass_cost(self.target, queries)
        if self.request.in_place or not target.dense:
            return cost
        products = -(-queries // PASS_ROWS) * self._products(target, PASS_ROWS)
        return cost + Cost(products - self._products(target, queries))

    def verification(self, placement: Placement, shape: DraftShape) -> PassTime:
        """Returns the times of a pass over the full cache that verifies a draft."""
        target, host, gpus, queries = self.target, self.host, self.request.hardware.gpus, shape.size + 1
        dense = self.dense(queries) + Cost(launch_ms=self._segment_launches(placement, queries))
        if self.request.in_place:
            attending = self._store_attention(self.request.context, queries)
            return PassTime(placement, shape, dense, attending)
        link = cpu = other_gpus = memory = ahead = 0.0
        share, exchanges = self.request.store_layout.stored_share, target.paged_layers * EXCHANGE_MS
        streamed = placement.streamed_bytes * share
        # The link streams beside all layers but the first; the last one attends what came last.
        layer = dense.ms / target.layers
        if streamed:
            rate = sum(gpu.to_device_rate for gpu in gpus)
            rate *= STREAMING_SHARE * (host.link_beside_attention if placement.cpu_tokens else 1.0)
            link = streamed / rate / 1e6 + layer
            segment = self.request.store_layout.layer_bytes(self.request.segment_tokens)
            filled = len(gpus) * segment * (self.config.store.ring_buffers - 1)
            ahead = min(streamed, filled) / rate / 1e6
        if placement.cpu_tokens:
            attending = self._store_attention(placement.cpu_tokens, queries)
            cpu = dense.ms + attending / (host.attention_beside_link if streamed else 1.0) + exchanges
        for tier, gpu in zip(placement.gpus, gpus[1:], strict=False):  # GPUs without a tier hold nothing
            if tier.tokens:
                packed = tier.streamed_tokens + placement.packed * tier.resident_tokens
                attending = self._tier_attention(gpu, tier.tokens, packed, queries)
                other_gpus = max(other_gpus, dense.ms + attending + exchanges)
        if moved := streamed + placement.cpu_attended_bytes * share:
            memory = host.read_ms(moved) + layer
        tokens = placement.resident_tokens + placement.streamed_tokens
        packed = placement.streamed_tokens + placement.packed * placement.resident_tokens
        own = self._tier_attention(gpus[0], tokens, packed, queries)
        return PassTime(placement, shape, dense, own, link, cpu, other_gpus, memory, ahead)

    def _segment_launches(self, placement: Placement, queries: int) -> float:
        """Returns the time in ms to launch attention over the segments that a pass streams.

        All resident tokens are one segment, whose kernels are among those of the layer, unless they are
        unpacked segment by segment. A part of a segment counts as a part, so that times along a line of
        shares have one valley.
        """
        if self.request.in_place:
            return 0.0
        streamed = placement.streamed_tokens
        calls = streamed / self.request.segment_tokens * SEGMENT_CALLS
        if self.request.store_layout.packed and queries * self.target.group > MOST_PACKED_QUERIES:
            unpacked = streamed + 2 * placement.packed * placement.resident_tokens
            calls += unpacked / self.request.segment_tokens * UNPACKING_KERNELS
        return self.target.paged_layers * calls / LAYER_KERNELS * self.processor.launch_ms

    def _attention(self, shape: ModelShape, tokens: int, queries: int) -> float:
        """Returns the ms in which the processor that decodes attends so many paged tokens, of any tier."""
        if isinstance(self.processor, Gpu):
            return self._gpu_attention(self.processor, shape, tokens, queries)
        return self._cpu_attention(shape, tokens, queries)

    def _store_attention(self, tokens: int, queries: int) -> float:
        """Returns the ms in which the CPU attends so many tokens of the target as they are stored."""
        ms = self._cpu_attention(self.target, tokens, queries)
        return ms * PACKED_ATTENTION if self.request.store_layout.packed else ms

    def _tier_attention(self, gpu: Gpu, tokens: int, packed: int, queries: int) -> float:
        """Returns the ms in which a GPU attends to tokens of the target, and takes their attention mass.

        Args:
            packed: how many of the tokens are in packed pages, if pages are packed at all.
        """
        rows, tile, unpacking = queries * self.target.group, tile_rows(self.target.head_dim), 0.0
        if not self.request.store_layout.packed:
            packed = 0
        elif rows > MOST_PACKED_QUERIES:
            packed, unpacking = 0, self._unpacking(gpu, packed)
        computed = -(-rows // tile) * tile / self.target.group  # queries, with what fills the last tile
        plain = self._gpu_attention(gpu, self.target, tokens - packed, computed)
        reading = gpu.read_ms(packed * self.target.token_bytes * self.request.store_layout.stored_share)
        flops = self.target.paged_layers * self.target.attention_flops * packed * computed
        return plain + unpacking + max(reading, gpu.compute_ms(flops)) / REGISTER_SHARE

    def _unpacking(self, gpu: Gpu, tokens: int) -> float:
        """Returns the ms in which a GPU unpacks so many tokens: it reads packed ones, and writes others."""
        layout = self.request.store_layout
        size = tokens * self.target.token_bytes * (1 + layout.stored_share)
        return gpu.read_ms(size) / UNPACKING_SHARE if layout.packed else 0.0

    def _gpu_attention(self, gpu: Gpu, shape: ModelShape, tokens: int, queries: float) -> float:
        flops = shape.paged_layers * shape.attention_flops * tokens * queries
        return max(gpu.read_ms(tokens * shape.token_bytes), gpu.compute_ms(flops))

    def _cpu_attention(self, shape: ModelShape, tokens: int, queries: int) -> float:
        rate = attention_rate(self.host.attention, queries * shape.group)
        return tokens * shape.token_bytes / rate / 1e6

    def _windows(self, shape: ModelShape, queries: int) -> float:
        """Returns the ms in which the processor that decodes attends the sliding windows of all layers."""
        size = shape.window_bytes(self.request.context)
        if isinstance(self.processor, Gpu):
            flops = shape.window_flops(self.request.context) * queries
            return max(self.processor.read_ms(size), self.processor.compute_ms(flops))
        return size / attention_rate(self.host.attention, queries * shape.group) / 1e6

    def round(self, verification: PassTime, draft: Cost) -> RoundTime:
        """Returns the times of a round whose draft is made ahead, beside the pass before it.

        The likeliest verdicts of that pass are drafted for, as many as make the round shortest.
        """
        request, shape = self.request, verification.shape
        tokens = shape.expected_tokens((request.acceptance, *LATER_CHOICES))
        between = self.processor.verdict_ms if isinstance(self.processor, Gpu) else 0.0
        late = ms = verification.after(draft.ms) + draft.ms
        busy = self.busy_ms(verification)
        chances: tuple[float, ...] = ()
        guessed = shape.depth and request.levels[-1].guesses
        limit = self.config.offload.ahead if guessed and not request.in_place else 0
        likely = shape.outcome_chances(request.acceptance)
        for count in range(1, 1 + min(limit, len(likely))):
            guesses = likely[:count]
            sooner = late
            for chance, ready_ms in zip(guesses, self.ahead_ms(shape, count), strict=False):
                sooner -= chance * max(0.0, late - max(verification.ms, busy + ready_ms))
            if sooner < ms:
                chances, ms = guesses, sooner
        share, longer = self._refresh(verification.placement, tokens)
        ms += between + share * longer
        return RoundTime(verification, draft, ms, tokens, chances, share, longer)

    def _refresh(self, placement: Placement, tokens: float) -> tuple[float, float]:
        """Returns the share of rounds that refresh a cache, and by how many ms such a round is longer."""
        apart = (placement.cpu_tokens + sum(tier.tokens for tier in placement.gpus)) / self.request.context
        costs = [level.refresh_cost(self, tokens, apart) for level in self.request.levels]
        return max(costs, default=(0.0, 0.0))

    def busy_ms(self, verification: PassTime) -> float:
        """Returns for how long a pass keeps the processor from drafting beside it.

        The GPU is counted as if it attended all of the context, so that no plan looks better for attending
        less of it there.
        """
        queries, context = verification.gamma + 1, self.request.context
        if self.request.in_place:
            whole = self._store_attention(context, queries)
        else:
            packed = context if verification.placement.packed else 0
            whole = self._tier_attention(self.request.hardware.gpus[0], context, packed, queries)
        busy = verification.dense.busy_ms + whole
        if any(level.drafts_on_host for level in self.request.levels):
            busy = max(busy, verification.cpu_attention)
        return busy

    def bottleneck(self, best: RoundTime) -> str:
        """Returns the part that would have to become faster first for a shorter round."""
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
        """Returns the time of the prefill, layer by layer; meanwhile its KV crosses the link to the host."""
        target, tokens = self.target, self.request.context
        products = 2 * (target.active_parameters - target.embedding_parameters) * tokens
        attention = target.prompt_flops(tokens)
        attention /= PREFILL_ATTENTION_SHARE["cpu" if self.request.in_place else "gpu"]
        computing = self.processor.compute_ms(products + attention)
        chunks = -(-tokens // self.config.prefill.chunk)
        computing += chunks * self._expanding(target, target.quantized + target.split_parameters)
        launching = chunks * self._launching(target, -(-tokens // chunks))
        if self.request.in_place:
            return computing + launching
        gpu = self.request.hardware.gpus[0]
        sent = self.memory.remote_mlps * tokens * target.hidden * target.dtype.itemsize
        computing += sent / gpu.to_host_rate / 1e6 + sent / gpu.to_device_rate / 1e6
        if self.request.store_layout.packed:  # read twice, written once
            moved = tokens * target.token_bytes * (2 + self.request.store_layout.stored_share)
            computing += gpu.read_ms(moved) / PACKING_SHARE
        writing = (
            tokens * target.token_bytes * self.request.store_layout.stored_share / gpu.to_host_rate / 1e6
        )
        return max(computing, writing, launching)

    def piece_tokens(self) -> int:
        """Returns how many tokens of the prompt to take through all layers at a time: `prefill.piece`.

        As few as make the prefill longer by `PIECES_COST` at most; 0: all of them. What a piece costs is that
        the KV before it crosses the link once more, for longer than the piece attends to it.
        """
        if self.config.prefill.piece:
            return self.config.prefill.piece
        piece = self.config.prefill.chunk
        if self.request.in_place:
            return piece
        limit_ms = PIECES_COST * self.prefill_ms()
        while 2 * piece < self.request.context and self.memory.piece_fits(piece):
            earlier = self.request.context**2 / (2 * piece)  # of all pieces
            if earlier * self._waiting_for_link(piece) <= limit_ms:
                return piece
            piece *= 2
        return 0

    def _waiting_for_link(self, piece: int) -> float:
        """Returns the ms for which a piece waits for each token before it that crosses the link."""
        gpu, target = self.request.hardware.gpus[0], self.target
        sent = target.token_bytes * self.request.store_layout.stored_share
        link_ms = sent / (STREAMING_SHARE * gpu.to_device_rate) / 1e6
        attention_ms = self._gpu_attention(gpu, target, 1, piece / PREFILL_ATTENTION_SHARE["gpu"])
        return max(0.0, link_ms - attention_ms) + self._unpacking(gpu, 1)
