"""Drafted tokens stay on the device until the host reads them, and their KV is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.enumeration import ScriptedDraws, Text
from support.small_engine import CPU
from support.small_engine import SIZES as ENGINE
from support.table_models import Parts, small_model
from support.tiny_models import byte_ids, noisy_copy
from torch import Tensor
from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams
from offload_rt.config.draft_shape import DraftShape
from offload_rt.drafting.model_drafter import ModelDrafter
from offload_rt.drafting.verifier import Sampling
from offload_rt.engine.batching import run_alone
from offload_rt.engine.engine import Engine
from offload_rt.engine.sequence import TokenSequence
from offload_rt.model.decoder import NotANumber
from offload_rt.model.work import LevelStats
from offload_rt.sampling.rejection import Draft
from offload_rt.sampling.sampler import Sampler
from offload_rt.sampling.tokens import Tokens


def on_device(*ids: int, **given: Any) -> Tokens:
    return Tokens(tensor=torch.tensor(ids), **given)


def test_tokens_arrive_on_the_host_once_they_are_read() -> None:
    with pytest.raises(ValueError, match="host or a tensor on a device"):
        Tokens()
    parts = [Tokens([1, 2]), on_device(3), on_device(4, 5)]
    assert (len(parts[0]), parts[0].arrived, parts[0].known, parts[0].pending()) == (2, True, [1, 2], [])
    assert parts[0].on(CPU) is parts[0].on(CPU), "uploaded once"
    with pytest.raises(RuntimeError, match="read them first"):
        _ = parts[2].known
    parts[2].arrive(parts[2].pending())
    whole = Tokens.joined(parts)
    assert not whole.arrived and whole.on(CPU).tolist() == [1, 2, 3, 4, 5]
    deeper = Tokens.joined([whole, on_device(6)])
    deeper.arrive(deeper.pending())
    assert deeper.known == [1, 2, 3, 4, 5, 6] and not deeper.pending()
    assert [part.known for part in (whole, *parts)] == [[1, 2, 3, 4, 5], [1, 2], [3], [4, 5]]
    assert Tokens.joined(parts).arrived and Tokens.joined(parts[:1]) is parts[0]


@pytest.mark.parametrize("bad", [None, 0, 2])
def test_tokens_drawn_from_nan_are_refused(bad: int | None) -> None:

    def refuse() -> None:
        raise NotANumber(str(whole.known))

    nan = [torch.tensor(number == bad) for number in range(3)]
    whole = Tokens.joined([on_device(7 + n, nan=nan[n], on_nan=refuse) for n in range(3)])
    read = whole.pending()
    assert len(read) == 2
    if bad is None:
        whole.arrive(read)
    else:
        with pytest.raises(NotANumber, match=r"\[7, 8, 9\]"):
            whole.arrive(read)
    assert whole.known == [7, 8, 9]


SIZES = ENGINE | {"streaming.window": 252, "speculation.gamma2": 3}


class Setting:
    """A sequence and its drafter.

    Attributes:
        passed: number of new tokens of each pass of the small model.
    """

    def __init__(self, engine: Engine, sequence: TokenSequence) -> None:
        self.engine = engine
        self.sequence = sequence
        self.passed: list[int] = []
        self.verifier = sequence.verifier
        assert isinstance(self.verifier.drafter, ModelDrafter)
        self.drafter = self.verifier.drafter

    @property
    def stats(self) -> LevelStats:
        return self.drafter.stats

    def draft(self, shape: DraftShape) -> Draft:
        return run_alone(self.drafter.proposal(self.sequence.view, shape).complete())

    def round(self) -> int:
        """Takes a decode step; returns the number of accepted tokens."""
        (result,) = self.engine.step([self.sequence])
        assert not isinstance(result, Exception)
        return result.accepted


@contextmanager
def opened(
    target: PreTrainedModel, config: str, temperature: float = 0.0, **overrides: object
) -> Iterator[Setting]:
    params = SamplingParams(max_tokens=200, temperature=temperature, seed=1)
    with LLM.from_models(target, noisy_copy(target), config=config, overrides=SIZES | overrides) as llm:
        sequence = llm.engine.open(byte_ids(90), params.max_tokens)
        llm.engine.begin(sequence, sequence.plan, llm.continuation(params))
        setting = Setting(llm.engine, sequence)
        small = llm.engine.draft
        if small is not None:
            forward = small.forward

            def counted(inputs: Any, order: Any = None) -> Any:
                setting.passed += [part.new.count for part in inputs]
                return forward(inputs, order)

            small.forward = counted  # type: ignore[method-assign]
        yield setting


def test_a_small_model_passes_over_every_token_once(target: PreTrainedModel) -> None:
    seen: set[int] = set()
    with opened(target, "naive") as setting:
        cache, text = setting.drafter.cache, setting.sequence.tokens
        for _ in range(30):
            setting.passed.clear()
            before = cache.verified_length
            accepted = setting.round()
            seen.add(accepted)
            # First the tokens that the cache lacks, then one drawn token after the other.
            assert setting.passed == [len(text) - accepted - 1 - before, 1, 1]
            # The KV of accepted tokens stays. That of the last one drawn was never computed.
            assert cache.verified_length == len(text) - accepted - 1 + min(accepted, 2)
            assert len(cache.speculative) == 0
    assert seen == {0, 1, 2, 3}
    with opened(target, "triforce") as setting:  # rounds of the middle level, before anything is verified
        middle, view, due = setting.drafter, setting.sequence.view, 1
        seen.clear()
        for _ in range(20):
            setting.passed.clear()
            result = run_alone(middle.round(view, DraftShape(depth=2)))
            assert setting.passed == [due, 1]
            view = view.extended(result.tokens)
            due = 2 if result.accepted == 2 else 1  # the last one drawn is lacking too
            seen.add(result.accepted)
    assert seen == {0, 1, 2}


SHAPES = [DraftShape(depth=3), DraftShape("sequences", 3, (2,)), DraftShape("tree", 2, (3, 2))]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", ["naive", "retrieval"])
def test_a_draft_is_read_together_with_its_verdict(
    target: PreTrainedModel, config: str, shape: DraftShape, temperature: float
) -> None:
    with opened(target, config, temperature) as setting:
        before = setting.stats.host_reads
        for _ in range(3):
            setting.draft(shape)  # thrown away
        draft = setting.draft(shape)
        assert len(draft) == shape.size and not draft.tokens.arrived
        verifier, view = setting.verifier, setting.sequence.view
        verification = verifier.verification(view, draft)
        (output,) = verifier.model.forward([verification.input])
        result = run_alone(verifier.verdict(view, draft, verification.input, output))
        assert setting.stats.host_reads == before
        assert verifier.stats.host_reads == 1
        assert draft.tokens.arrived  # the verdict brought them
        path = [draft.tokens.known.index(token) for token in result.tokens[:-1]]
        assert len(path) == result.accepted
        # The drafter's cache holds the accepted tokens, but for leaves of a small model's draft.
        cache, text = setting.drafter.cache, view.extended(result.tokens[:-1])
        found = cache.speculative.match(text.part(cache.verified_length))
        computed = result.accepted if config == "retrieval" else min(result.accepted, shape.depth - 1)
        assert cache.verified_length + len(found) == len(view) + computed


def test_tokens_of_a_draft_made_step_by_step_are_known(target: PreTrainedModel) -> None:
    with opened(target, "retrieval") as setting:
        proposal = setting.drafter.proposal(setting.sequence.view, DraftShape(depth=3))
        for steps in (1, 2, 3):
            assert run_alone(proposal.step())
            assert len(proposal.draft().tokens.known) == setting.stats.host_reads == steps
        assert not run_alone(proposal.step())
        assert setting.stats.host_reads == 3


@pytest.mark.parametrize("shape", [DraftShape(depth=3), DraftShape("grown", 3, nodes=9)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_displaced_draft_is_recomputed_in_one_pass(
    target: PreTrainedModel, shape: DraftShape, temperature: float
) -> None:
    with opened(target, "naive", temperature) as setting:
        view, width = setting.sequence.view, shape.per_pass
        undisturbed = run_alone(setting.drafter.proposal(view.extended([1]), shape).complete())
        # The last token and the outcome, then each level but the last.
        assert setting.passed == [2, width, width]
        first, second = (setting.drafter.proposal(view.extended([token]), shape) for token in (1, 2))
        for proposal in (first, first, second):
            assert run_alone(proposal.step())
        setting.passed.clear()
        draft = run_alone(first.complete())
        assert setting.passed == [1 + 2 * width]  # the outcome, and both levels
        assert len(draft) == len(undisturbed) == 3 * width
        if temperature == 0.0:
            known = [one.tokens.on(CPU).tolist() for one in (draft, undisturbed)]
            assert known[0] == known[1] and draft.tree == undisturbed.tree


def test_greedy_siblings_differ_where_tokens_are_equally_likely() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = DraftShape("tree", 1, (4,))
    for _ in range(100):
        parts, row = Parts(seed=0), torch.randint(3, (256,), generator=generator).double()
        parts.small.logits = lambda view, entries, row=row: row  # type: ignore[method-assign,misc]
        text = Text(parts.full(small_model())(Sampling(Sampler(0.0), ScriptedDraws())), [1, 2], 9, shape)
        draft = run_alone(text.verifier.drafter.proposal(text.view, shape).complete())
        tokens = draft.tokens.on(CPU).tolist()
        assert tokens[0] == int(row.argmax()), "the lowest ID, as the verifier takes it"
        assert len(set(tokens)) == 4 and all(row[token] == 2.0 for token in tokens)


NAN = SIZES | {"streaming.window": 28, "speculation.gamma2": 4}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("config", ["naive", "triforce"])
def test_nan_in_drawn_tokens_names_the_draft(
    target: PreTrainedModel, config: str, temperature: float
) -> None:
    """It appears after the prompt was read, when the passes of a draft are not checked one by one."""
    draft = noisy_copy(target)
    draft.config._name_or_path = "the/draft"
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=1)

    def spoiled(module: object, inputs: object, output: Tensor) -> Tensor:
        return torch.full_like(output, torch.nan)

    with LLM.from_models(target, draft, config=config, overrides=NAN) as llm:
        events = llm.stream(byte_ids(60), params)
        next(events)
        draft.model.layers[1].mlp.register_forward_hook(spoiled)
        with pytest.raises(NotANumber, match=r"^the/draft: .*output of layer 1"):
            list(events)
