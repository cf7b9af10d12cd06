"""Models from folders and ids: what is wrong is said in one line that names it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from support.tiny_models import (
    HEAD_DIM,
    byte_ids,
    byte_tokenizer,
    local_model,
    random_model,
    real_text,
    tiny_draft,
    tiny_target,
    to,
    transformers_greedy,
)
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from cpu_kv import SlabAllocator
from offload_rt import LLM, SamplingParams
from offload_rt.errors import UsageError
from offload_rt.kernels import native
from offload_rt.machine.devices import choose_device, choose_devices, choose_dtype
from offload_rt.model import hub
from offload_rt.model.checkpoint_config import model_config
from offload_rt.model.host_embedding import host_bytes
from offload_rt.model.loading import load_model, load_tokenizer
from offload_rt.model.quantized_weights import stored_bytes
from offload_rt.model.rope import Yarn

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_target("llama-gqa").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_folder_gives_the_model_and_its_tokenizer(saved: Path) -> None:
    model = load_model(saved, CPU, torch.float32)
    original = tiny_target("llama-gqa").state_dict()
    assert all(torch.equal(value, original[name]) for name, value in model.state_dict().items())
    assert not model.training
    tokenizer = load_tokenizer(saved)
    assert tokenizer is not None and tokenizer(real_text()[:50])["input_ids"] == byte_ids(50)
    assert load_model(saved, CPU, torch.bfloat16).dtype == torch.bfloat16
    assert load_model(saved, CPU, None).dtype == torch.float32  # the checkpoint's own


@pytest.mark.gpu
def test_on_a_gpu_the_embedding_is_in_host_memory(saved: Path, tmp_path: Path) -> None:
    """Tokens, sessions and plans are those of a model whose embedding is on the device."""
    cuda = torch.device("cuda")
    model, here = load_model(saved, cuda, torch.float32), load_model(saved, CPU, torch.float32)
    weight, expected = model.model.embed_tokens.weight, here.model.embed_tokens.weight
    assert model.device == weight.device == torch.device("cuda:0")
    assert host_bytes(model) == weight.nbytes > 0 == host_bytes(here)
    assert model.num_parameters() == here.num_parameters() and torch.equal(weight.cpu(), expected)
    params, file = SamplingParams(max_tokens=10), tmp_path / "a.safetensors"
    found = []
    for device in ("cpu", "cuda"):
        with LLM(saved, config="retrieval", device=device, dtype="float32") as llm:
            context = llm.read(byte_ids(300)) if device == "cpu" else llm.load(file)  # weights are compared
            if device == "cpu":
                context.save(file)
            found.append(context.generate((), params).tokens)
            target, (shape, _) = llm.engine.target, llm.engine.planner.shapes
            assert target.weight_bytes == stored_bytes(target.module) - host_bytes(target.module)
            assert shape.embedding_on_gpu == (device == "cpu")
    assert found[0] == found[1]


@pytest.mark.gpu
def test_an_embedding_that_every_pass_reads_or_that_cannot_be_locked_stays_on_the_gpu(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda")
    tiny_target("llama-gqa", tie_word_embeddings=True).save_pretrained(tmp_path)
    assert host_bytes(load_model(tmp_path, cuda, torch.float32)) == 0
    monkeypatch.setattr(SlabAllocator, "is_locked", lambda slabs, memory: False)
    model = load_model(saved, cuda, torch.float32)
    assert host_bytes(model) == 0 and model.model.embed_tokens.weight.device == torch.device("cuda:0")


def test_progress_of_loading_is_told(saved: Path) -> None:
    told: list[tuple[str, int, int]] = []
    with LLM(
        saved, str(saved), config="naive", device="cpu", on_progress=lambda *report: told.append(report)
    ):
        count = len(load_file(saved / WEIGHTS))
        assert told == [(phase, n, count) for phase in ("load", "load draft") for n in range(1, count + 1)]


def test_an_llm_from_folders(saved: Path, tmp_path: Path) -> None:
    tiny_draft().save_pretrained(tmp_path / "draft")
    params = SamplingParams(max_tokens=10)
    with LLM(saved, str(tmp_path / "draft"), config="naive", device="cpu", dtype="float32") as llm:
        result = llm.generate(real_text()[:40], params)
    with LLM.from_models(tiny_target("llama-gqa"), config="plain") as plain:
        assert plain.generate(byte_ids(40), params).tokens == result.tokens
    assert (result.model, result.draft) == (str(saved), str(tmp_path / "draft"))
    assert (result.dtype, result.device, result.prompt_tokens) == ("float32", "cpu", 40)


def overwrite(folder: Path, data: bytes, name: str = WEIGHTS) -> None:
    (folder / name).write_bytes(data)


def add_tensors(folder: Path, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Or takes away, where there is none."""
    held = {**load_file(folder / WEIGHTS), **tensors}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})


def unknown(folder: Path, model_type: str, architecture: str) -> None:
    edit_config(folder, model_type=model_type, architectures=[architecture])


def weights_as_pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def corrupt_second_shard(folder: Path) -> None:
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (folder / WEIGHTS).rename(folder / names[0])
    overwrite(folder, bytes(7), names[1])
    index = {"weight_map": {"model.norm.weight": names[0], "lm_head.weight": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


TORN = r"model\.safetensors is truncated or corrupt"
UNREADABLE = r"its config\.json cannot be read: .* is not a valid JSON file"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"there is no config\.json in it"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), r"there are no weights in it"),
    "truncated": (lambda folder: overwrite(folder, (folder / WEIGHTS).read_bytes()[:-9000]), TORN),
    "a pipe": (weights_as_pipe, r"model\.safetensors is no file; download it again"),
    "empty weights": (lambda folder: overwrite(folder, b""), TORN),
    "corrupt": (lambda folder: overwrite(folder, b"not at all what it should be" * 100), TORN),
    "corrupt second shard": (
        lambda folder: corrupt_second_shard(folder),
        r"model-00002-of-00002\.safetensors is truncated or corrupt",
    ),
    "missing tensor": (
        lambda folder: add_tensors(folder, {"model.layers.1.self_attn.k_proj.weight": None}),
        r"1 weights are missing.*model\.layers\.1\.self_attn\.k_proj\.weight",
    ),
    "wrong shape": (
        lambda folder: edit_config(folder, intermediate_size=96),
        r"layers\.0\.mlp\.down_proj\.weight is \[64, 128\] in the files and \[64, 96\] by the config",
    ),
    "fewer layers": (
        lambda folder: edit_config(folder, num_hidden_layers=1),
        r"9 of those in the files have no place by the config, the first is model\.layers\.1\.input_",
    ),
    "broken json": (lambda folder: overwrite(folder, b'{"model_type": "llama",', "config.json"), UNREADABLE),
    "config of bytes": (lambda folder: overwrite(folder, b"\xff" * 9, "config.json"), UNREADABLE),
    "unknown architecture": (
        lambda folder: unknown(folder, "perceptron9000", "Perceptron9000ForCausalLM"),
        r"perceptron9000",
    ),
    "not causal": (
        lambda folder: unknown(folder, "vit", "ViTForImageClassification"),
        r"ViTForImageClassification",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_refused(damage: Callable[[Path], object], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(UsageError, match=message) as caught:
        load_model(folder, CPU, torch.float32)
    assert str(caught.value).startswith(f"model {folder}")
    assert "\n" not in str(caught.value)


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    tied: PreTrainedModel = tiny_target("qwen2", tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    load_model(tmp_path, CPU, torch.float32)
    add_tensors(
        tmp_path, {"lm_head.weight": load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"].clone()}
    )
    load_model(tmp_path, CPU, torch.float32)


def test_tensors_that_no_text_goes_through_are_left_alone(folder: Path) -> None:
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "v_head.weight", "vision_tower.layers.0.weight"]
    add_tensors(folder, {name: torch.ones(8) for name in names})
    load_model(folder, CPU, torch.float32)


def test_a_bias_that_the_config_leaves_out_is_refused(folder: Path) -> None:
    add_tensors(folder, {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
    with pytest.raises(UsageError, match=r"1 of those .* first is model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_model(folder, CPU, torch.float32)


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MULTIMODAL: dict[str, tuple[Callable[[], PreTrainedModel], Mapping[str, object]]] = {
    "gemma3": (partial(local_model, "gemma3"), VISION | {"image_size": 28, "patch_size": 14}),
    "qwen3_5": (
        partial(local_model, "qwen3.5"),
        {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64},
    ),
    "mistral3": (  # the form of Ministral 3
        partial(
            random_model,
            "ministral3",
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            initializer_range=0.2,
        ),
        VISION | {"image_size": 28, "patch_size": 14},
    ),
}


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_language_model_of_a_multimodal_checkpoint(kind: str, tmp_path: Path) -> None:
    build, vision = MULTIMODAL[kind]
    text = build()
    text.generation_config.eos_token_id = None
    config = AutoConfig.for_model(kind, text_config=text.config.to_dict(), vision_config=dict(vision))
    config.tie_word_embeddings = text.config.tie_word_embeddings
    whole = AutoModelForImageTextToText.from_config(config).float()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    with LLM(tmp_path, config="lookup", device="cpu") as llm:
        assert llm.engine.target.weight_bytes == text.num_parameters() * 4
        tokens = llm.generate(byte_ids(40), SamplingParams(max_tokens=8, ignore_eos=True)).tokens
    assert tokens == transformers_greedy(text, byte_ids(40), 8)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./not-here", "../not/here", "~/not-here", "a/b/c"])
def test_a_path_that_does_not_exist(name: str) -> None:
    for read in (lambda: load_model(name, CPU, None), lambda: load_tokenizer(name)):
        with pytest.raises(UsageError, match=f"model {name}: there is no such folder"):
            read()


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model"])
def test_an_id_that_cannot_be_fetched(name: str) -> None:
    for read in (lambda: load_model(name, CPU, None), lambda: load_tokenizer(name)):
        with pytest.raises(
            UsageError, match=f"model {name}: there is no such folder here, and no .*ID"
        ) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_a_model_without_tokenizer_works_with_ids(tmp_path: Path) -> None:
    tiny_target("llama").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path) is None
    with LLM(tmp_path, config="plain", device="cpu") as llm:
        result = llm.generate(byte_ids(5), SamplingParams(max_tokens=3))
        assert len(result.tokens) == 3 and result.text == ""
        with pytest.raises(UsageError, match="no tokenizer: give the prompt as token ids"):
            llm.generate("text")
        with pytest.raises(UsageError, match="no tokenizer: stop strings"):
            llm.generate(byte_ids(5), SamplingParams(stop=("x",)))


def test_devices_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("cpu") == choose_device("auto") == CPU
    assert choose_dtype("bfloat16", CPU, torch.float32) == torch.bfloat16
    with pytest.raises(UsageError, match="device 'tpu' is unknown: use one of auto, cpu, cuda"):
        choose_device("tpu")
    with pytest.raises(UsageError, match="dtype 'int8' is unknown"):
        choose_dtype("int8", CPU, None)


@pytest.mark.parametrize("dots", [None, False, True], ids=["no library", "without dots", "with dots"])
def test_auto_never_rounds_weights(monkeypatch: pytest.MonkeyPatch, dots: bool | None) -> None:
    """A checkpoint in float16 has values that bfloat16 rounds, too."""
    kernel = None if dots is None else SimpleNamespace(bfloat16_dots=dots)
    monkeypatch.setattr(native, "load_kernel", lambda: kernel)
    for own in (torch.float32, torch.float16, None):
        assert choose_dtype("auto", CPU, own) == torch.float32
    assert choose_dtype("auto", CPU, torch.bfloat16) == (torch.bfloat16 if dots else torch.float32)
    assert choose_dtype("auto", torch.device("cuda"), torch.bfloat16) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_auto_by_the_config_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(native, "load_kernel", lambda: SimpleNamespace(bfloat16_dots=True))
    to(tiny_target("llama"), dtype).save_pretrained(tmp_path)
    with LLM(tmp_path, config="plain", device="cpu") as llm:
        assert llm.engine.target.dtype == (dtype if dtype == torch.bfloat16 else torch.float32)


def test_a_gpu_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    first, other = torch.device("cuda", 1), torch.device("cuda", 2)
    assert choose_device("auto") == choose_device("cuda") == choose_device("cuda:1") == first
    assert choose_devices("cpu") == (CPU,) and choose_devices("auto") == (first,)
    assert choose_devices("cuda,cuda:2") == choose_devices("cuda:1,cuda:2") == (first, other)
    for names, said in (
        ("cuda:1,cuda:3", "cuda:3: this torch sees 3 CUDA devices, counted from 0"),
        ("cuda:1,cpu", "cuda:1,cpu: only GPUs can be combined; write cuda:0,cuda:1"),
        ("cuda,cuda:1", "cuda,cuda:1: names a GPU twice"),
        ("cuda:2,cuda:1", "models run on cuda:1; name that one first"),
        ("cuda:1,", "device '' is unknown"),
    ):
        with pytest.raises(UsageError, match=said):
            choose_devices(names)


def test_an_exception_of_the_callers_progress_report_passes_through(folder: Path) -> None:
    class Mine(Exception):
        pass

    def report(phase: str, done: int, of: int) -> None:
        raise Mine(phase)

    with pytest.raises(Mine, match="load"):
        load_model(folder, CPU, torch.float32, report)
    with pytest.raises(Mine, match="load"):
        LLM(folder, config="plain", device="cpu", on_progress=report)

    def out_of_memory(phase: str, done: int, of: int) -> None:
        raise MemoryError("of the caller")

    with pytest.raises(MemoryError, match="of the caller"):
        load_model(folder, CPU, torch.float32, out_of_memory)


def test_without_network_the_hub_is_asked_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def unreachable(url: str, timeout: float) -> None:
        asked.append(url)
        raise OSError("no route")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "get_session", lambda: SimpleNamespace(head=unreachable))
    monkeypatch.setattr(hub, "snapshot_download", lambda *name, local_files_only: fetched(*name))

    def fetched(name: str) -> str:
        if name != "owner/in-cache":
            raise OSError("not there")
        return str(folder)

    hub._hub_failure.cache_clear()
    try:
        for read in (lambda name: load_model(name, CPU, None), load_tokenizer, model_config):
            with pytest.raises(
                UsageError, match=r"cannot be reached \(no route\).*give the folder that does"
            ):
                read("owner/not-in-cache")
        # What its cache holds is loaded from there.
        assert load_model("owner/in-cache", CPU, torch.float32).config.hidden_size == 64
        assert len(asked) == 1
    finally:
        hub._hub_failure.cache_clear()


def test_yarn_is_as_if_the_config_said_so(tmp_path: Path) -> None:
    """Also beyond the positions that the model was trained for."""
    plain, stretched = tmp_path / "plain", tmp_path / "stretched"
    model = tiny_target("qwen3", max_position_embeddings=128)
    for folder in (plain, stretched):
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    edit_config(
        stretched,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": model.config.rope_parameters["rope_theta"],
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    results = []
    for folder, rope in ((stretched, None), (plain, "yarn:4"), (plain, None)):
        with LLM(folder, config="retrieval", device="cpu", rope=rope) as llm:
            frequencies = llm.engine.target.rotary_frequencies
            short = llm.generate(byte_ids(100), params).tokens
            long: object
            try:
                long = llm.generate(byte_ids(400), params).tokens
            except UsageError as error:
                long = str(error)
            results.append((llm.engine.target.max_positions, frequencies, short, long))
    said, given, unscaled = results
    assert said[0] == given[0] == 512 and torch.equal(said[1], given[1])
    assert said[2:] == given[2:] and isinstance(given[3], list)
    assert not torch.equal(given[1], unscaled[1]) and given[2] != unscaled[2]
    assert "are more than the 128 positions" in str(unscaled[3])
    with pytest.raises(UsageError, match="scales its rotary frequencies already"):
        LLM(stretched, device="cpu", rope="yarn:4")


def test_yarn_needs_rotary_frequencies_that_layers_share(tmp_path: Path) -> None:
    tiny_target("gemma3").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="layers do not share rotary frequencies"):
        load_model(tmp_path, CPU, None, rope=Yarn(2.0))
    # Qwen3's positions include room for an answer.
    assert Yarn(4.0).stretched("qwen3", 40_960) == Yarn(4.0).stretched("llama", 32_768) == 131_072
    assert Yarn.parse("yarn:2.5:1000") == Yarn(2.5, 1000)


def test_ignored_attention_is_told(folder: Path) -> None:
    told: list[str] = []
    for config in ({}, {"dual_chunk_attention_config": {"chunk_size": 262144}}):
        edit_config(folder, **config)
        with LLM(folder, config="plain", device="cpu", on_notice=told.append):
            assert any("dual-chunk attention is ignored" in notice for notice in told) == bool(config)


def test_a_quantized_or_integer_model_is_refused_before_its_weights_are_read(folder: Path) -> None:
    """The lines are in test_bad_input.py; a packed weight that a config describes is not called nonsense."""
    add_tensors(folder, {"model.layers.0.mlp.up_proj.weight": torch.ones(128, 64, dtype=torch.int8)})
    edit_config(folder, quantization_config={"quant_method": "quanto", "weights": "int8"})
    with pytest.raises(UsageError, match=r"quantized \(quanto\)"):
        load_model(folder, CPU, None)
