"""Writes Llama checkpoints of transformers to the GGUF files that llama.cpp and OpenVINO read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf

F32 = gguf.GGMLQuantizationType.F32
TYPES = {
    "float32": (F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}


def gguf_file(model: Path, dtype: str, folder: Path) -> Path:
    """The GGUF file of a checkpoint in `folder`, written if it is missing or older than the checkpoint.

    Its readers are given token IDs, and no token ends a sequence.

    Args:
        dtype: of its matrices: `float32`, `float16`, `bfloat16`; vectors are float32, as llama.cpp has them.

    Raises:
        ValueError: the architecture, rotary embedding or type cannot be written.
    """
    if dtype not in TYPES:
        raise ValueError(f"no GGUF file of {dtype}: choose one of {', '.join(TYPES)}")
    path = folder / f"{'-'.join(model.resolve().parts[1:])}-{dtype}.gguf"
    changed = max(file.stat().st_mtime for file in model.iterdir())
    if not path.exists() or path.stat().st_mtime < changed:
        unfinished = path.with_suffix(f".{os.getpid()}")
        _write(model, dtype, unfinished)
        unfinished.replace(path)
    return path


def _write(folder: Path, dtype: str, path: Path) -> None:
    # Imported here: a peer whose file is written already does not hold transformers in memory.
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(folder)
    if config.model_type != "llama":
        raise ValueError(f"{folder} has the architecture {config.model_type}: only llama can be written")
    rope, size = config.rope_parameters, config.vocab_size
    if rope["rope_type"] != "default":
        raise ValueError(f"rotary embeddings {rope} cannot be written: only default ones")
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
        # OpenVINO requires a byte-pair tokenizer with a control token, though it is given token IDs.
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "gpt-2"),
        (writer.add_token_list, ["</s>", "a", "b", "ab", *(f"<{token}>" for token in range(4, size))]),
        (writer.add_token_types, [gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (size - 1)),
        (writer.add_token_merges, ["a b"]),
        (writer.add_bos_token_id, 0),
        (writer.add_eos_token_id, 0),
    ):
        add(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().float().numpy()
        if ".q_proj." in name or ".k_proj." in name:
            # llama.cpp rotates neighbours together, transformers a head's first half with its second.
            halves = tensor.reshape(-1, 2, config.head_dim // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        kind = of_matrices if tensor.ndim > 1 else F32
        gguf_name = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(gguf_name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
