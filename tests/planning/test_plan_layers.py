"""Plans for models whose layers do not all attend to the whole sequence."""

from __future__ import annotations

import functools
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machine_cases import DESKTOP, HOST
from support.plan_cases import check_sums, expected_round
from support.tiny_models import random_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from cpu_kv import ElementType
from cpu_kv.sizes import PROMPT_WRITES
from offload_rt.caches.layer_kinds import LayerKind, LayerKinds
from offload_rt.commands import cli
from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.drafting.levels.configs import load_config
from offload_rt.errors import UsageError
from offload_rt.model.config_shapes import shape_of
from offload_rt.model.layer_kinds import Recurrence
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.named_shapes import find_shape
from offload_rt.model.shape import ModelShape
from offload_rt.planning.cost_model import PACKED_ATTENTION, CostModel
from offload_rt.planning.memory import MemoryBudget
from offload_rt.planning.planner import plan
from offload_rt.planning.request import PlanRequest, allowed_drafts
from offload_rt.system.hardware import GIB, Hardware, named_hardware

QWEN = find_shape("qwen3.5-9b", None)  # 8 of 32 layers are full, the others keep a state
GEMMA = find_shape("gemma3-4b", None)  # 5 of 34 layers are full, the others slide over 1,024 tokens
MISTRAL = find_shape("mistral-7b-v0.1", None)  # all 32 layers slide over 4,096 tokens
CPU_RATE = 48.0
"""GB/s at which the desktop's CPU attends with 4 queries a KV head, as Qwen has: between 1 and 16."""
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
QWEN_LIKE = SIZES | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}


def qwen_like() -> PreTrainedModel:
    return random_model("qwen3_5_text", **QWEN_LIKE)


def gemma_like() -> PreTrainedModel:
    return random_model("gemma3_text", sliding_window=32, **SIZES)


def asked(
    target: ModelShape, config: str = "plain", context: int = 30_000, hardware: Hardware = DESKTOP
) -> PlanRequest:
    return PlanRequest(target, None, load_config(config, {"store.code": "raw"}), context, 256, hardware)


# Shapes.


def test_the_shape_of_a_model_with_recurrent_layers() -> None:
    """Convolutions keep 4 inputs of keys, queries and values; a head's state is a matrix in float32."""
    shape = shape_of(qwen_like(), ElementType.BFLOAT16, "small")
    mixer = qwen_like().model.layers[0].linear_attn
    assert shape.kinds.full == (3, 7) and shape.paged_layers == 2 and len(shape.kinds.recurrent) == 6
    assert shape.recurrence == Recurrence(
        sum(one.numel() for one in mixer.parameters()), (2 * 2 * 8 + 4 * 16) * 4, 4 * 8 * 16
    )
    assert shape.state_bytes == 6 * (96 * 4 * 2 + 512 * 4)
    assert replace(shape, dtype=ElementType.FLOAT32).state_bytes == 6 * (96 * 4 + 512) * 4
    assert shape.token_bytes == 2 * (2 * 2 * 16 * 2), "two full layers"
    assert shape.window_bytes() == 0 and not shape.drafts_trees


def test_the_shape_of_a_model_with_windows() -> None:
    shape = shape_of(gemma_like(), ElementType.BFLOAT16, "small")
    assert shape.kinds.full == (5,) and len(shape.kinds.windowed) == 7
    assert shape.window_bytes() == 7 * 32 * (2 * 2 * 16 * 2) == 32 * shape.window_bytes(1)
    assert shape.window_bytes(20) == 20 * shape.window_bytes(1), "a sequence shorter than the window"
    assert shape.token_bytes == shape.layer_token_bytes == 2 * 2 * 16 * 2
    assert shape.state_bytes == 0 and shape.recurrence is None and shape.drafts_trees


@pytest.mark.parametrize("made", [qwen_like, gemma_like])
def test_a_folder_has_the_shape_of_its_model(made: Any, tmp_path: Path) -> None:
    model = made()
    model.config.save_pretrained(tmp_path)
    assert find_shape(tmp_path, None) == shape_of(model, None, str(tmp_path))


def test_layers_of_different_sizes_have_each_their_own() -> None:
    """Gemma 4: a full layer has fewer and wider KV heads than one that slides."""
    shape = find_shape("gemma4-31b", None)
    assert shape.token_bytes == 10 * 2 * 4 * 512 * 2
    assert shape.window_bytes() == 50 * 1024 * 2 * 16 * 256 * 2


def test_memory_of_a_long_pass_is_not_that_of_weights() -> None:
    """Keys, queries and values of four heads are there several times in float32; wider inputs add to them."""
    narrow, wide = (
        shape_of(random_model("qwen3_5_text", **QWEN_LIKE | {"hidden_size": width}), None, "small").recurrence
        for width in (64, 2048)
    )
    assert narrow is not None and wide is not None
    assert 4 < narrow.working_bytes / (4 * (8 + 8 + 16) * 4) < 30
    assert narrow.working_bytes <= wide.working_bytes <= narrow.working_bytes + 2 * 2048 * 2


def test_fused_kernels_are_not_tried_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_qwen3_5.torch_chunk_gated_delta_rule

    @functools.wraps(plain)
    def fused(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no GPU")

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", fused)
    assert shape_of(qwen_like(), None, "small").state_bytes > 0
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is fused


def test_a_state_of_unknown_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not on meta")

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", broken)
    with pytest.raises(
        UsageError, match=r"small: the size of the state of its layer 0 \(Qwen3_5Gated.*not on"
    ):
        shape_of(qwen_like(), None, "small")


def test_a_plan_that_skips_layers_leaves_out_what_they_keep() -> None:
    plan = LayerOrder.parse("skip:0,3a,4m", QWEN.layers)
    assert plan is not None
    fewer = QWEN.running(plan)
    assert (fewer.layers, fewer.paged_layers, len(fewer.kinds.recurrent)) == (30, 7, 23)
    assert QWEN.recurrence is not None and fewer.state_bytes * 24 == QWEN.state_bytes * 23
    attention = 2 * 4096 * 256 * (16 + 4)
    left_out = QWEN.recurrence.parameters + attention + 2 * QWEN.mlp_parameters
    assert fewer.parameters == QWEN.parameters - left_out


def test_kinds_are_those_of_all_layers() -> None:
    with pytest.raises(ValueError, match="31 layers, but kinds of 32"):
        replace(QWEN, layers=31)
    fewer = replace(find_shape("llama3.1-8b", None), layers=5, kv_heads=2)
    assert fewer.kinds == LayerKinds((LayerKind(2, 128),) * 5)


# Memory.


def test_memory_of_recurrent_states() -> None:
    """Four copies on the GPU, and one for each of eight points in host memory."""
    one = 24 * ((2 * 16 + 32) * 128 * 4 * 2 + 32 * 128 * 128 * 4)
    gpu, host = MemoryBudget(asked(QWEN)).gpu(0, resident=256), MemoryBudget(asked(QWEN)).host
    assert QWEN.state_bytes == one
    assert gpu["recurrent_states"] == 4 * one and "sliding_windows" not in gpu
    assert host["rewind_points"] == 8 * one
    token = 8 * 2 * 4 * 256 * 2  # full layers alone
    assert gpu["resident_kv"] == 256 * token
    assert host["kv"] == -(-30_256 // 256) * 256 * token
    assert gpu["newest_tokens"] == (256 + 1) * token + 8 * 16 * 256 * 2


def test_memory_of_sliding_windows() -> None:
    """Twice the window and the tokens of a pass on the GPU, the window at each point in host memory."""
    token = 29 * 2 * 4 * 256 * 2
    plain, drafting = asked(GEMMA), asked(GEMMA, "retrieval")
    assert MemoryBudget(plain).gpu(0)["sliding_windows"] == (2 * 1024 + 1) * token
    assert MemoryBudget(drafting).gpu(0)["sliding_windows"] == (2 * 1024 + drafting.longest_draft + 1) * token
    assert MemoryBudget(plain).host["rewind_points"] == 8 * 1024 * token
    assert "recurrent_states" not in MemoryBudget(plain).gpu(0)
    # Without a GPU they are the host's.
    in_place = MemoryBudget(asked(GEMMA, hardware=Hardware(HOST, (), measured=True))).host
    assert in_place["sliding_windows"] == (2 * 1024 + 1) * token


def test_fewer_points_are_kept_where_the_host_has_room_for_fewer() -> None:
    for points, kept in ((20, 8), (3, 3), (0, 1)):
        # The reserve and the embedding; nothing is paged.
        memory = GIB + MISTRAL.host_embedding_bytes + points * MISTRAL.window_bytes()
        hardware = Hardware(replace(HOST, memory_bytes=memory), DESKTOP.gpus, measured=True)
        found = MemoryBudget(asked(MISTRAL, hardware=hardware)).host
        assert found["rewind_points"] == kept * MISTRAL.window_bytes()


def test_a_prefill_holds_the_kv_of_a_layer_where_one_is_full() -> None:
    sliding, full = (
        replace(MISTRAL, kinds=kinds) for kinds in (MISTRAL.kinds, LayerKinds.uniform(32, 8, 128))
    )
    difference = MemoryBudget(asked(full)).gpu(0)["prefill"] - MemoryBudget(asked(sliding)).gpu(0)["prefill"]
    written = (PROMPT_WRITES + 1) * 2048
    assert difference == (30_000 + written) * 2 * 8 * 128 * 2
    # A mixer needs more for a chunk than an MLP.
    assert QWEN.recurrence is not None
    without = replace(QWEN, recurrence=replace(QWEN.recurrence, working_bytes=0))
    assert MemoryBudget(asked(QWEN)).gpu(0)["prefill"] > MemoryBudget(asked(without)).gpu(0)["prefill"]


def test_a_draft_model_keeps_windows_and_states_too() -> None:
    target = replace(find_shape("llama3.1-8b", None), vocabulary=GEMMA.vocabulary)
    config = load_config("naive", {})
    small = replace(GEMMA, kinds=LayerKinds.uniform(34, 4, 256))
    with_windows, without = (
        MemoryBudget(PlanRequest(target, draft, config, 30_000, 256, DESKTOP)).gpu(0)["draft_cache"]
        for draft in (GEMMA, small)
    )
    entries = without // small.token_bytes
    assert with_windows == entries * GEMMA.token_bytes + (2 * 1024 + 128) * GEMMA.window_bytes(1)


# Time.


def test_windows_and_states_take_time_in_every_pass() -> None:
    gpu = DESKTOP.gpus[0]
    weights = CostModel(asked(QWEN)).processor.read_ms(QWEN.step_bytes)
    assert CostModel(asked(QWEN)).pass_cost(QWEN, 1).busy_ms == pytest.approx(
        weights + gpu.read_ms(2 * QWEN.state_bytes)
    )
    weights = gpu.read_ms(GEMMA.step_bytes)
    for context, seen in ((30_000, 1024), (500, 500)):
        step = CostModel(asked(GEMMA, context=context)).pass_cost(GEMMA, 1)
        assert step.busy_ms == pytest.approx(weights + gpu.read_ms(seen * GEMMA.window_bytes(1)) / 0.5)
        assert step.launch_ms == pytest.approx(34 * 0.3), "all layers have kernels"
    # The CPU attends windows where it computes, at its own rate.
    cpu = CostModel(asked(GEMMA, hardware=Hardware(HOST, (), measured=True)))
    windows = GEMMA.window_bytes() / 50.0 / 1e6
    assert cpu.pass_cost(GEMMA, 1).busy_ms == pytest.approx(
        HOST.read_ms(GEMMA.step_bytes) + windows, rel=0.01
    )


def test_only_full_layers_stream_and_exchange() -> None:
    full = replace(QWEN, kinds=LayerKinds.uniform(32, 4, 256), recurrence=None)
    lanes, whole = (
        expected_round(CostModel(asked(shape)), CHAIN, cpu=10_240).verification for shape in (QWEN, full)
    )
    placement = lanes.placement
    assert placement.streamed_bytes == (30_000 - 10_240) * 8 * 2 * 4 * 256 * 2
    assert placement.streamed_bytes * 4 == whole.placement.streamed_bytes
    attending = placement.cpu_attended_bytes / CPU_RATE / 0.8 / 1e6
    assert lanes.cpu_attention == pytest.approx(lanes.dense.ms + attending + 8 * 0.15)
    segments = 8 * placement.streamed_tokens / asked(QWEN).segment_tokens
    assert lanes.dense.launch_ms == pytest.approx(0.3 * (32 + segments * 14 / 45))
    # Many queries are bound by computing.
    rates = CostModel(asked(QWEN))
    many = rates.verification(rates.memory.placement(0, 0), CHAIN.deep(255))
    assert many.attention == DESKTOP.gpus[0].compute_ms(8 * 4 * 16 * 256 * 30_000 * 256)


def test_drafts_over_full_kv_or_retrieved_kv_concern_full_layers() -> None:
    def predictor(level: dict[str, str], hardware: Hardware = DESKTOP) -> CostModel:
        config = load_config("shared", {"speculation.levels": [level], "retrieval.budget": 1024})
        return CostModel(PlanRequest(QWEN, None, config, 30_000, 256, hardware))

    shared = {"model": "target", "cache": "shared", "layers": "skip:0,3"}
    rates = predictor(shared)
    attending = PACKED_ATTENTION * 30_000 * QWEN.token_bytes / CPU_RATE / 0.8 / 1e6 + 8 * 0.15
    assert rates.host_attention_ms(30_000, 1) == pytest.approx(attending)
    (level,) = rates.request.levels
    running = QWEN.running(LayerOrder.parse("skip:0,3", 32) or LayerOrder.whole(32))
    alone = rates.pass_cost(running, 1).busy_ms
    assert level.pass_cost(rates, 1).busy_ms == pytest.approx(alone + attending * 7 / 8)
    # Chunks of full layers alone are chosen.
    rates = predictor({"model": "target", "cache": "retrieved"}, Hardware(HOST, (), measured=True))
    (level,) = rates.request.levels
    retrieval = rates.config.retrieval
    choosing = 30_000 // retrieval.chunk * 8 * 4 * 10 / 1e6
    # Of the chosen chunks 23 % are replaced; the window always is.
    moved = retrieval.recent + 0.23 * (retrieval.budget - retrieval.recent)
    copying = 2 * HOST.read_ms(moved * QWEN.token_bytes)
    assert level.refresh_cost(rates, 4.0, 0.0)[1] == pytest.approx(choosing + copying)


def test_a_prompt_is_attended_within_windows() -> None:
    pairs = 30_000 * 1024 - 1024**2 / 2
    expected = 4 * 8 * 256 * (5 * 30_000**2 / 2 + 28 * pairs)  # but for the last layer, which slides
    assert GEMMA.prompt_flops(30_000) == pytest.approx(expected)
    assert MISTRAL.prompt_flops(100) == 31 * 4 * 32 * 128 * 100**2 / 2
    assert QWEN.prompt_flops(1000) == 7 * 4 * 16 * 256 * 1000**2 / 2


# Plans.


@pytest.mark.parametrize("config", ["plain", "retrieval", "streaming", "lookup", "trees", "shared"])
@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_a_model_without_full_layers_pages_nothing(config: str, gpus: int) -> None:
    hardware = named_hardware("rtx4090" if gpus else "none", max(1, gpus))
    planned = plan(asked(MISTRAL, config, hardware=hardware))
    check_sums(planned)
    assert planned.fits and MISTRAL.token_bytes == planned.host["kv"] == 0
    report: Any = planned.to_json()
    assert report["layers"] == {"paged": 0, "sliding_windows": 32, "recurrent_states": 0}
    sizes = [value for name, value in report["placement"].items() if name.endswith("_bytes")]
    assert not any(sizes)


def test_recurrent_targets_draft_chains() -> None:
    auto, tree = DraftShape.parse("auto"), DraftShape.parse("grown:32")
    sequences = DraftShape.parse("sequences:2")
    assert allowed_drafts(auto, GEMMA, None) == auto.candidates()
    assert allowed_drafts(auto, QWEN, None) == allowed_drafts(tree, QWEN) == CHAIN.candidates()
    assert allowed_drafts(tree, GEMMA, QWEN) == CHAIN.candidates(), "the draft has states"
    assert allowed_drafts(sequences, QWEN) == sequences.candidates()
    planned = plan(asked(QWEN, "trees"))
    assert planned.gamma <= 31
    assert any(said.startswith("a chain is drafted instead of") for said in planned.assumptions)
    assert not any(said.startswith("a chain") for said in plan(asked(GEMMA, "trees")).assumptions)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--model qwen3.5-9b --gpu rtx4090 --context 262144",
            ["7.99 GiB in 8 of 32 layers", "states     0.19 GiB: 4 copies, in 24 layers"],
        ),
        (
            "--model gemma3-4b --gpu rtx4090 --context 128k",
            ["2.50 GiB in 5 of 34 layers", "windows    0.23 GiB: the last 1,024 tokens in 29 layers"],
        ),
        (
            "--model mistral-7b-v0.1 --gpu rtx4090 --context 32k --config plain",
            ["KV         nothing is paged: all 32 layers", "windows    1.00 GiB: the last 4,096 tokens"],
        ),
    ],
)
def test_the_command_tells_what_layers_keep(
    flags: str, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert cli.main(["plan", *shlex.split(flags), "--verbose", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert all(one in out for one in said), out
    report = json.loads(file.read_text())
    layers, (gpu,) = report["layers"], report["memory"]["gpus"]
    assert (layers["sliding_windows"] > 0) == ("sliding_windows" in gpu)
    assert (layers["recurrent_states"] > 0) == ("recurrent_states" in gpu)


def test_what_does_not_fit_names_quantised_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split("plan --model qwen3.5-27b --gpu rtx4090 --context 262144")) == 2
    err = capsys.readouterr().err
    assert "GPU 0 (rtx4090) has 23.3 GiB" in err and "weights 47.7" in err and "--quantize nf4" in err


def test_the_meta_device_is_enough() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen_like().config)
    assert shape_of(model, None, "small") == shape_of(qwen_like(), None, "small")
