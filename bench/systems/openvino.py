"""OpenVINO GenAI's paged attention on a CPU: KV in float32, and as it comes, in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.gguf_file import gguf_file
from bench.systems import Opener, Run, Setup, kv_values, refuse_link

GIB = 2**30


class OpenVino:
    """A pipeline that keeps the blocks of the prompt it has read."""

    def __init__(self, exact: bool, setup: Setup) -> None:
        refuse_link(setup)
        if setup.device != "cpu":
            raise ValueError(f"is measured on CPUs only, not on {setup.device}")
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = setup.chunk
        scheduler.cache_size = 1 + -(-4 * kv_values(setup) * setup.capacity // GIB)
        given: dict[str, Any] = {"ATTENTION_BACKEND": "PA", "INFERENCE_NUM_THREADS": setup.threads}
        if exact:
            given |= {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}
        self._pipeline = openvino_genai.LLMPipeline(
            # It reads no other unquantised type.
            str(gguf_file(Path(setup.model), "float16", setup.folder)),
            "CPU",
            scheduler_config=scheduler,
            **given,
        )
        self._how = openvino_genai.GenerationConfig(ignore_eos=True, do_sample=setup.temperature > 0)
        if setup.temperature:
            self._how.temperature, self._how.top_k, self._how.top_p = setup.temperature, 0, 1.0
        version = openvino_genai.__version__.partition("-")[0]
        self.label = f"OpenVINO GenAI {version}, {'float32' if exact else '8-bit'} KV"
        self.notes: tuple[str, ...] = ("weights are rounded to float16",) if setup.dtype == "float32" else ()
        if not exact:
            self.notes += ("not lossless: KV has 8 bits",)

    def prepare(self, prompt: Sequence[int]) -> float:
        self._prompt = openvino.Tensor(np.array([prompt], dtype=np.int64))
        started = perf_counter()
        self._generate(1)
        return 1e3 * (perf_counter() - started)

    def run(self, new_tokens: int) -> Run:
        done = self._generate(max(2, new_tokens))
        # The first token comes with what the cache of blocks leaves of the prompt.
        ms = done.perf_metrics.get_tpot().mean * (max(2, new_tokens) - 1)
        return Run(list(done.tokens[0])[:new_tokens], ms, max(2, new_tokens) - 1)

    def _generate(self, count: int) -> Any:
        self._how.max_new_tokens = count
        return self._pipeline.generate(self._prompt, self._how)

    def close(self) -> None:
        del self._pipeline


SYSTEMS: dict[str, Opener] = {"f32": partial(OpenVino, True), "default": partial(OpenVino, False)}
