"""`python docs/architectures.py`: which of transformers' causal language models run, and why others do not.

Of every architecture a tiny model with random weights is given to `LLM.from_models`. What it takes is run
speculatively, and its greedy tokens must be those of transformers' own `generate`; what it refuses is listed
with the line that it says. Architectures with windowed or linear layers are tried a second time with full
attention in every layer.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offload_rt import LLM, SamplingParams
from offload_rt.errors import UsageError
from offload_rt.files import write_whole
from offload_rt.model.shape import from_config

PAGE = Path(__file__).with_suffix(".md")
EQUAL = "tokens equal"
_NOT_TRIED = ("no small model of it can be built", "its config class has no usable defaults")
LAYERS = 4
VOCABULARY = 256
NEW_TOKENS = 16
PROMPT = [(7 * n * n + 3 * n) % VOCABULARY for n in range(300)]
LARGEST = 50_000_000
"""Parameters: what no setting of sizes makes smaller is not run."""

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 262_144,
    "initializer_range": 0.2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_FULL_ATTENTION = {
    "layer_types": LAYERS * ["full_attention"],
    "position_embedding_type": "rope",  # Granite 4 has it where no layer is linear
}
_NO_WINDOW = {"sliding_window": None}
_OVERRIDES = {"draft.sinks": 4, "draft.window": 60, "speculation.step_down": False}

_PAGE = """# Architectures

Causal language models of transformers {version}. A model *runs* where the greedy tokens of a tiny random one,
decoded speculatively, are those of transformers' own `generate`; otherwise the reason stands as `offload-rt`
says it. *All layers full* is an architecture whose config class has other layers by default, with full
attention in every layer: a checkpoint runs if its own config says so.

A few scalar factors between embedding, layers, norm and head are known by their names in the config (Granite,
Cohere). A model that does more there is found out by a comparison with its own forward pass, and refused.

LongRoPE (Phi-3 and Phi-4-mini at 128K) has other rotary frequencies for texts longer than the original
context. A text has those of its length from its beginning: it runs, with transformers' own tokens, if its
prompt is longer, or if prompt and new tokens together are not. A text that would grow across the border is
refused.

The tables are the result of `python docs/architectures.py`.
{sections}"""


@dataclass(frozen=True)
class Row:
    """One architecture.

    Attributes:
        name: its class; with *all layers full* where they are not by default.
        result: `EQUAL`, or why not.
    """

    name: str
    result: str


def main() -> None:
    """Runs all of them, and writes the page beside this file."""
    rows = []
    for model_type in architectures():
        for row in rows_of(model_type):
            print(f"{row.name}: {row.result}", flush=True)
            rows.append(row)
    write_whole(PAGE, page(rows))


def architectures() -> list[str]:
    """Model types of transformers' causal language models, one a class."""
    by_class = {
        name: model_type  # the last one is the text model's own where a composed one shares the class
        for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if not name.endswith("ForConditionalGeneration")
    }
    return list(by_class.values())


def rows_of(model_type: str) -> list[Row]:
    """As its config class has it by default, and with full attention in every layer if that differs."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        try:
            default = CONFIG_MAPPING[model_type]()
        except Exception:  # transformers raises many kinds for one thing
            return [Row(name, _NOT_TRIED[1])]
        rows = [Row(name, _verdict(name, _small(default, {}) or default, default))]
        types = _layer_types(default)
        full = None
        if types & {"full_attention", "sliding_attention", "linear_attention"}:
            full = _small(default, _FULL_ATTENTION)
        elif getattr(default, "sliding_window", None):
            full = _small(default, _NO_WINDOW)
        if full is not None and types != {"full_attention"} >= _layer_types(full):
            rows.append(Row(f"{name}, all layers full", _verdict(name, full)))
        return rows


def _layer_types(config: PretrainedConfig) -> set[str]:
    return set(getattr(config, "layer_types", None) or [])


def _verdict(name: str, *configs: PretrainedConfig) -> str:
    """Of the first of these configs that a model can be built from."""
    for config in configs:
        try:
            parameters = from_config(config, torch.float32, name).parameters
        except UsageError as refused:
            if refused.__cause__ is None:  # else it could not be built in this size
                return _reason(refused)
        else:
            if parameters < LARGEST:
                return _tokens(config)
    return _NOT_TRIED[0]


def _reason(refused: UsageError) -> str:
    """The message without the names before it."""
    return str(refused).partition(": ")[2].partition(" ")[2]


def _small(default: PretrainedConfig, settings: dict[str, Any]) -> PretrainedConfig | None:
    """A config of the same class with small sizes; None where its own checks refuse them."""
    known = {*dir(default), *vars(default)}
    sizes = {key: value for key, value in (_SIZES | settings).items() if key in known}
    if "qk_rope_head_dim" in known:  # latent attention: the width of its heads follows from others
        sizes.pop("head_dim", None)
    try:
        return type(default)(**sizes)
    except Exception:  # transformers raises many kinds for one thing
        return None


def _tokens(config: PretrainedConfig) -> str:
    """Runs a model of random weights."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also those that begin as zeros or ones
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.generation_config.eos_token_id = None
    try:
        with LLM.from_models(model, config="streaming", overrides=_OVERRIDES) as llm:
            params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
            tokens = llm.generate(PROMPT, params).tokens
    except UsageError as refused:
        return _reason(refused)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    return EQUAL if out[0, len(PROMPT) :].tolist() == tokens else "TOKENS DIFFER"


def page(rows: list[Row]) -> str:
    """The markdown page."""
    parts = {
        "run": [row for row in rows if row.result == EQUAL],
        "are refused": [row for row in rows if row.result not in (EQUAL, *_NOT_TRIED)],
        "could not be tried": [row for row in rows if row.result in _NOT_TRIED],
    }
    sections = ""
    for heading, part in parts.items():
        lines = [f"| {row.name} | {row.result} |\n" for row in part]
        sections += f"\n## {len(part)} {heading}\n\n| architecture | result |\n|---|---|\n{''.join(lines)}"
    return _PAGE.format(version=transformers.__version__, sections=sections)


def read_page(text: str) -> dict[str, str]:
    """Results by name, from a page."""
    cells = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return {name: result for name, result in cells if result != "result"}


if __name__ == "__main__":
    main()
