"""Tokens that are drafted on the device: when the host learns of them, and what becomes of their KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import pytest
import torch
from enumeration import FullTokenCache, Parts, ScriptedDraws
from tiny_models import byte_ids, noisy_copy, tiny_target

from offload_rt import LLM, SamplingParams
from offload_rt.drafting.base import NoDrafter, Text
from offload_rt.drafting.drawn import DrawnTokens
from offload_rt.drafting.hierarchical import VerifierDrafter
from offload_rt.drafting.verifier import Sampling, Verifier
from offload_rt.model import NotANumber
from offload_rt.sampling import GeneratorDraws, SamplingLaw

PROMPT = [1, 3, 0, 2, 4]
UNUSED: dict[str, Any] = {"read": None, "on_nan": None}


def test_a_host_that_looks_waits_once() -> None:
    waits: list[Sequence[torch.Tensor]] = []

    def read(*tensors: torch.Tensor) -> list[torch.Tensor]:
        waits.append(tensors)
        return list(tensors)

    tokens = DrawnTokens(torch.tensor([5, 6, 7]), torch.tensor(False), read, UNUSED["on_nan"])
    assert len(tokens) == 3 and not waits
    assert (tokens[1], tokens[:-1], list(tokens)) == (6, [5, 6], [5, 6, 7])
    assert len(waits) == 1


def test_tokens_that_were_brought_along_are_not_waited_for() -> None:
    tokens = DrawnTokens(torch.tensor([5]), torch.tensor(False), **UNUSED)
    tokens.arrive(torch.tensor([5]), torch.tensor(False))
    assert tokens[0] == 5


def test_tokens_drawn_from_nan_are_refused() -> None:
    def refuse(tokens: list[int]) -> NoReturn:
        raise NotANumber(str(tokens))

    nan = torch.tensor(True)
    tokens = DrawnTokens(torch.tensor([5, 6]), nan, lambda *tensors: list(tensors), refuse)
    with pytest.raises(NotANumber, match=r"\[5, 6\]"):
        tokens[0]
    with pytest.raises(NotANumber, match=r"\[5, 6\]"):
        tokens.arrive(torch.tensor([5, 6]), nan)


class Setting:
    """A greedy target with a drafter below it: the small model, the target over a cheaper cache, or both.

    Attributes:
        passed: new tokens of each pass of the lowest level.
    """

    def __init__(self, parts: Parts, below: str) -> None:
        def drafter(full: FullTokenCache, sampling: Sampling) -> VerifierDrafter:
            if below == "small":
                return parts.draft_model(sampling)
            if below == "retrieved":
                return parts.derived("retrieved", full, sampling, NoDrafter(), 0)
            return parts.derived("retrieved", full, sampling, parts.draft_model(sampling), 2)

        sampling = Sampling(SamplingLaw(0.0), ScriptedDraws())
        composition = parts.full(drafter)
        self.verifier: Verifier = composition(sampling)
        cache: Any = self.verifier.cache
        cache.prefill(PROMPT[:-1])
        self.text = list(PROMPT)
        top = self.verifier.drafter
        assert isinstance(top, VerifierDrafter)
        self.drafter = top
        top.prefill(Text(self.text))
        self.passed: list[int] = []

        def counted(length: int, queries: int) -> float:
            self.passed.append(queries)
            return 0.0

        lowest = top.verifier.drafter if below == "both" else top
        assert isinstance(lowest, VerifierDrafter)
        lowest.verifier._pass_cost = counted

    def round(self, count: int) -> int:
        """A round; how many drafted tokens were accepted."""
        result = self.verifier.round(Text(self.text), count)
        self.text += result.tokens
        self.drafter.settle(Text(self.text))
        return result.accepted


def test_a_small_model_passes_over_every_token_once() -> None:
    setting = Setting(Parts(seed=3), "small")
    seen: set[int] = set()
    for _ in range(30):
        setting.passed.clear()
        held = setting.drafter.verifier.cache.length
        accepted = setting.round(3)
        seen.add(accepted)
        # What the cache lacked of the text goes first, then one drawn token after the other.
        assert setting.passed == [len(setting.text) - accepted - 1 - held, 1, 1]
        # Accepted tokens stay, but for the last one drawn, whose KV was never computed.
        kept = min(accepted, 2)
        assert setting.drafter.verifier.cache.length == len(setting.text) - accepted - 1 + kept
    assert seen == {0, 1, 2, 3}


def test_a_small_model_below_a_middle_level_does_too() -> None:
    """Round after round of the middle level, before anything is settled."""
    setting = Setting(Parts(seed=3), "both")
    middle, seen = setting.drafter.verifier, set()
    text = Text(setting.text)
    due = 1
    for _ in range(20):
        setting.passed.clear()
        result = middle.round(text, 2)
        assert setting.passed == [due, 1]
        text = text.extended(result.tokens)
        due = 2 if result.accepted == 2 else 1  # the last one drawn is lacking too
        seen.add(result.accepted)
    assert seen == {0, 1, 2}


def test_a_draft_that_is_thrown_away_is_not_waited_for() -> None:
    setting = Setting(Parts(seed=4), "retrieved")
    for _ in range(3):
        setting.drafter.propose(Text(setting.text), 3)
        setting.round(0)
    setting.round(3)
    assert setting.drafter.verifier.stats.host_reads == 0
    # A small model must know which of its tokens stand.
    small = Setting(Parts(seed=4), "small")
    small.drafter.propose(Text(small.text), 3)
    before = small.drafter.verifier.stats.host_reads
    small.round(0)
    assert small.drafter.verifier.stats.host_reads == before + 1


NAN = {"speculation.step_down": False, "draft.sinks": 4, "draft.window": 28, "speculation.gamma2": 4}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("config", ["naive", "triforce"])
def test_nan_in_drawn_tokens_names_the_draft(config: str, temperature: float) -> None:
    """It comes up after the prompt was read, where nobody looks at each pass."""
    target = tiny_target("llama")
    draft = noisy_copy(target)
    draft.config._name_or_path = "the/draft"
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=1)
    with LLM.from_models(target, draft, config=config, overrides=NAN) as llm:
        events = llm.stream(byte_ids(60), params)
        next(events)
        draft.model.layers[1].mlp.register_forward_hook(
            lambda module, inputs, output: torch.full_like(output, torch.nan)
        )
        with pytest.raises(NotANumber, match=r"^the/draft: .*output of layer 1"):
            list(events)


def test_the_host_reads_drafts_of_the_program_too() -> None:
    """By their tokens, whoever asks: here without a verdict over them."""
    setting = Setting(Parts(seed=5), "retrieved")
    setting.verifier.sampling.law = SamplingLaw(1.0)
    setting.verifier.sampling.draws = GeneratorDraws(0)
    draft = setting.drafter.propose(Text(setting.text), 3)
    assert len(list(draft.tokens)) == 3 and draft.laws is not None
    assert setting.drafter.verifier.stats.host_reads == 1
