"""The page of supported architectures agrees with the program."""

from __future__ import annotations

import pytest
import transformers
from architectures import EQUAL, PAGE, Row, architectures, page, read_page, rows_of

from offload_rt.kernels.native import load_kernel

RUNNING = ("llama", "qwen3", "granite", "cohere", "glm4_moe", "smollm3", "phi", "phi3")
MIXED = (
    "granitemoehybrid",
    "cohere2",
    "gemma3_text",
    "olmo3",
    "mistral",
    "qwen3_next",
    "gemma4_text",
    "gpt_oss",
    "lfm2_moe",
)
REFUSED = ("gpt2", "opt", "falcon", "gpt_neox", "stablelm", "nemotron", "gemma2", "mamba")
ODD = ("deepseek_v3", "deepseek_v32", "minicpm3", "nanochat", "doge", "diffllama", "jamba", "moshi", "zamba2")


@pytest.mark.parametrize("model_type", RUNNING + MIXED + REFUSED + ODD)
def test_the_page_agrees_with_the_program(model_type: str) -> None:
    text = PAGE.read_text()
    if f"transformers {transformers.__version__}." not in text:
        pytest.skip(f"the page is of another version than {transformers.__version__}")
    written = read_page(text)
    rows = rows_of(model_type)
    assert rows
    for row in rows:
        assert written[row.name] == row.result
        if row.result == EQUAL and load_kernel() is not None:
            assert f"| {row.name} | {EQUAL} | {row.layers} | {row.exactness} |" in text


def test_the_page_has_every_architecture_and_no_difference() -> None:
    written = read_page(PAGE.read_text())
    if f"transformers {transformers.__version__}." in PAGE.read_text():
        names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        assert {names[model_type] for model_type in architectures()} <= set(written)
    assert "TOKENS DIFFER" not in written.values()
    assert list(written.values()).count(EQUAL) > 40


def test_a_page_is_read_as_it_was_written() -> None:
    rows = [Row("OneForCausalLM", EQUAL), Row("OtherForCausalLM, all layers full", "has no model.norm")]
    assert read_page(page(rows)) == {row.name: row.result for row in rows}
