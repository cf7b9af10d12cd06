"""Blocks whose weights are on another GPU: where there is none, on other streams of the one."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.small_engine import (
    CPU,
    CUDA,
    DEVICES,
    ON_CUDA,
    PAGE,
    PROMPT,
    again,
    engine_overrides,
    link_to,
    other_gpu,
)
from support.tiny_models import byte_ids, noisy_copy, tiny_target, to
from torch import Tensor
from transformers import PreTrainedModel

from cpu_kv import ElementType
from cpu_kv.streams import follower
from offload_rt import LLM, SamplingParams
from offload_rt.drafting.levels.configs import load_config
from offload_rt.errors import UsageError
from offload_rt.model.named_shapes import find_shape
from offload_rt.model.remote_mlp import RemoteMlp, place_mlps
from offload_rt.model.runner import CausalModel, open_runner
from offload_rt.planning.memory import MemoryBudget
from offload_rt.planning.request import PlanRequest
from offload_rt.system.hardware import GIB, Hardware, named_hardware


@DEVICES
@pytest.mark.parametrize("config", ["triforce", "plain", "easyspec"])
def test_a_spread_model_writes_what_a_whole_one_does(device: torch.device, config: str) -> None:
    target = tiny_target("llama-gqa")
    draft, whole = noisy_copy(target), copy.deepcopy(target)
    other = other_gpu(device)
    sampled = SamplingParams(temperature=0.7, seed=5, max_tokens=20)
    # What is drawn depends on the length of drafts, which the plan chooses by where the weights are.
    overrides = engine_overrides(ahead=2) | {"speculation.gamma2": 4}
    written = []
    for model in (to(whole, device), place_mlps(target, device, other, 1)):
        links: dict[str, Any] = {"link": link_to(device), "other_links": [link_to(other)]}
        with LLM.from_models(model, to(draft, device), config=config, overrides=overrides, **links) as llm:
            context = llm.read(PROMPT)
            alone = again(context, sampled, config, overrides | {"offload.ahead": 0})
            written.append([again(context).tokens, alone.tokens])
    assert written[0] == written[1]


def test_weights_are_counted_where_they_are() -> None:
    target = tiny_target("llama-gqa")
    layers = target.model.layers
    block_bytes = sum(p.nbytes for p in layers[0].mlp.parameters())
    place_mlps(target, CPU, torch.device("meta"), 1)
    assert [isinstance(layer.mlp, RemoteMlp) for layer in layers] == [True, False]
    assert {p.device.type for p in layers[0].mlp.parameters()} == {"meta"}
    assert {p.device.type for n, p in target.named_parameters() if "layers.0.mlp" not in n} == {"cpu"}
    assert layers[0].mlp.weight_bytes == block_bytes


def test_a_spread_model_is_not_captured() -> None:
    """Memory of another GPU is not that of a graph."""

    def captures(model: PreTrainedModel) -> bool:
        made: list[torch.device] = []
        with pytest.MonkeyPatch.context() as patch:
            place = property(lambda model: CUDA)
            patch.setattr(type(model), "device", place, raising=False)
            patch.setattr("offload_rt.model.runner.CudaCapture", made.append)
            patch.setattr("offload_rt.model.runner.check_against_own_forward", lambda model: None)
            patch.setattr(CausalModel, "_found_to_differ", lambda model: "products")  # computes nothing
            open_runner(model, "tiny", print)
        return bool(made)

    target = tiny_target("llama-gqa")
    assert captures(target)
    assert not captures(place_mlps(target, CPU, CPU, 2))


def test_a_model_without_such_blocks_is_refused() -> None:
    target = tiny_target("llama-gqa")
    del target.model.layers[1].mlp
    with pytest.raises(UsageError, match="LlamaForCausalLM: its layers have no `mlp` to put on cuda:1"):
        place_mlps(target, CPU, torch.device("cuda", 1), 2)


@ON_CUDA
def test_what_the_first_gpu_has_no_room_for_is_on_the_second(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the planner's figures to the tokens, as `--device cuda:0,cuda:1` has it."""
    overrides: dict[str, object] = {"store.page": PAGE, "retrieval.budget": 128, "retrieval.recent": 32}
    overrides["offload.refresh_from"] = "stream"  # from the store, one buffer less would make room enough
    shape, config = find_shape("demo", ElementType.FLOAT32), load_config("retrieval", overrides)
    gpu = replace(named_hardware("rtx4090").gpus[0], memory_bytes=2 * GIB)
    hardware = replace(named_hardware("rtx4090"), gpus=(gpu, gpu))
    asked = PlanRequest(shape, None, config, 400, 24, hardware)
    room = sum(MemoryBudget(asked).gpu(0).values()) - shape.mlp_bytes - 1
    hardware = replace(hardware, gpus=(replace(gpu, memory_bytes=room), gpu))
    held = list[tuple[int, int]]()

    def usable(
        first: torch.device, loaded: int = 0, on_progress: object = None, other_gpus: Any = ()
    ) -> Hardware:
        if not other_gpus:
            return replace(hardware, gpus=(gpu,))
        held.append((loaded, sum(size for _, size in other_gpus)))
        return hardware

    tokens = []
    for devices in ((device, other_gpu(device)), (device,)):
        with monkeypatch.context() as patch:
            patch.setattr("offload_rt.api.opening.usable_hardware", usable)
            patch.setattr("offload_rt.planning.sequence_planner.usable_hardware", usable)
            patch.setattr("offload_rt.api.opening.choose_devices", lambda names, found=devices: found)
            patch.setattr(torch.cuda, "device_count", lambda: 2)
            device_names = "auto" if len(devices) == 1 else "cuda:0,cuda:1"
            given: dict[str, Any] = {"overrides": overrides, "size_hint": (400, 24), "device": device_names}
            told = list[str]()
            with LLM(dtype="float32", config="retrieval", on_notice=told.append, **given) as llm:
                tokens.append(llm.generate(byte_ids(400), SamplingParams(max_tokens=24)).tokens)
                # All of them, for half a GiB that later plans may lack: this model is not as large.
                assert len(llm.engine.target.remote_mlps) == shape.layers * (len(devices) - 1)
                whole = llm.engine.target.weight_bytes
                idle = "another GPU is idle: device cuda:0,cuda:1 lets it keep and attend KV, too"
                assert (idle in told) == (len(devices) == 1)
    assert tokens[0] == tokens[1]
    there = shape.layers * shape.mlp_bytes
    assert held == [(0, 0), (whole - there, there)]


@ON_CUDA
def test_each_stream_has_one_of_its_own_there(device: torch.device) -> None:
    """What waits for a link in one of them holds up none of the others."""
    block = RemoteMlp(torch.nn.Linear(8, 8), device, other_gpu(device))
    given = torch.ones(1, 8, device=device)

    def computed(stream: torch.cuda.Stream) -> Tensor:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.inference_mode(), torch.cuda.stream(stream):
            out: Tensor = block(given)
        stream.synchronize()
        return out.cpu()

    streams = [torch.cuda.Stream(device) for _ in range(2)]
    first, second, again = map(computed, (*streams, streams[0]))
    assert torch.equal(first, second) and torch.equal(first, again)
    there = {follower(stream, other_gpu(device)) for stream in streams}
    assert len(there) == 2 and follower(streams[0], other_gpu(device)) in there
