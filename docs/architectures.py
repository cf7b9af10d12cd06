"""`python docs/architectures.py`: which of transformers' causal language models run, and why others do not.

Of every architecture a tiny model with random weights is given to `LLM.from_models`. What it takes is run
speculatively, and its greedy tokens must be those of transformers' own `generate`; what it refuses is listed
with the line that it says. Architectures with other layers that are refused so are tried a second time with
full attention in every layer.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cpu_kv import ElementType
from offload_rt import LLM, SamplingParams
from offload_rt.caches.layer_kinds import LayerKind, LayerKinds
from offload_rt.errors import UsageError
from offload_rt.model.config_shapes import from_config
from offload_rt.model.layer_kinds import layer_kinds
from offload_rt.model.self_check import BORDERS
from offload_rt.system.files import write_whole

PAGE = Path(__file__).with_suffix(".md")
EQUAL = "tokens equal"
_NOT_TRIED = ("no small model of it can be built", "its config class has no usable defaults")
VOCABULARY = 256
NEW_TOKENS = 16
PROMPT = [(7 * n * n + 3 * n) % VOCABULARY for n in range(300)]
LARGEST = 50_000_000
"""Parameters: what no setting of sizes makes smaller is not run."""
LAYERS = 4
MOST_LAYERS = 8
"""Where the first four layers by default are not of all kinds: so many are taken until they are."""

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
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "mamba_n_heads": 8,  # of 16 each: twice the hidden size
    "mamba_d_head": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 32,
    "chunk_size": 32,
    "lru_width": 64,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size")
"""Settings of which the prompt crosses `_WINDOW` tokens, where there is one by default."""
_WINDOW = 64
_BORDER = 200
"""Position that the prompt crosses where a config names one from which on layers compute otherwise."""
_MIXED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "gemma4_text": {"hidden_size_per_layer_input": 0},  # 12B and 31B
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 1, "num_hidden_layers": LAYERS},
    "granitemoehybrid": {"layer_types": 2 * ["linear_attention", "full_attention"]},
    "laguna": {"layer_types": 2 * ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": 2 * ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": 2 * ["conv", "full_attention"]},
    "mellum": {"layer_types": 2 * ["sliding_attention", "full_attention"]},
}
"""Layers of published checkpoints of architectures whose config class has layers of one kind by default."""
_FULL_ATTENTION = {
    "layer_types": LAYERS * ["full_attention"],
    "position_embedding_type": "rope",  # Granite 4 has it where no layer is linear
}
_NO_WINDOW = {"sliding_window": None}
_OVERRIDES = {
    "speculation.levels": ["lookup", "target:streaming"],
    "speculation.step_down": False,
    "streaming.sinks": 4,
    "streaming.window": 12,
}

_PAGE = """# Architectures

Causal language models of transformers {version}. A model *runs* where the greedy tokens of a tiny random one,
decoded speculatively, are those of transformers' own `generate`; otherwise the reason stands as `offload-rt`
says it. The prompt crosses every position that a config names (original context, `floor_scale`, windows).
*All layers full* is an architecture that is refused with the layers that its config class has by
default, with full attention in every layer: a checkpoint runs if its own config says so.

*On a CPU* says what drafts, batches and caches leave as it is, as a result's `exactness` does: every bit of
plain decoding (*bits*; in float32 and bfloat16, with the native library), or all but the rounding of near
ties (*distribution*). On a GPU, with Triton, it is the same. Windows are short here: from 1,024 tokens on
a CPU attends to them page by page, so that those of Mistral's checkpoints leave every bit there.

What a layer keeps of a sequence is read from its config and modules. The KV of *full* attention is paged in
CPU memory. The others stay on the device, as they are small:

- *Windows*: the KV of as many tokens as the layer attends to. Drafts over a part of the KV read them whole.
- *Recurrent states*: linear attention, state-space layers, short convolutions. After a rejection the accepted
  tokens go through these layers once more, in front of the next pass. Drafts are chains and sequences side by
  side, as a tree would take a state for each branch. transformers uses `flash-linear-attention`,
  `causal-conv1d` and `mamba-ssm` where they are installed, and its own slow code elsewhere.

Of such a model, a sequence can return to up to eight lengths at which something was read or kept; what is
taken back to a length between them is read again from the one before. Layers cannot be grouped or left out,
and passes are not recorded as CUDA graphs.

Of a checkpoint that takes images or sound too (Gemma 3 and 4, Ministral 3, Qwen3.5), only the language model
is loaded, where transformers has it on its own.

Latent attention (MLA: DeepSeek, GLM-4.7-Flash, MiniCPM3) is refused. It would take pages of the compressed
vector and of the rotary key, one head for all, queries that take in the up-projection, and kernels for values
of another width than keys.

A few scalar factors between embedding, layers, norm and head are known by their names in the config (Granite,
Cohere, Falcon-H1). A model that does more there is found out by a comparison with its own forward pass, and
refused.

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
        layers: their kinds, where it runs.
        exactness: of float32 on a CPU, where it runs; see `GenerationResult.exactness`.
    """

    name: str
    result: str
    layers: str = ""
    exactness: str = ""


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
    """As its config class has it by default, and if that is refused with full attention in every layer."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        try:
            default = CONFIG_MAPPING[model_type]()
        except Exception:  # transformers raises many kinds for one thing
            return [Row(name, _NOT_TRIED[1])]
        mixed = _small(default, _layers(default) | _MIXED.get(model_type, {}))
        rows = [_row(name, mixed or default, default)]
        if rows[0].result == EQUAL:
            return rows
        types = _layer_types(default)
        full = None
        if types.keys() & {"full_attention", "sliding_attention", "linear_attention"}:
            full = _small(default, _borders(default) | _FULL_ATTENTION)
        elif getattr(default, "sliding_window", None):
            full = _small(default, _borders(default) | _NO_WINDOW)
        if full is not None and set(types) != {"full_attention"} >= _layer_types(full).keys():
            rows.append(_row(f"{name}, all layers full", full))
        return rows


def _layer_types(config: PretrainedConfig) -> dict[str, int]:
    """Returns the types of a config's layers, each with the first layer of it."""
    types = list(getattr(config, "layer_types", None) or [])
    return {one: types.index(one) for one in types}


def _layers(default: PretrainedConfig) -> dict[str, Any]:
    """Returns settings by which few layers are of all types that a config has by default."""
    settings: dict[str, Any] = {name: _WINDOW for name in _WINDOWS if getattr(default, name, None)}
    settings |= _borders(default)
    first = _layer_types(default)
    if len(first) > 1 and not isinstance(getattr(type(default), "layer_types", None), property):
        count = max(LAYERS, 1 + max(first.values()))
        types = list(default.layer_types)[:count] if count <= MOST_LAYERS else list(first)
        settings |= {"layer_types": types, "layers_block_type": types, "num_hidden_layers": len(types)}
    return settings


def _borders(default: PretrainedConfig) -> dict[str, Any]:
    """Returns the settings of a config that name a position, with `_BORDER` in their place."""
    settings = default.to_dict()
    moved: dict[str, Any] = {name: _BORDER for name in BORDERS if settings.get(name)}
    rope = settings.get("rope_parameters") or {}
    within = {name: _BORDER for name in BORDERS if rope.get(name)}
    return moved | ({"rope_parameters": rope | within} if within else {})


def _row(name: str, *configs: PretrainedConfig) -> Row:
    """Of the first of these configs that a model can be built from."""
    for config in configs:
        try:
            shape = from_config(config, ElementType.FLOAT32, name.partition(",")[0])
        except UsageError as refused:
            if refused.__cause__ is None:  # else it could not be built in this size
                return Row(name, _reason(refused))
        else:
            if shape.parameters < LARGEST:
                return _run(name, config)
    return Row(name, _NOT_TRIED[0])


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


def _run(name: str, config: PretrainedConfig) -> Row:
    """Runs a model of random weights."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also those that begin as zeros or ones
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.generation_config.eos_token_id = None
    try:
        overrides = _OVERRIDES if layer_kinds(model).full else _OVERRIDES | {"speculation.levels": ["lookup"]}
        with LLM.from_models(model, config="lookup", overrides=overrides) as llm:
            params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
            written = llm.generate(PROMPT, params)
    except UsageError as refused:
        return Row(name, _reason(refused))
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    result = EQUAL if out[0, len(PROMPT) :].tolist() == written.tokens else "TOKENS DIFFER"
    return Row(name, result, _described(layer_kinds(model)), written.exactness)


def _described(kinds: LayerKinds) -> str:
    """Returns the kinds of layers, the most frequent first."""
    found = Counter(map(_name, kinds.kinds))
    return ", ".join(kind for kind, _ in found.most_common())


def _name(kind: LayerKind) -> str:
    if kind.recurrent:
        state = "convolution" if kind.mixer == "conv" else "state"
        return f"attention beside a {state}" if kind.kv_heads else state
    if kind.windowed:
        return "window"
    return "full" if kind.full else "only MLP"


def page(rows: list[Row]) -> str:
    """The markdown page."""
    parts = {
        "run": [row for row in rows if row.result == EQUAL],
        "are refused": [row for row in rows if row.result not in (EQUAL, *_NOT_TRIED)],
        "could not be tried": [row for row in rows if row.result in _NOT_TRIED],
    }
    sections = ""
    for heading, part in parts.items():
        titles = ["architecture", "result", "layers", "on a CPU"][: 4 if heading == "run" else 2]
        lines = [titles, ["---"] * len(titles)]
        lines += [[row.name, row.result, row.layers, row.exactness][: len(titles)] for row in part]
        table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        sections += f"\n## {len(part)} {heading}\n\n{table}"
    return _PAGE.format(version=transformers.__version__, sections=sections)


def read_page(text: str) -> dict[str, str]:
    """Results by name, from a page."""
    cells = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return {name: result for name, result, *_ in cells if result not in ("result", "---")}


if __name__ == "__main__":
    main()
