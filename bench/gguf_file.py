"""Writes Llama checkpoints, as transformers saves them, to the GGUF files that llama.cpp reads."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

WRITER = 2  # what it writes has changed so often

FloatArray = npt.NDArray[np.float32]

F32 = gguf.GGMLQuantizationType.F32
TYPES = {
    "float32": (F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
YARN_KEYS = {"rope_theta", "rope_type", "factor", "original_max_position_embeddings"}  # that GGUF has too


def gguf_file(model: Path, dtype: str, folder: Path) -> Path:
    """The GGUF file of a checkpoint in `folder`, written where it is missing or older than the checkpoint.

    What reads it is given token ids, and no token ends a text.

    Args:
        dtype: of its matrices: `float32`, `float16`, `bfloat16`; vectors are float32, as llama.cpp has them.

    Raises:
        ValueError: of architectures and rotary embeddings that cannot be written, and of unknown types.
    """
    if dtype not in TYPES:
        raise ValueError(f"no GGUF file of {dtype}: choose one of {', '.join(TYPES)}")
    changed = max(file.stat().st_mtime_ns for file in model.iterdir())
    key = hashlib.sha256(f"{WRITER} {model.resolve()} {changed}".encode()).hexdigest()[:16]
    path = folder / f"{model.name}-{dtype}-{key}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        _write(model, dtype, unfinished)
        unfinished.replace(path)
    return path


def _write(model: Path, dtype: str, path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{model} is of the architecture {config['model_type']}: only llama can be written")
    heads: int = config["num_attention_heads"]
    kv_heads: int = config.get("num_key_value_heads") or heads
    head_dim: int = config.get("head_dim") or config["hidden_size"] // heads
    kind, file_type = TYPES[dtype]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(file_type)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_vocabulary(writer, model / "tokenizer.json", config["vocab_size"])
    _add_rotary_embedding(writer, config, head_dim)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for file in sorted(model.glob("*.safetensors")):
        for name, stored in gguf.SafetensorsLocal(file).tensors.items():
            tied = name == "lm_head.weight" and config.get("tie_word_embeddings", False)
            if tied or name.endswith("rotary_emb.inv_freq"):
                continue
            source = gguf.GGMLQuantizationType[stored.dtype]  # has the name that safetensors gives it
            tensor: FloatArray = gguf.dequantize(stored.mmap_bytes(), source).reshape(stored.shape)
            if ".q_proj." in name or ".k_proj." in name:
                tensor = _interleaved(tensor, heads if ".q_proj." in name else kv_heads)
            out = kind if tensor.ndim > 1 else F32
            known = names.get_name(name, (".weight", ".bias"))
            writer.add_tensor(known, gguf.quantize(tensor, out), raw_dtype=out)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, path: Path, size: int) -> None:
    """OpenVINO asks for one; where there is none of byte pairs, llama.cpp goes without."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    if stored.get("model", {}).get("type") != "BPE" or not stored["model"]["merges"]:
        writer.add_tokenizer_model("none")
        return
    names = {token: name for name, token in stored["model"]["vocab"].items()}
    names |= {one["id"]: one["content"] for one in stored["added_tokens"]}
    merges = [one if isinstance(one, str) else " ".join(one) for one in stored["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(token, f"<unused {token}>") for token in range(size)])
    control = {one["id"] for one in stored["added_tokens"]}
    kinds = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([kinds[token in control] for token in range(size)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def _interleaved(tensor: FloatArray, heads: int) -> FloatArray:
    """Rows of a projection, such that the two components that are rotated together are neighbours.

    transformers rotates components of the first half of a head with those of the second.
    """
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def _add_rotary_embedding(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    # Before transformers 5, `rope_theta` stood beside `rope_scaling`.
    rope = {"rope_theta": config.get("rope_theta", 10_000.0)}
    rope |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn" and rope.keys() <= YARN_KEYS:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind == "llama3":
        lengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
        turns = rope["original_max_position_embeddings"] / lengths
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = np.clip((turns - low) / (high - low), 0, 1)
        factors = 1 / ((1 - kept) / rope["factor"] + kept)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    elif kind != "default":
        raise ValueError(f"rotary embeddings {rope} cannot be written: only default, linear, yarn, llama3")
