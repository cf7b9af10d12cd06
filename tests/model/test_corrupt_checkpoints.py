"""Checkpoints whose files contradict themselves are refused; other files beside them do no harm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload_rt import LLM, SamplingParams, UsageError
from offload_rt.drafting.levels.configs import load_config
from offload_rt.model.embedded import demo_model
from offload_rt.model.loading import checked_config, load_tokenizer
from offload_rt.model.local_models import LocalModel

LONG, HUGE = "9" * 5000, 10**5000
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo's target."""
    return Path(shutil.copytree(demo_model("target"), tmp_path / "model"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("value", [0, -1, None, "x", 1.5, [3], {}, True, 10**30])
@pytest.mark.parametrize(
    "key",
    ["max_position_embeddings", "num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_size"],
)
def test_numbers_that_no_model_has(folder: Path, key: str, value: object) -> None:
    edit(folder / "config.json", lambda config: config.update({key: value}))
    with pytest.raises(UsageError, match=f"config.json.*{key}"):
        checked_config(folder)


@pytest.mark.parametrize("value", [-1, "x", 1.5, [3], {}, 10**30])
def test_a_window_that_is_no_number(folder: Path, value: object) -> None:
    edit(folder / "config.json", lambda config: config.update(sliding_window=value))
    with pytest.raises(UsageError, match="config.json has sliding_window = "):
        checked_config(folder)


@pytest.mark.parametrize("value", ["x", 3, [3]])
def test_other_types_than_files_have(folder: Path, value: object) -> None:
    edit(folder / "config.json", lambda config: config.update(text_config=value))
    with pytest.raises(UsageError, match="text_config"):
        checked_config(folder)
    edit(folder / "config.json", lambda config: config.pop("text_config"))
    edit(folder / "tokenizer_config.json", lambda config: config.update(model_max_length=[value]))
    with pytest.raises(UsageError, match="model_max_length|tokenizer cannot be read"):
        load_tokenizer(folder)


FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        (
            FOUR_BITS | {"bnb_4bit_quant_type": "fp5"},
            "bnb_4bit_quant_type is 'fp5', and bitsandbytes has",
        ),
        (FOUR_BITS | {"bnb_4bit_quant_type": 3}, "bnb_4bit_quant_type is '3'"),
        (FOUR_BITS | {"bnb_4bit_compute_dtype": "float7"}, "'float7', which is no data type"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": "x"}, "cannot be read"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "cannot be read"),
        ({"quant_method": "gptq", "bits": "x"}, "cannot be read"),
        (FOUR_BITS | {"llm_int8_skip_modules": [3]}, "llm_int8_skip_modules is no list of names"),
        (
            {"quant_method": "gptq", "modules_to_not_convert": [3]},
            "modules_to_not_convert is no list of names",
        ),
        ({"quant_method": "nope"}, "nope"),
    ],
)
def test_quantization_of_no_kind(folder: Path, stated: dict[str, object], why: str) -> None:
    edit(folder / "config.json", lambda config: config.update(quantization_config=stated))
    with pytest.raises(UsageError, match=why):
        checked_config(folder)


@pytest.mark.parametrize(
    "name",
    [
        "stray.safetensors",
        "._model.safetensors",
        "consolidated.safetensors",
        "adapter_model.safetensors",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
    ],
)
def test_what_lies_beside_the_weights_is_not_read(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    checked_config(folder)
    (folder / "model.safetensors").write_text(POINTER)
    with pytest.raises(UsageError, match=r"model\.safetensors is truncated or corrupt"):
        checked_config(folder)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "", ".."], ids=["null", "long", "empty", "folder"])
def test_an_index_of_what_no_file_is_called(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UsageError, match="files of weights are missing|is no file"):
        checked_config(folder)
    assert LocalModel("it", folder).weight_bytes >= 0


def test_a_tokenizer_that_lacks_its_own_token(folder: Path) -> None:
    """Its post-processor names it, and Rust panics."""
    single = [{"SpecialToken": {"id": "<nope>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    edit(folder / "tokenizer.json", lambda content: content.update(post_processor=processor))
    with LLM(str(folder), config="plain") as llm:
        with pytest.raises(UsageError, match="tokenizer fails .*tokenizer.json names tokens that it"):
            llm.generate("Call me", SamplingParams(max_tokens=2))
        assert llm.generate([1, 2], SamplingParams(max_tokens=2)).tokens


@pytest.mark.parametrize(
    "value",
    [f"stride:{LONG}", f"acceptance:{LONG}", LONG, HUGE],
    ids=["stride", "acceptance", "text", "number"],
)
@pytest.mark.parametrize(
    "key", ["retrieval.refresh", "retrieval.budget", "speculation.gamma2", "prefill.chunk", "store.page"]
)
def test_keys_of_many_digits(key: str, value: object) -> None:
    with pytest.raises(UsageError, match=key):
        load_config("retrieval", {key: value})


@pytest.mark.parametrize(
    "made",
    [
        lambda llm, most: llm.generate("a", max_tokens=most),
        lambda llm, most: llm.generate("a", seed=most),
        lambda llm, most: llm.generate("a", temperature=most),
        lambda llm, most: llm.generate("a", top_k=-most),
        lambda llm, most: llm.generate("a", logprobs=most),
        lambda llm, most: llm.generate([1, most]),
        lambda llm, most: llm.read("a", room=most),
        lambda llm, most: llm.read("a").rewind(most),
        lambda llm, most: llm.decode([most]),
        lambda llm, most: llm.generate("a", json_schema={"type": "integer", "minimum": most}),
        lambda llm, most: llm.generate("a", json_schema=f'{{"minimum": {LONG}}}'),
        lambda llm, most: llm.generate(most),
    ],
)
def test_numbers_of_many_digits(demo: LLM, made: Callable[[LLM, int], object]) -> None:
    """Python itself refuses to write them into a message."""
    with pytest.raises(UsageError):
        made(demo, HUGE)


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM(config="plain")
