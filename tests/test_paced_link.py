"""The whole engine over a paced link: the way of a GPU, with its staging ring, on CPU tensors."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tiny_models import byte_ids, noisy_copy, tiny_target
from transformers import PreTrainedModel

from cpu_kv import CopyFailed, LayerStream, PacedLink, TransferEngine, TransferStalled
from cpu_kv.link import Pairs
from offload_rt import LLM, SamplingParams

CONFIGS = ("plain", "naive", "streaming", "retrieval", "triforce", "lookup")
PROMPT = byte_ids(150)
PARAMS = SamplingParams(max_tokens=40)
PAGE = 16
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, layers, kv heads, head_dim, float32


def overrides(ring: int = 2, segment: int = 32, engine: bool = False) -> dict[str, object]:
    """`engine`: with all that draws or chooses at another time than a run in place."""
    return {
        "offload.ahead": 3 if engine else 0,
        "offload.refresh_from_stream": engine,
        "retrieval.budget": 64,
        "retrieval.recent": 16,
        "draft.sinks": 4,
        "draft.window": 60,
        "speculation.gamma2": 5,
        "speculation.step_down": False,
        "store.page": PAGE,
        "store.slab_tokens": 64,
        "store.ring_buffers": ring,
        "store.segment_tokens": segment,
    }


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("llama-gqa")


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return noisy_copy(target)


def generate(target: Any, draft: Any, config: str, link: Any, params: SamplingParams, **sizes: Any) -> Any:
    with LLM.from_models(target, draft, config=config, overrides=overrides(**sizes), link=link) as llm:
        return llm.generate(PROMPT, params)


@pytest.mark.parametrize(("ring", "segment"), [(2, 16), (3, 32), (4, 4096)])
@pytest.mark.parametrize("config", CONFIGS)
def test_tokens_are_those_of_the_run_in_place(
    target: PreTrainedModel, draft: PreTrainedModel, config: str, ring: int, segment: int
) -> None:
    expected = generate(target, draft, config, None, PARAMS)
    found = generate(target, draft, config, PacedLink(1e9), PARAMS, ring=ring, segment=segment)
    assert found.tokens == expected.tokens
    assert (found.rounds, found.timings.draft_n) == (expected.rounds, expected.timings.draft_n)
    whole = generate(target, draft, config, PacedLink(1e9), PARAMS, ring=ring, segment=segment, engine=True)
    assert whole.tokens == expected.tokens
    assert expected.transfer.bytes_to_device == expected.transfer.bytes_to_host == 0
    assert found.transfer.bytes_to_device > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_slow_link_changes_no_token(
    target: PreTrainedModel, draft: PreTrainedModel, config: str, temperature: float
) -> None:
    """A write-back that is still under way when the next round begins counts as done."""
    params = SamplingParams(temperature=temperature, max_tokens=12)
    expected = generate(target, draft, config, None, params)
    found = generate(target, draft, config, PacedLink(1e9, latency_s=2e-3), params, segment=4096)
    assert found.tokens == expected.tokens
    assert found.rounds == expected.rounds
    assert found.timings.draft_n_accepted == expected.timings.draft_n_accepted


@pytest.mark.parametrize("ring", [2, 3])
@pytest.mark.parametrize("config", ["plain", "naive", "lookup"])
def test_what_crosses_the_link(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    config: str,
    ring: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pass reads the pages of the text so far once; every token's KV is written once."""
    lengths: list[int] = []
    stream = TransferEngine.stream

    def recorded(engine: TransferEngine, end: int, **arguments: Any) -> LayerStream:
        lengths.append(end)
        return stream(engine, end, **arguments)

    monkeypatch.setattr(TransferEngine, "stream", recorded)
    result = generate(target, draft, config, PacedLink(1e9), PARAMS, ring=ring, engine=True)
    assert len(lengths) == result.rounds + 1  # the last one is begun ahead, for a round that does not come
    # A round commits its root and what it accepted of the draft.
    committed = result.rounds + result.timings.draft_n_accepted
    assert lengths[0] == (len(PROMPT) - 1) // PAGE * PAGE
    assert all(length % PAGE == 0 for length in lengths)
    read = result.transfer.bytes_to_device - result.transfer.bytes_abandoned
    assert read == sum(lengths[:-1]) * TOKEN_BYTES
    assert result.transfer.bytes_to_host == (len(PROMPT) - 1 + committed) * TOKEN_BYTES


def test_plain_counts_anew(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    link = PacedLink(1e9)
    with LLM.from_models(target, draft, config="naive", overrides=overrides(), link=link) as llm:
        llm.generate(PROMPT, PARAMS)
        plain = llm.plain(PARAMS)
    count, first = PARAMS.max_tokens, len(PROMPT) - 1
    assert plain.transfer.bytes_to_host == count * TOKEN_BYTES
    # A stream begins with the pass before its own, and ends at a page that was full by then.
    lengths = [first // PAGE * PAGE, *((first + n) // PAGE * PAGE for n in range(count - 1))]
    assert plain.transfer.bytes_to_device - plain.transfer.bytes_abandoned == sum(lengths) * TOKEN_BYTES


class Breaking(PacedLink):
    """Fails at its copy number `fails_at`, and at none after it."""

    def __init__(self, fails_at: int) -> None:
        super().__init__(1e9)
        self.copies = 0
        self.fails_at = fails_at

    def move(self, pairs: Pairs) -> None:
        self.copies += 1
        if self.copies == self.fails_at:
            raise RuntimeError("the cable was pulled")
        super().move(pairs)


@pytest.mark.parametrize("config", ["plain", "triforce"])
@pytest.mark.parametrize("fails_at", [1, 2, 4, 9, 30])
def test_a_copy_that_fails_is_named_and_can_be_lived_with(
    target: PreTrainedModel, draft: PreTrainedModel, config: str, fails_at: int
) -> None:
    params = SamplingParams(max_tokens=10)
    expected = generate(target, draft, config, None, params)
    before = set(threading.enumerate())
    link = Breaking(fails_at)
    with LLM.from_models(target, draft, config=config, overrides=overrides(), link=link) as llm:
        with pytest.raises(CopyFailed, match=r"copy to the (host|device) of [\d,]+ bytes .*cable was pulled"):
            llm.generate(PROMPT, params)
        assert llm.generate(PROMPT, params).tokens == expected.tokens
    assert set(threading.enumerate()) <= before


def test_a_copy_that_stalls_is_named(target: PreTrainedModel) -> None:
    link = PacedLink(1e9, latency_s=30.0, timeout=0.05)
    with (
        pytest.raises(TransferStalled, match=r"a copy of [\d,]+ bytes was not done after 0\.05 s"),
        LLM.from_models(target, config="plain", overrides=overrides(), link=link) as llm,
    ):
        llm.generate(PROMPT, PARAMS)


def test_closing_in_the_middle_of_a_text(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    before = set(threading.enumerate())
    link = PacedLink(1e9, latency_s=1e-3)
    llm = LLM.from_models(target, draft, config="retrieval", overrides=overrides(), link=link)
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    llm.close()
    stream.close()
    assert set(threading.enumerate()) <= before
