"""Experts in 4 bits: their weights in memory, their products, rows that depend on no others, and refusals."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plan_cases import request
from support.rounded_checkpoints import COMPRESSED, Rounding, fp8, int4, write_rounded
from support.tiny_models import MIXTURES, byte_ids, mixture, noisy_copy, transformers_greedy
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpu_kv import ElementType
from offload_rt import LLM, SamplingParams
from offload_rt.errors import UsageError
from offload_rt.model import quantized_experts
from offload_rt.model.loading import load_model
from offload_rt.model.named_shapes import find_shape
from offload_rt.model.quantization import MOST_PAIRS
from offload_rt.model.quantized_experts import QuantizedMatrices
from offload_rt.model.quantized_weights import stored_bytes
from offload_rt.planning.assumptions import machine
from offload_rt.planning.cost_model import LAYER_KERNELS, CostModel
from offload_rt.planning.planner import plan
from offload_rt.system.hardware import named_hardware

CPU = torch.device("cpu")
PROMPT, PARAMS = byte_ids(300), SamplingParams(max_tokens=30)
SIZES: dict[str, object] = {
    "streaming.sinks": 4,
    "streaming.window": 60,
    "speculation.gamma2": 4,
    "speculation.step_down": False,
}
FEW, MANY = MOST_PAIRS // 2, MOST_PAIRS
"""Rows whose products with two experts each are taken pair by pair, and rows whose products are grouped."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The mixtures by name, and a draft for the first one."""
    folder = tmp_path_factory.mktemp("mixtures")
    paths = {name: folder / name for name in (*MIXTURES, "draft")}
    models = {name: mixture(name) for name in MIXTURES}
    models["draft"] = noisy_copy(models["qwen3-moe"], noise=0.1)
    for name, model in models.items():
        model.save_pretrained(paths[name])
    return paths


def functional() -> Any:
    """Returns bitsandbytes' functions, which cannot be imported beside an emulated GPU."""
    import bitsandbytes

    return bitsandbytes.functional


def expanded(model: PreTrainedModel, whole: PreTrainedModel) -> PreTrainedModel:
    """Returns `whole` in float64 with the weights of a quantised model, expanded."""
    reference = copy.deepcopy(whole).double()
    reference.set_experts_implementation("eager")
    for path, module in model.named_modules():
        if isinstance(module, QuantizedMatrices):
            matrices = torch.stack([module.matrix(at, torch.float32) for at in range(len(module.packed))])
            transposed = experts_of(reference).is_transposed
            reference.get_parameter(path).data = (matrices.mT if transposed else matrices).double()
        elif (state := getattr(getattr(module, "weight", None), "quant_state", None)) is not None:
            weight = functional().dequantize_4bit(module.weight.data, state)
            reference.get_parameter(f"{path}.weight").data = weight.double()
    return reference


def loaded(folders: dict[str, Path], name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_model(folders[name], CPU, dtype, quantize="nf4")


def experts_of(model: PreTrainedModel) -> nn.Module:
    experts: nn.Module = model.model.layers[0].mlp.experts
    return experts


def routed(model: PreTrainedModel, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden states, the two experts of each, and their weights."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, model.config.hidden_size, generator=generator)
    numbers: Any = experts_of(model).num_experts
    scores = torch.rand(rows, numbers, generator=generator)
    weights, experts = scores.topk(2, dim=-1)
    return hidden.to(dtype), experts, weights.to(dtype)


@pytest.mark.parametrize("name", MIXTURES)
def test_weights_in_memory(folders: dict[str, Path], name: str) -> None:
    """Experts have 4 bits with their scales, and are near the weights of the checkpoint."""
    whole, model = mixture(name), loaded(folders, name, torch.bfloat16)
    assert not any(parameter.dim() == 3 for parameter in experts_of(model).parameters())
    seen = 0
    for path, module in model.named_modules():
        if isinstance(module, QuantizedMatrices):
            given = whole.get_parameter(path)
            seen += given.numel()
            assert module.packed.dtype == torch.uint8 and 2 * module.packed.numel() == given.numel()
            for expert, matrix in enumerate(given.mT if experts_of(whole).is_transposed else given):
                error = module.matrix(expert, torch.float32) - matrix
                assert 0.02 < error.norm() / matrix.norm() < 0.12
    assert seen == sum(
        p.numel() for path, p in whole.named_parameters() if "experts." in path and p.dim() == 3
    )
    planned = find_shape(folders[name], ElementType.BFLOAT16, quantize="nf4")
    assert stored_bytes(model) == pytest.approx(planned.weight_bytes, rel=0.05)  # tables of 1 KiB


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("rows", [1, FEW, MANY])
@torch.inference_mode()
def test_products_are_those_of_the_expanded_weights(folders: dict[str, Path], name: str, rows: int) -> None:
    """Against the code of the architecture, in float64."""
    model = loaded(folders, name)
    reference = expanded(model, mixture(name))
    hidden, experts, weights = routed(model, rows, torch.float32)
    computed = experts_of(model)(hidden, experts, weights)
    expected = experts_of(reference)(hidden.double(), experts, weights.double())
    assert (computed - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_logits(folders: dict[str, Path], name: str) -> None:
    """They are those of the expanded weights in float64, and as near the whole model's as 4 bits allow."""
    ids, whole = torch.tensor([byte_ids(60)]), mixture(name)
    model = loaded(folders, name)
    module: Any
    for module in model.modules():  # else linear layers compute in bfloat16 on some processors
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    expected, logits = expanded(model, whole)(ids).logits, model(ids).logits
    assert (logits - expected).abs().max() < 2e-4 * expected.abs().max()
    alike = nn.functional.cosine_similarity(logits, whole(ids).logits, dim=-1)
    assert 0.4 < alike.mean() < 0.999


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_no_bit_of_a_row_depends_on_others(folders: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    model = loaded(folders, name, dtype)
    experts, given = experts_of(model), routed(model, MANY, dtype)
    alone = [experts(*(part[row : row + 1] for part in given)) for row in range(MANY)]
    for rows in (2, 3, 7, 16, 33, FEW):
        assert torch.equal(experts(*(part[:rows] for part in given)), torch.cat(alone[:rows]))
    # In larger passes an expert's rows share a product, so that only the distribution is the same.
    together, noise = experts(*given), 1e-5 if dtype == torch.float32 else 0.02
    assert (together - torch.cat(alone)).abs().max() < noise * together.abs().max()


@pytest.mark.parametrize("name", MIXTURES)
def test_speculation_writes_what_plain_decoding_does(folders: dict[str, Path], name: str) -> None:
    draft = folders["draft"] if name == "qwen3-moe" else None
    sizes = SIZES if draft else {}
    config = "streaming" if draft else "lookup"
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "quantize": "nf4"}
    with LLM(folders[name], config="plain", **options) as llm:
        plain = llm.generate(PROMPT, PARAMS)
        module = llm.engine.target.module
        assert isinstance(experts_of(module).down_proj, QuantizedMatrices)
        assert plain.tokens == transformers_greedy(module, PROMPT, len(plain.tokens))
    with LLM(folders[name], draft, config=config, overrides=sizes, **options) as llm:
        result = llm.generate(PROMPT, PARAMS)
    assert result.tokens == plain.tokens and result.exactness.startswith("distribution")
    assert not draft or 0 < result.timings.accepted_tokens < result.timings.drafted_tokens


def test_one_tensor_is_expanded_at_a_time(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """While a checkpoint loads, at most one tensor of experts is there in the checkpoint's dtype."""
    alive, most = set[int](), list[int]()
    build = QuantizedMatrices.__init__

    def watched(module: QuantizedMatrices, matrices: Tensor, transposed: bool) -> None:
        alive.add(id(matrices))
        weakref.finalize(matrices, alive.discard, id(matrices))
        most.append(len(alive))
        build(module, matrices, transposed)

    monkeypatch.setattr(QuantizedMatrices, "__init__", watched)
    loaded(folders, "qwen3-moe")
    assert most == [1] * 4 and not alive


def test_experts_that_compute_otherwise_are_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_experts, "_matrix_names", lambda _: ())
    said = r"experts \(Qwen3MoeExperts\) does not compute as transformers' interface .* leave --quantize out$"
    with pytest.raises(UsageError, match=said):
        loaded(folders, "qwen3-moe")
    with pytest.raises(UsageError, match=said):
        find_shape(folders["qwen3-moe"], None, quantize="nf4")


def test_a_checkpoint_of_other_sizes_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    mixture("qwen3-moe", moe_intermediate_size=32).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((folders["qwen3-moe"] / "config.json").read_bytes())
    with pytest.raises(UsageError, match=r"down_proj is \[8, 64, 32\] in the files and \[8, 64, 64\]"):
        loaded({"smaller": tmp_path}, "smaller")


# ------------------------------------------------------------------------------- packed checkpoints

FP8: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(("rounding", "stated", "error"), [(int4, COMPRESSED, 0.15), (fp8, FP8, 0.04)])
def test_packed_experts_that_are_expanded(
    folders: dict[str, Path], tmp_path: Path, rounding: Rounding, stated: dict[str, object], error: float
) -> None:
    write_rounded(folders["qwen3-moe"], tmp_path / "packed", rounding, stated)
    with LLM(tmp_path / "packed", config="lookup", device="cpu", dtype="float32") as llm:
        result, module = llm.generate(PROMPT, PARAMS), llm.engine.target.module
    assert result.tokens == transformers_greedy(module, PROMPT, len(result.tokens))
    assert any("weights are expanded to the model's dtype as they load" in one for one in result.notices)
    for path, weight in mixture("qwen3-moe").named_parameters():
        if ".experts." in path:
            difference = module.get_parameter(path) - weight
            assert 0.01 < difference.norm() / weight.norm() < error


def bitsandbytes_4bit(weight: Tensor) -> dict[str, Tensor]:
    packed, state = functional().quantize_4bit(weight, quant_type="nf4")
    return {"weight": packed} | {f"weight.{key}": part for key, part in state.as_dict(packed=True).items()}


def gptq(weight: Tensor) -> dict[str, Tensor]:
    rows, columns = weight.shape
    return {
        "qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
        "qzeros": torch.zeros(1, rows // 8, dtype=torch.int32),
        "scales": torch.ones(1, rows, dtype=torch.float16),
    }


@pytest.mark.parametrize(
    ("rounding", "stated", "method"),
    [
        (bitsandbytes_4bit, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "fp4"),
        (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 64}, "gptq"),
        (gptq, {"quant_method": "awq", "bits": 4, "group_size": 64}, "awq"),
    ],
)
def test_packed_experts_that_are_refused(
    folders: dict[str, Path], tmp_path: Path, rounding: Rounding, stated: dict[str, object], method: str
) -> None:
    write_rounded(folders["qwen3-moe"], tmp_path / "packed", rounding, stated)
    said = rf"packed: its experts are packed \({method}\) one by one, .* in bfloat16 .* with --quantize nf4$"
    with pytest.raises(UsageError, match=said):
        load_model(tmp_path / "packed", CPU, None)


# ----------------------------------------------------------------------------------------- planning


def test_experts_of_a_pass() -> None:
    """By arithmetic: 8 of 128 experts for one row; two rows leave each one out with a chance of (15/16)^2."""
    shape = find_shape("qwen3-30b-a3b", None)
    one = 3 * 768 * 2048
    assert [shape.distinct_experts(rows) for rows in (1, 2)] == pytest.approx([8, 128 * (1 - (15 / 16) ** 2)])
    assert 127.9 < shape.distinct_experts(200) < 128
    assert shape.active_parameters == shape.step_parameters - 48 * 120 * one
    assert shape.expert_bytes == 2 * one
    packed = find_shape("qwen3-30b-a3b", None, quantize="nf4")
    bits = 4 + (8 + 32 / 256) / 64
    assert packed.expert_bytes == pytest.approx(one * bits / 8)
    assert packed.quantized == packed.quantized_linear + 48 * 128 * one
    assert find_shape("qwen3-30b-a3b", None, quantize="int8").expert_bytes == 2 * one
    assert find_shape("llama2-7b", None).distinct_experts(9) == 0


def test_times_of_experts() -> None:
    """On a GPU that reads 1,000 GB/s, with rows too few to be bound by products."""
    whole, packed = (find_shape("qwen3-30b-a3b-2507", None, quantize=name) for name in ("none", "nf4"))
    others = whole.step_parameters - whole.all_experts
    for shape in (whole, packed):
        costs = CostModel(request(config="plain", target=shape, draft=None))
        linear = shape.quantized_linear
        rest = (others - linear) * 2 + (shape.quantization.nbytes(linear) if shape.quantization else 0)
        for rows in (1, 4):
            experts = 3 * 8 * rows if shape is packed else shape.distinct_experts(rows)
            read = rest + 48 * experts * shape.expert_bytes
            assert costs.dense(rows).busy_ms == pytest.approx(read / 1e9, rel=1e-3)
    launches = [
        CostModel(request(config="plain", target=shape, draft=None)).dense(4).launch_ms
        for shape in (whole, packed)
    ]
    assert launches[1] / launches[0] == pytest.approx(1 + 2 * 4 * 8 / LAYER_KERNELS)
    # For more than MOST_PAIRS pairs each expert is expanded, and the step from one way to the other is small.
    costs = CostModel(request(config="plain", target=packed, draft=None))
    few, many = (costs.dense(rows).busy_ms for rows in (MOST_PAIRS // 8, MOST_PAIRS // 8 + 1))
    assert 0.5 < many / few < 3
    said = "\n".join(machine(costs.request))
    assert "goes through 8 of 128 in a layer, and a pass of several tokens through 8 for 1, 52 for 8" in said


@pytest.mark.parametrize("name", ["qwen3-30b-a3b-2507", "qwen3.5-35b-a3b"])
@pytest.mark.parametrize("context", [131_072, 262_144])
def test_mixtures_fit_a_card_of_24_gb(name: str, context: int) -> None:
    target = find_shape(name, None, quantize="nf4")
    asked = request(
        {}, "retrieval", context - 256, hardware=named_hardware("rtx4090"), draft=None, target=target
    )
    planned = plan(asked)
    assert planned.fits and planned.gpus[0]["experts"] > 0
    assert not plan(replace(asked, target=find_shape(name, None))).fits
