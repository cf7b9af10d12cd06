"""The plan of a run on this machine, and what the runtime makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.small_engine import PAGE, PROMPT, SIZES, again, engine_overrides
from support.tiny_models import byte_ids, tiny_target
from transformers import PreTrainedModel

from cpu_kv import ElementType, PacedLink
from offload_rt import LLM, Context, SamplingParams
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.caches.sizes import GpuTier, Tiers
from offload_rt.drafting.levels.configs import load_config
from offload_rt.errors import UsageError
from offload_rt.machine import inspection
from offload_rt.machine.inspection import usable_hardware
from offload_rt.model.config_shapes import from_config
from offload_rt.model.named_shapes import find_shape
from offload_rt.model.shape import ModelShape
from offload_rt.planning import sequence_planner
from offload_rt.planning.memory import GPU_RESERVE_BYTES
from offload_rt.planning.planner import Plan, plan, ranked
from offload_rt.planning.request import PlanRequest
from offload_rt.planning.sequence_planner import SequencePlan, SequencePlanner
from offload_rt.system.hardware import AttentionRate, Hardware, named_hardware

CPU = torch.device("cpu")
LLAMA = replace(find_shape("llama2-7b", ElementType.BFLOAT16), max_positions=2**18)


def planned(shape: ModelShape, config: str, context: int, new: int, loaded_bytes: int = 0) -> Plan:
    hardware = usable_hardware(CPU, loaded_bytes)
    return plan(PlanRequest(shape, None, load_config(config), context, new, hardware))


@pytest.mark.parametrize("config", ["plain", "retrieval"])
@pytest.mark.parametrize(("prompt", "new"), [(150, 40), (1, 3), (5000, 100)])
def test_what_the_plan_says_is_what_the_store_reserves(config: str, prompt: int, new: int) -> None:
    target = tiny_target("llama-gqa")
    found = planned(from_config(target.config, ElementType.FLOAT32, "tiny"), config, prompt, new)
    with LLM.from_models(target, config=config, link=PacedLink(1e9)) as llm:
        stream = llm.stream(byte_ids(prompt), SamplingParams(max_tokens=new))
        assert llm.engine.store.reserved_bytes == pytest.approx(found.host["kv"], rel=0.02)
        stream.close()


def test_models_that_are_loaded_take_nothing_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = LLAMA.weight_bytes
    monkeypatch.setattr(inspection, "available_memory", lambda: 30 * 2**30 - needed)
    assert not planned(LLAMA, "plain", 20_000, 256).fits
    assert planned(LLAMA, "plain", 20_000, 256, loaded_bytes=needed).fits


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines plan as if their target were on a GPU, and run on the CPU."""
    given = SequencePlanner.plan

    def planned(planner: SequencePlanner, *arguments: Any) -> SequencePlan:
        with monkeypatch.context() as patch:
            patch.setattr(planner.target, "device", torch.device("cuda"))
            return given(planner, *arguments)

    monkeypatch.setattr(SequencePlanner, "plan", planned)
    monkeypatch.setattr(sequence_planner, "usable_hardware", lambda *given: named_hardware("rtx4090"))


@pytest.mark.usefixtures("on_a_gpu")
def test_on_a_gpu_sizes_and_shares_are_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PlanRequest] = []
    made: list[Plan] = []

    def of_a_large_one(requests: Iterable[PlanRequest]) -> list[Plan]:
        (request,) = requests
        asked.append(request)
        made.append(plan(replace(request, target=LLAMA, context=80_000, new_tokens=256)))
        return made[-1:]

    monkeypatch.setattr(sequence_planner, "ranked", of_a_large_one)
    target = tiny_target("llama-gqa")
    with LLM.from_models(target, config="retrieval", link=PacedLink(1e9)) as llm:
        subject = llm.engine.planner
        (given,) = subject.configs
        planned = subject.plan(1000, 24)
        config, shares = planned.config, planned.tiers
        assert (asked[0].context, asked[0].new_tokens) == (1000, 24)
        assert shares.resident_tokens > 0 and shares.cpu_tokens > 0
        decided = given
        for key in ("offload.refresh_from", "retrieval.bits", "retrieval.budget"):
            decided = decided.having(key, made[0].request.config.value(key))
        decided = decided.having("prefill.piece", config.prefill.piece)
        assert config == decided and config.retrieval.budget > 0 and config.prefill.piece > 0
        assert shares.resident_tokens % config.store.page == shares.cpu_tokens % config.store.page == 0
        # What a config says is kept.
        subject.configs = (given.having("offload.resident_tokens", 512),)
        fewer = subject.plan(1000, 24).tiers
        assert fewer.resident_tokens == 512 < shares.resident_tokens
        subject.configs = (subject.configs[0].having("offload.cpu_tokens", 256),)
        fewer = subject.plan(1000, 24).tiers
        assert (fewer.resident_tokens, fewer.cpu_tokens) == (512, 256)
        assert len(asked) == 3, "also what is given has to fit"


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("texts", [1, 2])
def test_another_gpu_keeps_what_it_has_room_for(texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest crosses both links, and a batch shares both GPUs."""
    target = tiny_target("llama-gqa")
    shape, reserve = from_config(target.config, ElementType.FLOAT32, "tiny"), GPU_RESERVE_BYTES

    def hardware(device: torch.device, loaded: int, on_progress: object, gpus: list[object]) -> Hardware:
        assert gpus == [(CPU, 0)]
        sizes = loaded + reserve + 3 * 2**20, reserve + texts * 12 * PAGE * shape.token_bytes
        first, other = (replace(named_hardware("rtx4090").gpus[0], memory_bytes=size) for size in sizes)
        # Nothing is faster in host memory.
        host = replace(named_hardware("rtx4090").host, attention=(AttentionRate(1, 1e-3),))
        return Hardware(host, (first, replace(other, to_device_rate=50.0)), measured=True)

    monkeypatch.setattr(sequence_planner, "usable_hardware", hardware)
    overrides = engine_overrides(resident_tokens=PAGE) | {"store.segment_bytes": 8192, "prefill.chunk": 64}
    links: dict[str, Any] = {"link": PacedLink(1e9), "other_links": [PacedLink(1e9)]}
    with LLM.from_models(target, config="plain", overrides=overrides, **links) as llm:
        plan = llm.engine.planner.plan(60 * PAGE + 5, 24, texts)
        config, shares = plan.config, plan.tiers
        (gpu,) = shares.gpus
        assert (shares.resident_tokens, shares.cpu_tokens) == (PAGE, 0)
        ring = config.store.ring_buffers * 32 // shape.layers
        assert gpu.resident_tokens == (12 * PAGE - ring) // PAGE * PAGE
        left = 60 * PAGE + 5 - PAGE - gpu.resident_tokens
        assert gpu.streamed_tokens == left * 2 // 3 // PAGE * PAGE, "twice as fast a link"


def test_links_of_no_known_rate_share_evenly() -> None:
    links: dict[str, Any] = {"link": PacedLink(1e9), "other_links": [PacedLink(1e9), PacedLink(1e9)]}
    overrides = engine_overrides(resident_tokens=32, cpu_tokens=16)
    with LLM.from_models(tiny_target("llama-gqa"), config="plain", overrides=overrides, **links) as llm:
        assert llm.engine.planner.plan(150, 8).tiers == Tiers(32, 16, (GpuTier(0, 32),) * 2, packed=False)
        assert llm.engine.planner.plan(20, 8).tiers == Tiers(32, 16, (GpuTier(),) * 2, packed=False)
    with pytest.raises(UsageError, match="attends KV in place"):
        LLM.from_models(tiny_target("llama-gqa"), config="plain", other_links=[PacedLink(1e9)])


def test_another_gpu_may_have_no_tier() -> None:
    links: dict[str, Any] = {"link": PacedLink(1e9), "other_links": [PacedLink(1e9)]}
    with LLM.from_models(tiny_target("llama-gqa"), config="plain", overrides=SIZES, **links) as llm:
        context = Context(llm, llm.engine.open(PROMPT, 4, tiers=Tiers(2 * PAGE, PAGE)))
        assert len(context.generate((), SamplingParams(max_tokens=4, ignore_eos=True)).tokens) == 4


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("place", ["stream", "store"])
def test_the_cache_is_refreshed_from_where_the_plan_says(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def decided(requests: Iterable[PlanRequest]) -> list[Plan]:
        (request,) = requests
        assert request.config.offload.refresh_from == "auto"
        return [plan(request.having("offload.refresh_from", place))]

    monkeypatch.setattr(sequence_planner, "ranked", decided)
    with LLM.from_models(tiny_target("llama-gqa"), config="retrieval", link=PacedLink(1e9)) as llm:
        context = llm.read(PROMPT)
        for config in (None, "retrieval", None):
            again(context, config=config)
            (sequence,) = llm.engine.sequences
            (cache,) = sequence.full.derived
            assert isinstance(cache, RetrievedCache)
            assert len(cache.buffers) == 1 + (place == "stream"), "one in use, one that fills"


@pytest.mark.usefixtures("on_a_gpu")
def test_sequences_of_a_batch_share_what_is_free_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened one after the other, the shortest first; none takes what the others need."""
    reserve = GPU_RESERVE_BYTES
    free, told = reserve + 1596 * 2**10, list[tuple[int, int]]()

    def hardware(device: torch.device, loaded: int, on_progress: object, gpus: object) -> Hardware:
        taken = sum(sequence.full.resident_bytes for sequence in subject.sequences)
        gpu = replace(named_hardware("rtx4090").gpus[0], memory_bytes=loaded + free - taken)
        return replace(named_hardware("rtx4090"), gpus=(gpu,))

    def seen(requests: Iterable[PlanRequest]) -> list[Plan]:
        (request,) = requests
        told.append((request.context, request.hardware.gpus[0].memory_bytes))
        plans = ranked([request])
        residents.append(plans[0].placement.resident_tokens)
        return plans

    residents: list[int] = []
    monkeypatch.setattr(sequence_planner, "usable_hardware", hardware)
    monkeypatch.setattr(sequence_planner, "ranked", seen)
    target = tiny_target("llama-gqa")
    sizes = engine_overrides() | {"prefill.chunk": 64}
    with LLM.from_models(target, config="plain", overrides=sizes, link=PacedLink(1e9)) as llm:
        subject = llm.engine
        token_bytes, weights = subject.store.layout.token_bytes, subject.target.weight_bytes
        prompts = [byte_ids(900), byte_ids(40), byte_ids(800)]
        found = llm.generate(prompts, SamplingParams(max_tokens=3, seed=1))
        assert [one.prompt_tokens for one in found] == [900, 40, 800]
        left = free
        for texts, (tokens, resident, (context, memory)) in zip(
            (3, 2, 1), zip((40, 800, 900), residents, told, strict=True), strict=True
        ):
            assert (context, memory) == (tokens, weights + reserve + (left - reserve) // texts)
            left -= min(resident, tokens - 1) // PAGE * PAGE * token_bytes  # whole pages of what is read
        assert residents[0] == 40 and 0 < residents[1] <= 800
        alone = llm.generate(prompts[2], SamplingParams(max_tokens=3, seed=1))
        assert residents[-1] == 800 and alone.tokens == found[2].tokens


def test_every_continuation_is_of_the_planned_sizes(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = SequencePlanner.plan

    def smaller(planner: SequencePlanner, *arguments: Any) -> SequencePlan:
        plan = given(planner, *arguments)
        return replace(plan, request=plan.request.having("retrieval.budget", 48))

    monkeypatch.setattr(SequencePlanner, "plan", smaller)
    with LLM.from_models(target, config="retrieval", overrides=SIZES, link=PacedLink(1e9)) as llm:
        context = llm.read(PROMPT)
        for config in (None, "plain", None):
            again(context, config=config)
        (sequence,) = llm.engine.sequences
        (derived,) = sequence.full.derived
        assert isinstance(derived, RetrievedCache) and derived.budget == 48
