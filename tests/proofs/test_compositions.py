"""Levels as tables: trees and orders of layers at every level yield the greedy tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from support.small_engine import LINKS, PROMPT, again, engine_overrides, passes_of
from support.tiny_models import noisy_copy, tiny_target
from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams
from offload_rt.engine.controller import RoundTimes
from offload_rt.engine.results import GenerationResult
from offload_rt.errors import UsageError
from offload_rt.model.layer_order import LayerOrder

PARAMS = SamplingParams(max_tokens=16)
DEPTH = 3
EVERYTHING = {"retrieval.budget": 512, "streaming.window": 512}
"""Every cache holds the whole text."""

Tables = list[dict[str, object]]


def run(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    levels: Sequence[Mapping[str, object]],
    link: str = "in place",
    params: SamplingParams = PARAMS,
    sizes: Mapping[str, object] = {},
) -> tuple[GenerationResult, list[RoundTimes]]:
    """A text drafted by `levels`, and its rounds."""
    overrides = engine_overrides(ahead=2) | {"speculation.gamma1": 2, "speculation.gamma2": DEPTH, **sizes}
    options: dict[str, Any] = {"overrides": overrides | {"speculation.levels": levels}, "link": LINKS[link]()}
    with LLM.from_models(target, draft, config="retrieval", **options) as llm:
        result = llm.read(PROMPT, params.max_tokens).generate((), params)
        (sequence,) = llm.engine.sequences
        return result, sequence.rounds


LEVELS: dict[str, Callable[[str], Tables]] = {
    "retrieved": lambda shape: [{"model": "target", "cache": "retrieved", "draft": shape}],
    "streaming": lambda shape: [{"model": "target", "cache": "streaming", "draft": shape}],
    "shared": lambda shape: [{"model": "target", "cache": "shared", "draft": shape}],
    "draft": lambda shape: [{"model": "draft", "cache": "streaming", "draft": shape}],
    "both": lambda shape: [
        {"model": "draft", "cache": "streaming", "draft": shape},
        {"model": "target", "cache": "retrieved", "draft": "sequences:3"},
    ],
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("source", ["suffix", "lookup"])
def test_finds_replace_the_drafts_of_a_small_model(
    target: PreTrainedModel, draft: PreTrainedModel, plain_tokens: list[int], source: str, link: str
) -> None:
    middle = {"model": "target", "cache": "retrieved"}
    small = {"model": "draft", "cache": "streaming"}
    alone, _ = run(target, draft, [small, middle], link)
    sizes = {"lookup.prefer_ngram": 1}
    joined, _ = run(target, draft, [small | {"prefer": source}, middle], link, sizes=sizes)
    assert joined.tokens == alone.tokens == plain_tokens[: PARAMS.max_tokens]
    if link == "in place":  # a clock decides how much is drafted while a pass runs
        seldom = {"lookup.prefer_ngram": 64}
        neither, _ = run(target, draft, [small | {"prefer": source}, middle], link, sizes=seldom)
        drawn = [result.levels[0].rounds for result in (joined, alone, neither)]
        assert drawn[0] < drawn[1] == drawn[2], "it draws only where nothing is found"


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("shape", ["tree:3,2", "sequences:3", "grown:12"])
@pytest.mark.parametrize("levels", LEVELS)
def test_trees_yield_the_tokens_of_plain_decoding(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    plain_tokens: list[int],
    levels: str,
    shape: str,
    link: str,
) -> None:
    result, _ = run(target, draft, LEVELS[levels](shape), link)
    assert result.tokens == plain_tokens[: PARAMS.max_tokens]
    assert result.levels[0].accepted
    # More than chains propose.
    below = result.levels[-2]
    assert below.proposed > DEPTH * result.rounds
    assert below.accepted <= DEPTH * result.rounds


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("entries", [254, 258])
def test_embeddings_of_one_tokenizer_may_be_padded_otherwise(
    target: PreTrainedModel, plain_tokens: list[int], entries: int, temperature: float
) -> None:
    draft = noisy_copy(target)
    draft.resize_token_embeddings(entries, mean_resizing=False)
    prompt = [*PROMPT[:-1], 255]  # the smaller draft has no such entry
    params = SamplingParams(temperature, max_tokens=16, seed=3)
    overrides = engine_overrides()
    with LLM.from_models(target, draft, config="naive", overrides=overrides) as llm:
        text = llm.read(prompt)
        result, plain = again(text, params), again(text, params, "plain")
    assert result.levels[0].accepted > 0
    assert temperature or result.tokens == plain.tokens


def test_another_vocabulary_is_refused(target: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="has 250 tokens in its vocabulary, the target .* has 256"):
        LLM.from_models(target, tiny_target("llama", vocabulary=250), config="naive")


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("shape", ["chain", "tree:3,2", "sequences:3", "grown:12"])
@pytest.mark.parametrize("levels", LEVELS)
def test_a_draft_that_sees_everything_is_accepted_to_its_end(
    target: PreTrainedModel, plain_tokens: list[int], levels: str, shape: str, link: str
) -> None:
    """The small model is the target itself."""
    same = noisy_copy(target, noise=0.0)
    result, rounds = run(target, same, LEVELS[levels](shape), link, sizes=EVERYTHING)
    assert result.tokens == plain_tokens[: PARAMS.max_tokens]
    accepted = [times.accepted for times in rounds if times.depth == DEPTH]
    assert accepted == [DEPTH] * (PARAMS.max_tokens // (DEPTH + 1))


@pytest.mark.parametrize("shape", ["tree:3,2", "grown:12"])
def test_trees_accept_more_than_chains(target: PreTrainedModel, draft: PreTrainedModel, shape: str) -> None:
    (chains, _), (trees, _) = (run(target, draft, LEVELS["draft"](kind)) for kind in ("chain", shape))
    assert trees.rounds < chains.rounds


@pytest.fixture(scope="module")
def deep() -> PreTrainedModel:
    """Five layers, of which the third and the fourth are a group."""
    return tiny_target("llama-gqa", layers=5)


@pytest.fixture(scope="module")
def deep_draft(deep: PreTrainedModel) -> PreTrainedModel:
    return noisy_copy(deep)


@pytest.fixture(scope="module")
def deep_tokens(deep: PreTrainedModel) -> list[int]:
    with LLM.from_models(deep, config="plain") as llm:
        return llm.generate(PROMPT, PARAMS).tokens


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("calibrate", [True, False])
@pytest.mark.parametrize("layers", ["groups:2", "skip:1a"])
@pytest.mark.parametrize("model", ["draft", "target", "both"])
def test_orders_of_layers_yield_the_tokens_of_plain_decoding(
    deep: PreTrainedModel,
    deep_draft: PreTrainedModel,
    deep_tokens: list[int],
    model: str,
    layers: str,
    calibrate: bool,
    link: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = passes_of(monkeypatch)
    order: dict[str, Any] = {"layers": layers, "calibrate": calibrate}
    tables = [
        {"model": "draft", "cache": "streaming", **order},
        {"model": "target", "cache": "retrieved", **order},
    ]
    chosen = tables if model == "both" else [table for table in tables if table["model"] == model]
    result, _ = run(deep, deep_draft, chosen, link)
    assert result.tokens == deep_tokens
    assert all(level.proposed for level in result.levels[:-1])
    plan, plans = LayerOrder.parse(layers, 5), {plan for _, plan in passes}
    assert plan is not None and plans == {None, plan} | ({LayerOrder.whole(5)} if calibrate else set())


@pytest.mark.parametrize("shape", ["chain", "grown:12"])
def test_each_token_is_calibrated_once(
    deep: PreTrainedModel, deep_draft: PreTrainedModel, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = passes_of(monkeypatch)
    table = {"model": "draft", "cache": "streaming", "layers": "groups:2", "draft": shape}
    result, _ = run(deep, deep_draft, [table])
    calibrated = [sum(counts) for counts, plan in passes if plan == LayerOrder.whole(5)]
    read = len(PROMPT) - 1  # the prompt goes through all layers in turn, too
    while read > 0:
        read -= calibrated.pop(0)
    assert read == 0
    # What the last round yields is drafted below by nobody; the prompt's last token is the first.
    assert result.rounds - 1 <= len(calibrated) <= result.rounds
    assert sum(calibrated) <= len(result.tokens)


@pytest.mark.parametrize("calibrate", [True, False])
def test_a_calibrated_draft_begins_as_the_target_would(deep: PreTrainedModel, calibrate: bool) -> None:
    table = {"model": "target", "cache": "retrieved", "layers": "skip:1", "calibrate": calibrate}
    _, rounds = run(deep, None, [table], sizes=EVERYTHING)
    accepted = [times.accepted for times in rounds if times.proposed]
    assert all(accepted) == calibrate
    assert min(accepted) < DEPTH, "without a layer, the rest is a guess"
