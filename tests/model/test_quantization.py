"""Quantised weights: tokens of transformers' own decoding, rows that do not depend on others, and bytes."""

from __future__ import annotations

import io
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file, save_file
from support.chat_templates import LLAMA as TEMPLATE
from support.chat_templates import tokenizer, user
from support.plan_cases import LLAMA, gpu, request
from support.rounded_checkpoints import COMPRESSED, DYNAMIC, fp8, int4, write_rounded
from support.tiny_heads import write_head
from support.tiny_models import byte_ids, local_model, noisy_copy, real_text, tiny_target, transformers_greedy
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, PreTrainedModel

from cpu_kv import ElementType
from offload_rt import LLM, SamplingParams
from offload_rt.commands import cli
from offload_rt.errors import UsageError
from offload_rt.model.config_shapes import from_config
from offload_rt.model.decoder import NotANumber
from offload_rt.model.loading import load_model
from offload_rt.model.named_shapes import find_shape
from offload_rt.model.quantization import Quantization
from offload_rt.model.quantized_weights import move_scales, quantized_linear, stored_bytes
from offload_rt.model.runner import CausalModel
from offload_rt.model.weights_digest import weights_digest
from offload_rt.planning.assumptions import machine
from offload_rt.planning.cost_model import FUSED_ROWS, CostModel, product_rate
from offload_rt.system.hardware import ProductRate
from offload_rt.system.installation import install_extra

CPU = torch.device("cpu")
PROMPT, PARAMS = byte_ids(150), SamplingParams(max_tokens=30)
SIZES: dict[str, object] = {
    "streaming.sinks": 4,
    "streaming.window": 60,
    "retrieval.budget": 64,
    "retrieval.recent": 16,
    "speculation.gamma2": 4,
    "speculation.step_down": False,
}
OTHERS = (1, 16, 64)
"""Numbers of rows beside the one that is looked at."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model by the format of its weights, and a draft for it."""
    folder = tmp_path_factory.mktemp("quantized")
    paths = {name: folder / name for name in ("plain", "draft", "nf4", "int8", "int4", "fp8")}
    whole = tiny_target("llama-gqa", vocabulary=257, hidden=128)
    whole.save_pretrained(paths["plain"])
    noisy_copy(whole, noise=0.1).save_pretrained(paths["draft"])
    of_bitsandbytes = {
        "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "int8": BitsAndBytesConfig(load_in_8bit=True),
    }
    for name, config in of_bitsandbytes.items():
        given: dict[str, Any] = {"quantization_config": config, "device_map": {"": "cpu"}}
        model: Any = AutoModelForCausalLM.from_pretrained(paths["plain"], dtype=torch.float32, **given)
        model.save_pretrained(paths[name])
    write_rounded(paths["plain"], paths["int4"], int4, COMPRESSED)
    write_rounded(paths["plain"], paths["fp8"], fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    for path in paths.values():
        tokenizer(TEMPLATE, bos_token="<s>").save_pretrained(path)
    return paths


# ------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize(
    ("name", "quantize", "told"),
    [
        ("nf4", "none", None),
        ("int8", "none", "llm_int8_threshold is 0 instead of 6"),
        ("plain", "nf4", None),
        ("plain", "int8", None),
        (
            "int4",
            "none",
            "(int4) weights are expanded to the model's dtype as they load, and activations are",
        ),
        (
            "fp8",
            "none",
            "fp8 weights are expanded to the model's dtype as they load, and activations are not",
        ),
    ],
)
def test_tokens_are_those_of_transformers(
    folders: dict[str, Path], name: str, quantize: str, told: str | None
) -> None:
    notices = list[str]()
    given: dict[str, Any] = {"config": "streaming", "device": "cpu", "overrides": SIZES}
    with LLM(folders[name], folders["draft"], quantize=quantize, on_notice=notices.append, **given) as llm:
        model = llm.engine.target.module
        assert model.dtype == llm.engine.target.dtype == torch.float32
        prompts = [PROMPT, byte_ids(40, start=700), byte_ids(90, start=2000)]
        results = [llm.generate(PROMPT, PARAMS), *llm.generate(prompts[1:], PARAMS)]
        assert [one.tokens for one in results] == [transformers_greedy(model, one, 30) for one in prompts]
        drafted = sum(one.timings.drafted_tokens for one in results)
        assert drafted - 10 > sum(one.timings.accepted_tokens for one in results) > 10
        assert [notice for notice in notices if told is not None and told in notice] or told is None
    packed = name in ("nf4", "int8") or quantize != "none"
    plain = stored_bytes(load_model(folders["plain"], CPU, torch.float32))
    assert (stored_bytes(model) < 0.5 * plain) == packed


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two numbers of 4 bits in a byte, an exponent for 32 of them; also the numbers that they stand for.

    ``weight``: ``[experts, inputs, outputs]``; in files the inputs come last.
    """
    groups = weight.mT.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    scaled, values = groups / exponents.exp2(), torch.tensor([*FP4, *(-number for number in FP4)])
    numbers = (scaled[..., None] - values).abs().argmin(-1)
    packed = (numbers[..., ::2] | numbers[..., 1::2] << 4).to(torch.uint8)
    return (
        packed,
        (exponents[..., 0] + 127).to(torch.uint8),
        (values[numbers] * exponents.exp2()).flatten(-2).mT,
    )


def test_packed_experts_as_gpt_oss_is_published(tmp_path: Path) -> None:
    model = local_model("gpt-oss", intermediate_size=64)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"], expanded = mxfp4(tensors.pop(name))
        model.get_parameter(name).data = expanded.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, config="lookup", device="cpu", dtype="float32") as llm:
        result = llm.generate(PROMPT, PARAMS)
    assert result.tokens == transformers_greedy(model, PROMPT, len(result.tokens))
    assert any("mxfp4 weights are expanded" in notice for notice in result.notices)


def test_what_it_says_differs_from_the_whole_models(folders: dict[str, Path]) -> None:
    logits = []
    for name, quantize in (("plain", "none"), ("nf4", "none"), ("plain", "nf4"), ("plain", "int8")):
        model = load_model(folders[name], CPU, torch.float32, quantize=quantize)
        logits.append(last_logits(model, [PROMPT])[0])
    whole, *others = logits
    differences = [float((other - whole).abs().max() / whole.abs().max()) for other in others]
    assert all(0.001 < difference < 0.6 for difference in differences)


def test_ask_quantizes(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "out.json"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    command = ["ask", "--model", str(folders["plain"]), "--draft", str(folders["draft"]), "--quantize", "nf4"]
    overrides = [f"--set={key}={json.dumps(value)}" for key, value in SIZES.items()]
    flags = ["--config", "streaming", "--device", "cpu", "--temperature", "0", "-n", "12", "--quiet"]
    assert cli.main([*command, *overrides, *flags, "--json", str(written), real_text()[:200]]) == 0
    with LLM(folders["plain"], config="plain", device="cpu", quantize="nf4") as llm:
        prompt = llm.prompt_ids([user(real_text()[:200])])
        expected = transformers_greedy(llm.engine.target.module, prompt, 12)
    assert json.loads(written.read_text())["tokens"] == expected


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_heads_layer_plans_and_remote_blocks(folders: dict[str, Path], quantize: str, tmp_path: Path) -> None:
    model = load_model(folders["plain"], CPU, torch.float32, remote_mlps=(CPU, 1), quantize=quantize)
    runner, head = CausalModel(model, "tiny"), write_head(model, tmp_path / "head", seed=1)
    (remote,) = runner.remote_mlps
    assert remote.weight_bytes == stored_bytes(model.model.layers[1].mlp) < 3 * 128 * 256 * 2
    skipped = runner.layer_order("skip:0m,1a")
    assert skipped is not None
    left_out = stored_bytes(model.model.layers[0].mlp) + stored_bytes(model.model.layers[1].self_attn)
    assert runner.left_out_bytes(skipped) == left_out
    runner.restore()
    expected = transformers_greedy(model, PROMPT, 30)
    tables: list[dict[str, object]] = [
        {"model": "target", "cache": "retrieved", "layers": layers} for layers in ("skip:1m", "groups:2")
    ]
    cases: list[tuple[str, dict[str, object]]] = [("heads", {"head.path": str(head)})]
    cases += [("plain", {"speculation.levels": [table]}) for table in tables]
    for config, overrides in cases:
        with LLM.from_models(model, config=config, overrides=SIZES | overrides) as llm:
            result = llm.generate(PROMPT, PARAMS)
        assert result.tokens == expected
        assert 0 < result.timings.accepted_tokens < result.timings.drafted_tokens


def test_scales_follow_8_bit_weights() -> None:
    moved: Any = quantized_linear("int8", torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    moved.weight.data = moved.weight.data.clone()  # as a module does that goes to a GPU
    assert moved.weight.CB.data_ptr() != moved.weight.data.data_ptr()
    move_scales(nn.Sequential(moved))
    assert moved.weight.CB.data_ptr() == moved.weight.data.data_ptr()
    assert moved.weight.SCB.shape == (64,)


def test_saved_contexts_and_nan(folders: dict[str, Path], tmp_path: Path) -> None:
    """KV of other weights is refused, and a weight that is broken is named."""
    for name, quantize in (("plain", "nf4"), ("plain", "int8"), ("draft", "nf4"), ("plain", "none")):
        with LLM(folders[name], config="plain", device="cpu", quantize=quantize) as llm:
            if (name, quantize) == ("plain", "nf4"):
                llm.read(PROMPT).save(tmp_path / "context")
                assert llm.load(tmp_path / "context").tokens == PROMPT
            else:
                with pytest.raises(UsageError, match="another model"):
                    llm.load(tmp_path / "context")
    model = load_model(folders["plain"], CPU, torch.float32, quantize="nf4")
    eight_bits = torch.ones(2).to(torch.float8_e4m3fn)
    model.model.embed_tokens.other = nn.Parameter(eight_bits, requires_grad=False)
    model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(NotANumber, match=r"the weight model\.norm\.weight has NaN"):
        CausalModel(model, "tiny")


# --------------------------------------------------------------------------------------- refusals


def test_a_missing_package_is_a_line(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package, command in (
        ("bitsandbytes", f"--model {folders['nf4']}"),
        ("bitsandbytes", f"--model {folders['plain']} --quantize int8"),
        ("accelerate", f"--model {folders['fp8']}"),
        ("compressed_tensors", f"--model {folders['int4']}"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            assert cli.main(["generate", "--prompt", "a", "--device", "cpu", *command.split()]) == 2
        error = capsys.readouterr().err
        assert error.endswith(f" weights need {package}: {install_extra('quantized')}\n")
        assert error.count("\n") == 1


def test_scales_tell_models_apart(folders: dict[str, Path]) -> None:
    digests = set()
    for nested in (False, True):
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
        )
        model: Any = AutoModelForCausalLM.from_pretrained(
            folders["plain"], dtype=torch.float32, quantization_config=config, device_map={"": "cpu"}
        )
        digests.add(weights_digest(CausalModel(model, "one")))
    assert len(digests) == 2


def test_what_cannot_be_quantized(folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match=r"quantized already \(bitsandbytes\); leave --quantize out"):
        load_model(folders["nf4"], CPU, None, quantize="int8")
    for unknown in ("q4", "mxfp4"):
        with pytest.raises(UsageError, match=f"quantize {unknown!r} is unknown: use none, nf4 or int8"):
            load_model(folders["plain"], CPU, None, quantize=unknown)


def test_a_matrix_that_cannot_be_packed_is_named(tmp_path: Path) -> None:
    packs = getattr(quantized_linear("nf4", torch.ones(64, 64)), "support_avx512bf16_for_cpu", False)
    tiny_target("llama", hidden=48).save_pretrained(tmp_path)
    if not packs:
        pytest.skip("this processor multiplies with 4-bit matrices of any size")
    with pytest.raises(
        UsageError, match=r"q_proj is \[48, 48\], and a 4-bit matrix needs a multiple of 32 rows"
    ):
        load_model(tmp_path, CPU, None, quantize="nf4")


def test_a_gguf_file_says_what_it_would_take(tmp_path: Path) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + text("general.architecture") + struct.pack("<I", 8)
    of_4_bits = 12  # Q4_K: 144 bytes for 256 weights
    table = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 32768, 2**16, of_4_bits, 0)
    file = tmp_path / "model.gguf"
    file.write_bytes(head + text("llama") + table)
    said = r"its 1\.1 GiB of weights would be expanded to 4\.0 GiB of bfloat16; .* with --quantize nf4"
    for name in (file, tmp_path):
        with pytest.raises(UsageError, match=said):
            LLM(name, device="cpu")
    file.write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="its weights would be expanded to bfloat16"):
        find_shape(file, None)


# ----------------------------------------------------------------------- rows that share a pass


def last_logits(model: PreTrainedModel, rows: list[list[int]]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor(rows), use_cache=False).logits[:, -1]
    return logits


def dependence(compute: Callable[[int], Tensor]) -> list[float]:
    """The largest deviation of a row among others from the same row alone, as a share of its values.

    Args:
        compute: of so many rows, returns the first one.
    """
    alone = compute(1)
    return [float((compute(1 + others) - alone).abs().max() / alone.abs().max()) for others in OTHERS]


@torch.inference_mode()
def of_product(product: nn.Module) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(65, 128, generator=generator)
    rows[9] *= 30  # an outlier in another row
    return dependence(lambda count: product(rows[None, :count])[0, 0])


def of_model(model: PreTrainedModel) -> list[float]:
    rows = [[byte] for byte in byte_ids(65)]
    return dependence(lambda count: last_logits(model, rows[:count])[0])


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        ("nf4", "none"),
        ("int8", "none"),
        ("plain", "nf4"),
        ("plain", "int8"),
        ("int4", "none"),
        ("fp8", "none"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_others(
    folders: dict[str, Path], name: str, quantize: str, dtype: torch.dtype
) -> None:
    model = load_model(folders[name], CPU, dtype, quantize=quantize)
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {dtype}
    noise = 1e-5 if dtype == torch.float32 else 0.02
    assert max(of_model(model)) < noise
    if quantize != "none":
        weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(1))
        assert max(of_product(quantized_linear(quantize, weight))) < 1e-5


def test_a_model_whose_rows_depend_on_others_is_refused(folders: dict[str, Path]) -> None:
    """The check of independence sees that they do."""
    loader: Any = AutoModelForCausalLM.from_pretrained
    outliers = loader(folders["int8"], dtype=torch.float32, device_map={"": "cpu"}).eval()
    rounded: Any = tiny_target("llama-gqa", hidden=128)
    groups = {"group_0": {"targets": ["Linear"], "input_activations": DYNAMIC}}
    apply_quantization_config(rounded, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for model, said in (
        (outliers, r"q_proj chooses outlier columns .* load it with llm_int8_threshold=0"),
        (rounded, r"q_proj rounds activations with one scale .* load it with dequantize=True"),
    ):
        assert max(of_product(model.model.layers[0].mlp.gate_proj)) > 1e-3
        with pytest.raises(UsageError, match=said):
            LLM.from_models(model)


# ----------------------------------------------------------------------------------------- planning


def test_bytes_of_a_shape_are_arithmetic() -> None:
    shape = find_shape("qwen3-32b", ElementType.BFLOAT16, quantize="nf4")
    linear = 64 * (2 * 5120 * 128 * (64 + 8) + 3 * 5120 * 25600)
    norms = 64 * (2 * 5120 + 2 * 128) + 5120
    embedding = 151_936 * 5120
    assert shape.parameters == linear + norms + 2 * embedding == 32_762_123_264
    bits = 4 + 8 / 64 + 32 / (64 * 256)  # a scale of 8 bits for 64 weights, one of 32 bits for 256 of those
    exact = linear * bits / 8 + (norms + 2 * embedding) * 2
    assert shape.weight_bytes == pytest.approx(exact, rel=1e-4)
    assert shape.weight_bytes - shape.step_bytes == 2 * embedding
    assert shape.mlp_bytes == pytest.approx(3 * 5120 * 25600 * bits / 8, abs=1)
    assert shape.token_bytes == find_shape("qwen3-32b", None).token_bytes == 64 * 2 * 8 * 128 * 2
    assert find_shape("qwen3-32b", None, quantize="int8").mlp_bytes == 3 * 5120 * 25600
    # nf4 packs experts, too; int8 attention and the router, 2% of the weights.
    experts = find_shape("qwen3-30b-a3b", ElementType.BFLOAT16)
    linear, fused = 48 * (2 * 2048 * 128 * 36 + 2048 * 128), 48 * 128 * 3 * 768 * 2048
    for quantize, packed, size in (("nf4", linear + fused, bits / 8), ("int8", linear, 1)):
        saved = experts.weight_bytes - find_shape("qwen3-30b-a3b", None, quantize=quantize).weight_bytes
        assert saved == pytest.approx(packed * (2 - size), rel=1e-3)


@pytest.mark.parametrize(
    ("stated", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            4.126953125,
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "fp8"}, 16),
        (COMPRESSED, 16),
    ],
)
def test_bytes_are_those_of_the_checkpoints_format(stated: dict[str, object], bits: float) -> None:
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3)
    whole = from_config(config, ElementType.BFLOAT16, "tiny")
    config.quantization_config = stated
    linear = 3 * (4 * 256 * 256 + 3 * 256 * 512)
    shape = from_config(config, ElementType.BFLOAT16, "tiny")
    assert whole.weight_bytes - shape.weight_bytes == pytest.approx(linear * (16 - bits) / 8, abs=1)
    assert whole.mlp_bytes - shape.mlp_bytes == pytest.approx(3 * 256 * 512 * (16 - bits) / 8, abs=1)


def test_modules_that_a_config_leaves_alone_are_counted_whole() -> None:
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3)
    of_all, skips = {"quant_method": "bitsandbytes", "load_in_8bit": True}, ["lm_head", "model.layers.1.mlp"]
    config.quantization_config = of_all
    everywhere = from_config(config, ElementType.BFLOAT16, "tiny").weight_bytes
    config.quantization_config = of_all | {"llm_int8_skip_modules": skips}
    assert from_config(config, ElementType.BFLOAT16, "tiny").weight_bytes - everywhere == 3 * 256 * 512
    config.quantization_config = of_all | {"llm_int8_skip_modules": []}  # the head, too
    assert everywhere - from_config(config, ElementType.BFLOAT16, "tiny").weight_bytes == 512 * 256


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_planned_bytes_are_those_that_are_loaded(folders: dict[str, Path], quantize: str) -> None:
    planned = find_shape(folders["plain"], ElementType.BFLOAT16, quantize=quantize)
    loaded = load_model(folders["plain"], CPU, torch.bfloat16, quantize=quantize)
    assert stored_bytes(loaded) == pytest.approx(
        planned.weight_bytes, rel=3e-3 if quantize == "nf4" else 0.02
    )
    assert planned.quantized == 2 * (2 * 128 * 128 + 2 * 128 * 32 + 3 * 128 * 256)


def test_the_plan_of_a_quantized_model(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "plan --verbose --model qwen3-32b --quantize nf4 --gpu rtx4090 --context 131072 --config retrieval"
    )
    assert cli.main(command.split()) == 0
    out = capsys.readouterr().out
    assert "plan       qwen3-32b in bfloat16 with nf4 weights, prompt of 130,816 tokens, 256 new" in out
    assert "of 23.30 GiB: weights 16.44" in out
    assert "note       more than 40,960 positions: run it with --rope yarn:4, as planned here" in out
    assert "in nf4 of 4.13 bits with their scales, 14.99 GiB, the other 1,555,824,640 as they are" in out
    assert cli.main(command.replace("--quantize nf4 ", "").split()) == 2


def test_times_of_products() -> None:
    """Known by arithmetic, on a GPU that reads 1,000 GB/s: measured rates are taken where there are some."""
    rates = tuple(ProductRate("nf4", rows, rate) for rows, rate in ((1, 1000.0), (16, 800.0), (64, 400.0)))
    found = [product_rate(rates, rows) for rows in (1, 16, 64, 128)]
    assert found == pytest.approx([1000, 800, 400, 200])
    assert 1 / product_rate(rates, 40) == pytest.approx((1 / 800 + 1 / 400) / 2)

    llama = LLAMA.with_weights(Quantization.named("nf4"))
    packed, others = llama.quantized, llama.step_parameters - llama.quantized
    assert others == 32000 * 4096  # the head; norms are counted as quantised
    assumed = CostModel(request(config="plain", target=llama))
    measured = CostModel(request(config="plain", target=llama, hardware=gpu(products=rates)))
    other = CostModel(
        request(config="plain", target=llama, hardware=gpu(products=(ProductRate("int8", 1, 1.0),)))
    )
    expanding = packed * 4 / 1e9
    assert assumed.dense(1).busy_ms == pytest.approx(llama.step_bytes / 1e9) == other.dense(1).busy_ms
    assert measured.dense(1).busy_ms == pytest.approx(packed / 1e9 + others * 2 / 1e9)
    assert measured.dense(64).busy_ms == pytest.approx(packed / 400e6 + others * 2 / 1e9)
    within, beyond = (assumed.dense(rows).busy_ms for rows in (FUSED_ROWS, FUSED_ROWS + 1))
    assert beyond - within == pytest.approx(expanding, rel=0.05)
    whole = CostModel(request(config="plain"))
    chunks = -(-whole.request.context // whole.config.prefill.chunk)
    assert assumed.prefill_ms() - whole.prefill_ms() == pytest.approx(chunks * expanding)
    for predictor, said in (
        (assumed, "nf4 weights (not measured)"),
        (measured, "(measured): 1000 at 1, 800 at 16"),
    ):
        assert said in "\n".join(machine(predictor.request))
