"""What is true of any plan, on any machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.plan_cases import JF68M, check_sums, expected_round, gpu, request

from offload_rt.drafting.levels.configs import load_config
from offload_rt.model.named_shapes import SHAPES
from offload_rt.planning.cost_model import CostModel
from offload_rt.planning.memory import MemoryBudget
from offload_rt.planning.planner import THRIFTY, plan
from offload_rt.planning.request import PlanRequest
from offload_rt.system.hardware import GIB, AttentionRate, Gpu, Hardware, Host

GAMMA_8 = {"speculation.gamma2": 8}
quick = settings(derandomize=True, deadline=None, max_examples=30)


shapes = st.builds(
    lambda shape, dtype: replace(shape, vocabulary=JF68M.vocabulary, dtype=dtype, max_positions=2**20),
    st.sampled_from(list(SHAPES.values())),
    st.sampled_from([torch.float32, torch.bfloat16]),
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
def requests(draw: st.DrawFn, shortest: int = 1) -> PlanRequest:
    name = draw(st.sampled_from(["triforce", "retrieval", "plain", "naive", "streaming", "lookup"]))
    overrides: dict[str, object] = {
        "retrieval.budget": draw(st.sampled_from([512, 2048, 8192])),
        "speculation.gamma2": draw(st.integers(shortest, 40)),
        "store.ring_buffers": draw(st.integers(2, 6)),
        "offload.ahead": draw(st.sampled_from([0, 1, 4, 9])),
        "weights.planes": draw(st.sampled_from(["auto", "on", "off"])),
        "store.segment_bytes": draw(st.sampled_from([2**20, 2**24, 2**26])),
    }
    return PlanRequest(
        target=draw(shapes),
        draft=JF68M if draw(st.booleans()) or name == "naive" else None,
        config=load_config(name, overrides),
        context=draw(st.integers(1, 300_000)),
        new_tokens=draw(st.integers(0, 2048)),
        hardware=draw(machines()),
        expected_acceptance=draw(st.floats(0, 1)),
        small_model_acceptance=draw(st.floats(0, 1)),
    )


@quick
@given(requests(shortest=0))
def test_parts_fit_and_shares_add_up(asked: PlanRequest) -> None:
    check_sums(plan(asked))


def with_card(asked: PlanRequest, **changes: Any) -> PlanRequest:
    hardware = asked.hardware
    return replace(asked, hardware=replace(hardware, gpus=(replace(hardware.gpus[0], **changes),)))


@st.composite
def gpu_requests(draw: st.DrawFn, longest: int = 150_000) -> PlanRequest:
    """Requests that fit, on a card that can keep none, some or all of the KV."""
    asked = replace(draw(requests()), context=draw(st.integers(1, longest)))
    hardware = draw(machines(gpus=(1, 1)))
    host = replace(hardware.host, memory_bytes=2000 * GIB, lockable_bytes=2000 * GIB)
    asked = replace(asked, hardware=Hardware(host, hardware.gpus, measured=False))
    parts = MemoryBudget(with_card(asked, memory_bytes=0)).gpu(0)
    needed = sum(parts.values()) - parts["reserve"]
    needed += int(draw(st.floats(0, 1.2)) * asked.context * asked.target.token_bytes)
    return with_card(asked, memory_bytes=1 + max(needed + 2**29, int(needed / 0.97)))


@quick
@given(gpu_requests(), st.floats(1.0, 4.0), st.integers(1, 200))
def test_a_better_machine_is_never_slower_and_a_longer_context_never_faster(
    asked: PlanRequest, factor: float, pages: int
) -> None:
    """Texts end with a page: the rest of one goes with some share as a whole, however fast the machine is."""
    card, page = asked.hardware.gpus[0], asked.config.store.page
    asked = replace(asked, context=-(-asked.context // page) * page)
    roomier = with_card(asked, memory_bytes=int(factor * card.memory_bytes))
    faster_link = with_card(asked, to_device_rate=factor * card.to_device_rate)
    longer = replace(asked, context=asked.context + pages * page)
    for better, worse in ((roomier, asked), (faster_link, asked), (asked, longer)):
        plans = plan(better), plan(worse)
        # A retrieved cache of another size is another drafter, and smaller chunks leave others more room.
        keys = ("retrieval.budget", *(key for key, _ in THRIFTY))
        sizes = {tuple(one.request.config.value(key) for key in keys) for one in plans}
        if all(one.fits for one in plans) and len(sizes) == 1:
            less, more = (one.check() for one in plans)
            # The planner tries few shares: one between them may be shorter by less than a thousandth.
            assert less.ms_per_token <= more.ms_per_token * (1 + 1e-9)
            assert less.prefill_ms <= more.prefill_ms * (1 + 1e-9)


tokens_given = st.sampled_from([-1, 0, 1024, 4096, 10**9])


@quick
@given(gpu_requests(longest=10_000), tokens_given, tokens_given)
@example(request(context=20_001, overrides=GAMMA_8), -1, -1)
@example(request(context=20_001, overrides=GAMMA_8, hardware=gpu(2, memory_bytes=12 * GIB)), -1, -1)
@example(request(context=20_001, overrides=GAMMA_8), 1024, -1)
@example(request(context=20_001, overrides=GAMMA_8, hardware=gpu(memory_bytes=80 * GIB)), -1, 8192)
@example(request(context=20_001, overrides=GAMMA_8, hardware=gpu(memory_bytes=80 * GIB)), 4096, 10**9)
def test_no_other_shares_make_a_shorter_round(asked: PlanRequest, resident: int, cpu: int) -> None:
    """Every way to share out a context, tried one by one; shares that are given are kept."""
    asked = asked.having("offload.resident_tokens", resident).having("offload.cpu_tokens", cpu)
    planned = plan(asked)
    assume(planned.fits and planned.request.config.retrieval.budget == asked.config.retrieval.budget)
    check_sums(planned)
    asked, placement = planned.request, planned.placement
    assert resident < 0 or placement.resident_tokens == min(resident, asked.context)
    if cpu >= 0:
        assert placement.cpu_tokens in (cpu, asked.context - placement.resident_tokens)
        return
    (drafted,), predictor, page = asked.drafts, CostModel(asked), asked.config.store.page
    most = MemoryBudget(asked).capacities[0] if resident < 0 else placement.resident_tokens
    places = {(kept, asked.context - kept) for kept in (range(0, most, page) if resident < 0 else ())}
    places |= {(most, share) for share in (*range(0, asked.context - most, page), asked.context - most)}
    best = min(expected_round(predictor, drafted, *place).ms_per_token for place in places)
    assert planned.check().ms_per_token == pytest.approx(best, rel=1e-9)


@quick
@given(hardware=machines(gpus=(1, 1)), shape=shapes, context=st.integers(1000, 200_000))
def test_a_faster_link_needs_no_longer_pieces(hardware: Hardware, shape: Any, context: int) -> None:
    """The KV before a piece crosses the link once more for it; 0: all tokens are one piece."""
    card = hardware.gpus[0]
    faster = replace(hardware, gpus=(replace(card, to_device_rate=2 * card.to_device_rate),))
    asked = [request({}, "plain", context, target=shape, hardware=one) for one in (hardware, faster)]
    piece, with_faster = (CostModel(one).piece_tokens() for one in asked)
    chunk = asked[0].config.prefill.chunk
    assert piece == 0 or (piece % chunk == 0 and piece < context)
    assert piece == 0 or 0 < with_faster <= piece


def test_pieces_of_a_prompt() -> None:
    """With a key head for every head, more crosses the link while as much is computed."""
    grouped = replace(SHAPES["llama3.1-8b"], vocabulary=JF68M.vocabulary, max_positions=2**18)
    assert CostModel(request({}, target=grouped)).piece_tokens() == 2048
    assert CostModel(request()).piece_tokens() == 4096
    assert CostModel(request(hardware=gpu(to_device_rate=1.0))).piece_tokens() == 0
    assert CostModel(request({"prefill.piece": 512})).piece_tokens() == 512
    assert CostModel(request(hardware=gpu(0))).piece_tokens() == 2048
