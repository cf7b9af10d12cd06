"""One context under several configurations: tokens equal those of a new reading."""

from __future__ import annotations

from typing import Any

import pytest
from small_engine import again
from tiny_models import byte_ids, noisy_copy, tiny_target

from offload_rt import LLM, SamplingParams
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.errors import UsageError

SMALL: dict[str, object] = {
    "retrieval.budget": 64,
    "retrieval.recent": 16,
    "retrieval.refresh": "stride:1000",
    "draft.sinks": 4,
    "draft.window": 28,
    "speculation.gamma2": 5,
    "speculation.step_down": False,
    "store.page": 16,
    "store.slab_tokens": 64,
    "store.segment_bytes": 16384,
}
CONFIGS = ("plain", "retrieval", "triforce", "lookup", "streaming", "naive")


def counted(result: Any) -> Any:
    return (
        result.config,
        result.tokens,
        result.rounds,
        [(x.name, x.proposed, x.accepted) for x in result.levels],
    )


def test_a_context_is_decoded_as_a_new_reading_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama-gqa", seed=3)
    draft, prompt, params = noisy_copy(target), byte_ids(200), SamplingParams(max_tokens=16)
    fresh = {}
    for config in CONFIGS:
        with LLM.from_models(target, draft, config=config, overrides=SMALL) as llm:
            fresh[config] = counted(llm.generate(prompt, params))
    with LLM.from_models(target, draft, config="triforce", overrides=SMALL) as llm:
        # Longer than what follows, so that it leaves queries and chunks behind that must not be used.
        text = llm.read(prompt)
        again(text, SamplingParams(max_tokens=30))
        for config in CONFIGS:
            assert counted(again(text, params, config, SMALL)) == fresh[config]
        monkeypatch.setattr(
            RetrievedCache, "adopt", lambda *_: pytest.fail("a cache that is not read is kept up")
        )
        assert counted(again(text, params, "plain")) == fresh["plain"]
        monkeypatch.undo()
        assert counted(again(text, params)) == fresh["triforce"]


def test_another_config_needs_the_means_that_it_retrieves_by() -> None:
    params = SamplingParams(max_tokens=2)
    with LLM.from_models(tiny_target(), config="plain", overrides=SMALL) as llm:
        text = llm.read(byte_ids(100))
        with pytest.raises(UsageError, match=r"retrieval\.rest needs .* set retrieval\.rest=false"):
            text.generate(byte_ids(3), params, "retrieval", SMALL)
        with pytest.raises(UsageError, match="has no tokenizer: stop strings"):
            text.generate(byte_ids(3), params, stop="end")
        assert len(text) == 100, "where generating is refused, the prompt is not appended"
        alone = SMALL | {"retrieval.rest": False}
        by_means = alone | {"retrieval.select": "mean_keys"}
        with pytest.raises(UsageError, match="keys of chunks of 8 tokens, .* retrieval.select=attention"):
            text.generate((), params, "retrieval", by_means)
        assert len(again(text, params, "retrieval", alone).tokens) == 2
        with pytest.raises(UsageError, match="more than the 8192 positions"):
            text.generate((), SamplingParams(max_tokens=9000))
        assert len(again(text, params).tokens) == 2
    with LLM.from_models(tiny_target(), config="retrieval", overrides=SMALL) as llm:
        text = llm.read(byte_ids(100))
        with pytest.raises(UsageError, match="keys of chunks of 8 tokens"):  # by attention, none are kept
            text.generate((), params, "retrieval", by_means)
