"""The planner: what fits, what goes where, what that costs; hand-computed cases and laws of any plan."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from offload_rt import cli
from offload_rt.config import Config, load_config
from offload_rt.errors import UsageError
from offload_rt.hardware import GIB, AttentionRate, Gpu, Hardware, Host
from offload_rt.named_hardware import CARDS, named_hardware
from offload_rt.placement import PlanRequest, gpu_memory, host_memory, resident_capacity, ring_fits
from offload_rt.planner import Plan, plan
from offload_rt.prediction import Predictor, attention_rate, expected_tokens, hit_rate
from offload_rt.shapes import ModelShape, find_shape
from offload_rt.sharing import EXTRA_RING_BUFFERS, Shares

quick = settings(derandomize=True, deadline=None, max_examples=40)
BF16 = torch.bfloat16
LLAMA = find_shape("llama2-7b", None)
JF68M = find_shape("jf68m", None)
CONTEXT = 131_072

HOST = Host(
    memory_bytes=92 * GIB,
    lockable_bytes=92 * GIB,
    memory_rate=70.0,
    compute_rate=800.0,
    attention=(AttentionRate(1, 50.0), AttentionRate(16, 40.0), AttentionRate(32, 30.0)),
    attention_beside_link=0.8,
    link_beside_attention=0.9,
    launch_ms=0.5,
    threads=8,
)
CARD = Gpu("card", 24 * GIB, 1000.0, 160.0, 25.0, 20.0, 0.3)
DESKTOP = Hardware(HOST, (CARD,), measured=True)


def request(**changes: Any) -> PlanRequest:
    """Llama2-7B with a small draft at 128K on a desktop, unless `changes` say otherwise."""
    given: dict[str, Any] = {
        "target": LLAMA,
        "draft": JF68M,
        "config": load_config("triforce"),
        "context": CONTEXT,
        "new_tokens": 256,
        "hardware": DESKTOP,
    }
    return PlanRequest(**given | changes)


def gpu(number: int = 1, **changes: Any) -> Hardware:
    """The desktop with `number` cards and other figures of the card or its host."""
    card = {key: value for key, value in changes.items() if hasattr(CARD, key)}
    host = {key: value for key, value in changes.items() if key not in card}
    return Hardware(replace(HOST, **host), (replace(CARD, **card),) * number, measured=True)


# Hand-computed.


def test_llama2_7b_streams_128k_in_2_7_seconds() -> None:
    """64 GiB over 25 GB/s, and half a layer's weights and launches behind it."""
    assert CONTEXT * LLAMA.token_bytes == 64 * GIB
    assert LLAMA.weight_bytes / 1e9 == pytest.approx(13.5, abs=0.05)
    predictor = Predictor(request())
    placement, _ = Shares(predictor, 3, 0).round(0, 0, 0)
    lanes = predictor.verification(placement, 0)
    assert (placement.streamed_bytes, placement.resident_bytes, placement.cpu_attended_bytes) == (
        64 * GIB,
        0,
        0,
    )
    tail = (LLAMA.step_bytes / 1000.0 / 1e6 + 32 * 0.3) / 32
    assert lanes.ms == lanes.link == pytest.approx(64 * GIB / 25e6 + tail)
    assert lanes.ms == pytest.approx(2_750, rel=0.01)
    assert lanes.cpu_attention == 0
    assert lanes.host_memory == pytest.approx(64 * GIB / 70e6 + tail)
    assert lanes.processor == pytest.approx(32 * tail + 64 * GIB / 1000e6)


def test_a_pass_with_a_cpu_share() -> None:
    """A quarter resident, a quarter attended by the CPU at 17 queries, half streamed."""
    predictor = Predictor(request())
    placement, _ = Shares(predictor, 3, 16).round(CONTEXT // 4, CONTEXT // 4, 0)
    lanes = predictor.verification(placement, 16)
    dense = LLAMA.step_bytes / 1000.0 / 1e6 + 32 * 0.3
    assert lanes.link == pytest.approx(32 * GIB / (25 * 0.9) / 1e6 + dense / 32)
    rate = (40 - 10 / 16) * 0.8
    sent = 17 * 4096 * 2
    exchange = 32 * (0.04 + sent / 20e6 + (sent + 17 * 32 * 4) / 25e6)
    assert lanes.cpu_attention == pytest.approx(dense + 16 * GIB / rate / 1e6 + exchange)
    assert lanes.host_memory == pytest.approx(48 * GIB / 70e6 + dense / 32)
    assert lanes.processor == pytest.approx(dense + 48 * GIB / 1000e6)
    assert lanes.ms == max(lanes.link, lanes.cpu_attention)


def test_the_link_waits_where_the_ring_is_shallow() -> None:
    """While a layer's queries are computed, the link gets no further than the ring has room."""
    slow = replace(CARD, memory_rate=20.0)
    predictor = Predictor(request(hardware=Hardware(HOST, (slow,), measured=True)))
    dense = LLAMA.step_bytes / 20e6 / 32 + 0.3
    layer = 2 * GIB / 25e6
    segment = 4096 * LLAMA.layer_token_bytes / 25e6
    for ring in (2, 3):
        placement, _ = Shares(predictor, ring, 0).round(0, 0, 0)
        expected = 32 * max(layer, dense + layer - (ring - 1) * segment) + dense
        assert predictor.verification(placement, 0).link == pytest.approx(expected)


def test_the_time_of_a_hierarchys_draft() -> None:
    """16 tokens in steps of 1.75, each of them after two steps of the small model."""
    predictor = Predictor(request())
    small = JF68M.step_bytes + 256 * JF68M.token_bytes
    middle = LLAMA.step_bytes + 4096 * LLAMA.token_bytes
    step = 2 * (small / 1e9 + 2 * 0.03) + middle / 1e9 + 32 * 0.03
    assert predictor.draft(16).ms == pytest.approx(16 / 1.75 * step)
    without_graphs = Predictor(request(graphs=False))
    assert without_graphs.draft(16).ms - predictor.draft(16).ms == pytest.approx(16 / 1.75 * 36 * 0.27)


def test_grouped_heads_are_more_queries_a_key_head() -> None:
    """Llama-3.1-8B has four query heads a key head: the CPU attends 32 of them at 8 tokens, at 30 GB/s."""
    eight = find_shape("llama3.1-8b", None)
    predictor = Predictor(request(target=eight, draft=None))
    placement, _ = Shares(predictor, 3, 7).round(0, CONTEXT, 0)
    lanes = predictor.verification(placement, 7)
    sent = 8 * 4096 * 2
    exchange = 32 * (0.04 + sent / 20e6 + (sent + 8 * 32 * 4) / 25e6)
    assert lanes.cpu_attention == pytest.approx(lanes.dense.ms + 16 * GIB / 30e6 + exchange)
    assert lanes.link == 0


def test_a_draft_without_a_gpu() -> None:
    """A middle step verifies two drafted tokens: three queries a key head, at their rate."""
    rates = (AttentionRate(1, 60.0), AttentionRate(3, 20.0))
    predictor = Predictor(request(hardware=Hardware(replace(HOST, attention=rates), (), measured=True)))
    small = JF68M.step_bytes / 70e6 + 256 * JF68M.token_bytes / 60e6 + 2 * 0.5
    middle = max(LLAMA.step_bytes / 70e6, 3 * LLAMA.step_flops / 800e6)
    middle += 4096 * LLAMA.token_bytes / 20e6 + 32 * 0.5
    assert predictor.draft(7).ms == pytest.approx(7 / 1.75 * (2 * small + middle))


def test_many_tokens_are_bound_by_arithmetic() -> None:
    predictor = Predictor(request(hardware=gpu(compute_rate=1.0)))
    step = predictor.step(LLAMA, 10, 0, split=True, graphs=False)
    assert step.busy_ms == pytest.approx(10 * LLAMA.step_flops / 1e9)


def test_a_prefill_by_hand() -> None:
    """Half the square of the prompt's length in 31 layers, and all products, on one card and on two."""
    attention = 31 * 4 * 32 * 128 * CONTEXT**2 / 2 / 0.6
    products = 2 * (LLAMA.parameters - 2 * 32000 * 4096) * CONTEXT
    one = (attention + products) / 160e9
    assert Predictor(request()).prefill_ms() == pytest.approx(one)
    exchanged = 2 * 32 * CONTEXT * 4096 * 2 / 20e6
    assert Predictor(request(hardware=gpu(2))).prefill_ms() == pytest.approx(one / 2 + exchanged)
    slow_link = Predictor(request(hardware=gpu(to_host_rate=0.5)))
    assert slow_link.prefill_ms() == pytest.approx(64 * GIB / 0.5e6)


def test_memory_of_one_card_by_hand() -> None:
    config = load_config("triforce")
    parts = gpu_memory(request(), 0, 3)
    assert parts["weights"] == LLAMA.weight_bytes and parts["draft_weights"] == JF68M.weight_bytes
    assert parts["retrieved_caches"] == 2 * (4096 + 64) * 512 * 1024
    assert parts["draft_cache"] == (16 + 240 + 64) * 6 * 1024
    assert parts["staging_ring"] == 3 * config.store.segment_tokens * 16 * 1024
    assert parts["reserve"] == int(0.03 * 24 * GIB)
    # One layer's KV and the hidden states of the prompt, and what a chunk of 2,048 tokens passes through.
    chunk = 2048 * (4 * 4096 + 4 * 4096 + 3 * 11008) * 2
    assert parts["prefill"] == CONTEXT * (16 * 1024 + 4096 * 2) + chunk
    # The newest tokens' KV: a page, a pass of up to 65, and its queries.
    assert parts["newest_tokens"] == (256 + 65) * 512 * 1024 + 65 * 32 * 4096 * 2
    assert parts["logits"] == 65 * 32000 * (2 + 4 + 4)


def test_two_cards_halve_what_is_split() -> None:
    one, two = gpu_memory(request(), 0, 3), gpu_memory(request(hardware=gpu(2)), 1, 3)
    for part in ("weights", "retrieved_caches", "staging_ring", "newest_tokens"):
        assert two[part] == one[part] // 2
    assert "draft_weights" not in two
    planned = plan(request(hardware=gpu(2)))
    assert [parts["resident_kv"] for parts in planned.gpus] == [planned.placement.resident_bytes // 2] * 2
    assert any("tensor parallelism is not built yet" in said for said in planned.assumptions)


def test_host_memory_is_whole_pages_and_summaries() -> None:
    parts = host_memory(request(context=1000, new_tokens=100))
    assert parts == {"kv": 1280 * 512 * 1024, "summaries": 137 * 256 * 1024, "reserve": int(0.03 * 92 * GIB)}
    assert "summaries" not in host_memory(request(config=load_config("naive")))


def test_rates_between_measurements_and_beyond() -> None:
    rates = HOST.attention
    assert [attention_rate(rates, queries) for queries in (1, 16, 24, 32, 64)] == [50, 40, 35, 30, 15]
    assert attention_rate((AttentionRate(4, 30.0),), 1) == 30


def test_expected_tokens_and_hits_by_hand() -> None:
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(1.0, 8) == 9
    assert expected_tokens(0.92, 12) == pytest.approx((1 - 0.92**13) / 0.08)
    assert hit_rate(0.9, 4, 1) == pytest.approx(0.9**5)
    # Rejected at the first token or at the second, and the runner-up right every other time.
    assert hit_rate(0.9, 4, 3) == pytest.approx(0.9**5 + 0.5 * (0.1 + 0.9 * 0.1))
    assert hit_rate(0.9, 1, 4) == hit_rate(0.9, 1, 2)
    assert hit_rate(1.0, 8, 4) == 1


def test_two_links_fill_their_rings_from_one_memory() -> None:
    predictor = Predictor(request(hardware=gpu(2)))
    placement, _ = Shares(predictor, 3, 0).round(0, 0, 0)
    lanes = predictor.verification(placement, 0)
    ring = 2 * 4096 * LLAMA.layer_token_bytes  # of all cards, but for the buffers that are read
    assert lanes.link_ahead == pytest.approx(ring / 2 / 25e6)
    assert lanes.host_memory_ahead == pytest.approx(ring / 70e6)
    dense = (LLAMA.step_bytes / 2 / 1000e6) + 32 * (2 * 0.03 + 0.3)
    assert lanes.link == pytest.approx(32 * GIB / 25e6 + dense / 32)
    assert lanes.dense.ms == pytest.approx(dense)


def test_a_round_by_hand() -> None:
    predictor = Predictor(request())
    shares = Shares(predictor, 3, 16)
    placement, late = shares.round(0, 0, 0)
    lanes, draft = late.verification, late.draft
    ring = 2 * 4096 * LLAMA.layer_token_bytes / 25e6
    assert ring < draft.ms < lanes.ms
    waited = lanes.link - ring + draft.ms  # the link is the slowest lane even so
    assert late.ms == pytest.approx(waited)
    _, ahead = shares.round(0, 0, 2)
    hits = hit_rate(0.92, 16, 2)
    assert ahead.ms == pytest.approx(hits * lanes.ms + (1 - hits) * waited)
    assert ahead.tokens == late.tokens == expected_tokens(0.92, 16)
    assert ahead.ms_per_token == ahead.ms / ahead.tokens
    assert placement.ring_bytes == 3 * 4096 * LLAMA.layer_token_bytes
    # A draft that takes longer than the pass is the round.
    slow = replace(draft, busy_ms=3 * lanes.ms)
    long = predictor.round(16, lanes, slow, 1)
    busy = slow.ms + 64 * GIB / 1000e6 + lanes.dense.busy_ms
    rate = hit_rate(0.92, 16, 1)
    assert long.ms == pytest.approx(rate * busy + (1 - rate) * (lanes.ms - ring + slow.ms))
    assert predictor.bottleneck(long) == "draft"


# The machine without a GPU.


def test_the_demo_pair_on_a_cpu_comes_near_what_was_measured() -> None:
    """Measured on 2 cores at 46 GB/s: a plain pass at 128K takes 31 ms, a middle step 3 to 5."""
    two_cores = replace(
        HOST,
        memory_bytes=20 * GIB,
        memory_rate=46.0,
        compute_rate=300.0,
        attention=(AttentionRate(1, 41.0), AttentionRate(8, 33.0), AttentionRate(16, 23.0)),
    )
    target, draft = find_shape("demo", torch.float32), find_shape("demo-draft", torch.float32)
    asked = request(target=target, draft=draft, hardware=Hardware(two_cores, (), measured=True))
    planned = plan(asked)
    assert planned.fits and planned.predicted is not None
    placement = planned.placement
    assert (placement.resident_bytes, placement.streamed_bytes) == (0, 0)
    assert placement.cpu_attended_bytes == GIB
    predicted = planned.predicted
    assert predicted.plain_ms_per_token == pytest.approx(31, rel=0.15)
    assert predicted.round_ms == pytest.approx(predicted.pass_ms + predicted.draft_ms)
    assert 3 <= Predictor(asked).step(target, 3, 4096, split=True, graphs=True).ms <= 5
    assert predicted.ms_per_token < predicted.plain_ms_per_token
    assert predicted.prefill_ms == pytest.approx(94_000, rel=0.15)
    assert predicted.bottleneck == "cpu attention"
    assert not planned.gpus and {"kv", "weights", "draft_weights", "reserve"} <= planned.host.keys()


# Laws of any plan.


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    kv_heads = draw(st.sampled_from([2, 4, 8]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    head_dim = draw(st.sampled_from([64, 128]))
    return ModelShape(
        name="random",
        layers=draw(st.integers(2, 40)),
        hidden=heads * head_dim,
        intermediate=draw(st.integers(256, 12_000)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=32_000,
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, BF16])),
    )


rates = st.floats(1.0, 100.0)
share_left = st.floats(0.6, 1.0)


@st.composite
def machines(draw: st.DrawFn, gpus: tuple[int, int] = (0, 2)) -> Hardware:
    attention = draw(st.lists(rates, min_size=3, max_size=3))
    host = Host(
        memory_bytes=int(draw(st.floats(2, 200)) * GIB),
        lockable_bytes=int(draw(st.floats(2, 200)) * GIB),
        memory_rate=draw(rates),
        compute_rate=draw(st.floats(50, 3000)),
        attention=tuple(AttentionRate(q, rate) for q, rate in zip((1, 8, 32), attention, strict=True)),
        attention_beside_link=draw(share_left),
        link_beside_attention=draw(share_left),
        launch_ms=draw(st.floats(0.05, 1)),
        threads=4,
    )
    card = Gpu(
        name="random",
        memory_bytes=int(draw(st.floats(2, 48)) * GIB),
        memory_rate=draw(st.floats(20, 3000)),
        compute_rate=draw(st.floats(5, 900)),
        to_device_rate=draw(st.floats(1, 60)),
        to_host_rate=draw(st.floats(1, 60)),
        launch_ms=draw(st.floats(0.01, 1)),
    )
    return Hardware(host, (card,) * draw(st.integers(*gpus)), measured=False)


@st.composite
def requests(draw: st.DrawFn, fixed: bool | None = True) -> PlanRequest:
    name = draw(st.sampled_from(["triforce", "retrieval", "plain", "naive", "streaming", "lookup"]))
    overrides: dict[str, object] = {
        "retrieval.budget": draw(st.sampled_from([512, 2048, 8192])),
        "speculation.gamma2": draw(st.integers(1, 40)),
        "store.ring_buffers": draw(st.integers(2, 6)),
        "store.segment_tokens": draw(st.sampled_from([256, 1024, 4096])),
    }
    return PlanRequest(
        target=draw(shapes()),
        draft=JF68M if draw(st.booleans()) or name == "naive" else None,
        config=load_config(name, overrides),
        context=draw(st.integers(1, 300_000)),
        new_tokens=draw(st.integers(0, 2048)),
        hardware=draw(machines()),
        same_model_acceptance=draw(st.floats(0, 1)),
        small_model_acceptance=draw(st.floats(0, 1)),
        fixed_draft=draw(st.booleans()) if fixed is None else fixed,
        drafts_ahead=draw(st.booleans()),
        graphs=draw(st.booleans()),
    )


def numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, int | float) else []


def check_sums(planned: Plan) -> None:
    """What is true of every plan."""
    asked, placement = planned.request, planned.placement
    whole = placement.resident_bytes + placement.streamed_bytes + placement.cpu_attended_bytes
    assert whole == asked.context * asked.target.token_bytes
    report = planned.to_json()
    assert all(number >= 0 for number in numbers(report))
    assert json.loads(json.dumps(report)) == report
    if not planned.fits:
        assert planned.predicted is None and planned.refusal is not None
        return
    page = asked.config.store.page
    assert placement.resident_tokens % page == 0 or placement.resident_tokens == asked.context
    assert placement.cpu_tokens % page == 0 or placement.streamed_tokens == 0
    for parts, card in zip(planned.gpus, asked.hardware.gpus, strict=True):
        assert sum(parts.values()) <= card.memory_bytes
        assert parts["staging_ring"] * asked.parts == placement.ring_bytes
    host = asked.hardware.host
    assert sum(planned.host.values()) <= host.memory_bytes
    predicted = planned.predicted
    assert predicted is not None
    assert predicted.round_ms >= predicted.pass_ms * (1 - 1e-9) or placement.streamed_tokens
    assert predicted.ms_per_token == pytest.approx(predicted.round_ms / predicted.tokens_per_round)
    assert 1 <= predicted.tokens_per_round <= planned.config.speculation.gamma2 + 1
    if asked.in_place:
        assert placement.cpu_tokens == asked.context
    else:
        assert planned.host["kv"] <= host.lockable_bytes
        assert placement.ring_buffers >= asked.config.store.ring_buffers


@quick
@given(requests(fixed=None))
def test_parts_fit_and_shares_add_up(asked: PlanRequest) -> None:
    check_sums(plan(asked))


def both_fit(one: PlanRequest, other: PlanRequest) -> tuple[Plan, Plan]:
    """Plans of both, where they compare: a retrieved cache of another size is another drafter."""
    plans = plan(one), plan(other)
    assume(all(planned.fits for planned in plans))
    assume(plans[0].config.retrieval.budget == plans[1].config.retrieval.budget)
    return plans


def faster_or_equal(better: Plan, worse: Plan) -> None:
    assert better.predicted is not None and worse.predicted is not None
    for figure in ("ms_per_token", "prefill_ms"):
        assert getattr(better.predicted, figure) <= getattr(worse.predicted, figure) * (1 + 1e-9)


def with_card(asked: PlanRequest, **changes: Any) -> PlanRequest:
    hardware = asked.hardware
    return replace(asked, hardware=replace(hardware, gpus=(replace(hardware.gpus[0], **changes),)))


@st.composite
def gpu_requests(draw: st.DrawFn, longest: int = 150_000) -> PlanRequest:
    """Requests that fit, on a card that can keep none, some or all of the KV."""
    asked = draw(requests()).with_context(draw(st.integers(1, longest)))
    hardware = draw(machines(gpus=(1, 1)))
    host = replace(hardware.host, memory_bytes=2000 * GIB, lockable_bytes=2000 * GIB)
    asked = replace(asked, hardware=Hardware(host, hardware.gpus, measured=False))
    parts = gpu_memory(with_card(asked, memory_bytes=0), 0, asked.config.store.ring_buffers)
    needed = sum(parts.values()) - parts["reserve"]
    needed += int(draw(st.floats(0, 1.2)) * asked.context * asked.target.token_bytes)
    return with_card(asked, memory_bytes=1 + max(needed + 2**29, int(needed / 0.97)))


@quick
@given(gpu_requests(), st.floats(1.0, 3.0))
def test_more_gpu_memory_is_never_slower(asked: PlanRequest, factor: float) -> None:
    more = with_card(asked, memory_bytes=int(factor * asked.hardware.gpus[0].memory_bytes))
    bigger, smaller = both_fit(more, asked)
    faster_or_equal(bigger, smaller)


@quick
@given(gpu_requests(), st.floats(1.0, 4.0))
def test_a_faster_link_is_never_slower(asked: PlanRequest, factor: float) -> None:
    faster_or_equal(
        *both_fit(with_card(asked, to_device_rate=factor * asked.hardware.gpus[0].to_device_rate), asked)
    )


@quick
@given(gpu_requests(), st.integers(1, 200))
def test_a_longer_context_is_never_faster(asked: PlanRequest, pages: int) -> None:
    longer = asked.with_context(asked.context + pages * asked.config.store.page)
    faster_or_equal(*both_fit(asked, longer))


@quick
@given(gpu_requests(longest=10_000))
@example(request(context=20_001, fixed_draft=True))
@example(request(context=20_001, fixed_draft=True, hardware=gpu(2, memory_bytes=12 * GIB)))
def test_no_other_shares_make_a_shorter_round(asked: PlanRequest) -> None:
    """Every way to share out a context, tried one by one."""
    planned = plan(asked)
    assume(planned.fits and planned.config.retrieval.budget == asked.config.retrieval.budget)
    check_sums(planned)
    predictor, page = Predictor(asked), asked.config.store.page
    gamma = asked.longest_draft
    best = float("inf")
    for ring in range(
        asked.config.store.ring_buffers, asked.config.store.ring_buffers + EXTRA_RING_BUFFERS + 1
    ):
        if not ring_fits(asked, ring):
            break
        shares, capacity = Shares(predictor, ring, gamma), resident_capacity(asked, ring)
        places = {(capacity, 0)}
        places |= {(capacity, cpu) for cpu in range(0, asked.context - capacity, page)}
        places |= {(resident, asked.context - resident) for resident in range(0, capacity + 1, page)}
        for (resident, cpu), outcomes in itertools.product(places, predictor.outcomes):
            best = min(best, shares.round(resident, cpu, outcomes)[1].ms_per_token)
    assert planned.predicted is not None
    assert planned.predicted.ms_per_token == pytest.approx(best, rel=1e-9)


# Choices.


def test_the_length_of_drafts_is_the_best_of_all() -> None:
    chosen = plan(request())
    assert chosen.predicted is not None
    gamma = chosen.config.speculation.gamma2
    assert 1 < gamma < 64
    for other in (1, 4, gamma - 1, gamma, gamma + 1, 32, 64):
        config = load_config("triforce", {"speculation.gamma2": other})
        fixed = plan(request(config=config, fixed_draft=True))
        assert fixed.predicted is not None
        # Where the length is fixed, less memory is set aside for longer drafts: a little more is resident.
        assert chosen.predicted.ms_per_token <= fixed.predicted.ms_per_token * 1.01
        assert (other == gamma) == (
            abs(fixed.predicted.tokens_per_round - chosen.predicted.tokens_per_round) < 1e-9
        )


def test_a_draft_of_fixed_length_is_kept() -> None:
    config = load_config("triforce", {"speculation.gamma2": 5})
    planned = plan(request(config=config, fixed_draft=True))
    assert planned.config.speculation.gamma2 == 5
    assert any("gamma2 5 (as given)" in said for said in planned.assumptions)


def test_drafting_ahead_pays() -> None:
    ahead, late = plan(request()), plan(request(drafts_ahead=False))
    assert ahead.predicted is not None and late.predicted is not None
    assert ahead.predicted.ms_per_token < late.predicted.ms_per_token


def test_plain_decoding_has_no_drafts() -> None:
    planned = plan(request(config=load_config("plain")))
    predicted = planned.predicted
    assert predicted is not None
    assert (predicted.draft_ms, predicted.tokens_per_round) == (0, 1)
    assert predicted.ms_per_token == predicted.pass_ms == predicted.plain_ms_per_token
    assert "no speculation: 1 token a pass" in planned.assumptions


def test_a_missing_draft_model_leaves_its_level_out() -> None:
    planned = plan(request(draft=None))
    assert planned.config.speculation.levels == ("target:retrieved",)
    assert any("no draft model" in said for said in planned.assumptions)
    with pytest.raises(UsageError, match="naive drafts with a small model"):
        request(draft=None, config=load_config("naive"))


def test_a_retrieved_cache_shrinks_to_fit_and_says_so() -> None:
    config = load_config("triforce", {"retrieval.budget": 8192})
    planned = plan(request(config=config))
    budget = planned.config.retrieval.budget
    assert planned.fits and 2048 <= budget < 8192
    assert any(f"retrieval.budget is {budget} instead of 8192" in said for said in planned.assumptions)
    larger = request(config=config).with_budget(budget + 8)
    assert not ring_fits(larger, config.store.ring_buffers)


def test_what_holds_a_run_up_is_named() -> None:
    def bottleneck(**changes: Any) -> str:
        planned = plan(request(**changes))
        assert planned.predicted is not None
        return planned.predicted.bottleneck

    slow_cpu = tuple(AttentionRate(one.queries, one.rate / 1000) for one in HOST.attention)
    assert bottleneck(hardware=gpu(attention=slow_cpu)) == "link"
    assert bottleneck(hardware=gpu(to_device_rate=0.01)) == "cpu attention"
    assert bottleneck(context=2000, hardware=gpu(launch_ms=30.0)) == "launch"
    plain = load_config("plain")
    assert bottleneck(context=2000, config=plain, hardware=gpu(launch_ms=0.001)) == "gpu compute"
    starved = Hardware(replace(HOST, memory_rate=5.0), (CARD,), measured=True)
    assert bottleneck(hardware=starved) == "host memory"


# Refusals.


def refusal(**changes: Any) -> str:
    planned = plan(request(**changes))
    check_sums(planned)
    assert not planned.fits and planned.refusal is not None
    return planned.refusal


def nearest_context(said: str) -> int:
    found = re.search(r"a context of (\d+) tokens", said)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hardware": gpu(memory_bytes=15 * GIB)}, "GPU 0 (card) has 15.0 GiB and would need"),
        (
            {"hardware": Hardware(replace(HOST, memory_bytes=40 * GIB), (CARD,), measured=True)},
            "host memory has 40.0",
        ),
        ({"hardware": Hardware(replace(HOST, lockable_bytes=GIB), (CARD,), measured=True)}, "ulimit -l"),
        (
            {"hardware": Hardware(replace(HOST, memory_bytes=60 * GIB), (), measured=True)},
            "host memory has 60.0",
        ),
    ],
)
def test_the_nearest_context_fits_and_the_next_page_does_not(changes: dict[str, Any], why: str) -> None:
    said = refusal(**changes)
    assert why in said and "\n" not in said
    context = nearest_context(said)
    assert 0 < context < CONTEXT and context % 256 == 0
    assert plan(request(**changes | {"context": context})).fits
    assert not plan(request(**changes | {"context": context + 256})).fits


def test_nearest_plans_of_other_kinds() -> None:
    thirteen = find_shape("llama2-13b", None)
    roomy = replace(HOST, memory_bytes=200 * GIB, lockable_bytes=200 * GIB)
    said = refusal(target=thirteen, hardware=Hardware(roomy, (CARD,), measured=True))
    assert said.endswith("what fits: 2 such GPUs")
    assert plan(request(target=thirteen, hardware=Hardware(roomy, (CARD,) * 2, measured=True))).fits
    wide = find_shape("llama2-7b", torch.float32)
    said = refusal(target=wide, hardware=Hardware(roomy, (CARD,), measured=True))
    assert "--dtype bfloat16" in said
    tight = load_config("triforce", {"retrieval.budget": 60_000})
    found = re.search(r"--set retrieval.budget=(\d+)", refusal(config=tight))
    assert found is not None and plan(request(config=tight).with_budget(int(found[1]))).fits
    assert "smaller model" in refusal(hardware=gpu(memory_bytes=GIB // 4))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context": 0}, "context 0"),
        ({"new_tokens": -1}, "new tokens -1"),
        ({"same_model_acceptance": 1.5}, "acceptance 1.5"),
        ({"hardware": gpu(3)}, "32 key heads, which 3 GPUs cannot share"),
        ({"draft": find_shape("qwen2.5-0.5b", None)}, "151936 tokens in its vocabulary"),
    ],
)
def test_requests_that_make_no_sense(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        request(**changes)


# What is told.

KEYS = {
    "placement": {"resident_bytes", "streamed_bytes", "cpu_attended_bytes", "ring_bytes"},
    "memory": {"gpus", "host"},
    "predicted": {
        *("pass_ms", "draft_ms", "round_ms", "tokens_per_round", "ms_per_token", "prefill_ms", "bottleneck"),
        "plain_ms_per_token",
    },
}


def test_the_json_has_its_keys_and_figures() -> None:
    planned = plan(request())
    report: Any = planned.to_json()
    assert set(report) == {"fits", "placement", "memory", "predicted", "assumptions"}
    for name, keys in KEYS.items():
        assert keys <= set(report[name])
    assert report["fits"] is True
    assert report["placement"]["ring_bytes"] == planned.placement.ring_bytes
    assert report["memory"]["gpus"][0]["weights"] == LLAMA.weight_bytes
    assert all(re.search(r"\d", sentence) for sentence in report["assumptions"])
    refused: Any = plan(request(hardware=gpu(memory_bytes=GIB))).to_json()
    assert refused["fits"] is False and refused["refusal"]
    assert set(refused["predicted"].values()) == {None} and set(refused["predicted"]) == KEYS["predicted"]


def test_assumptions_tell_the_figures_they_rest_on() -> None:
    planned = plan(request())
    told = "\n".join(planned.assumptions)
    queries = planned.config.speculation.gamma2 + 1
    for figure in (
        *(
            "read at 70.0 GB/s",
            "50.0 GB/s at 1",
            "40.0 GB/s at 16",
            "link 25.0 GB/s",
            "20.0 GB/s back",
            "0.30 ms",
        ),
        *("draft:streaming 0.50", "target:retrieved 0.92", "0.80 of it beside the link", "(measured)"),
        f"{queries} queries a key head at {attention_rate(HOST.attention, queries):.1f} GB/s",
        "131072 tokens and 256 new ones are more than the 131072 positions",
    ):
        assert figure in told
    assert "(named, not measured)" in "\n".join(plan(request(hardware=named_hardware("l40"))).assumptions)


def test_named_machines() -> None:
    hardware = named_hardware("rtx4090")
    card = hardware.gpus[0]
    assert not hardware.measured and len(hardware.gpus) == 1
    assert card.memory_bytes == 24_564 * 2**20 and card.memory_rate == pytest.approx(0.9 * 1008)
    assert (card.to_device_rate, hardware.host.memory_rate) == (25, 70)
    assert hardware.host.memory_bytes == 92 * GIB
    assert attention_rate(hardware.host.attention, 16) == pytest.approx(49)
    assert attention_rate(hardware.host.attention, 32) == pytest.approx(24.5)
    other = named_hardware("h100", 2, link=50, dram=300, ram=512, cpu_attention=100, vram=60)
    assert [one.memory_bytes for one in other.gpus] == [60 * GIB] * 2
    assert (other.gpus[0].to_device_rate, other.host.memory_rate) == (50, 300)
    assert attention_rate(other.host.attention, 1) == 100
    assert named_hardware("none").gpus == ()
    plain = load_config("plain")
    assert all(plan(request(hardware=named_hardware(name, 2), config=plain)).fits for name in CARDS)
    with pytest.raises(UsageError, match="rtx5090.*rtx4090"):
        named_hardware("rtx5090")


# The command.


def run(arguments: str, *more: str) -> int:
    return cli.main(["plan", *arguments.split(), *more])


def test_the_command_tells_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    flags = "--model llama2-7b --draft jf68m --context 130048 --gpu rtx4090 --json"
    assert run(flags, str(file)) == 0
    out, err = capsys.readouterr()
    report = json.loads(file.read_text())
    predicted = report["predicted"]
    assert not err
    for said in (
        "llama2-7b and jf68m in bfloat16, 130,048 tokens of context, 256 new; config triforce",
        "KV         63.50 GiB: resident on the GPU",
        f"{predicted['ms_per_token']:.1f} ms a token",
        f"bottleneck {predicted['bottleneck']}",
        *report["assumptions"],
    ):
        assert said in out
    assert report["fits"] and sum(report["memory"]["gpus"][0].values()) <= 24_564 * 2**20


def test_the_command_refuses_with_the_nearest_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert run("--model llama2-7b --context 130048 --gpu rtx4090 --ram 48 --json", str(file)) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert "llama2-7b at 130048 tokens does not fit: host memory has 44.0 GiB" in err
    context = nearest_context(err)
    report = json.loads(file.read_text())
    assert report["fits"] is False and report["refusal"] in err
    assert run(f"--model llama2-7b --context {context} --gpu rtx4090 --ram 48") == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model llama2-7b", "--context"),
        ("--model nothing --context 10 --gpu none", "no shape of that name"),
        ("--context 10 --gpu rtx9", "--gpu rtx9"),
        ("--context 10 --link 25", "--link describes a machine: name its card"),
        ("--context 10 --gpu none --dram -1", "--dram -1"),
        ("--context 10 --gpu none --gpus 0", "--gpus 0"),
        ("--context 10 --gpu none --config nothing", "unknown config 'nothing'"),
        ("--context 10 --gpu none --set retrieval.size=1", "retrieval.size"),
        ("--context 10 --gpu none --acceptance 2", "acceptance 2"),
        ("--context -5 --gpu none", "context -5"),
        ("--context 10 --gpu none --json /no/such/folder/x", "its folder does not exist"),
        ("--context 10 --gpu none --config naive --draft none", "drafts with a small model"),
    ],
)
def test_mistakes_are_a_line(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(flags) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("offload-rt: error: ") and err.count("\n") == 1 and said in err


def test_flags_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--model llama3.1-8b --draft llama3.2-1b --context 60000 --new-tokens 100 --gpu rtx3090 --gpus 2"
        " --link 12.5 --dram 60 --ram 128 --cpu-attention 33 --vram 20 --acceptance 0.85"
        " --draft-acceptance 0.6 --set speculation.gamma2=7 --dtype float16 --no-ahead"
    )
    assert run(flags) == 0
    out = capsys.readouterr().out
    for said in (
        *("float16, 60,000 tokens of context, 100 new", "link 12.5 GB/s", "124.0 GiB", "read at 60.0 GB/s"),
        *("33.0 GB/s at 16", "target:retrieved 0.85", "draft:streaming 0.60", "gamma2 7 (as given)"),
        *("of 20.00 GiB", "2 GPUs share", "drafts are made between passes"),
    ):
        assert said in out


def test_without_a_named_machine_it_is_this_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor: Any = ModuleType("offload_rt.doctor")
    doctor.inspect = lambda: SimpleNamespace(hardware=Hardware(HOST, (), measured=True))
    monkeypatch.setitem(sys.modules, "offload_rt.doctor", doctor)
    assert run("--context 32768") == 0
    out = capsys.readouterr().out
    assert "demo and demo-draft in float32" in out and "host (measured)" in out


def test_the_plans_config_is_the_runs() -> None:
    planned = plan(request())
    config: Config = planned.config
    assert config.store.ring_buffers == planned.placement.ring_buffers
    assert config.prefill == planned.request.config.prefill and config.name == "triforce"
