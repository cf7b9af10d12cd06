"""Models whose weights are in two planes: what they compute, what drafts read, and what they leave behind."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated.gpu import EMULATED
from safetensors.torch import load_file
from support.small_engine import ON_CUDA, engine_overrides, link_to
from support.tiny_models import tiny_target, to
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpu_kv import CpuLink
from offload_rt import LLM, SamplingParams, UsageError
from offload_rt.kernels import plane_products
from offload_rt.kernels.planes import (
    PlaneLinear,
    WeightPlanes,
    draft_plane_alone,
    reads_draft_plane_alone,
)
from offload_rt.model import plane_weights
from offload_rt.model.attention_hook import ATTENTION_NAME
from offload_rt.model.decoder import NotANumber
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.plane_weights import SplitWeights, in_planes, splits
from offload_rt.model.runner import CausalModel
from offload_rt.model.self_check import TOKENS, Probe
from offload_rt.model.weights_digest import weights_digest
from offload_rt.system.second_device import SecondDevice

NATIVE = ["llama-gqa", "qwen3"]
"""Architectures whose layers the native library computes. Products of others are those of torch, which sums
them in another order than the library does those of weights in planes."""
SIZES = {"retrieval.budget": 64, "retrieval.recent": 16, "store.page": 16, "store.slab_tokens": 64}
PROMPT = [(7 * at + at // 5) % 251 for at in range(300)]


def model_of(arch: str) -> PreTrainedModel:
    return tiny_target(arch).bfloat16()


def overrides(planes: str, **others: object) -> dict[str, object]:
    return {"weights.planes": planes, **SIZES, **others}


@pytest.mark.parametrize("arch", NATIVE)
def test_tokens_and_kv_are_those_of_plain_weights(arch: str, tmp_path: Path) -> None:
    """The KV of a saved context has the same bits."""
    target = model_of(arch)
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    modules = [*target.named_modules()]
    found = dict[str, Any]()
    for planes in ("off", "on"):
        tokens = list[list[int]]()
        for config in ("plain", "retrieval"):
            with LLM.from_models(target, config=config, overrides=overrides(planes)) as llm:
                assert in_planes(target) == (planes == "on")
                params = [SamplingParams(temperature, max_tokens=12, seed=1) for temperature in (0.0, 0.8)]
                with llm.read(PROMPT) as context:
                    tokens += [context.fork().generate((), one).tokens for one in params]
                    context.save(tmp_path / f"{config}.safetensors")
        found[planes] = tokens, load_file(tmp_path / "plain.safetensors")
    assert found["on"][0] == found["off"][0]
    for name, tensor in found["off"][1].items():
        assert name == "checksums" or torch.equal(found["on"][1][name], tensor), name  # of times, too
    assert [*target.named_modules()] == modules
    after = target.state_dict()
    assert [*after] == [*before] and all(torch.equal(after[name], before[name]) for name in before)


def rounded(target: PreTrainedModel) -> PreTrainedModel:
    """The model with weights as drafts read them."""
    split = SplitWeights(target)
    weights = {
        name: part.planes.expanded(draft=True)
        for name, part in target.named_modules()
        if isinstance(part, PlaneLinear)
    }
    split.join()
    for name, weight in weights.items():
        target.get_submodule(name).weight.data = weight
    return target


@torch.inference_mode()
def hidden_states(runner: CausalModel, order: LayerOrder | None) -> Tensor:
    """Hidden states of a pass as `CausalModel.forward` computes them, `[5, hidden_size]`."""
    probe = Probe(runner)
    ids, positions = probe.tokens, torch.arange(TOKENS)
    return runner.compute(probe, ids, positions, order, range(TOKENS))[1]


@pytest.mark.parametrize("arch", [*NATIVE, "gemma3", "phi3"])
def test_drafts_read_the_draft_plane(arch: str) -> None:
    runner = CausalModel(model_of(arch), "tiny", planes=True)
    plain = CausalModel(model_of(arch), "tiny")
    draft = CausalModel(rounded(model_of(arch)), "tiny")
    order = runner.drafting(None)
    assert order is not None and order.draft_plane and order.in_turn() == order
    exact, wanted = hidden_states(plain, None), hidden_states(draft, None)
    found = [hidden_states(runner, None), hidden_states(runner, order)]
    off = [float((one - other).float().norm()) for one, other in zip(found, (exact, wanted), strict=True)]
    between = float((exact - wanted).float().norm())
    assert max(off) == 0 if arch in NATIVE else max(off) < between / 4
    assert between > 0.02 * float(exact.float().norm())
    assert plain.drafting(None) is None


def test_what_is_known_of_the_weights() -> None:
    runner, plain = (
        CausalModel(model_of("llama"), "tiny", planes=True),
        CausalModel(model_of("llama"), "tiny"),
    )
    assert weights_digest(runner) == weights_digest(plain)
    split = sum(
        part.planes.codes.numel() for part in runner.module.modules() if isinstance(part, PlaneLinear)
    )
    share = (plain.weight_bytes - runner.weight_bytes) / split
    assert 0.4 < share <= 0.5  # of a byte, less what a row of 64 has besides
    runner.check_weights()
    projection: Any = runner.module.model.layers[1].mlp.down_proj
    projection.codes[3, 5], projection.rests[3], projection.lows[3] = 127, 255, 2**15 - 1 - 2047
    with pytest.raises(NotANumber, match="model.layers.1.mlp.down_proj.weight"):
        runner.check_weights()


def test_what_stays_plain() -> None:
    target = model_of("llama")
    layers: Any = target.model.layers
    target.lm_head.weight = target.model.embed_tokens.weight
    layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    layers[1].mlp.up_proj.weight = layers[1].mlp.gate_proj.weight
    split = SplitWeights(target)
    plain = [name for name, part in target.named_modules() if type(part) is nn.Linear]
    shared = ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]
    assert plain == ["model.layers.0.mlp.up_proj", *shared, "lm_head"]
    split.join()
    assert not in_planes(target)


def test_there_is_nothing_to_split() -> None:
    with pytest.raises(UsageError, match="weights.planes = on: .* no linear layers .*--dtype bfloat16"):
        LLM.from_models(tiny_target("llama"), config="plain", overrides=overrides("on"))


@pytest.mark.parametrize(("seconds", "gains"), [(0.5, True), (0.95, False)])
def test_a_trial_decides(seconds: float, gains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = model_of("llama")
    assert not splits("auto", target, "tiny", gain=True)  # the trial needs more weights
    monkeypatch.setattr(plane_weights, "TRIAL_BYTES", 1)
    clock = itertools.accumulate(itertools.cycle([0.0, seconds, 0.0, 1.0]))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert splits("auto", target, "tiny", gain=True) == gains
    assert not splits("auto", target, "tiny", gain=False)
    assert not splits("off", target, "tiny", gain=True)
    assert splits("on", target, "tiny", gain=False)


@ON_CUDA
def test_on_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of drafts are not those of verifications; verified tokens are those of plain decoding."""
    if EMULATED:  # which runs no Triton kernels
        monkeypatch.setattr(plane_products, "use_triton", lambda: None)
    target, found = to(model_of("llama-gqa"), device), []
    for config in ("plain", "retrieval"):
        given = engine_overrides() | {"weights.planes": "on"}
        with LLM.from_models(target, config=config, overrides=given, link=link_to(device)) as llm:
            order = llm.engine.target.drafting(None)
            assert order is not None and order.draft_plane
            found.append(llm.generate(PROMPT, SamplingParams(max_tokens=12)))
    assert found[0].tokens == found[1].tokens
    assert found[1].timings.accepted_tokens > 0
    assert not in_planes(target)


def generated(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, SamplingParams(max_tokens=8)).tokens


@pytest.mark.parametrize("first", [0, 1])
def test_llms_share_the_planes_of_a_model(first: int) -> None:
    """The weights are joined when the last one is closed, in whichever order."""
    target = model_of("llama-gqa")
    with LLM.from_models(target, config="plain") as llm:
        expected = generated(llm)
    llms = [
        LLM.from_models(target, config="retrieval", overrides=overrides(planes)) for planes in ("on", "off")
    ]
    assert [generated(llm) for llm in llms] == [expected, expected]
    llms[first].close()
    assert in_planes(target) and generated(llms[1 - first]) == expected
    llms[1 - first].close()
    assert not in_planes(target)
    with LLM.from_models(target, config="plain") as llm:
        assert generated(llm) == expected


def test_weights_that_another_llm_computes_with_are_not_split() -> None:
    target = model_of("llama-gqa")
    with LLM.from_models(target, config="plain") as llm:
        expected = generated(llm)
        with pytest.raises(
            UsageError, match="weights.planes = on: .* is in use by an LLM .*close that first"
        ):
            LLM.from_models(target, config="retrieval", overrides=overrides("on"))
        assert not in_planes(target) and generated(llm) == expected


def test_a_model_can_be_trained_afterwards() -> None:
    target = model_of("llama")
    with LLM.from_models(target, config="plain", overrides=overrides("on")) as llm:
        generated(llm)
    target.requires_grad_(True)
    loss = target(torch.tensor([PROMPT[:9]])).logits.float().square().mean()
    loss.backward()
    for name, weight in target.named_parameters():
        assert not weight.is_inference() and weight.grad is not None, name


def test_what_fails_in_the_middle_leaves_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    target, split, calls = model_of("llama"), WeightPlanes.split, itertools.count()
    before = {name: weight.clone() for name, weight in target.state_dict().items()}

    def failing(weight: Tensor) -> WeightPlanes | None:
        if next(calls) == 9:
            raise MemoryError
        return split(weight)

    monkeypatch.setattr(WeightPlanes, "split", failing)
    with pytest.raises(MemoryError):
        CausalModel(target, "tiny", planes=True)
    assert not in_planes(target) and target.config._attn_implementation != ATTENTION_NAME
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


def test_a_second_device_reads_what_its_caller_reads() -> None:
    second = SecondDevice(torch.device("cpu"), CpuLink(), threads=1)
    try:
        for alone in (False, True):
            with draft_plane_alone(alone):
                started = second.start(lambda: torch.tensor(reads_draft_plane_alone()))
            assert bool(second.finish(started)) is alone
    finally:
        second.close()
