"""vLLM on a GPU, where it is installed: with its own offloading of KV, of weights, or of neither.

It is written for the API of vLLM 0.26, and nobody has run it here yet. vLLM decodes with all KV of a text on
the GPU: what it offloads are prefixes of prompts, which come back before the first token.
"""

from __future__ import annotations

import os
from functools import partial
from time import perf_counter
from typing import Any

from bench.systems import Opener, Prompt, Run, Setup

GIB = 2**30
BLOCK = 16  # tokens that share a place in its KV


class Vllm:
    """A model in vLLM, in this process.

    Args:
        offloaded: what lies in CPU memory: `KV`, `weights` or nothing.
    """

    notes: tuple[str, ...] = ("an adapter that nobody has run yet",)

    def __init__(self, offloaded: str, setup: Setup) -> None:
        if setup.device == "cpu":
            raise ValueError("is measured on GPUs only")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the memory of this process is what it takes
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", setup.device.partition(":")[2] or "0")
        import vllm

        tokens = -(-setup.capacity // BLOCK) * BLOCK
        given: dict[str, Any] = {"max_model_len": tokens, "max_num_batched_tokens": setup.chunk}
        if setup.gpu_memory_gib:
            import torch

            total = torch.cuda.get_device_properties(0).total_memory / GIB
            given["gpu_memory_utilization"] = 0.9 * min(1.0, setup.gpu_memory_gib / total)
        if offloaded == "KV":
            given["kv_offloading_size"] = 1 + setup.batch * tokens * setup.kv_token_bytes / GIB
        if offloaded == "weights":
            given["cpu_offload_gb"] = setup.weight_bytes / GIB
        self._llm = vllm.LLM(
            setup.model,
            dtype=setup.dtype,
            skip_tokenizer_init=True,
            generation_config="vllm",  # its own defaults, not the checkpoint's
            enable_prefix_caching=True,
            max_num_seqs=setup.batch,
            disable_log_stats=False,  # or it tells no times
            **given,
        )
        law: dict[str, Any] = {"temperature": setup.temperature, "ignore_eos": True, "detokenize": False}
        self._params = partial(vllm.SamplingParams, **law)
        self._kv_returns = offloaded == "KV"
        self.label = f"vLLM {vllm.__version__}, {offloaded or 'nothing'} offloaded"

    def prepare(self, prompt: Prompt) -> float:
        self._prompt = [{"prompt_token_ids": list(text)} for text in prompt]
        self._llm.reset_prefix_cache()
        started = perf_counter()
        self._generate(1)
        return 1e3 * (perf_counter() - started)

    def run(self, new_tokens: int) -> Run:
        if self._kv_returns:
            self._llm.reset_prefix_cache()  # of the GPU: what was offloaded stays
        done = self._generate(max(2, new_tokens))
        # The first token comes with what the cache of prefixes leaves of the prompt.
        times = [one.metrics for one in done]
        first = f"first token after {1e3 * min(one.first_token_latency for one in times):.0f} ms"
        seconds = max(one.last_token_ts for one in times) - min(one.first_token_ts for one in times)
        tokens = [token for one in done for token in one.outputs[0].token_ids[:new_tokens]]
        timed = len(done) * (max(2, new_tokens) - 1)
        return Run(tokens, 1e3 * seconds, timed, notes=(first,) if self._kv_returns else ())

    def _generate(self, count: int) -> Any:
        return self._llm.generate(self._prompt, self._params(max_tokens=count), use_tqdm=False)

    def close(self) -> None:
        del self._llm


SYSTEMS: dict[str, Opener] = {
    "resident": partial(Vllm, ""),
    "kv-offloaded": partial(Vllm, "KV"),
    "weights-offloaded": partial(Vllm, "weights"),
}
