"""llama.cpp, by llama-cpp-python: with KV of either precision, and flash attention.

Passes are llama.cpp's own, without the overhead of llama-cpp-python.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np

from bench.gguf_file import gguf_file
from bench.systems import Opener, Prompt, Run, Setup

KV_TYPES = {"float16": llama_cpp.GGML_TYPE_F16, "float32": llama_cpp.GGML_TYPE_F32}


class LlamaCpp:
    """A model in llama.cpp.

    Args:
        kv: type of keys and values: one of `KV_TYPES`.
        flash: whether attention is llama.cpp's flash attention.
        offload_kqv: False leaves KV and attention to the CPU where the weights are a GPU's.

    Raises:
        ImportError: llama-cpp-python was built without CUDA, and the device is a GPU.
    """

    def __init__(self, setup: Setup, kv: str, *, flash: bool = False, offload_kqv: bool = True) -> None:
        device, _, index = setup.device.partition(":")
        on_gpu = device != "cpu"
        if on_gpu and not llama_cpp.llama_supports_gpu_offload():
            raise ImportError("llama-cpp-python is without CUDA: build it with CMAKE_ARGS=-DGGML_CUDA=ON")
        model, context = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
        model.n_gpu_layers, model.main_gpu = -1 if on_gpu else 0, int(index or 0)
        model.split_mode = llama_cpp.LLAMA_SPLIT_MODE_NONE
        context.n_ctx, context.n_seq_max = setup.batch * setup.capacity, setup.batch
        context.n_batch = context.n_ubatch = self._chunk = max(setup.chunk, setup.batch)
        context.n_threads = context.n_threads_batch = setup.threads
        context.type_k = context.type_v = KV_TYPES[kv]
        context.flash_attn_type, context.offload_kqv = int(flash), offload_kqv
        llama_cpp.llama_backend_init()
        file = gguf_file(Path(setup.model), setup.dtype, setup.folder)
        self._model: Any = llama_cpp.llama_model_load_from_file(str(file).encode(), model)
        self._context: Any = self._model and llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise ValueError("llama.cpp cannot open the model; see its log")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(self._chunk, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._tokens = llama_cpp.llama_vocab_n_tokens(vocabulary)
        host, rounded = on_gpu and not offload_kqv, "sums of values" if flash else "attention weights"
        self.label = f"llama-cpp-python {llama_cpp.__version__}, {kv} KV"
        self.label += ", flash attention" * flash + ", attention on the CPU" * host
        notes = {
            f"KV is {kv}, weights are {setup.dtype}": kv != setup.dtype,
            f"queries and {rounded} are rounded to float16": kv == "float16" and (host or not on_gpu),
            f"is not limited to {setup.gpu_memory_gib:g} GiB of the GPU": on_gpu and setup.gpu_memory_gib > 0,
        }
        self.notes = tuple(note for note, holds in notes.items() if holds)

    def _pass(self, entries: Sequence[tuple[int, int, int]], *, logits: bool) -> None:
        """Passes entries of a sequence's number, a position and a token each."""
        batch, batch.n_tokens = self._batch, len(entries)
        for at, (sequence, position, token) in enumerate(entries):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, logits
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("a pass of llama.cpp has failed")

    def prepare(self, prompt: Prompt) -> float:
        self._prompt, started = prompt, perf_counter()
        llama_cpp.llama_memory_clear(self._memory, True)
        for number, tokens in enumerate(prompt):
            entries = [(number, at, token) for at, token in enumerate(tokens[:-1])]
            for at in range(0, len(entries), self._chunk):
                self._pass(entries[at : at + self._chunk], logits=False)
        return 1e3 * (perf_counter() - started)

    def run(self, new_tokens: int) -> Run:
        start, count = len(self._prompt[0]) - 1, len(self._prompt)
        for number in range(count):
            llama_cpp.llama_memory_seq_rm(self._memory, number, start, -1)
        newest, steps, started = (
            np.array([tokens_of_text[-1] for tokens_of_text in self._prompt]),
            [],
            perf_counter(),
        )
        for at in range(start, start + new_tokens):
            self._pass([(number, at, int(token)) for number, token in enumerate(newest)], logits=True)
            logits = llama_cpp.llama_get_logits(self._context)
            newest = np.ctypeslib.as_array(logits, (count, self._tokens)).argmax(-1)
            steps.append(newest)
        ms, tokens = 1e3 * (perf_counter() - started), np.array(steps).T.flatten().tolist()
        return Run(tokens, ms, len(tokens), new_tokens)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


SYSTEMS: dict[str, Opener] = {
    "f16": partial(LlamaCpp, kv="float16"),
    "f32": partial(LlamaCpp, kv="float32"),
    "f16-flash": partial(LlamaCpp, kv="float16", flash=True),
    "f16-host": partial(LlamaCpp, kv="float16", offload_kqv=False),
}
