"""One context under several configurations: tokens equal those of a new reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_engine import again
from support.tiny_models import byte_ids, noisy_copy, tiny_target

from offload_rt import LLM, Context, SamplingParams
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.errors import UsageError

SMALL: dict[str, object] = {
    "retrieval.budget": 64,
    "retrieval.recent": 16,
    "retrieval.refresh": "stride:1000",
    "streaming.sinks": 4,
    "streaming.window": 28,
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


MEAN_KEYS = SMALL | {"retrieval.select": "mean_keys"}


@pytest.mark.parametrize("packed", [False, True])
def test_means_are_computed_when_they_are_first_needed(packed: bool, tmp_path: Path) -> None:
    """Whatever config the context was read with; bit for bit those that are computed while reading."""
    target, prompt, params = tiny_target(), byte_ids(200), SamplingParams(max_tokens=16)
    if packed:
        target = target.bfloat16()
    store = {"store.code": "packed"} if packed else {}
    chunks = (SMALL, MEAN_KEYS, MEAN_KEYS | {"retrieval.chunk": 4}, SMALL | {"retrieval.rest": False})
    fresh, means = [], []
    for values in chunks:
        with LLM.from_models(target, config="retrieval", overrides=values | store) as llm:
            text = llm.read(prompt)
            fresh.append(counted(again(text, params)))
            text.rewind(len(prompt))
            means.append(kept(llm))
    for reading in ("plain", "retrieval"):
        with LLM.from_models(target, config=reading, overrides=SMALL | store) as llm:
            text = llm.read(prompt)
            text.save(tmp_path / "a.safetensors")
            for one in (text, llm.load(tmp_path / "a.safetensors"), text.fork()):
                for values, tokens, wanted in zip(chunks, fresh, means, strict=True):
                    assert counted(again(one, params, "retrieval", values)) == tokens
                    one.rewind(len(prompt))
                    found = kept(llm, one)
                    for which, theirs in wanted.items():
                        assert torch.equal(found[which], theirs), which
                one.close()


def kept(llm: LLM, context: Context | None = None) -> dict[str, torch.Tensor]:
    """Returns the means that a sequence keeps, by their names."""
    sequence = llm.engine.sequences[-1] if context is None else context._sequence
    kv = sequence.full.sequence
    named = {"summaries": kv.summaries, "page_means": kv.page_means}
    layers = range(kv.layout.layers)
    return {
        name: torch.stack([one.means(layer).clone() for layer in layers])
        for name, one in named.items()
        if one is not None
    }


def test_where_another_config_is_refused_the_prompt_is_not_appended() -> None:
    params = SamplingParams(max_tokens=2)
    with LLM.from_models(tiny_target(), config="plain", overrides=SMALL) as llm:
        text = llm.read(byte_ids(100))
        with pytest.raises(UsageError, match=r"retrieval\.chunk = 32: must divide store\.page = 16"):
            text.generate(byte_ids(3), params, "retrieval", SMALL | {"retrieval.chunk": 32, "store.page": 32})
        with pytest.raises(UsageError, match="has no tokenizer: stop strings"):
            text.generate(byte_ids(3), params, stop="end")
        assert len(text) == 100
        with pytest.raises(UsageError, match="more than the 8192 positions"):
            text.generate((), SamplingParams(max_tokens=9000))
        assert len(again(text, params).tokens) == 2
