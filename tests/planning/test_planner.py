"""The planner: golden plans, choices, refusals, and what is told."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from support.machine_cases import DESKTOP, HOST
from support.plan_cases import CONTEXT, JF68M, LLAMA, check_sums, expected_round, gpu, host, nearest, request

from cpu_kv import ElementType
from offload_rt.caches.sizes import whole_pages
from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.config.priors import DRAFT_LENGTHS, DRAFT_PLANE_REJECTIONS, expected_tokens, outcome_chances
from offload_rt.drafting.levels.configs import load_config
from offload_rt.errors import UsageError
from offload_rt.model.named_shapes import find_shape
from offload_rt.model.quantization import Quantization
from offload_rt.planning.cost_model import CostModel, attention_rate
from offload_rt.planning.memory import MemoryBudget
from offload_rt.planning.planner import Prediction, plan, ranked
from offload_rt.planning.request import PlanRequest
from offload_rt.system.hardware import GIB, KNOWN_GPUS, AttentionRate, Hardware, named_hardware


def predicted(**changes: Any) -> Prediction:
    return plan(request(**changes)).check()


# Golden plans: a change of the cost model moves them, and is told so.


@pytest.mark.parametrize(
    ("model", "draft", "config", "machine", "ms", "plain_ms", "gamma", "tokens"),
    [
        ("llama2-7b", "jf68m", "triforce", ("rtx4090", 1), 98.56, 909.6, 39, (13824, 33280, 79896)),
        ("llama3.1-8b", None, "retrieval", ("rtx4090", 1), 34.42, 150.0, 15, (58112, 13056, 55832)),
        ("qwen2.5-14b", None, "trees", ("rtx4090", 2), 64.98, 93.82, 64, (13312, 0, 17804)),
        ("demo", "demo-draft", "triforce", ("none", 1), 6.11, 22.6, 7, (0, 127_000, 0)),
    ],
)
def test_golden_plans(
    model: str,
    draft: str | None,
    config: str,
    machine: tuple[str, int],
    ms: float,
    plain_ms: float,
    gamma: int,
    tokens: tuple[int, int, int],
) -> None:
    """Predictions at 127,000 tokens, pinned to one per cent."""
    dtype = ElementType.FLOAT32 if model == "demo" else None
    small = None if draft is None else find_shape(draft, dtype)
    overrides: dict[str, object] = {"store.code": "raw", "retrieval.bits": 16, "retrieval.budget": 4096}
    overrides["weights.planes"] = "off"
    asked = PlanRequest(
        find_shape(model, dtype),
        small,
        load_config(config, overrides),
        127_000,
        256,
        named_hardware(*machine),
    )
    planned = plan(asked)
    check_sums(planned)
    found, placement = planned.check(), planned.placement
    assert (found.ms_per_token, found.plain_ms_per_token) == pytest.approx((ms, plain_ms), rel=0.01)
    assert planned.gamma == gamma
    assert (placement.resident_tokens, placement.cpu_tokens, placement.streamed_tokens) == tokens


def test_the_demo_pair_on_a_cpu_comes_near_what_was_measured() -> None:
    """Measured on 2 cores at 46 GB/s: a plain pass takes 31 ms, a middle step 3 to 5, a prefill 94 s."""
    rates = (AttentionRate(1, 41.0), AttentionRate(8, 33.0), AttentionRate(16, 23.0))
    cores = replace(HOST, memory_bytes=20 * GIB, memory_rate=46.0, compute_rate=300.0, attention=rates)
    target, draft = find_shape("demo", ElementType.FLOAT32), find_shape("demo-draft", ElementType.FLOAT32)
    asked = request(target=target, draft=draft, hardware=Hardware(cores, (), measured=True))
    found = plan(asked).check()
    assert found.plain_ms_per_token == pytest.approx(31, rel=0.15)
    assert 3 <= CostModel(asked).pass_cost(target, 3, 4096).ms <= 5
    assert found.ms_per_token < found.plain_ms_per_token
    assert found.prefill_ms == pytest.approx(94_000, rel=0.15)
    assert found.bottleneck == "cpu attention"


def test_llama2_7b_streams_128k_in_2_7_seconds() -> None:
    """64 GiB over 98 % of 25 GB/s, and a layer's weights and launches behind it."""
    assert CONTEXT * LLAMA.token_bytes == 64 * GIB
    lanes = expected_round(CostModel(request()), CHAIN).verification
    assert lanes.placement.streamed_bytes == 64 * GIB and lanes.cpu_attention == 0
    assert lanes.ms == lanes.link == pytest.approx(2_806, rel=0.01)
    # Two cards: the second keeps what it has room for, and what is left crosses two links.
    both = expected_round(CostModel(request(hardware=gpu(2))), CHAIN).verification
    (card,) = both.placement.gpus
    assert card.resident_tokens > 0 <= both.placement.streamed_tokens - card.streamed_tokens <= 1
    assert both.ms < lanes.ms / 2


def test_packed_pages_take_three_quarters_of_the_host_and_of_the_link() -> None:
    raw, packed = request(), request({"store.code": "auto"})
    share = packed.store_layout.stored_share
    slow = replace(DESKTOP, gpus=(replace(DESKTOP.gpus[0], triton=False),))
    assert request({"store.code": "auto"}, hardware=slow).store_layout == raw.store_layout, (
        "plain torch would unpack"
    )
    assert 0.75 < share <= 0.76 and raw.store_layout.stored_share == 1
    assert MemoryBudget(packed).host["kv"] == pytest.approx(share * MemoryBudget(raw).host["kv"])
    lanes, fewer = (expected_round(CostModel(one), CHAIN).verification for one in (raw, packed))
    layer = CostModel(raw).dense(2).ms / LLAMA.layers
    assert fewer.link - layer == pytest.approx(share * (lanes.link - layer), rel=1e-3)
    slot = raw.ring_bytes // 3
    assert packed.ring_bytes == pytest.approx((3 * share + 1) * slot)
    # On a GPU it is as it is, and a CPU alone attends it in place.
    assert packed.target.token_bytes == raw.target.token_bytes
    assert (
        request({"store.code": "auto"}, hardware=Hardware(HOST, (), measured=True)).store_layout
        == raw.store_layout
    )


def test_packed_pages_stay_packed_on_a_card_that_cannot_keep_all() -> None:
    raw, packed = request(), request({"store.code": "auto"})
    share, size = packed.store_layout.stored_share, 4096 * LLAMA.token_bytes
    parts, smaller = (MemoryBudget(one).gpu(0, 4096)["resident_kv"] for one in (raw, packed))
    assert parts == size and smaller == pytest.approx(share * size)
    kept, more = (
        MemoryBudget(raw).capacities[0] * LLAMA.token_bytes,
        MemoryBudget(packed).capacities[0] * LLAMA.token_bytes,
    )
    buffer = packed.ring_bytes - raw.ring_bytes + MemoryBudget(packed).gpu(0)["prefill"]
    buffer -= MemoryBudget(raw).gpu(0)["prefill"]
    assert share * more == pytest.approx(kept - buffer, abs=2 * 256 * LLAMA.token_bytes)
    # A pass attends to packed pages as they are.
    placement = MemoryBudget(packed).placement(4096, 8192)
    lanes = CostModel(packed).verification(placement, CHAIN)
    before = CostModel(raw).verification(replace(placement, packed=False), CHAIN)
    attended = CONTEXT - 8192
    reading = DESKTOP.gpus[0].read_ms(share * attended * LLAMA.token_bytes) / 0.6
    assert placement.packed and lanes.attention == pytest.approx(reading)
    assert lanes.dense == before.dense, "a segment takes as many launches"
    # For more queries, a pass reads packed pages, writes unpacked ones and reads these.
    many = replace(CHAIN, depth=300)
    lanes, before = (
        CostModel(one).verification(replace(placement, packed=one is packed), many) for one in (packed, raw)
    )
    unpacking = DESKTOP.gpus[0].read_ms((1 + share) * attended * LLAMA.token_bytes) / 0.8
    assert lanes.attention == pytest.approx(before.attention + unpacking)
    busy = (one.cpu_attention - one.dense.ms - 32 * 0.15 for one in (lanes, before))
    assert next(busy) == pytest.approx(1.2 * next(busy))
    # What fits as it is stays so, and the pass takes as long as with raw pages.
    short = plan(request({"store.code": "auto"}, context=8192))
    assert short.placement.resident_tokens == 8192 and not short.placement.packed
    check_sums(short)
    assert short.check().pass_ms == plan(request(context=8192)).check().pass_ms
    for context in (40_000, CONTEXT):
        check_sums(plan(request({"store.code": "auto"}, context=context)))


def test_memory_of_a_card() -> None:
    """Known by arithmetic: weights, 4,096 entries twice with means, in whole pages, a ring of 3 × 64 MiB."""
    parts = MemoryBudget(request()).gpu(0)
    embeddings = [2 * 32_000 * 4096, 2 * 32_000 * 768]  # in host memory
    assert parts["weights"] == LLAMA.weight_bytes - embeddings[0]
    assert parts["draft_weights"] == JF68M.weight_bytes - embeddings[1]
    assert MemoryBudget(request()).host["embeddings"] == sum(embeddings)
    assert (
        MemoryBudget(request(target=replace(LLAMA, embedding_on_gpu=True))).gpu(0)["weights"]
        == LLAMA.weight_bytes
    )
    assert MemoryBudget(request(target=replace(LLAMA, tied=True))).gpu(0)["weights"] == LLAMA.weight_bytes
    assert parts["retrieved_caches"] == 2 * 4864 * 512 * 1024
    assert parts["staging_ring"] == 3 * 64 * 2**20
    assert parts["reserve"] == int(0.03 * 24 * GIB)
    one_buffer = MemoryBudget(request({"offload.refresh_from": "store"})).gpu(0)["retrieved_caches"]
    assert parts["retrieved_caches"] == 2 * one_buffer
    assert MemoryBudget(request(context=1000, new_tokens=100)).host["kv"] == 1280 * 512 * 1024
    # A second card holds nothing but KV.
    assert MemoryBudget(request(hardware=gpu(2))).gpu(1).keys() == {"resident_kv", "staging_ring", "reserve"}


def test_quantised_chunks_take_half_or_a_quarter_of_the_memory_and_of_the_reads() -> None:
    exact, eight, four = (
        request({"retrieval.bits": bits, "retrieval.budget": 16_384}) for bits in (16, 8, 4)
    )
    sizes = [MemoryBudget(one).gpu(0)["retrieved_caches"] for one in (exact, eight, four)]
    # Chunks with ranges; beside them, twice, means and what is in full precision; two layers on their way.
    token, window = LLAMA.token_bytes, 255 + 8 + 32 + 128
    beside = 2 * whole_pages(512 + window + 128) * token + 2 * 16_384 * token // 32
    for size, codes in zip(sizes[1:], (2, 4), strict=True):
        ranges = 16_384 * LLAMA.layers * LLAMA.kv_heads * (4 * LLAMA.head_dim // 32 + 4)
        assert size == 2 * (16_384 * token // codes + ranges) + beside
    steps = [one.levels[-1].pass_cost(CostModel(one), 1).ms for one in (exact, eight, four)]
    assert steps[0] > steps[1] > steps[2]
    # Where nothing is said, eight bits on a GPU, and what is there in place.
    for hardware, bits in ((DESKTOP, 8), (Hardware(HOST, (), measured=True), 16)):
        chosen, given = (
            plan(request({"retrieval.bits": one}, hardware=hardware, context=16_384))
            for one in ("auto", bits)
        )
        assert chosen.predicted == given.predicted and (chosen.gpus, chosen.host) == (given.gpus, given.host)


def test_weights_beyond_the_first_card_are_on_the_second() -> None:
    asked = request(hardware=gpu(2, memory_bytes=19 * GIB))
    assert MemoryBudget(asked).remote_mlps == 13, "as few as make room, and half a GiB more"
    assert MemoryBudget(asked).shortage is None
    assert str(MemoryBudget(replace(asked, given_remote_mlps=10)).shortage).startswith(
        "GPU 0 (gpu) has 19.0 GiB"
    )
    whole, first, second = (
        MemoryBudget(one).gpu(number) for one, number in ((request(), 0), (asked, 0), (asked, 1))
    )
    assert second["weights"] == whole["weights"] - first["weights"] == 13 * 3 * 4096 * 11008 * 2
    # What goes there and back takes time, a graph cannot hold it, and a prefill sends all hidden states.
    there, here = CostModel(asked), CostModel(request())
    assert there.pass_cost(LLAMA, 1).ms > here.pass_cost(LLAMA, 1).ms
    assert there.pass_cost(LLAMA, 1, graph=True) == there.pass_cost(LLAMA, 1)
    assert there.pass_cost(JF68M, 1, graph=True) == here.pass_cost(JF68M, 1, graph=True)
    assert there.prefill_ms() > here.prefill_ms()
    fixed = plan(replace(asked, given_remote_mlps=12))
    assert "MLP blocks of 12 of 32 layers are on GPU 1" in "\n".join(fixed.assumptions)


def test_rates_between_measurements_and_beyond() -> None:
    rates = HOST.attention
    assert [attention_rate(rates, queries) for queries in (1, 16, 24, 32, 64)] == [50, 40, 35, 30, 15]
    assert attention_rate((AttentionRate(4, 30.0),), 1) == 30


def test_expected_tokens_and_outcomes() -> None:
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(1.0, 8) == 9
    # All accepted; rejected at the first token or at the second, and the runner-up right every other time.
    assert outcome_chances(0.9, 2) == pytest.approx((0.9**3, 0.5 * 0.1, 0.5 * 0.9 * 0.1))
    assert outcome_chances(1.0, 8) == (1,) + 8 * (0,)


# Choices.


def test_the_length_of_drafts_is_the_best_of_all() -> None:
    chosen = plan(request())
    best, gamma = chosen.check(), chosen.gamma
    assert 1 < gamma < 64
    for other in (1, 4, gamma - 1, gamma, gamma + 1, 32, 64):
        fixed = plan(request({"speculation.gamma2": other}))
        found = fixed.check()
        assert fixed.gamma == other
        assert any(f"gamma2 {other} (as given)" in said for said in fixed.assumptions)
        # Where the length is fixed, less memory is set aside for longer drafts: a little more is resident.
        assert best.ms_per_token <= found.ms_per_token * 1.01
        assert (other == gamma) == (abs(found.tokens_per_round - best.tokens_per_round) < 1e-9)


def test_plain_decoding_has_no_drafts() -> None:
    planned = plan(request(config="plain"))
    found = planned.check()
    assert (found.draft_ms, found.tokens_per_round) == (0, 1)
    assert found.ms_per_token == found.pass_ms + 4.0 == found.plain_ms_per_token  # with the verdict
    assert "no speculation: 1 token a pass" in planned.assumptions


def test_a_missing_draft_model_leaves_its_level_out() -> None:
    planned = plan(request(draft=None))
    assert [level.name for level in planned.request.levels] == ["target:retrieved"]
    assert any("no draft model" in said for said in planned.assumptions)
    # Then what is below it drafts for the full cache.
    levels = [{"model": "datastore", "draft": "grown:32"}, "draft:streaming"]
    asked = request({"speculation.levels": levels, "datastore.path": "any"}, "naive", draft=None)
    assert [(shape.kind, shape.size) for shape in asked.drafts] == [("grown", 32)]
    with pytest.raises(UsageError, match="naive drafts with a small model"):
        request(draft=None, config="naive")


def test_drafts_ahead_hide_behind_the_pass() -> None:
    late, ahead = (
        expected_round(CostModel(request({"offload.ahead": most})), CHAIN.deep(16)) for most in (0, 2)
    )
    assert late.verification.ms < late.ms and not late.chances
    assert ahead.chances == outcome_chances(0.92, 16)[:2]
    assert ahead.ms < late.ms and ahead.tokens == late.tokens == expected_tokens(0.92, 16)
    # So do trees, whose siblings make rejections harder to guess; each takes a draft of its own.
    costs = CostModel(request({"speculation.levels": ["target:retrieved"]}))
    chances = expected_round(costs, DraftShape.parse("grown:64").deep(16)).chances
    assert chances and chances == outcome_chances(0.92, 16, 0.25)[: len(chances)]
    # A draft that takes longer than the pass is the round.
    predictor = CostModel(request())
    slow = predictor.round(late.verification, replace(late.draft, busy_ms=late.verification.ms))
    assert predictor.bottleneck(slow) == "draft"


@pytest.mark.parametrize(
    ("policy", "config", "context", "share"),
    [
        ("every", "triforce", CONTEXT, 1.0),
        ("stride:32", "triforce", CONTEXT, 1 / 4),
        ("acceptance:0.5", "triforce", CONTEXT, 0.0),  # how often is not foreseen
        ("every", "naive", CONTEXT, 0.0),
        ("every", "triforce", 4096 - 256, 0.0),  # it holds everything
    ],
)
def test_how_often_a_retrieved_cache_is_refreshed(
    policy: str, config: str, context: int, share: float
) -> None:
    asked = request({"retrieval.refresh": policy, "speculation.gamma2": 12}, config, context)
    found = expected_round(CostModel(asked), CHAIN.deep(12))  # 8 tokens a round
    assert found.refresh_share == share and (found.refresh_ms > 0) == (share > 0)


def test_a_refresh_from_the_stream_gathers_only_what_others_attend() -> None:
    def longer(cpu: int, place: str) -> float:
        keys = {"retrieval.refresh": "every", "offload.refresh_from": place}
        return expected_round(CostModel(request(keys)), CHAIN.deep(16), 0, cpu).refresh_ms

    assert longer(0, "stream") < longer(CONTEXT // 4, "stream") < longer(0, "store")


@pytest.mark.parametrize(
    ("policy", "gib", "faster"), [("every", 96, "stream"), ("every", 48, "store"), ("stride:64", 48, "store")]
)
def test_a_refresh_fills_a_second_buffer_where_that_is_faster(policy: str, gib: int, faster: str) -> None:
    """A second buffer takes 2.34 GiB that could hold KV instead: too much unless everything is resident."""
    asked = request({"retrieval.refresh": policy}, hardware=gpu(memory_bytes=gib * GIB))
    forced = {place: plan(asked.having("offload.refresh_from", place)) for place in ("stream", "store")}
    for place, one in forced.items():
        retrieved: Any = one.to_json()["retrieved"]
        assert retrieved["refresh_from"] == place
    assert plan(asked) == forced[faster] == min(forced.values(), key=lambda one: one.ms_per_token)
    told = {"stream": "the stream, into a second buffer", "store": "the store, between passes"}[faster]
    assert any(told in said for said in forced[faster].assumptions)


def test_a_retrieved_cache_shrinks_to_fit_and_says_so() -> None:
    asked = request({"retrieval.budget": 8192, "offload.refresh_from": "stream"})
    planned = plan(asked)
    check_sums(planned)  # counted with the smaller cache
    budget = planned.request.config.retrieval.budget
    assert planned.fits and 2048 <= budget < 8192
    assert any(f"retrieval.budget is {budget} instead of 8192" in said for said in planned.assumptions)
    assert str(MemoryBudget(asked.having("retrieval.budget", budget + 8)).shortage).startswith("GPU 0 (gpu)")
    # One of the size asked for comes before a second buffer: its better drafts are in no figure of the plan.
    assert plan(request({"retrieval.budget": 8192})).request.config.retrieval.budget == 8192


def test_where_memory_is_short_the_ring_and_the_prefill_shrink_first() -> None:
    """A million tokens of a small model: hidden states of the prompt take most of the card."""
    asked = replace(
        request(config="retrieval", draft=None), target=find_shape("qwen2.5-7b-1m", None), context=10**6
    )
    hardware = replace(asked.hardware, host=replace(HOST, memory_bytes=200 * GIB, lockable_bytes=200 * GIB))
    roomy = replace(asked, hardware=hardware).having("offload.refresh_from", "store")
    room = sum(MemoryBudget(roomy).gpu(0).values()) - 2**28
    tight = replace(roomy, hardware=replace(hardware, gpus=(replace(hardware.gpus[0], memory_bytes=room),)))
    planned = plan(tight)
    check_sums(planned)
    found = planned.request.config
    assert planned.fits and found.store.segment_bytes == 16 * 2**20
    assert found.retrieval.budget == asked.config.retrieval.budget, "drafts stay as good as asked for"
    assert any("store.segment_bytes is 16777216 instead of 67108864" in said for said in planned.assumptions)


def test_trees_are_drafted_in_steps_and_verified_in_one_pass() -> None:
    asked = request({"offload.ahead": 4}, "trees", context=50_000, draft=None)
    assert [one.size for one in asked.drafts] == [64] and asked.longest_draft == 64
    found = expected_round(CostModel(asked), asked.drafts[0])
    late = expected_round(CostModel(asked.having("offload.ahead", 0)), asked.drafts[0])
    assert found.verification.gamma == 64 and found.chances and found.ms < late.ms and not late.chances
    assert expected_tokens(0.92, 16) < found.tokens < expected_tokens(0.97, 16), "siblings save rejections"
    # The shapes are those that a round may choose, look-up's finds among them.
    for draft, merge, most in (
        ("auto", "", 64),
        ("grown:64", "suffix", 64 + max(DRAFT_LENGTHS)),
        ("chain", "lookup", 2 * max(DRAFT_LENGTHS)),
    ):
        level = {"model": "target", "cache": "retrieved", "draft": draft, "merge": merge}
        free = request({"speculation.levels": [level], "speculation.gamma2": 0}, context=50_000)
        assert free.longest_draft == most


def test_a_draft_over_the_full_kv_waits_for_the_cpu() -> None:
    """On a GPU the CPU attends to all of the context for each drafted token, beside its share of the pass."""
    predictor = CostModel(request(config="shared", draft=None))
    attending = CONTEXT * LLAMA.token_bytes / 50.0 / 1e6
    assert predictor.draft(CHAIN.deep(2)).ms > 2 * attending
    verification = predictor.verification(predictor.memory.placement(0, CONTEXT // 2), CHAIN.deep(2))
    assert predictor.busy_ms(verification) == verification.cpu_attention
    # Layers that are left out cost nothing.
    skipping = [{"model": "target", "cache": "shared", "layers": "skip:1,2,3,4,5,6,7,8"}]
    fewer = CostModel(request({"speculation.levels": skipping}, "shared", draft=None))
    calibrated, rough = (fewer.draft(CHAIN.deep(depth)).ms for depth in (1, 2))
    assert calibrated == predictor.draft(CHAIN).ms + predictor.draft(CHAIN.deep(1)).ms
    assert rough - calibrated == pytest.approx(0.75 * calibrated, rel=0.05)


def test_what_holds_a_run_up_is_named() -> None:
    def bottleneck(**changes: Any) -> str:
        return predicted(**changes).bottleneck

    slow_cpu = tuple(AttentionRate(one.queries, one.rate / 1000) for one in HOST.attention)
    assert bottleneck(hardware=host(attention=slow_cpu)) == "link"
    assert bottleneck(hardware=gpu(to_device_rate=0.01)) == "cpu attention"
    assert bottleneck(context=2000, hardware=gpu(launch_ms=30.0)) == "launch"
    assert bottleneck(context=2000, config="plain", hardware=gpu(launch_ms=0.001)) == "gpu compute"
    assert bottleneck(hardware=host(memory_rate=5.0)) == "host memory"


# Refusals.


ROOMY = host(memory_bytes=200 * GIB, lockable_bytes=200 * GIB)
THIRTEEN = replace(find_shape("llama2-13b", None), max_positions=2**18)
FLOAT32 = replace(LLAMA, dtype=ElementType.FLOAT32)


@pytest.mark.parametrize(
    ("changes", "why", "change", "longest"),
    [
        ({"hardware": gpu(memory_bytes=15 * GIB)}, "GPU 0 (gpu) has 15.0", "--quantize nf4", 46080),
        ({"hardware": host(memory_bytes=40 * GIB)}, "host memory has 40.0", "", 78336),
        ({"hardware": host(lockable_bytes=GIB)}, "ulimit -l", "", 1792),
        ({"hardware": host(0, memory_bytes=60 * GIB)}, "host memory has 60.0", "", 89856),
        ({"target": THIRTEEN, "hardware": ROOMY}, "weights 23.9", "--quantize nf4", 0),
        ({"target": FLOAT32, "hardware": ROOMY}, "weights 24.6", "--dtype bfloat16", 0),
        ({"overrides": {"retrieval.budget": 60_000}}, "29.7", "--set retrieval.budget=13120", 119552),
        (
            {"overrides": {"offload.resident_tokens": 65_536}},
            "32.0",
            "--set offload.resident_tokens=15104",
            20224,
        ),
        ({"hardware": gpu(memory_bytes=GIB // 4)}, "take a smaller model", "", 0),
    ],
)
def test_a_refusal_names_the_nearest_plan(
    changes: dict[str, Any], why: str, change: str, longest: int
) -> None:
    """What is said to fit does (`check_sums`), and one page more than the longest context does not."""
    planned = plan(request(**changes))
    check_sums(planned)
    said = str(planned.refusal)
    assert why in said and "\n" not in said
    assert said.partition("what fits: ")[2].partition("; ")[0] == change
    assert said.partition("the longest context that fits is ")[2] == (f"{longest} tokens" if longest else "")
    if longest:
        assert not plan(request(**changes | {"context": longest + 256})).fits


@pytest.mark.parametrize("gib", [14.5, 15, 16])
def test_the_longest_context_is_that_of_all_compositions(gib: float) -> None:
    """One more page fits none of them, plain decoding included, and the change that is named makes it fit."""
    asked = [
        request({}, config, hardware=gpu(memory_bytes=int(gib * GIB)), draft=None)
        for config in ("retrieval", "trees", "lookup", "plain")
    ]
    (refused,) = ranked(asked)
    said = str(refused.refusal)
    longest = int(re.findall(r"the longest context that fits is (\d+) tokens", said)[0])
    fitting, beyond = (
        [plan(replace(one, context=tokens)).fits for one in asked] for tokens in (longest, longest + 256)
    )
    assert any(fitting) and not any(beyond)
    assert fitting[-1], "plain decoding takes the least memory"
    assert "what fits: --quantize nf4" in said and all(plan(one).fits for one in nearest(refused))


def test_a_refusal_says_how_far_other_flags_reach() -> None:
    """Where no flag makes the context fit, the one that reaches farthest is named, and so far it fits."""
    card = gpu(memory_bytes=16 * GIB)
    refused = plan(request({}, "retrieval", hardware=card, draft=None, target=LLAMA, context=200_000))
    ((flags, most),) = re.findall(r"with (--.*) up to (\d+) tokens fit;", str(refused.refusal))
    assert flags == "--quantize nf4"
    asked = request({}, "retrieval", hardware=card, draft=None, context=int(most))
    asked = replace(asked, target=asked.target.with_weights(Quantization.named("nf4")))
    assert plan(asked).fits and not plan(replace(asked, context=asked.context + 256)).fits


def test_experts_that_stay_as_they_are_are_named() -> None:
    asked = request({}, "plain", context=8192, hardware=named_hardware("rtx3090"), draft=None)
    experts = find_shape("qwen3-30b-a3b", None, quantize="int8")
    said = str(plan(replace(asked, target=experts)).refusal)
    assert "int8 leaves the experts in bfloat16, 54.0 GiB: this needs a GPU of 58 GiB" in said
    assert "GiB, or --quantize nf4, which quantizes experts too" in said
    refused = plan(replace(asked, target=find_shape("qwen3-30b-a3b", None)))
    assert "what fits: --quantize nf4" in str(refused.refusal)
    assert plan(replace(asked, target=find_shape("qwen3-30b-a3b", None, quantize="nf4"))).fits


def test_what_is_quantized_is_not_advised_to_be() -> None:
    target = LLAMA.with_weights(Quantization.named("int8"))
    refused = plan(request(target=target, hardware=gpu(memory_bytes=4 * GIB)))
    assert "quantize" not in str(refused.refusal) and "2 such GPUs" not in str(refused.refusal)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"new_tokens": -1}, "new tokens -1"),
        ({"draft": find_shape("qwen2.5-0.5b", None)}, "151936 tokens in its vocabulary"),
    ],
)
def test_requests_that_make_no_sense(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        request(**changes)


def test_assumptions_tell_the_figures_they_rest_on() -> None:
    told = "\n".join(plan(request()).assumptions)
    for figure in (
        *("read at 70.0 GB/s", "50.0 GB/s at 1", "40.0 GB/s at 16", "link 25.0 GB/s"),
        *("20.0 GB/s back", "0.30 ms", "draft:streaming 0.50", "target:retrieved 0.92", "(measured)"),
    ):
        assert figure in told
    assert "(named, not measured)" in "\n".join(plan(request(hardware=named_hardware("l40"))).assumptions)


def test_named_machines() -> None:
    hardware = named_hardware("rtx4090")
    for written in ("4090", "RTX-4090", "RTX 4090", "NVIDIA GeForce RTX 4090"):
        assert named_hardware(written) == hardware
    assert named_hardware("RTX 4060 Ti 16 GB") == named_hardware("rtx4060ti-16")
    for written in ("NVIDIA GeForce RTX 5060 Ti", "5060ti", "rtx4060ti", "A100"):
        with pytest.raises(UsageError, match="several sizes; use (rtx5060ti-8 or|rtx4060ti-8 or|a100-40 or)"):
            named_hardware(written)
    (card,) = hardware.gpus
    assert card.memory_bytes == pytest.approx(23.3 * GIB, rel=1e-3) and card.memory_rate == pytest.approx(
        0.9 * 1008
    )
    assert (card.to_device_rate, hardware.host.memory_rate, hardware.host.memory_bytes) == (25, 70, 92 * GIB)
    rates = [attention_rate(hardware.host.attention, queries) for queries in (1, 8, 16, 32)]
    assert rates == pytest.approx([49, 49, 30.1, 15.05])
    zen = named_hardware("rtx4090", cpu="zen4").host
    rates = [attention_rate(zen.attention, queries) for queries in (1, 16, 32)]
    assert rates == pytest.approx([49, 49, 24.5]), "memory is the limit up to 16 queries"
    with pytest.raises(UsageError, match="--cpu z80: is not known; use one of avx2, zen4"):
        named_hardware("rtx4090", cpu="z80")
    other = named_hardware("h100", 2, vram=60)
    assert [one.memory_bytes for one in other.gpus] == [60 * GIB] * 2
    machines = [named_hardware(name, 2) for name in KNOWN_GPUS]
    plans = [plan(request(hardware=one, config="plain")) for one in machines]
    assert all(one.fits == (one.request.hardware.gpus[0].memory_bytes >= 9 * GIB) for one in plans)
    with pytest.raises(UsageError, match="rtx9999.*rtx4090"):
        named_hardware("rtx9999")


@pytest.mark.parametrize(("gpu", "context", "gain"), [("h100", 124_928, 1.2), ("l40", 29_952, 1.1)])
def test_a_second_gpu_shares_a_context_that_the_first_one_could_keep(
    gpu: str, context: int, gain: float
) -> None:
    asked = request(hardware=named_hardware(gpu, 2), config="plain", context=context)
    assert MemoryBudget(asked).capacities[0] == context
    alone = asked.having("offload.resident_tokens", context)
    assert plan(alone).ms_per_token > gain * plan(asked).ms_per_token


def test_the_budget_is_that_with_the_least_predicted_time() -> None:
    """It weighs what drafts read, and KV that no longer stays on the GPU, against acceptance."""
    for hardware in (DESKTOP, gpu(memory_rate=200.0), Hardware(HOST, (), measured=True)):
        free = {"retrieval.budget": 0, "offload.refresh_from": "store"}
        asked = request(free, context=32_768, hardware=hardware)
        tried = [plan(asked.having("retrieval.budget", 2**power)) for power in range(10, 16)]
        chosen = plan(asked)
        assert chosen.predicted == min(tried, key=lambda one: one.ms_per_token).predicted
        rejected = [1 - one.request.acceptance for one in tried[:5]]
        assert rejected == pytest.approx([0.08 * 2 ** (-0.45 * at) for at in range(5)])
    known = [replace(asked, measured_acceptance=rate) for rate in (0.1, 0.99)]
    assert [one.acceptance for one in known] == [0.1, 0.99]
    assert all(plan(one).request.config.retrieval.budget == 1024 for one in known), (
        "more would cost, and yield nothing"
    )
    # As many as are held at least, and as fit.
    wide = {"retrieval.budget": 0, "retrieval.recent": 5000}
    assert plan(request(wide, context=4096)).request.config.retrieval.budget == 5008
    full = request({"retrieval.budget": 0}, hardware=gpu(memory_bytes=17 * GIB))
    assert plan(full).fits and plan(full).request.config.retrieval.budget < 8192


def test_resident_tokens_that_are_proposed_are_whole_pages() -> None:
    """Also where nothing is paged, so that all of a short context could stay."""
    windows = find_shape("mistral-7b-v0.1", ElementType.FLOAT32)
    given = {"offload.resident_tokens": 1024}
    planned = plan(request(given, context=1, target=windows, hardware=gpu(memory_bytes=20 * GIB), draft=None))
    assert str(planned.refusal).startswith("GPU 0 (gpu) has 20.0 GiB") and "bfloat16" in str(planned.refusal)


# Weights in two planes.


def in_planes(planes: str, **changes: Any) -> PlanRequest:
    """Llama-3.1-8B, which drafts for itself."""
    given: dict[str, Any] = {"target": find_shape("llama3.1-8b", None), "draft": None, **changes}
    return request({"weights.planes": planes}, "retrieval", 100_000, **given)


def test_weights_in_planes_take_three_quarters_and_drafts_read_less() -> None:
    off, on = in_planes("off"), in_planes("on")
    linear = off.target.parameters - off.target.embedding_parameters
    assert on.target.split_parameters == linear
    assert off.target.gpu_bytes - on.target.gpu_bytes == linear // 2
    assert on.having("weights.planes", "off").target == off.target
    plain, split = CostModel(off), CostModel(on)
    (level,) = on.levels
    share = level.pass_cost(split, 1).busy_ms / level.pass_cost(plain, 1).busy_ms
    assert 0.55 < share < 0.7  # of what is read, and attention
    assert 0.8 < split.dense(1).busy_ms / plain.dense(1).busy_ms < 1
    assert level.acceptance(off) - level.acceptance(on) == pytest.approx(DRAFT_PLANE_REJECTIONS)
    for memory in ("weights", "retrieved_caches"):
        assert (split.memory.gpu(0)[memory] < plain.memory.gpu(0)[memory]) == (memory == "weights")


def test_the_planner_chooses_planes_by_their_time() -> None:
    off, on, chosen = (plan(in_planes(planes)) for planes in ("off", "on", "auto"))
    assert chosen.ms_per_token == on.ms_per_token < off.ms_per_token
    assert chosen.request.target.planes and chosen.request.config.weights.planes == "on"
    assert any("two planes of 12 bits" in sentence for sentence in chosen.assumptions)
    # As fast as both, however much a rejected draft costs and a weight takes to read.
    for hardware in (gpu(to_device_rate=1.0), gpu(memory_rate=5000.0)):
        off, on, chosen = (plan(in_planes(planes, hardware=hardware)) for planes in ("off", "on", "auto"))
        assert chosen.ms_per_token == min(off.ms_per_token, on.ms_per_token)
    for other in (
        find_shape("llama3.1-8b", ElementType.FLOAT32),
        find_shape("llama3.1-8b", None, None, "nf4"),
    ):
        assert not plan(
            in_planes("on", target=other, hardware=gpu(memory_bytes=80 * GIB))
        ).request.target.planes


def test_what_fits_does_not_depend_on_planes_unless_they_are_asked_for() -> None:
    """Whether they gain is known once weights are loaded; a plan that needs them could not be kept."""
    small = {"hardware": gpu(memory_bytes=16 * GIB)}
    assert plan(in_planes("on", **small)).fits
    refused = plan(in_planes("auto", **small))
    assert refused.refusal is not None and "what fits: --set weights.planes=on" in refused.refusal
    off = plan(in_planes("off", **small)).refusal
    assert off is not None and "weights.planes" not in off


def test_a_processor_drafts_by_one_plane() -> None:
    off, on = (in_planes(planes, hardware=named_hardware("none", ram=64)) for planes in ("off", "on"))
    (level,) = on.levels
    plain, split = CostModel(off), CostModel(on)
    assert level.pass_cost(split, 1).busy_ms < 0.65 * level.pass_cost(plain, 1).busy_ms
    assert split.dense(1).busy_ms == pytest.approx(plain.dense(1).busy_ms, rel=0.01)
    nothing_drafts = off.having("speculation.levels", ()).having("weights.planes", "auto")
    assert not nothing_drafts.may_split_weights and on.may_split_weights
