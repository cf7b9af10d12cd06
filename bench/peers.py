"""transformers' own generation over one prompt, which is read once.

transformers 5.23 leaves three things to do so that its systems can be timed side by side over one prefill,
apart from it. Plain generation goes on from a filled cache; the first pass of look-up and assisted
generation does not, and reads the whole text a second time behind it. An assistant has no way to be given a
filled cache. And generation with a cache leaves it longer: it is cropped before each run.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from bench.cases import LOOKUP_TOKENS


@dataclass(frozen=True)
class PeerRun:
    """One run of a peer.

    Attributes:
        ms: from the moment the tokens of the first round are out to the end: without what `generate` sets up.
        timed: how many tokens came in that time. Where one round made all, `ms` is the whole call's.
        rounds: passes of the target.
    """

    tokens: list[int]
    ms: float
    timed: int
    rounds: int


class _Arrivals(BaseStreamer):
    """Notes when tokens come, and how many at a time."""

    def __init__(self) -> None:
        self.started = perf_counter()
        self.times: list[float] = []
        self.counts: list[int] = []
        self._prompt = True

    def put(self, value: Tensor) -> None:
        if self._prompt:
            self._prompt = False
            return
        self.times.append(perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass

    def run(self, tokens: list[int]) -> PeerRun:
        timed = sum(self.counts[1:])
        if timed:
            return PeerRun(tokens, 1e3 * (self.times[-1] - self.times[0]), timed, len(self.counts))
        return PeerRun(tokens, 1e3 * (self.times[-1] - self.started), len(tokens), len(self.counts))


class Peers:
    """transformers' systems over one prompt.

    Args:
        target, draft: left as they are; the peers are modules of their own that share the weights.

    Attributes:
        cache: the target's.
        kv_bytes: of the prompt but its last token.
        prefill_ms, assistant_prefill_ms: reading all of the prompt but its last token, in one pass.
    """

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel | None, prompt: Sequence[int]) -> None:
        self._target = _twin(target)
        self._draft = None if draft is None else _twin(draft)
        self._prompt = torch.tensor([prompt], device=target.device)
        started = perf_counter()
        self.cache = _read(self._target, self._prompt[:, :-1])
        self.prefill_ms = 1e3 * (perf_counter() - started)
        layers: list[Any] = list(self.cache.layers)
        self.kv_bytes: int = sum(
            layer.keys.nbytes + layer.values.nbytes for layer in layers if layer.is_initialized
        )
        self.assistant_prefill_ms: float | None = None
        if self._draft is not None:
            started = perf_counter()
            self._draft_cache = _read(self._draft, self._prompt[:, :-1])
            self.assistant_prefill_ms = 1e3 * (perf_counter() - started)
            self._draft.generate = self._given_cache(self._draft.generate)
        self._target.prepare_inputs_for_generation = _going_on(self._target.prepare_inputs_for_generation)

    def _given_cache(self, generate: Any) -> Any:
        @functools.wraps(generate)
        def given(*arguments: Any, **options: Any) -> Any:
            if options.get("past_key_values") is None:
                options["past_key_values"] = self._draft_cache
            return generate(*arguments, **options)

        return given

    def run(self, system: str, new_tokens: int) -> PeerRun:
        """Greedy decoding by one of `cases.PEERS`."""
        options: dict[str, Any] = {}
        if system == "lookup":
            options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        elif system == "assisted":
            self._rewind(self._draft_cache)
            options["assistant_model"] = self._draft
        self._rewind(self.cache)
        arrivals = _Arrivals()
        out = self._target.generate(
            self._prompt,
            past_key_values=self.cache,
            do_sample=False,
            max_new_tokens=new_tokens,
            streamer=arrivals,
            **options,
        )
        return arrivals.run(out[0, self._prompt.shape[1] :].tolist())

    @torch.inference_mode()
    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        """Logits `[vocabulary]` after the prompt and `tokens`."""
        self._rewind(self.cache)
        ids = torch.cat([self._prompt[:, -1:], self._prompt.new_tensor([tokens], dtype=torch.long)], dim=1)
        out = self._target(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[0, -1].float()
        return logits

    def _rewind(self, cache: DynamicCache) -> None:
        cache.crop(self._prompt.shape[1] - 1 - cache.get_seq_length())


def _twin(model: PreTrainedModel) -> Any:
    """A module of its own with the same weights, that decodes greedily and ends at no token."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    twin.config._attn_implementation = "sdpa"
    twin.generation_config = GenerationConfig()
    return twin


@torch.inference_mode()
def _read(model: Any, tokens: Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    if tokens.shape[1]:
        model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if tokens.device.type == "cuda":
            torch.cuda.synchronize(tokens.device)
    return cache


def _going_on(prepare: Any) -> Any:
    """`prepare_inputs_for_generation` that never runs over what the cache holds already."""

    @functools.wraps(prepare)
    def going_on(
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: DynamicCache | None = None,
        **options: Any,
    ) -> Any:
        if next_sequence_length is None and past_key_values is not None:
            next_sequence_length = input_ids.shape[1] - past_key_values.get_seq_length()
        return prepare(
            input_ids, next_sequence_length=next_sequence_length, past_key_values=past_key_values, **options
        )

    return going_on
