"""llama.cpp, by llama-cpp-python: with KV of either precision, flash attention, and its prompt look-up.

Passes are llama.cpp's own, without what llama-cpp-python does around them; a text is a sequence of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from bench.gguf_file import gguf_file
from bench.systems import Opener, Prompt, Run, Setup

KV_TYPES = {"float16": llama_cpp.GGML_TYPE_F16, "float32": llama_cpp.GGML_TYPE_F32}
LOOKUP = (3, 4)
"""Most tokens that prompt look-up compares, and most that it proposes a round: fastest on a CPU behind 16K
tokens. For GPUs, llama-cpp-python recommends 10."""


class LlamaCpp:
    """A model in llama.cpp.

    Args:
        kv: type of keys and values: one of `KV_TYPES`.
        flash: whether attention is llama.cpp's flash attention.
        lookup: what followed the first occurrence of the last tokens is proposed.
        offload_kqv: False leaves KV and attention to the CPU where the weights are a GPU's.

    Raises:
        ImportError: if llama-cpp-python was built without CUDA and the device is a GPU.
    """

    def __init__(
        self, setup: Setup, kv: str, *, flash: bool = False, lookup: bool = False, offload_kqv: bool = True
    ) -> None:
        device, _, index = setup.device.partition(":")
        on_gpu = device != "cpu"
        if on_gpu and not llama_cpp.llama_supports_gpu_offload():
            raise ImportError("llama-cpp-python is without CUDA: build it with CMAKE_ARGS=-DGGML_CUDA=ON")
        model, context = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
        model.n_gpu_layers, model.main_gpu = -1 if on_gpu else 0, int(index or 0)
        model.split_mode = llama_cpp.LLAMA_SPLIT_MODE_NONE
        context.n_ctx, context.n_seq_max = setup.batch * (setup.capacity + LOOKUP[1]), setup.batch
        context.n_batch = context.n_ubatch = self._chunk = max(setup.chunk, setup.batch * (1 + LOOKUP[1]))
        context.n_threads = context.n_threads_batch = setup.threads
        context.type_k = context.type_v = KV_TYPES[kv]
        context.flash_attn_type, context.offload_kqv = int(flash), offload_kqv
        llama_cpp.llama_backend_init()
        file = gguf_file(Path(setup.model), setup.dtype, setup.folder)
        self._model: Any = llama_cpp.llama_model_load_from_file(str(file).encode(), model)
        self._context: Any = self._model and llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise ValueError("llama.cpp makes no context of it")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(self._chunk, 0, 1)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._tokens, self._temperature = llama_cpp.llama_vocab_n_tokens(vocabulary), setup.temperature
        self._lookup = LlamaPromptLookupDecoding(*LOOKUP) if lookup else None
        host, rounded = on_gpu and not offload_kqv, "sums of values" if flash else "attention weights"
        parts = {
            f"llama-cpp-python {llama_cpp.__version__}, {kv} KV": True,
            "flash attention": flash,
            f"prompt look-up of {LOOKUP[1]} tokens": lookup,
            "attention on the CPU": host,
        }
        notes = {
            f"KV is {kv}, weights are {setup.dtype}": kv != setup.dtype,
            f"queries and {rounded} are rounded to float16": kv == "float16" and (host or not on_gpu),
            f"is not kept to {setup.gpu_memory_gib:g} GiB of the GPU": on_gpu and setup.gpu_memory_gib > 0,
        }
        self.label = ", ".join(part for part, holds in parts.items() if holds)
        self.notes = tuple(note for note, holds in notes.items() if holds)

    def _pass(self, entries: Sequence[tuple[int, int, int]], *, logits: bool) -> None:
        """A pass over a text's number, a position and a token each."""
        batch, batch.n_tokens = self._batch, len(entries)
        for at, (text, position, token) in enumerate(entries):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, logits
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, text
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("a pass of llama.cpp has failed")

    def _choices(self, count: int) -> list[int]:
        """Tokens behind each entry of a pass."""
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (count, self._tokens))
        if self._temperature:
            logits = logits / self._temperature + np.random.gumbel(size=logits.shape)
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen

    def prepare(self, prompt: Prompt) -> float:
        self._prompt, started = prompt, perf_counter()
        llama_cpp.llama_memory_clear(self._memory, True)
        for number, text in enumerate(prompt):
            entries = [(number, at, token) for at, token in enumerate(text[:-1])]
            for at in range(0, len(entries), self._chunk):
                self._pass(entries[at : at + self._chunk], logits=False)
        return 1e3 * (perf_counter() - started)

    def run(self, new_tokens: int) -> Run:
        length, count = len(self._prompt[0]), len(self._prompt)
        end, ends = length + new_tokens, [length] * count
        ids = np.empty((count, end), np.intc)
        ids[:, :length] = self._prompt
        self._forget(ends)
        rounds, alone, drafted, started = 0, 0, 0, perf_counter()
        while going := [number for number in range(count) if ends[number] < end]:
            entries = []
            for number in going:
                known = ids[number, : ends[number]]
                draft = self._lookup(known)[: end - 1 - len(known)] if self._lookup else ()
                entries += [(number, *one) for one in enumerate([*known[-1:], *draft], len(known) - 1)]
            self._pass(entries, logits=True)
            for (number, at, token), choice in zip(entries, self._choices(len(entries)), strict=True):
                if (ends[number], ids[number, at]) == (at + 1, token):  # nothing stands behind a rejected one
                    ids[number, at + 1], ends[number] = choice, at + 2
            self._forget(ends)
            rounds, alone, drafted = rounds + 1, alone + len(going), drafted + len(entries) - len(going)
        ms, tokens = 1e3 * (perf_counter() - started), ids[:, length:].flatten().tolist()
        accepted = {"lookup": (len(tokens) - alone) / drafted} if drafted else {}
        return Run(tokens, ms, len(tokens), rounds, accepted)

    def _forget(self, ends: Sequence[int]) -> None:
        """Of each text, what was passed from its last token on."""
        for number, end in enumerate(ends):
            llama_cpp.llama_memory_seq_rm(self._memory, number, end - 1, -1)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


SYSTEMS: dict[str, Opener] = {
    "f16": partial(LlamaCpp, kv="float16"),
    "f32": partial(LlamaCpp, kv="float32"),
    "f16-flash": partial(LlamaCpp, kv="float16", flash=True),
    "f32-flash": partial(LlamaCpp, kv="float32", flash=True),
    "f16-host": partial(LlamaCpp, kv="float16", offload_kqv=False),
    "lookup": partial(LlamaCpp, kv="float32", lookup=True),
}
