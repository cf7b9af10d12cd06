"""Scores of prompts are transformers' own log probabilities, whatever reads the prompt, and in what parts."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.small_engine import DEVICES, LINKS, PROMPT, SIZES, engine_overrides, link_to
from support.tiny_models import ARCHITECTURES, LOCAL_ARCHITECTURES, byte_ids, local_model, tiny_target, to
from torch import Tensor
from transformers import PreTrainedModel

from offload_rt import LLM, Context, PromptScore, SamplingParams, UsageError
from offload_rt.engine import scoring
from offload_rt.engine.scoring import PromptScorer

TOLERANCE = 2e-3  # of recurrent layers, which sum in other parts; of the others a tenth would do
TOP = 4
ALL = [*ARCHITECTURES, *(f"local {arch}" for arch in LOCAL_ARCHITECTURES)]


@cache
def model_of(arch: str) -> PreTrainedModel:
    return local_model(arch.removeprefix("local ")) if arch.startswith("local ") else tiny_target(arch)


def reference(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """transformers' own log probabilities of every token behind each of `tokens`, float64."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.double().log_softmax(-1)


def check(score: PromptScore, expected: Tensor, start: int) -> None:
    """The score is that of `expected` from position `start` on."""
    tokens, start = score.tokens, max(1, start)
    count = len(tokens) - start
    for values in (score.logprobs, score.greedy):
        assert len(values) == len(tokens) and values[:start] == [None] * start
    assert score.alternatives[:start] == [()] * start and score.scored == count
    before = expected[start - 1 : -1]
    own = before.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]
    found = torch.tensor(score.logprobs[start:], dtype=torch.float64)
    torch.testing.assert_close(found, own, rtol=0, atol=TOLERANCE)
    assert score.total == pytest.approx(float(own.sum()), abs=count * TOLERANCE)
    assert score.perplexity == pytest.approx(math.exp(-float(own.mean())), rel=1e-3)
    for row, best, token, greedy in zip(
        before, score.alternatives[start:], tokens[start:], score.greedy[start:], strict=True
    ):
        assert len({other for other, _ in best}) == TOP
        assert [logprob for _, logprob in best] == pytest.approx(row.topk(TOP).values.tolist(), abs=TOLERANCE)
        assert [row[other].item() for other, _ in best] == pytest.approx(
            [logprob for _, logprob in best], abs=TOLERANCE
        )
        assert greedy == (token == best[0][0])


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("arch", ALL)
def test_log_probabilities_are_those_of_transformers(arch: str, link: str) -> None:
    model = model_of(arch)
    expected = {length: reference(model, PROMPT[:length]) for length in (2, 17, 150)}
    overrides: dict[str, Any] = {**engine_overrides(), "prefill.chunk": 40, "prefill.piece": 64}
    with LLM.from_models(model, config="plain", overrides=overrides, link=LINKS[link]()) as llm:
        for length, start in ((2, 0), (17, 5), (150, 0), (150, 149)):
            check(llm.score(PROMPT[:length], top=TOP, start=start), expected[length], start)
        with llm.read(PROMPT[:100]) as context:  # of which only what follows is read
            check(context.score(PROMPT[100:], top=TOP), expected[150], 100)
            assert context.tokens == PROMPT[:100]
        assert llm.engine.store.used_bytes == 0


@DEVICES
def test_a_generation_goes_on_from_a_scored_prompt(device: torch.device) -> None:
    """And the prompt is read once, behind what a prefix has, but for the tokens that are to be scored."""
    model, reports = to(tiny_target("llama-gqa"), device), list[int]()
    options: dict[str, Any] = {"overrides": engine_overrides(), "link": link_to(device)}
    with LLM.from_models(
        model, config="retrieval", on_progress=lambda _, done, of: reports.append(of), **options
    ) as llm:
        plain = llm.generate(PROMPT, SamplingParams(max_tokens=20))
        whole = llm.score(PROMPT)
        context = llm.read(PROMPT[:90])
        for start, read in ((0, 149), (1, 149), (60, 90), (90, 60), (120, 60)):
            reports.clear()
            scorer = PromptScorer(llm.engine.target, PROMPT, start=start)
            with context.snapshot() as prefix:
                sequence = llm.engine.open(PROMPT, 20, prefix=prefix, scorer=scorer)
            assert reports[-1] == 2 * read  # layers
            score = scorer.score()
            assert score.logprobs[: scorer.start] == [None] * scorer.start
            assert score.logprobs[scorer.start :] == pytest.approx(whole.logprobs[scorer.start :], abs=1e-4)
            with Context(llm, sequence) as scored:
                assert scored.generate((), SamplingParams(max_tokens=20)).tokens == plain.tokens


def test_logits_of_few_tokens_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = tiny_target("llama-gqa"), list[int]()
    with LLM.from_models(model, config="plain", overrides=SIZES) as llm:
        whole = llm.score(PROMPT, top=TOP)
        logits = llm.engine.target.logits

        def counted(hidden: Tensor) -> Tensor:
            rows.append(hidden.shape[1])
            return logits(hidden)

        monkeypatch.setattr(llm.engine.target, "logits", counted)
        monkeypatch.setattr(scoring, "LOGITS_BYTES", 7 * 4 * 256 + 3)
        assert llm.score(PROMPT, top=TOP) == whole
        assert max(rows) == 7 and sum(rows) == 149
        rows.clear()
        llm.score(PROMPT, start=140)
        assert sum(rows) == 10  # of tokens that are not scored there are none


def test_windows_and_portions_come_in_order() -> None:
    """A prompt of a model with local layers is read in several portions, of which each has its outputs."""
    model, tokens = local_model("gemma3"), byte_ids(700)
    with LLM.from_models(model, config="plain", overrides={**SIZES, "prefill.chunk": 100}) as llm:
        check(llm.score(tokens, top=TOP), reference(model, tokens), 0)


def test_a_single_token_has_no_log_probability() -> None:
    with LLM.from_models(tiny_target("llama"), config="plain", overrides=SIZES) as llm:
        score = llm.score([7], top=2)
    assert score == PromptScore([7], [None], [None], [()])
    assert (score.scored, score.total) == (0, 0.0) and math.isnan(score.perplexity)


def test_bad_requests_are_refused_by_name() -> None:
    with LLM.from_models(tiny_target("llama"), config="plain", overrides=SIZES) as llm:
        for changes, message in (
            ({"top": 21}, "top 21 is out of range: use 0 to 20"),
            ({"top": "a"}, "top must be an integer, got 'a'"),
            ({"start": -1}, "start -1 is out of range: the prompt has 20 tokens; use 0 to 19"),
            ({"start": 20}, "start 20 is out of range"),
        ):
            arguments: dict[str, Any] = changes
            with pytest.raises(UsageError, match=message):
                llm.score(PROMPT[:20], **arguments)
        with pytest.raises(UsageError, match="more than the 8192 positions"):
            llm.score(byte_ids(8193))
        with pytest.raises(UsageError, match="the prompt is empty"):
            llm.score([])


def test_a_score_that_is_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target("llama")
    with LLM.from_models(model, config="plain", overrides=SIZES) as llm:
        logits = llm.engine.target.logits
        overflowing = monkeypatch.context()
        with overflowing as patch, pytest.raises(UsageError, match="prompt token 11 is NaN; compute in a"):
            patch.setattr(
                llm.engine.target,
                "logits",
                lambda hidden: logits(hidden).index_fill(0, torch.tensor(10), torch.nan),
            )
            llm.score(PROMPT[:20])
        with torch.no_grad():
            model.model.embed_tokens.weight[PROMPT[3]] = torch.nan
        with pytest.raises(UsageError, match=r"the weight model\.embed_tokens\.weight has NaN or infinite"):
            llm.score(PROMPT[:20])


def test_an_interrupt_leaves_nothing_behind() -> None:
    def interrupt(phase: str, done: int, of: int) -> None:
        if done > of // 2:
            raise KeyboardInterrupt

    overrides = {**SIZES, "prefill.chunk": 16, "prefill.piece": 32}
    with LLM.from_models(tiny_target("llama"), config="plain", overrides=overrides) as llm:
        whole = llm.score(PROMPT)
        llm.engine.on_progress = interrupt
        with pytest.raises(KeyboardInterrupt):
            llm.score(PROMPT)
        assert llm.engine.sequences == ()
        llm.engine.on_progress = None
        assert llm.score(PROMPT) == whole
        assert llm.engine.store.used_bytes == 0


def test_progress_of_a_scored_prompt_never_goes_back() -> None:
    seen: list[tuple[int, int]] = []
    with LLM.from_models(
        tiny_target("llama"),
        config="plain",
        overrides={**SIZES, "prefill.chunk": 40},
        on_progress=lambda _, done, of: seen.append((done, of)),
    ) as llm:
        seen.clear()
        llm.score(PROMPT)
    assert seen[-1] == (298, 298) and all(before < after for before, after in pairwise(seen))
