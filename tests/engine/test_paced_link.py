"""The whole engine over a paced link: the way of a GPU, with its staging ring, on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
from support.small_engine import CONFIGS, PAGE, PROMPT, SIZES, again
from transformers import PreTrainedModel

from cpu_kv import LayerStream, PacedLink, TransferEngine
from offload_rt import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=24)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, layers, kv heads, head_dim, float32


def overrides(ring: int = 2, segment: int = 32, engine: bool = False) -> dict[str, object]:
    """`engine`: with all that draws or chooses at another time than a run in place."""
    return SIZES | {
        "offload.ahead": 3 if engine else 0,
        "offload.refresh_from": "stream" if engine else "store",
        "store.ring_buffers": ring,
        "store.segment_bytes": 256 * segment,
    }


def generate(target: Any, draft: Any, config: str, link: Any, params: SamplingParams, **sizes: Any) -> Any:
    with LLM.from_models(target, draft, config=config, overrides=overrides(**sizes), link=link) as llm:
        return llm.generate(PROMPT, params)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_slow_link_changes_no_token(target: PreTrainedModel, draft: PreTrainedModel, config: str) -> None:
    """A write-back that is still under way when the next round begins counts as done."""
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=0)
    expected = generate(target, draft, config, None, params)
    found = generate(target, draft, config, PacedLink(1e9, latency_s=2e-3), params, segment=4096)
    assert found.tokens == expected.tokens
    assert found.rounds == expected.rounds
    assert found.timings.accepted_tokens == expected.timings.accepted_tokens


@pytest.mark.parametrize("ring", [2, 3])
@pytest.mark.parametrize("config", ["plain", "naive", "lookup"])
def test_what_crosses_the_link(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    config: str,
    ring: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pass reads the pages of the sequence so far once; every token's KV is written once."""
    lengths: list[int] = []
    stream = TransferEngine.stream

    def recorded(engine: TransferEngine, end: int, **arguments: Any) -> LayerStream:
        lengths.append(end)
        return stream(engine, end, **arguments)

    monkeypatch.setattr(TransferEngine, "stream", recorded)
    result = generate(target, draft, config, PacedLink(1e9), PARAMS, ring=ring, engine=True)
    assert len(lengths) == result.rounds + 1  # the last one is begun ahead, for a round that does not come
    # A round commits its root and what it accepted of the draft.
    committed = result.rounds + result.timings.accepted_tokens
    assert lengths[0] == (len(PROMPT) - 1) // PAGE * PAGE
    assert all(length % PAGE == 0 for length in lengths)
    read = result.transfer.bytes_to_device - result.transfer.bytes_abandoned
    assert read == sum(lengths[:-1]) * TOKEN_BYTES, "since the prompt was read"
    assert result.transfer.bytes_to_host == committed * TOKEN_BYTES


def test_plain_counts_anew(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    link = PacedLink(1e9)
    with LLM.from_models(target, draft, config="naive", overrides=overrides(), link=link) as llm:
        context = llm.read(PROMPT)
        again(context, PARAMS)
        plain = again(context, PARAMS, "plain")
    count, first = PARAMS.max_tokens, len(PROMPT) - 1
    assert plain.transfer.bytes_to_host == count * TOKEN_BYTES
    # A stream begins with the pass before its own, and ends at a page that was full by then.
    lengths = [first // PAGE * PAGE, *((first + n) // PAGE * PAGE for n in range(count - 1))]
    assert plain.transfer.bytes_to_device - plain.transfer.bytes_abandoned == sum(lengths) * TOKEN_BYTES


def test_sampled_drafts_are_the_deeper_the_slower_the_link_is(target: PreTrainedModel) -> None:
    """No clock may decide there: the link's rate, where it is known, stands for what passes cost."""
    drafted = []
    for rate in (1e11, 1e6):
        sizes = overrides() | {"speculation.gamma2": 0, "speculation.step_down": False}
        with LLM.from_models(target, config="retrieval", overrides=sizes, link=PacedLink(rate)) as llm:
            result = llm.generate(PROMPT, SamplingParams(0.5, max_tokens=24, seed=1))
        drafted.append(result.timings.drafted_tokens / result.rounds)
    assert drafted[1] > 1.5 * drafted[0]
