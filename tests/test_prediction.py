"""Predicted times and memory, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from machine_cases import HOST
from plan_cases import CONTEXT, JF68M, LLAMA, expected_round, gpu, request

from offload_rt.caches.bounded import SPECULATIVE_ENTRIES
from offload_rt.caches.shared import SharedCache
from offload_rt.drafting.expectations import expected_tokens
from offload_rt.drafting.shapes import CHAIN
from offload_rt.machine.hardware import GIB, AttentionRate, Hardware
from offload_rt.planning.placement import gpu_memory, host_memory, shortage
from offload_rt.planning.planner import plan
from offload_rt.planning.prediction import (
    CHOOSING_NS,
    EXCHANGE_MS,
    GATHER_SHARE,
    MASKED_ATTENTION_SHARE,
    Predictor,
    attention_rate,
    outcome_chances,
)
from offload_rt.planning.shapes import find_shape


def launches(segments: int) -> float:
    """Of a pass of 32 layers, with so many streamed segments in each."""
    return 32 * 0.3 + 32 * segments * 14 / 45 * 0.3


def test_llama2_7b_streams_128k_in_2_7_seconds() -> None:
    """64 GiB over 25 GB/s, and a layer's weights and launches behind it."""
    assert CONTEXT * LLAMA.token_bytes == 64 * GIB
    assert LLAMA.weight_bytes / 1e9 == pytest.approx(13.5, abs=0.05)
    lanes = expected_round(Predictor(request()), CHAIN).verification
    assert lanes.placement.streamed_bytes == 64 * GIB and lanes.cpu_attention == 0
    layer = (LLAMA.step_bytes / 1000.0 / 1e6 + launches(32)) / 32
    assert lanes.ms == lanes.link == pytest.approx(64 * GIB / 25e6 + layer)
    assert lanes.ms == pytest.approx(2_750, rel=0.01)


def test_a_pass_with_a_cpu_share() -> None:
    """A quarter resident, a quarter attended by the CPU, half streamed.

    Llama-3.1-8B has four query heads a key head: the CPU attends 20 of them at 5 tokens.
    """
    eight = replace(find_shape("llama3.1-8b", None), max_positions=2**18)
    predictor = Predictor(request(target=eight, draft=None))
    lanes = expected_round(predictor, CHAIN.deep(4), CONTEXT // 4, CONTEXT // 4).verification
    dense = eight.step_bytes / 1000e6 + launches(4)  # of 16,384 tokens
    assert lanes.link == pytest.approx(8 * GIB / (25 * 0.9) / 1e6 + dense / 32)
    rate = (40 - 10 * 4 / 16) * 0.8
    assert lanes.cpu_attention == pytest.approx(dense + 4 * GIB / rate / 1e6 + 32 * 0.15)
    assert lanes.host_memory == pytest.approx(12 * GIB / 70e6 + dense / 32)
    assert lanes.processor == pytest.approx(dense + 12 * GIB / 1000e6)
    assert lanes.ms == max(lanes.link, lanes.cpu_attention)
    # Nothing is streamed: the CPU attends at its full rate, and nothing crosses the link.
    alone = expected_round(predictor, CHAIN.deep(4), 0, CONTEXT).verification
    dense = eight.step_bytes / 1000e6 + launches(0)
    attended = dense + 16 * GIB / 37.5e6 + 32 * EXCHANGE_MS
    assert alone.cpu_attention == pytest.approx(attended) and alone.link == 0


def test_a_second_cards_lanes() -> None:
    """It keeps what it has room for; what is left crosses two links, and one memory is behind them."""
    predictor = Predictor(request(hardware=gpu(2)))
    lanes = expected_round(predictor, CHAIN).verification
    (card,) = lanes.placement.gpus
    assert card.resident_tokens > 0 <= lanes.placement.streamed_tokens - card.streamed_tokens <= 1
    streamed = (lanes.placement.streamed_tokens + card.streamed_tokens) * LLAMA.token_bytes
    segments = -(-lanes.placement.streamed_tokens // 4096)
    dense = LLAMA.step_bytes / 1000e6 + launches(segments)
    assert lanes.link == pytest.approx(streamed / 50e6 + dense / 32)
    assert lanes.host_memory == pytest.approx(streamed / 70e6 + dense / 32)
    # The other one reads what it holds and what it is sent, and is asked 32 times.
    attended = card.tokens * LLAMA.token_bytes
    assert lanes.other_gpus == pytest.approx(dense + attended / 1000e6 + 32 * EXCHANGE_MS)


def test_the_time_of_a_hierarchys_draft() -> None:
    """16 tokens in steps of 1.75, each of them after two steps of the small model."""
    predictor = Predictor(request())
    small = JF68M.step_bytes + 256 * JF68M.token_bytes / MASKED_ATTENTION_SHARE
    middle = LLAMA.step_bytes + (4096 + 576) * LLAMA.token_bytes / MASKED_ATTENTION_SHARE
    step = 2 * (small / 1e9 + 2 * 0.03) + middle / 1e9 + 32 * 0.03
    assert predictor.draft(CHAIN.deep(16)).ms == pytest.approx(16 / 1.75 * step)


def test_a_draft_without_a_gpu() -> None:
    """A middle step verifies two drafted tokens: three queries a key head, at their rate."""
    rates = (AttentionRate(1, 60.0), AttentionRate(3, 20.0))
    predictor = Predictor(request(hardware=Hardware(replace(HOST, attention=rates), (), measured=True)))
    small = JF68M.step_bytes / 70e6 + 256 * JF68M.token_bytes / 60e6 + 2 * 0.5
    middle = max(LLAMA.step_bytes / 70e6, 3 * 2 * LLAMA.step_parameters / 800e6)
    middle += (4096 + 576) * LLAMA.token_bytes / 20e6 + 32 * 0.5
    assert predictor.draft(CHAIN.deep(7)).ms == pytest.approx(7 / 1.75 * (2 * small + middle))


def test_many_tokens_are_bound_by_arithmetic() -> None:
    predictor = Predictor(request(hardware=gpu(compute_rate=1.0)))
    step = predictor.step(LLAMA, 10)
    assert step.busy_ms == pytest.approx(10 * 2 * LLAMA.step_parameters / 1e9)


def test_a_prefill_by_hand() -> None:
    """Half the square of the prompt's length in 31 layers, and all products; a second card does not help."""
    attention = 31 * 4 * 32 * 128 * CONTEXT**2 / 2 / 0.6
    products = 2 * (LLAMA.parameters - 2 * 32000 * 4096) * CONTEXT
    for cards in (1, 2):
        predictor = Predictor(request(hardware=gpu(cards)))
        assert predictor.prefill_ms() == pytest.approx((attention + products) / 160e9)
    slow_link = Predictor(request(hardware=gpu(to_host_rate=0.5)))
    assert slow_link.prefill_ms() == pytest.approx(64 * GIB / 0.5e6)


def test_memory_of_one_card_by_hand() -> None:
    parts = gpu_memory(request(), 0)
    assert parts["weights"] == LLAMA.weight_bytes and parts["draft_weights"] == JF68M.weight_bytes
    assert parts["retrieved_caches"] == 2 * (4096 + 128 + 576) * 512 * 1024
    one_buffer = gpu_memory(request({"offload.refresh_from": "store"}), 0)
    assert one_buffer == parts | {"retrieved_caches": (4096 + 128 + 576) * 512 * 1024}
    assert parts["draft_cache"] == (16 + 240 + 128) * 6 * 1024
    assert parts["staging_ring"] == 3 * 4096 * 16 * 1024
    assert parts["reserve"] == int(0.03 * 24 * GIB)
    # One layer's KV and the hidden states of the prompt; what a chunk of 2,048 tokens passes through, and
    # three of them on their way to the host.
    chunk = 2048 * (4 * 4096 + 4 * 4096 + 3 * 11008) * 2 + 3 * 2048 * 16 * 1024
    assert parts["prefill"] == CONTEXT * (16 * 1024 + 4096 * 2) + chunk
    # The newest tokens' KV: a page, a pass of up to 32, and its queries.
    assert parts["newest_tokens"] == (256 + 32) * 512 * 1024 + 32 * 32 * 4096 * 2
    assert parts["logits"] == 32 * 32000 * (2 + 4 + 4)


def test_a_second_card_holds_nothing_but_kv() -> None:
    asked = request({"offload.cpu_tokens": 4096}, hardware=gpu(2))
    assert gpu_memory(asked, 0) == gpu_memory(request(), 0)
    assert gpu_memory(asked, 1).keys() == {"resident_kv", "staging_ring", "reserve"}
    planned = plan(asked)
    first, second = planned.gpus
    placement, (card,) = planned.placement, planned.placement.gpus
    page_bytes, ring = 256 * LLAMA.token_bytes, 3 * 4096 * LLAMA.layer_token_bytes
    room = int(24 * GIB) - int(0.03 * 24 * GIB) - ring
    assert (
        second["resident_kv"] == card.resident_tokens * LLAMA.token_bytes == room // page_bytes * page_bytes
    )
    assert first["resident_kv"] == placement.resident_tokens * LLAMA.token_bytes < second["resident_kv"]
    # What is left crosses two links of equal rate.
    assert 0 <= placement.streamed_tokens - card.streamed_tokens <= 1
    assert any("the others keep and attend KV" in said for said in planned.assumptions)


def test_weights_beyond_the_first_card_are_on_the_second() -> None:
    asked = request(hardware=gpu(2, memory_bytes=19 * GIB))
    assert asked.elsewhere == 13, "as few as make room, and half a GiB more"
    fewer = replace(asked, mlps_elsewhere=10)
    assert shortage(asked) is None and str(shortage(fewer)).startswith("GPU 0 (card) has 19.0 GiB")
    mlp_bytes = 3 * 4096 * 11008 * 2
    first, second = asked.hardware.gpus
    full = replace(second, memory_bytes=sum(gpu_memory(asked, 1).values()) - 2 * mlp_bytes)
    fits = replace(asked, hardware=replace(asked.hardware, gpus=(first, full)))
    assert fits.elsewhere == 11 and shortage(fits) is None, "no more where there is no room for more"
    whole, first, second = (gpu_memory(*one) for one in ((request(), 0), (asked, 0), (asked, 1)))
    assert second["weights"] == whole["weights"] - first["weights"] == 13 * mlp_bytes
    assert second["prefill"] == 2048 * (2 * 4096 + 3 * 11008) * 2
    # What goes there and back takes time, a graph cannot hold it, and a prefill sends all hidden states.
    there, here = Predictor(asked), Predictor(request())
    assert there.step(LLAMA, 1).ms == pytest.approx(here.step(LLAMA, 1).ms + 13 * EXCHANGE_MS)
    assert there.step(LLAMA, 1, graph=True) == there.step(LLAMA, 1)
    assert there.step(JF68M, 1, graph=True) == here.step(JF68M, 1, graph=True)
    sent = 13 * CONTEXT * 4096 * 2
    longer = sent / 25e6 + sent / 20e6
    assert there.prefill_ms() == pytest.approx(here.prefill_ms() + longer)
    assert request(hardware=gpu(2)).elsewhere == request().elsewhere == 0
    # Of two ways to refresh, each is weighed with as many as it needs: one of them has a second buffer here.
    planned = plan(asked)
    ways = (planned.request.having("offload.refresh_from", way) for way in ("stream", "store"))
    alone = [plan(way) for way in ways]
    assert planned.ms_per_token == min(one.ms_per_token for one in alone)
    assert alone[0].request.elsewhere > alone[1].request.elsewhere
    fixed = plan(replace(asked, mlps_elsewhere=13))
    assert "MLP blocks of 13 of 32 layers are on GPU 1" in "\n".join(fixed.assumptions)
    plain = replace(
        planned.request.having("speculation.levels", ()), mlps_elsewhere=planned.request.elsewhere
    )
    assert planned.check().plain_ms_per_token == plan(plain).ms_per_token, "with the weights where they are"


def test_host_memory_is_whole_pages_and_summaries() -> None:
    parts = host_memory(request(context=1000, new_tokens=100))
    assert parts == {
        "kv": 1280 * 512 * 1024,
        "summaries": 4 * 512 * 1024,
        "reserve": int(0.03 * 92 * GIB),
    }
    by_mean_keys = host_memory(request({"retrieval.select": "mean_keys"}, context=1000, new_tokens=100))
    assert by_mean_keys["summaries"] == 137 * 256 * 1024 + 4 * 512 * 1024
    assert "summaries" not in host_memory(request(config="naive"))


def test_rates_between_measurements_and_beyond() -> None:
    rates = HOST.attention
    assert [attention_rate(rates, queries) for queries in (1, 16, 24, 32, 64)] == [50, 40, 35, 30, 15]
    assert attention_rate((AttentionRate(4, 30.0),), 1) == 30


def test_expected_tokens_and_outcomes_by_hand() -> None:
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(1.0, 8) == 9
    assert expected_tokens(0.92, 12) == pytest.approx((1 - 0.92**13) / 0.08)
    # All accepted; rejected at the first token or at the second, and the runner-up right every other time.
    assert outcome_chances(0.9, 2) == pytest.approx((0.9**3, 0.5 * 0.1, 0.5 * 0.9 * 0.1))
    assert outcome_chances(0.2, 2) == pytest.approx((0.5 * 0.8, 0.5 * 0.2 * 0.8, 0.2**3))
    assert outcome_chances(1.0, 8) == (1,) + 8 * (0,)


def test_a_round_by_hand() -> None:
    keys = {"retrieval.refresh": "acceptance:0.5"}  # how often is not foreseen
    late, ahead = (
        expected_round(Predictor(request(keys | {"offload.ahead": most})), CHAIN.deep(16)) for most in (0, 2)
    )
    lanes, draft = late.verification, late.draft
    ring = 2 * 4096 * LLAMA.layer_token_bytes / 25e6  # one of three buffers was read last
    assert ring < draft.ms < lanes.ms == lanes.link
    assert late.ms == pytest.approx(lanes.ms - ring + draft.ms)
    assert late.refresh_share == 0
    first, second = outcome_chances(0.92, 16)[:2]
    assert ahead.chances == (first, second)
    assert ahead.ms == pytest.approx((first + second) * lanes.ms + (1 - first - second) * late.ms)
    assert ahead.tokens == late.tokens == expected_tokens(0.92, 16)
    assert ahead.ms_per_token == ahead.ms / ahead.tokens
    # A draft that takes longer than the pass is the round; that of a second outcome would come too late.
    predictor = Predictor(request(keys))
    slow = replace(draft, busy_ms=lanes.ms)
    busy = 64 * GIB / 1000e6 + lanes.dense.busy_ms
    found = predictor.round(lanes, slow)
    assert found.chances == (first,)
    assert found.ms == pytest.approx(first * (busy + slow.ms) + (1 - first) * (lanes.ms - ring + slow.ms))
    assert predictor.bottleneck(found) == "draft"


@pytest.mark.parametrize(
    ("policy", "tokens", "share"),
    [("every", 7.0, 1.0), ("stride:32", 7.0, 1 / 5), ("stride:32", 40.0, 1.0), ("acceptance:0.5", 7.0, 0.0)],
)
def test_how_often_a_retrieved_cache_is_refreshed(policy: str, tokens: float, share: float) -> None:
    refreshed = {"retrieval.refresh": policy}
    assert Predictor(request(refreshed)).refresh_share(tokens) == share
    assert Predictor(request(config="naive")).refresh_share(tokens) == 0
    assert Predictor(request(refreshed, context=4096 - 256)).refresh_share(tokens) == 0, "it holds everything"


def test_a_refresh_by_hand() -> None:
    """2 GiB of entries are gathered over the link and written on the GPU, if need be by mean keys."""

    def longer(cpu: int = 0, policy: str = "every", **keys: str) -> float:
        settings = {"retrieval.refresh": policy, "offload.refresh_from": "store"} | keys
        found, without = (
            expected_round(Predictor(request(settings | changes)), CHAIN.deep(16), 0, cpu)
            for changes in ({}, {"retrieval.refresh": "acceptance:0.5"})
        )
        assert found.ms - without.ms == pytest.approx(found.refresh_share * found.refresh_ms)
        assert found.refresh_share == (policy == "every") or 0 < found.refresh_share < 1
        return found.refresh_ms

    copied, sent = 2 * 2 * GIB / 1000e6, 2 * GIB / (GATHER_SHARE * 25e6)
    assert longer() == longer(policy="stride:32") == pytest.approx(copied + sent)
    means = {"retrieval.select": "mean_keys"}
    assert longer(**means) == pytest.approx(4 * GIB / 70e6 + copied + sent), "the mean keys of chunks of 8"
    # From the stream, but for what the CPU attends: its entries are sent apart.
    stream = {"offload.refresh_from": "stream"}
    assert longer(**stream) == pytest.approx(copied)
    assert longer(CONTEXT // 4, **stream) == pytest.approx(copied + sent / 4)


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
    placement, predicted = planned.placement, planned.check()
    assert (placement.resident_bytes, placement.streamed_bytes, placement.cpu_attended_bytes) == (0, 0, GIB)
    assert predicted.plain_ms_per_token == pytest.approx(31, rel=0.15)
    scores, copied = CONTEXT // 8 * 4 * 4, 2 * 4096 * target.token_bytes
    refresh_ms = scores * CHOOSING_NS / 1e6 + copied / 46e6
    share = Predictor(asked).refresh_share(predicted.tokens_per_round)
    assert predicted.round_ms == pytest.approx(predicted.pass_ms + predicted.draft_ms + share * refresh_ms)
    assert 3 <= Predictor(asked).step(target, 3, 4096).ms <= 5
    assert predicted.ms_per_token < predicted.plain_ms_per_token
    assert predicted.prefill_ms == pytest.approx(94_000, rel=0.15)
    assert predicted.bottleneck == "cpu attention"
    assert not planned.gpus and {"kv", "weights", "draft_weights", "reserve"} <= planned.host.keys()


def test_a_tree_is_drafted_in_steps_and_verified_in_one_pass() -> None:
    """64 nodes in 16 steps of 4: siblings save half of the rejections, of three nodes in four."""
    asked = request({"offload.ahead": 4}, "trees", context=50_000, draft=None)
    assert [one.size for one in asked.drafts] == [64] and asked.longest_draft == 64
    predictor = Predictor(asked)
    one = predictor.step(asked.target, 4, 4096 + 208, graph=True)
    found = expected_round(predictor, asked.drafts[0])
    assert found.draft.ms == pytest.approx(16 * one.ms)
    assert found.tokens == pytest.approx(expected_tokens(0.92 + 0.08 * 0.5 * 0.75, 16))
    assert found.verification.gamma == 64 and found.chances == (), "nothing is drafted ahead of its verdict"
    # A small model's tree takes that model's steps.
    levels = [{"model": "draft", "cache": "streaming", "draft": "grown:32"}]
    small = Predictor(request({"speculation.levels": levels}, "naive", context=50_000))
    small_step = small.step(JF68M, 8, 256, graph=True)
    assert small.draft(small.request.drafts[0]).ms == pytest.approx(4 * small_step.ms)
    # The shapes are those that a round may choose, look-up's finds among them; fixed widths grow no further.
    for draft, merge, most in (
        ("auto", "", 64),
        ("grown:64", "suffix", 64 + 31),
        ("tree:8,8,8", "", 8 + 64),
        ("tree:300", "", 300),
        ("chain", "lookup", 31 + 31),
    ):
        level = {"model": "target", "cache": "retrieved", "draft": draft, "merge": merge}
        free = request({"speculation.levels": [level], "speculation.gamma2": 0}, context=50_000)
        assert free.longest_draft == most
        assert free.drafts == free.speculation.shapes[-1].candidates()
    # All nodes of fixed widths count.
    fixed = {"speculation.levels": [levels[0] | {"draft": "tree:4,2"}], "speculation.gamma2": 3}
    assert plan(request(fixed, "naive", context=50_000)).gamma == 4 + 8 + 8
    planned = plan(asked)
    assert planned.gamma == 64 and "trees of 64 nodes in 16 steps" in "".join(planned.assumptions)


def test_a_draft_over_the_full_kv_waits_for_the_cpu() -> None:
    """On a GPU the CPU attends to all of the text for each drafted token, beside its share of the pass."""
    asked = request(config="shared", draft=None)
    predictor = Predictor(asked)
    token_bytes, page = LLAMA.token_bytes, asked.config.store.page
    over_text = CONTEXT * token_bytes / 50.0 / 1e6 / HOST.attention_beside_link
    draft, dense = predictor.draft(CHAIN.deep(2)), predictor.step(LLAMA, 1)
    assert draft.ms == pytest.approx(2 * (over_text + dense.ms), rel=0.02)  # and the exchange of queries
    verification = predictor.verification(asked.placement(0, CONTEXT // 2), CHAIN.deep(2))
    assert predictor.busy_ms(verification) == verification.cpu_attention
    entries = page + SharedCache.PORTION + SPECULATIVE_ENTRIES
    assert plan(asked).gpus[0]["shared_cache"] == entries * token_bytes
