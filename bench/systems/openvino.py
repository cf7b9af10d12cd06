"""OpenVINO GenAI's paged attention on a CPU: with KV in float32, and by default in 8 bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.gguf_file import gguf_file
from bench.systems import Opener, Prompt, Run, Setup

GIB = 2**30


class OpenVino:
    """A pipeline that keeps the KV blocks of its prompt."""

    def __init__(self, exact: bool, setup: Setup) -> None:
        if setup.device != "cpu":
            raise ValueError(f"is measured on CPUs only, not on {setup.device}")
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = setup.chunk
        wider = 1 if setup.dtype == "float32" else 2  # KV may be float32, whatever the weights are
        kv_bytes = wider * setup.kv_token_bytes * setup.capacity * setup.batch
        scheduler.cache_size = 1 + -(-kv_bytes // GIB)
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads}
        if exact:
            options |= {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}
        # It reads no other type that is not quantized.
        file = str(gguf_file(Path(setup.model), "float16", setup.folder))
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(file, scheduler, "CPU", options)
        self._how = openvino_genai.GenerationConfig(ignore_eos=True, do_sample=False)
        version = openvino_genai.__version__.partition("-")[0]
        self.label = f"OpenVINO GenAI {version}, {'float32' if exact else '8-bit'} KV"
        self.notes: tuple[str, ...] = ("weights are rounded to float16",) if setup.dtype == "float32" else ()
        if not exact:
            self.notes += ("not lossless: KV has 8 bits",)

    def prepare(self, prompt: Prompt) -> float:
        self._prompt = [openvino.Tensor(np.array([text], dtype=np.int64)) for text in prompt]
        started = perf_counter()
        self._generate(1)
        return 1e3 * (perf_counter() - started)

    def run(self, new_tokens: int) -> Run:
        ms, texts = self._generate(max(2, new_tokens))
        timed = sum(len(text) - 1 for text in texts)
        return Run([token for text in texts for token in text[:new_tokens]], ms, timed)

    def _generate(self, count: int) -> tuple[float, list[list[int]]]:
        """Tokens of each sequence, and the ms that all but the first ones took."""
        self._how.max_new_tokens = count
        texts = [self._pipeline.add_request(*text, self._how) for text in enumerate(self._prompt)]
        while not all(text.can_read() for text in texts):
            self._pipeline.step()  # reads the part of the prompt that is not in the prefix cache
        started = perf_counter()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        ms = 1e3 * (perf_counter() - started)
        return ms, [text.read_all()[0].generated_ids for text in texts]

    def close(self) -> None:
        del self._pipeline


SYSTEMS: dict[str, Opener] = {"f32": partial(OpenVino, True), "default": partial(OpenVino, False)}
