"""llama.cpp, by llama-cpp-python: with KV of either precision, flash attention, and its prompt look-up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from bench.gguf_file import gguf_file
from bench.systems import Opener, Run, Setup, refuse_link

KV_TYPES = {"float16": llama_cpp.GGML_TYPE_F16, "float32": llama_cpp.GGML_TYPE_F32}
CONTEXT_STEP = 256
"""llama.cpp rounds contexts up to multiples of it, and the buffers of llama-cpp-python do not follow."""

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
        refuse_link(setup)
        device, _, index = setup.device.partition(":")
        on_gpu = device != "cpu"
        if on_gpu and not llama_cpp.llama_supports_gpu_offload():
            raise ImportError(
                f"llama-cpp-python cannot use {setup.device}: reinstall it with CMAKE_ARGS=-DGGML_CUDA=ON"
            )
        chunk = max(setup.chunk, 1 + LOOKUP[1])  # it samples from one batch what it proposed
        self._llama = llama_cpp.Llama(
            str(gguf_file(Path(setup.model), setup.dtype, setup.folder)),
            n_gpu_layers=-1 if on_gpu else 0,
            split_mode=llama_cpp.LLAMA_SPLIT_MODE_NONE,
            main_gpu=int(index or 0),
            n_ctx=-(-setup.capacity // CONTEXT_STEP) * CONTEXT_STEP,
            n_batch=chunk,
            n_ubatch=chunk,
            n_threads=setup.threads,
            n_threads_batch=setup.threads,
            type_k=KV_TYPES[kv],
            type_v=KV_TYPES[kv],
            flash_attn=flash,
            offload_kqv=offload_kqv,
            # With a draft, llama-cpp-python keeps logits of all tokens: by this it makes room for them.
            logits_all=lookup,
            draft_model=LlamaPromptLookupDecoding(*LOOKUP) if lookup else None,
            verbose=False,
        )
        self._lookup, self._temperature = lookup, setup.temperature
        parts = [f"llama-cpp-python {llama_cpp.__version__}", f"{kv} KV"]
        notes = []
        if flash:
            parts.append("flash attention")
        if lookup:
            parts.append(f"prompt look-up of {LOOKUP[1]} tokens")
        if on_gpu and not offload_kqv:
            parts.append("attention on the CPU")
        if kv != setup.dtype:
            notes.append(f"KV is {kv}, weights are {setup.dtype}")
        if kv == "float16" and not (on_gpu and offload_kqv):
            rounded = "sums of values" if flash else "attention weights"
            notes.append(f"queries and {rounded} are rounded to float16")
        if on_gpu and setup.gpu_memory_gib:
            notes.append(f"is not kept to {setup.gpu_memory_gib:g} GiB of the GPU")
        self.label, self.notes = ", ".join(parts), tuple(notes)

    def prepare(self, prompt: Sequence[int]) -> float:
        self._prompt = list(prompt)
        started = perf_counter()
        self._llama.reset()
        # Look-up needs logits of its drafts only; left to itself, it computes those of the whole prompt.
        self._llama._logits_all = False
        self._llama.eval(self._prompt[:-1])
        return 1e3 * (perf_counter() - started)

    def run(self, new_tokens: int) -> Run:
        # Not reset, it goes on behind `n_tokens`; what is behind that is removed.
        self._llama.n_tokens = len(self._prompt) - 1
        self._llama._logits_all = self._lookup
        law = {"temp": self._temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        generated = self._llama.generate(self._prompt[-1:], reset=False, **law)
        started = perf_counter()
        tokens = list(islice(generated, new_tokens))
        return Run(tokens, 1e3 * (perf_counter() - started), new_tokens)

    def close(self) -> None:
        self._llama.close()


SYSTEMS: dict[str, Opener] = {
    "f16": partial(LlamaCpp, kv="float16"),
    "f32": partial(LlamaCpp, kv="float32"),
    "f16-flash": partial(LlamaCpp, kv="float16", flash=True),
    "f32-flash": partial(LlamaCpp, kv="float32", flash=True),
    "f16-host": partial(LlamaCpp, kv="float16", offload_kqv=False),
    "lookup": partial(LlamaCpp, kv="float32", lookup=True),
}
