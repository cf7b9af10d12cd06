"""transformers' `generate` over a prompt that was read before.

Three things are left to do for that. Plain generation goes on from a filled cache; the first pass of look-up
and assisted generation does not, and reads the whole text a second time behind it. An assistant has no way to
be given a filled cache. And generation with a cache leaves it longer: it is rewound before each run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from bench.systems import Run, Setup


def sampling(setup: Setup) -> dict[str, Any]:
    """Options of `generate`."""
    if setup.temperature:
        return {"do_sample": True, "temperature": setup.temperature, "top_k": 0}
    return {"do_sample": False}


def generate(model: Any, ids: Tensor, cache: Any, count: int, **options: Any) -> Run:
    """Timed from the first round's tokens to the last: without what `generate` sets up, but where one round
    made all."""
    arrivals = _Arrivals()
    given = {"attention_mask": torch.ones_like(ids), "past_key_values": cache, "max_new_tokens": count}
    out = model.generate(ids, **given, streamer=arrivals, **options)
    times, (_, *rounds) = arrivals.times, arrivals.counts
    ms = 1e3 * (times[-1] - times[1 if len(rounds) > 1 else 0])
    return Run(out[0, ids.shape[1] :].tolist(), ms, sum(rounds[1:]) or count, len(rounds))


class _Arrivals(BaseStreamer):
    """Notes when tokens come, and how many at a time; first of all comes the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        self.times.append(perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


def give_cache(assistant: Any, cache: Callable[[], Any]) -> None:
    """Lets an assistant generate from a cache."""
    plain = assistant.generate

    @wraps(plain)
    def given(*arguments: Any, **options: Any) -> Any:
        if options.get("past_key_values") is None:
            options["past_key_values"] = cache()
        return plain(*arguments, **options)

    assistant.generate = given


def go_on_from_caches(model: Any) -> None:
    """Lets no pass of generation run over what its cache holds already."""
    prepare = model.prepare_inputs_for_generation

    @wraps(prepare)
    def going_on(
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Any:
        if next_sequence_length is None and past_key_values is not None:
            next_sequence_length = input_ids.shape[1] - past_key_values.get_seq_length()
        return prepare(
            input_ids, next_sequence_length=next_sequence_length, past_key_values=past_key_values, **options
        )

    model.prepare_inputs_for_generation = going_on
