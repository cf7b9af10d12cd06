"""The planner: choices, refusals, what is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from machine_cases import HOST
from plan_cases import (
    LLAMA,
    check_sums,
    gpu,
    host,
    request,
)

from offload_rt.errors import UsageError
from offload_rt.machine.hardware import GIB, KNOWN_GPUS, AttentionRate, named_hardware
from offload_rt.planning.placement import shortage
from offload_rt.planning.planner import Prediction, plan
from offload_rt.planning.prediction import attention_rate
from offload_rt.planning.shapes import find_shape


def predicted(**changes: Any) -> Prediction:
    return plan(request(**changes)).check()


def test_the_length_of_drafts_is_the_best_of_all() -> None:
    chosen = plan(request())
    best = chosen.check()
    gamma = chosen.gamma
    assert 1 < gamma < 64
    assert chosen.gpus[0]["logits"] == 32 * 32000 * (2 + 4 + 4), "room for the longest draft"
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
    assert found.ms_per_token == found.pass_ms == found.plain_ms_per_token
    assert "no speculation: 1 token a pass" in planned.assumptions


def test_a_missing_draft_model_leaves_its_level_out() -> None:
    planned = plan(request(draft=None))
    assert planned.request.levels == ("target:retrieved",)
    assert any("no draft model" in said for said in planned.assumptions)
    # Then what is below it drafts for the full cache.
    levels = [{"model": "datastore", "draft": "grown:32"}, "draft:streaming"]
    asked = request({"speculation.levels": levels, "datastore.path": "any"}, "naive", draft=None)
    assert [(shape.kind, shape.size) for shape in asked.drafts] == [("grown", 32)]
    with pytest.raises(UsageError, match="naive drafts with a small model"):
        request(draft=None, config="naive")


def test_a_retrieved_cache_shrinks_to_fit_and_says_so() -> None:
    asked = request({"retrieval.budget": 8192, "offload.refresh_from": "stream"})
    planned = plan(asked)
    check_sums(planned)  # counted with the smaller cache
    budget = planned.request.config.retrieval.budget
    assert planned.fits and 2048 <= budget < 8192
    assert any(f"retrieval.budget is {budget} instead of 8192" in said for said in planned.assumptions)
    assert str(shortage(asked.having("retrieval.budget", budget + 8))).startswith("GPU 0 (gpu)")


@pytest.mark.parametrize(("policy", "faster"), [("every", "stream"), ("stride:64", "store")])
def test_a_refresh_fills_a_second_buffer_where_that_is_faster(policy: str, faster: str) -> None:
    """A second buffer takes 2.34 GiB that could hold KV instead: too much for a rare refresh."""
    asked = request({"retrieval.refresh": policy}, hardware=gpu(memory_bytes=48 * GIB))
    forced = {place: plan(asked.having("offload.refresh_from", place)) for place in ("stream", "store")}
    stream, store = (forced[place] for place in ("stream", "store"))
    one_buffer = (4096 + 128 + 576) * LLAMA.token_bytes
    for place, buffers in (("stream", 2), ("store", 1)):
        assert forced[place].gpus[0]["retrieved_caches"] == buffers * one_buffer
        assert forced[place].to_json()["refresh_from"] == place
    more = store.placement.resident_bytes - stream.placement.resident_bytes
    assert more == pytest.approx(one_buffer, abs=256 * LLAMA.token_bytes)
    slower = {"stream": "store", "store": "stream"}[faster]
    assert forced[faster].ms_per_token < forced[slower].ms_per_token
    assert plan(asked) == forced[faster]
    assert any("the stream, into a second buffer, and take" in said for said in stream.assumptions)
    assert any("the store, between passes, and take" in said for said in store.assumptions)


def test_only_a_retrieved_cache_on_a_gpu_may_have_a_second_buffer() -> None:
    for config, gpus, told in (("naive", 1, None), ("triforce", 0, "store")):
        planned = plan(request(config=config, hardware=host(gpus, memory_bytes=200 * GIB)))
        assert planned.request.config.offload.refresh_from == "auto"
        assert planned.to_json()["refresh_from"] == told
    # Where it never is refreshed, and all KV is resident either way, one buffer is enough.
    small = plan(request(context=2048))
    assert small.placement.resident_tokens == 2048 and not small.request.refreshes_from_stream


@pytest.mark.parametrize("memory", [24, 19])
def test_a_retrieved_cache_of_the_size_asked_for_comes_before_a_second_buffer(memory: int) -> None:
    """Its better drafts are in no figure of the plan. The smaller card has no room for two at all."""
    tight, card = {"retrieval.budget": 8192, "retrieval.refresh": "every"}, gpu(memory_bytes=memory * GIB)
    stream, store = (
        plan(request(tight | {"offload.refresh_from": place}, hardware=card)) for place in ("stream", "store")
    )
    if memory == 24:
        assert stream.request.config.retrieval.budget < 8192 == store.request.config.retrieval.budget
        assert stream.ms_per_token < store.ms_per_token
    assert stream.fits == (memory == 24)
    assert plan(request(tight, hardware=card)) == store


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
FLOAT32 = replace(LLAMA, dtype=torch.float32)
RETRIEVED = {"retrieval.budget": 60_000}
RESIDENT = {"offload.resident_tokens": 65_536}


@pytest.mark.parametrize(
    ("changes", "why", "nearest"),
    [
        ({"hardware": gpu(memory_bytes=15 * GIB)}, "GPU 0 (gpu) has 15.0", [22016, "2 such GPUs"]),
        ({"hardware": host(memory_bytes=40 * GIB)}, "host memory has 40.0", [78848]),
        ({"hardware": host(lockable_bytes=GIB)}, "ulimit -l", [1792]),
        ({"hardware": host(0, memory_bytes=60 * GIB)}, "host memory has 60.0", [89088]),
        ({"target": THIRTEEN, "hardware": ROOMY}, "weights 24.2", ["2 such GPUs"]),
        ({"target": FLOAT32, "hardware": ROOMY}, "weights 25.1", ["2 such GPUs", "--dtype bfloat16"]),
        ({"overrides": RETRIEVED}, "29.6", [98816, "--set retrieval.budget=13296", "2 such GPUs"]),
        ({"overrides": RESIDENT}, "32.0", [19712, "--set offload.resident_tokens=15104"]),
        ({"overrides": RESIDENT, "hardware": gpu(memory_bytes=12 * GIB)}, "has 12.0", []),
        ({"hardware": gpu(memory_bytes=GIB // 4)}, "take a smaller model", []),
    ],
)
def test_a_refusal_names_the_nearest_plans(changes: dict[str, Any], why: str, nearest: list[Any]) -> None:
    """A context is a number here. What is said to fit does (`check_sums`), and one page more does not."""
    planned = plan(request(**changes))
    check_sums(planned)
    said = str(planned.refusal)
    assert why in said and "\n" not in said
    told = [f"a context of {one} tokens" if isinstance(one, int) else one for one in nearest]
    assert said.partition("what fits: ")[2] == ", or ".join(told)
    contexts = [one + 256 for one in nearest if isinstance(one, int)]
    assert not any(plan(request(**changes | {"context": longer})).fits for longer in contexts)


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


# What is told.


def test_assumptions_tell_the_figures_they_rest_on() -> None:
    planned = plan(request())
    told = "\n".join(planned.assumptions)
    queries = planned.gamma + 1
    for figure in (
        *("read at 70.0 GB/s", "50.0 GB/s at 1", "40.0 GB/s at 16", "link 25.0 GB/s"),
        *("20.0 GB/s back", "0.30 ms"),
        *("draft:streaming 0.50", "target:retrieved 0.92", "0.80 of it beside the link", "(measured)"),
        f"{queries} queries a key head at {attention_rate(HOST.attention, queries):.1f} GB/s",
    ):
        assert figure in told
    assert "(named, not measured)" in "\n".join(plan(request(hardware=named_hardware("l40"))).assumptions)


def test_named_machines() -> None:
    hardware = named_hardware("rtx4090")
    for written in ("4090", "RTX-4090", "RTX 4090", "NVIDIA GeForce RTX 4090"):
        assert named_hardware(written) == hardware
    assert named_hardware("RTX 4060 Ti 16 GB") == named_hardware("rtx4060ti-16")
    (card,) = hardware.gpus
    assert card.memory_bytes == 24_564 * 2**20 and card.memory_rate == pytest.approx(0.9 * 1008)
    assert (card.to_device_rate, hardware.host.memory_rate, hardware.host.memory_bytes) == (25, 70, 92 * GIB)
    rates = [attention_rate(hardware.host.attention, queries) for queries in (1, 8, 16, 32)]
    assert rates == pytest.approx([49, 49, 30.1, 15.05])
    other = named_hardware("h100", 2, vram=60)
    assert [one.memory_bytes for one in other.gpus] == [60 * GIB] * 2
    assert all(plan(request(hardware=named_hardware(name, 2), config="plain")).fits for name in KNOWN_GPUS)
    with pytest.raises(UsageError, match="rtx9999.*rtx4090"):
        named_hardware("rtx9999")
