"""Writes Llama checkpoints of transformers to the GGUF files that llama.cpp and OpenVINO read."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np

WRITER = 3  # what it writes has changed so often

F32 = gguf.GGMLQuantizationType.F32
TYPES = {
    "float32": (F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
ROTARY = ("default", "linear", "yarn", "llama3")  # whose frequencies do not depend on a text's length


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


def _write(folder: Path, dtype: str, path: Path) -> None:
    # Here: a peer that finds its file already written does not hold this in memory.
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(folder)
    if config.model_type != "llama":
        raise ValueError(f"{folder} is of the architecture {config.model_type}: only llama can be written")
    rope, size = config.rope_parameters, config.vocab_size
    if rope["rope_type"] not in ROTARY:
        raise ValueError(f"rotary embeddings {rope} cannot be written: only {', '.join(ROTARY)}")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    writer, (of_matrices, file_type) = gguf.GGUFWriter(path, "llama"), TYPES[dtype]
    for add, value in (
        (writer.add_file_type, file_type),
        (writer.add_context_length, config.max_position_embeddings),
        (writer.add_embedding_length, config.hidden_size),
        (writer.add_block_count, config.num_hidden_layers),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads),
        (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_key_length, config.head_dim),
        (writer.add_value_length, config.head_dim),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
        (writer.add_vocab_size, size),
        (writer.add_rope_dimension_count, config.head_dim),
        (writer.add_rope_freq_base, rope["rope_theta"]),
        # OpenVINO asks for a tokenizer of byte pairs with a control token, though it is given token ids.
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "gpt-2"),
        (writer.add_token_list, ["</s>", "a", "b", "ab", *(f"<{token}>" for token in range(4, size))]),
        (writer.add_token_types, [gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (size - 1)),
        (writer.add_token_merges, ["a b"]),
        (writer.add_bos_token_id, 0),
        (writer.add_eos_token_id, 0),
    ):
        add(value)
    if rope["rope_type"] != "default":
        rotary, pairs = model.model.rotary_emb, np.arange(0, config.head_dim, 2, dtype=np.float32)
        plain = rope["rope_theta"] ** -(pairs / config.head_dim)
        writer.add_tensor("rope_freqs.weight", plain / rotary.inv_freq.numpy())
        writer.add_rope_scaling_attn_factors(rotary.attention_scaling)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().float().numpy()
        if ".q_proj." in name or ".k_proj." in name:
            # Neighbours are rotated together, in transformers a head's first half with its second.
            halves = tensor.reshape(-1, 2, config.head_dim // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        kind = of_matrices if tensor.ndim > 1 else F32
        known = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(known, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
