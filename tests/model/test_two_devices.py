"""Layers in groups on two devices (EasySpec): tokens, KV and exchanges. A thread may be the second one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated.gpu import DEFAULT_STREAMS, Piece, Stream
from support.small_engine import CPU, CUDA, PROMPT, engine_overrides, link_to, other_gpu
from support.tiny_models import byte_ids, noisy_copy, tiny_target, to
from torch import Tensor
from transformers import PreTrainedModel

from cpu_kv import CpuLink, ElementType
from offload_rt import LLM, SamplingParams
from offload_rt.attention.backends import TorchCpuBackend
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.split import ModelLayers, SplitCache
from offload_rt.caches.streaming import StreamingCache
from offload_rt.drafting.levels.configs import load_config
from offload_rt.drafting.model_drafter import SmallModelDrafter
from offload_rt.errors import UsageError
from offload_rt.model.cuda_graphs import PassGraphs
from offload_rt.model.decoder import NotANumber
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.named_shapes import find_shape
from offload_rt.model.passes import PassInput
from offload_rt.model.runner import CausalModel
from offload_rt.planning.memory import MemoryBudget
from offload_rt.planning.planner import plan as planned
from offload_rt.planning.request import PlanRequest
from offload_rt.system.hardware import GIB, named_hardware
from offload_rt.system.second_device import SecondDevice

LAYERS, COUNT = 7, 14
LEVELS = {"draft": "streaming", "target": "retrieved"}


@pytest.fixture(scope="module")
def deep() -> PreTrainedModel:
    return tiny_target("llama-gqa", layers=LAYERS, spread=0.1)


@pytest.fixture(scope="module")
def small(deep: PreTrainedModel) -> PreTrainedModel:
    return noisy_copy(deep)


@pytest.fixture
def second() -> Iterator[SecondDevice]:
    device = SecondDevice(CPU, CpuLink(), threads=1)
    yield device
    device.close()


@pytest.mark.parametrize(
    ("size", "remote", "exchanges"), [(2, [3, 5], 2), (3, [2, 4, 5], 2), (4, [2, 3, 5], 2), (9, [3, 4, 5], 1)]
)
def test_the_second_device_has_the_last_layers_of_a_group(
    size: int, remote: list[int], exchanges: int
) -> None:
    plan = LayerOrder.parse(f"groups:{size}", LAYERS)
    assert plan is not None and plan.exchanges == 0
    shared = plan.on_two_devices()
    assert sorted(shared.remote) == remote and shared.exchanges == exchanges
    assert shared.groups == plan.groups and not {0, LAYERS - 1} & shared.remote
    calibrating = shared.in_turn()
    assert calibrating.groups == LayerOrder.whole(LAYERS).groups and calibrating.remote == shared.remote
    assert calibrating.exchanges == len(remote)
    assert LayerOrder.whole(LAYERS).on_two_devices() == LayerOrder.whole(LAYERS)


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[LayerOrder, Tensor]]:
    """Plans of all passes in groups from here on, and their logits."""
    passes: list[tuple[LayerOrder, Tensor]] = []
    forward = CausalModel.forward

    def noted(model: Any, parts: Any, plan: LayerOrder | None = None) -> Any:
        outputs = forward(model, parts, plan)
        passes.extend((plan, one.logits) for one in outputs if plan is not None)
        return outputs

    monkeypatch.setattr(CausalModel, "forward", noted)
    monkeypatch.setattr(PassGraphs, "LONGEST", 0)  # it runs what it would replay
    return passes


@pytest.fixture
def stray(monkeypatch: pytest.MonkeyPatch) -> list[Piece]:
    """Kernels in the default stream of the second emulated GPU, which the exchanges do not follow."""
    stream, kernels = DEFAULT_STREAMS[1], list[Piece]()

    def noted(piece: Piece) -> None:
        kernels.extend([piece] if piece.kernel else ())
        Stream.put(stream, piece)

    monkeypatch.setattr(stream, "put", noted)
    return kernels


def generated(
    deep: PreTrainedModel, small: PreTrainedModel, device: torch.device, level: dict[str, Any], devices: int
) -> tuple[list[int], int]:
    """Tokens and exchanges."""
    keys = {"speculation.levels": [level], "offload.group_devices": devices}
    overrides = engine_overrides(refresh_from="store", ahead=0) | keys
    links: dict[str, Any] = {"link": link_to(device), "other_links": [link_to(other_gpu(device))]}
    target, draft = to(copy.deepcopy(deep), device), to(copy.deepcopy(small), device)
    given = draft if level["model"] == "draft" else None
    with LLM.from_models(target, given, config="retrieval", overrides=overrides, **links) as llm:
        second = llm.engine._second
        result = llm.generate(PROMPT[:100], SamplingParams(max_tokens=8))
        assert second is not None
        return result.tokens, second.exchanges


CASES = [
    *(("draft", 2, "chain", False), ("draft", 3, "grown:8", False), ("draft", 4, "chain", False)),
    *(("target", 2, "grown:8", False), ("target", 3, "chain", True), ("target", 4, "grown:8", True)),
]


@pytest.mark.parametrize(
    ("device", "model", "size", "draft", "packed"),
    [(CPU, *case) for case in CASES]
    + [pytest.param(CUDA, *case, marks=pytest.mark.gpu) for case in (CASES[1], CASES[3])],
)
def test_two_devices_write_what_one_does(
    deep: PreTrainedModel,
    small: PreTrainedModel,
    device: torch.device,
    model: str,
    size: int,
    draft: str,
    packed: bool,
    drafted: list[tuple[LayerOrder, Tensor]],
    stray: list[Piece],
) -> None:
    level: dict[str, Any] = {
        "model": model,
        "cache": LEVELS[model],
        "layers": f"groups:{size}",
        "draft": draft,
    }
    if packed:
        deep = to(copy.deepcopy(deep), torch.bfloat16)
        level["calibrate"] = False  # layers in turn run by other kernels on one CPU, which round otherwise
    one, exchanges = generated(deep, small, device, level, 1)
    assert exchanges == 0 and not any(plan.remote for plan, _ in drafted)
    expected = [logits for _, logits in drafted]
    drafted.clear()
    of_link = len(stray)
    two, exchanges = generated(deep, small, device, level, 2)
    assert two == one and len(drafted) == len(expected) and len(stray) == 2 * of_link
    # A wrong draft costs acceptance alone: so each pass is compared.
    for (_, logits), whole in zip(drafted, expected, strict=True):
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
    # One for each group of a pass, and in a calibrating pass for each layer that is there.
    assert exchanges == sum(plan.exchanges for plan, _ in drafted) >= len(drafted)


def split_cache(model: CausalModel, second: SecondDevice, plan: LayerOrder, window: int) -> SplitCache:
    """An empty streaming cache on two devices."""
    model.remote_blocks.take(second, sorted(plan.remote))

    def part(on_second: bool) -> StreamingCache:
        layers = [layer for layer in range(model.layers) if (layer in plan.remote) == on_second]
        return whole_cache(ModelLayers.of(model, layers, second if on_second else None), window)

    return SplitCache(part(False), part(True), second, plan.remote, model.layers)


def whole_cache(model: Any, window: int) -> StreamingCache:
    frequencies = model.rotary_frequencies
    return StreamingCache(model.kv_layout(), frequencies, sinks=0, window=window, backend=TorchCpuBackend())


def logits_of(model: CausalModel, cache: Any, tokens: list[int], plan: LayerOrder | None) -> Tensor:
    """Of all tokens, in passes of a few."""
    found = []
    for start in range(0, len(tokens), 5):
        part = tokens[start : start + 5]
        new = NewTokens.below(cache.speculative, range(start - 1, start + len(part) - 1), part)
        (output,) = model.forward([PassInput(cache, new, rows=len(part))], plan)
        found.append(output.logits)
        cache.commit(range(len(part)))
    return torch.cat(found)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_pass_on_two_devices_computes_the_same(
    deep: PreTrainedModel, second: SecondDevice, size: int
) -> None:
    model, tokens = CausalModel(deep, "tiny"), byte_ids(20)
    plan = model.layer_order(f"groups:{size}")
    assert plan is not None
    shared = plan.on_two_devices()
    cache = split_cache(model, second, shared, len(tokens))
    found = logits_of(model, cache, tokens, shared)
    assert torch.equal(found, logits_of(model, whole_cache(model, len(tokens)), tokens, plan))
    assert second.exchanges == 4 * shared.exchanges
    model.restore()


def test_kv_is_exact_on_both_devices_after_calibration(deep: PreTrainedModel, small: PreTrainedModel) -> None:
    """All but what the newest draft left."""
    level = {"model": "draft", "cache": "streaming", "layers": "groups:3"}
    overrides = engine_overrides(ahead=0) | {"speculation.levels": [level], "offload.group_devices": 2}
    overrides |= {"streaming.sinks": 0, "streaming.window": 200}
    links: dict[str, Any] = {"link": link_to(CPU), "other_links": [link_to(CPU)]}
    with LLM.from_models(deep, small, config="retrieval", overrides=overrides, **links) as llm:
        tokens = llm.read(PROMPT)
        result = tokens.generate((), SamplingParams(max_tokens=COUNT))
        drafter = llm.engine.sequences[0].verifier.drafter
        assert isinstance(drafter, SmallModelDrafter)
        cache: Any = drafter.cache
        count, model = cache.verified_length, drafter.model
        assert isinstance(model, CausalModel) and isinstance(cache, SplitCache) and count > len(PROMPT)
        exact = whole_cache(model, 200)
        logits_of(model, exact, [*PROMPT, *result.tokens][:count], None)
        for part, layers in ((cache.home, [0, 1, 3, 6]), (cache.away, [2, 4, 5])):
            assert sorted(cache.remote) == [2, 4, 5] and part.verified_length == count
            found, expected = part.kv[:, :, :, :count], exact.kv[layers][:, :, :, :count]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_layer_of_a_nan_is_found_on_either_device(deep: PreTrainedModel, second: SecondDevice) -> None:
    broken = copy.deepcopy(deep)
    model = CausalModel(broken, "tiny")
    plan = LayerOrder.parse("groups:2", LAYERS)
    assert plan is not None
    shared = plan.on_two_devices()
    cache = split_cache(model, second, shared, 20)
    broken.model.layers[3].self_attn.o_proj.forward = lambda x: torch.full_like(x, torch.nan)
    with pytest.raises(NotANumber, match="in the output of layer 3"):
        model.raise_nan(PassInput(cache, NewTokens.chain(4), rows=1))
    model.restore()


FROM_STORE: dict[str, Any] = {"offload.refresh_from": "store"}
FROM_STREAM: dict[str, Any] = {"offload.refresh_from": "stream"}


def request(devices: int = 0, gpus: int = 2, link: float = 1.0, **sizes: object) -> PlanRequest:
    level = {"model": "target", "cache": "retrieved", "layers": "groups:4"}
    keys = {"speculation.levels": [level], "offload.group_devices": devices, "speculation.gamma2": 6}
    keys["weights.planes"] = "off"
    config = load_config("retrieval", keys | sizes)
    hardware = named_hardware("h200", gpus, link=link)
    return PlanRequest(find_shape("llama2-13b", ElementType.BFLOAT16), None, config, 16_000, 256, hardware)


def test_the_plan_counts_exchanges_and_copies() -> None:
    one, two = request(1, **FROM_STORE), request(2)
    (plan,) = two.groups
    shape = two.target
    assert plan.exchanges == 10 and len(plan.remote) == 20
    there, here = MemoryBudget(two).gpu(1), MemoryBudget(two).gpu(0)
    streamed = [request(devices, **FROM_STREAM) for devices in (1, 2)]
    assert [one.refreshes_from_stream for one in streamed] == [True, False]  # a pass streams to one GPU
    assert there["group_weights"] == 20 * shape.attention_bytes == 20 * 4 * shape.hidden**2 * 2
    assert there["group_caches"] + here["retrieved_caches"] == MemoryBudget(one).gpu(0)["retrieved_caches"]
    assert there["group_caches"] > 0 and "group_weights" not in MemoryBudget(one).gpu(1)


def test_two_devices_are_planned_where_they_gain() -> None:
    forms = [planned(request(devices)) for devices in (0, 1, 2)]
    times = [form.ms_per_token for form in forms]
    assert times[0] == min(times[1:]) and forms[0].group_devices == 1 + (times[2] < times[1])
    # Launches that no graph hides are what speaks against it: without them, the second GPU pays.
    free = request(**FROM_STORE)  # a pass would stream to one GPU alone
    gpus = tuple(replace(gpu, launch_ms=0.0, memory_rate=100.0) for gpu in free.hardware.gpus)
    chosen = planned(replace(free, hardware=replace(free.hardware, gpus=gpus)))
    assert chosen.group_devices == 2 and any("GPU 1 runs its share" in one for one in chosen.assumptions)
    small = (replace(gpus[0], memory_bytes=80 * GIB), replace(gpus[1], memory_bytes=GIB // 2))
    assert planned(replace(free, hardware=replace(free.hardware, gpus=small))).group_devices != 2
    assert planned(request(gpus=1)).group_devices == 0


def test_two_devices_without_a_second_are_refused() -> None:
    with pytest.raises(UsageError, match=r"offload.group_devices = 2: there is no second GPU; name two"):
        request(2, gpus=1)
