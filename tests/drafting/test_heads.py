"""Draft heads: what they compute, the states they continue from, their drafts, their files, and training."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.recording import RecordingCapture
from support.reference_head import ReferenceHead
from support.small_engine import LINKS, PARAMS, PROMPT, again, engine_overrides
from support.tiny_heads import FORMATS, SPECULATORS, Change, write_head
from support.tiny_models import byte_ids, byte_tokenizer, real_text, tiny_target, to
from torch import Tensor
from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams
from offload_rt.attention.selector import choose_backend
from offload_rt.caches.head import HeadCache
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.target_states import TargetStates
from offload_rt.drafting.base import TokenView
from offload_rt.drafting.head_drafter import HeadDrafter
from offload_rt.drafting.head_model import HeadModel
from offload_rt.drafting.verifier import Sampling
from offload_rt.engine.batching import run_alone
from offload_rt.errors import UsageError
from offload_rt.model.cuda_graphs import PassGraphs
from offload_rt.model.decoder import NotANumber
from offload_rt.model.head_files import load_head
from offload_rt.model.local_heads import DEMO_HEAD, find_head
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.model.runner import CausalModel
from offload_rt.sampling.sampler import GeneratorDraws, Sampler
from tools.demo_training import train_head
from tools.demo_training.windows import WindowSampler

CPU = torch.device("cpu")
HIDDEN, TOKENS = 64, 256
TAPS = 1, 1, 2


@pytest.fixture(scope="module")
def folder(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for `target`, of half of its vocabulary."""
    return write_head(target, tmp_path_factory.mktemp("heads") / "head", drafted=128, taps=TAPS)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    file = folder / "model.safetensors"
    return load_file(file) if file.exists() else torch.load(folder / "pytorch_model.bin", weights_only=True)


def reference_of(folder: Path, target: PreTrainedModel) -> ReferenceHead:
    before = json.loads((folder / "config.json").read_text()).get("norm_before_residual", False)
    embedding: Any = target.get_input_embeddings()
    return ReferenceHead(tensors_of(folder), embedding.weight, norm_before_residual=before)


def cache_of(head: Any, window: int = 64) -> HeadCache:
    return HeadCache(
        head.kv_layout(),
        head.rotary_frequencies,
        head.state_size,
        sinks=4,
        window=window,
        backend=choose_backend(CPU),
    )


# ------------------------------------------------------------------------------------ what they compute

OTHERS: dict[str, dict[str, Any]] = {
    "whole vocabulary": {"drafted": None},
    "two layers": {"layers": 2},
    "own embedding": {"own_embedding": True},
}
FORMS: dict[str, dict[str, Any]] = {form: {"form": form} for form in FORMATS} | OTHERS


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMS)
def test_passes_over_trees_are_what_published_heads_compute_along_each_path(
    target: PreTrainedModel, tmp_path: Path, name: str
) -> None:
    folder = write_head(target, tmp_path / "head", **{"drafted": 100, **FORMS[name]})
    runner = CausalModel(target, "tiny")
    model, reference = HeadModel(load_head(folder, runner), "head"), reference_of(folder, target)
    runner.restore()
    draw = random.Random(0)
    sequences = [Followed(model, reference, byte_ids(9)), Followed(model, reference, byte_ids(30)[11:])]
    for _ in range(8):
        inputs = [sequence.drawn(draw) for sequence in sequences]
        for sequence, output in zip(sequences, model.forward(inputs), strict=True):
            sequence.check(output)


class Followed:
    """A sequence that a head drafts below at random, beside what the reference computes of it.

    Attributes:
        paths: tokens of every entry and of those above it, and the states before each of these.
    """

    def __init__(self, model: HeadModel, reference: ReferenceHead, prompt: list[int]) -> None:
        self.reference, self.prompt = reference, prompt
        self.states = torch.randn(len(prompt), HIDDEN)  # of the target
        self.paths: list[tuple[list[int], Tensor]] = []
        self.new: list[tuple[list[int], Tensor]] = []
        self.cache = cache_of(model.head)
        self.cache.reset()
        tokens = prompt[1:]
        new = NewTokens.below(self.cache.speculative, range(-1, len(tokens) - 1), tokens)
        (output,) = model.forward([PassInput(self.cache, new, len(tokens), before=self.states[:-1])])
        expected = reference.run(prompt, self.states[:-1].double())
        close(output.logits, reference.logits(expected))
        self.cache.commit(range(len(tokens)))
        self.cache.settle()

    def after(self, path: tuple[list[int], Tensor]) -> Tensor:
        """The head's states after the prompt's tokens but the first, and after those of a path."""
        tokens, before = path
        return self.reference.run([*self.prompt, *tokens], torch.cat([self.states[:-1].double(), before]))

    def drawn(self, draw: random.Random) -> PassInput:
        """A pass of new tokens below any that are there; the first may be given the target's state."""
        count, held = draw.randint(1, 4), len(self.paths)
        parents = [draw.randrange(-1, held + at) for at in range(count)]
        tokens = [draw.randrange(TOKENS) for _ in range(count)]
        before = self.states[-1:] if parents[0] == -1 and draw.random() < 0.7 else None
        self.new = []
        for at, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
            above = [*self.paths, *self.new][parent] if parent >= 0 else ([], torch.empty(0, HIDDEN))
            last = self.states[-1:].double() if before is not None and not at else self.after(above)[-1:]
            self.new.append(([*above[0], token], torch.cat([above[1].double(), last])))
        new = NewTokens.below(self.cache.speculative, parents, tokens)
        return PassInput(self.cache, new, draw.randint(1, count), states=True, before=before)

    def check(self, output: PassOutput) -> None:
        assert output.states is not None
        expected = torch.cat([self.after(path)[-1:] for path in self.new])[-len(output.states) :]
        close(output.states, expected)
        close(output.logits, self.reference.logits(expected))
        self.cache.commit(range(len(self.new)))
        self.paths += self.new
        if len(self.paths) > 6:
            roots = [at for at, (tokens, _) in enumerate(self.paths) if len(tokens) == 1]
            self.cache.keep(roots)
            self.paths = [self.paths[at] for at in roots]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=3e-4, atol=3e-4)


@torch.inference_mode()
def test_a_long_prompt_is_seen_through_sinks_and_a_window(target: PreTrainedModel, folder: Path) -> None:
    """As by a head that reads the first tokens, and right behind them the newest ones."""
    runner = CausalModel(target, "tiny")
    head = load_head(folder, runner)
    runner.restore()
    model, reference = HeadModel(head, "head"), reference_of(folder, target)
    tokens, states = byte_ids(90), torch.randn(90, HIDDEN)
    whole = TargetStates("", 4, 16, HIDDEN, torch.float32, CPU)
    for start in range(0, 88, 11):
        whole.append(start, states[start : start + 11])
    drafter = HeadDrafter(model, cache_of(head, 16), whole, Sampling(Sampler(), GeneratorDraws(0)))
    run_alone(drafter.prefill(TokenView(tokens)))
    cache = drafter.cache
    assert cache.verified_length == 89 and cache.entries == 20
    new = NewTokens.below(cache.speculative, [-1], tokens[-1:])
    (output,) = model.forward([PassInput(cache, new, 1, before=states[88:89])])
    seen = [*range(1, 5), *range(73, 90)]
    expected = reference.run([0, *(tokens[at] for at in seen)], states[[at - 1 for at in seen]].double())
    close(output.logits, reference.logits(expected[-1:]))


@torch.inference_mode()
def test_recorded_passes_are_those_that_are_computed(target: PreTrainedModel, folder: Path) -> None:
    runner = CausalModel(to(copy.deepcopy(target), torch.float64), "tiny")
    head, draw = load_head(folder, runner), random.Random(0)
    capture = RecordingCapture()
    graphs = PassGraphs("head", CPU, capture, lambda text: pytest.fail(text))
    models = HeadModel(head, "computed"), HeadModel(head, "recorded", graphs)
    caches = cache_of(head, 16), cache_of(head, 16)
    models[1].prepare(caches[1], [1, 2])
    for cache in caches:
        cache.reset()
    for step in range(60):
        count, held = draw.randint(1, 3), len(caches[0].speculative)
        parents = [draw.randrange(-1, held + at) for at in range(count)]
        tokens = [draw.randrange(TOKENS) for _ in range(count)]
        before = torch.randn(draw.randint(1, count), HIDDEN, dtype=torch.float64)
        given = before if not step or draw.random() < 0.5 else None
        outputs = []
        for model, cache in zip(models, caches, strict=True):
            new = NewTokens.below(cache.speculative, parents, tokens)
            (output,) = model.forward([PassInput(cache, new, count, states=True, before=given)])
            cache.commit(range(count))
            if step % 4 == 3:
                line = cache.speculative.sees[-1]
                cache.keep([entry for entry in range(len(cache.speculative)) if line >> entry & 1])
                cache.settle()
            outputs.append(output)
        computed, recorded = outputs
        torch.testing.assert_close(recorded.logits, computed.logits)
        torch.testing.assert_close(recorded.states, computed.states)
    assert caches[1].verified_length > 20 and capture.captured == 3


# ------------------------------------------------------------------------- the states it continues from


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_states_are_those_of_the_first_and_the_newest_tokens(data: st.DataObject) -> None:
    sinks, window = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    kept = TargetStates("head", sinks, window, 1, torch.float32, CPU)
    known: dict[int, float] = {}
    first: list[float] = []  # of the first tokens
    end = start = 0  # at least the states of `start` to `end` are kept
    for number in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()) or not end:
            at = end + data.draw(st.sampled_from([0, 0, 0, 2]))
            values = [float(100 * number + one) for one in range(data.draw(st.integers(1, 9)))]
            kept.append(at, torch.tensor(values)[:, None])
            start = max(start if at == end else at, at + len(values) - window)
            if at == len(first):
                first += values
            known |= dict(enumerate(values, at))
            end = at + len(values)
        else:
            end = data.draw(st.integers(0, end))
            kept.truncate(end)
            start = min(start, end)
            first = first[:end]
        assert kept.end == end
        rows = kept.rows(start, end)
        assert rows is not None and rows[:, 0].tolist() == [known[at] for at in range(start, end)]
        parts = kept.parts(end)
        if parts and len(parts) == 2:
            assert parts[0][0] == 0 and parts[0][1][:, 0].tolist() == first[: len(parts[0][1])]
        saved = kept.saved(end)
        if saved is not None:
            other = TargetStates("head", sinks, window, 1, torch.float32, CPU)
            other.take(saved, end)
            for (at, rows), (found_at, found) in zip(parts, other.parts(end), strict=True):
                assert at == found_at and torch.equal(rows, found)
            stranger = TargetStates("another", sinks, window, 1, torch.float32, CPU)
            stranger.take(saved, end)
            assert not stranger.parts(end)


def test_states_of_the_first_tokens_outlive_a_reading_that_is_ended_early() -> None:
    states, kept, other = (
        torch.rand(200, 1),
        *(TargetStates("head", 4, 16, 1, torch.float32, CPU) for _ in range(2)),
    )
    (part,) = kept.wanted(0, 100, 200)
    kept.append(0, states[part])
    saved = kept.saved(100)
    assert saved is not None
    other.take(saved, 100)
    assert not other.parts(100)
    (part,) = other.wanted(100, 100, 200)
    other.append(100 + part.start, states[100:][part])
    (first, sinks), (start, rows) = other.parts(200)
    assert (first, start) == (0, 184)
    assert torch.equal(sinks, states[:4]) and torch.equal(rows, states[184:])


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("levels", [["head"], ["head", "target:retrieved"]], ids=["alone", "hierarchy"])
def test_passes_are_given_the_states_of_the_target(
    target: PreTrainedModel,
    plain_tokens: list[int],
    folder: Path,
    levels: list[str],
    link: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the hierarchy also those of the middle level's unverified rounds, which sees everything here."""
    found: list[tuple[list[int], Tensor]] = []
    forward = HeadDrafter.forward

    def noted(drafter: HeadDrafter, view: TokenView, *positional: Any, **arguments: Any) -> Any:
        request = forward(drafter, view, *positional, **arguments)
        if request.input.before is not None and len(request.input.before):
            first = request.input.positions[0]
            found.append((view.part(0, first + len(request.input.before)), request.input.before))
        return request

    monkeypatch.setattr(HeadDrafter, "forward", noted)
    overrides = engine_overrides(ahead=2) | {"speculation.levels": levels, "head.path": str(folder)}
    overrides |= {"retrieval.budget": 512}
    with LLM.from_models(target, config="heads", overrides=overrides, link=LINKS[link]()) as llm:
        result = llm.generate(PROMPT, PARAMS)
    assert result.tokens == plain_tokens
    assert (result.timings.accepted_tokens == result.timings.drafted_tokens) == (len(levels) == 2)
    reference, runner = reference_of(folder, target), CausalModel(target, "tiny")
    for tokens, before in found:
        taken, _ = train_head.target_states(runner, torch.tensor([tokens]), TAPS)
        expected = reference.first_states([part[0] for part in taken])[-len(before) - 1 : -1]
        torch.testing.assert_close(before.double(), expected, rtol=1e-3, atol=1e-3)
    runner.restore()
    assert len(found) >= len(result.tokens) / (6 if len(levels) == 1 else 2)
    assert result.levels[0].proposed > 0


# ------------------------------------------------------------------------------------------ drafts

LEVELS: dict[str, list[object]] = {
    "grown": [{"model": "head", "draft": "grown:12"}],
    "merged": [{"model": "head", "merge": "suffix"}],
    "sequoia": [{"model": "head", "draft": "sequoia:12"}],
    "tree, streaming": [{"model": "head", "draft": "tree:2,2"}, "target:streaming"],
    "three": ["head", "target:streaming", "target:retrieved"],
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)
def test_greedy_tokens_are_those_of_plain_decoding(
    target: PreTrainedModel, plain_tokens: list[int], folder: Path, levels: list[object], link: str
) -> None:
    overrides = engine_overrides(ahead=2) | {"speculation.levels": levels, "head.path": str(folder)}
    overrides |= {"head.window": 20}  # which the prompt exceeds
    with LLM.from_models(target, config="heads", overrides=overrides, link=LINKS[link]()) as llm:
        result = llm.generate(PROMPT, PARAMS)
    assert result.tokens == plain_tokens
    assert result.levels[0].name == "head" and result.levels[0].proposed > 0


def test_a_context_keeps_its_states_saved_forked_and_rewound(
    target: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    overrides: dict[str, object] = {"head.path": str(folder), "speculation.levels": ["head"]}
    overrides |= {"speculation.gamma2": 3, "speculation.step_down": False}

    def drafted(context: Any) -> tuple[list[int], int, int]:
        result = context.generate((), SamplingParams(max_tokens=12, ignore_eos=True))
        return result.tokens, result.levels[0].proposed, result.levels[0].accepted

    with LLM.from_models(target, config="heads", overrides=overrides) as llm:
        with llm.read(PROMPT) as context:
            context.save(tmp_path / "saved")
            with context.fork() as fork:
                expected = drafted(context)
                assert drafted(fork) == expected
            context.rewind(len(PROMPT))
            assert drafted(context) == expected
        with llm.load(tmp_path / "saved") as loaded:
            assert drafted(loaded) == expected
    plain = LLM.from_models(target, config="plain")
    with plain as llm, llm.load(tmp_path / "saved") as loaded:  # without a head they are not needed
        assert loaded.generate((), SamplingParams(max_tokens=12, ignore_eos=True)).tokens == expected[0]


def test_a_head_that_is_named_later_drafts_too(target: PreTrainedModel, folder: Path) -> None:
    overrides: dict[str, object] = {"head.path": str(folder), "speculation.step_down": False}
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM.from_models(target, config="plain") as llm, llm.read(PROMPT) as context:
        expected = context.generate((), params)
        context.rewind(len(PROMPT))
        result = context.generate((), params, "heads", overrides)
    assert result.tokens == expected.tokens and result.levels[0].proposed > 0


def test_sequences_of_a_batch_draft_as_each_alone(target: PreTrainedModel, folder: Path) -> None:
    overrides: dict[str, object] = {"head.path": str(folder), "speculation.levels": ["head"]}
    overrides |= {"speculation.gamma2": 3, "speculation.step_down": False}
    prompts = [PROMPT, byte_ids(70), byte_ids(33)[5:]]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with LLM.from_models(target, config="heads", overrides=overrides) as llm:
        apart = [llm.generate(prompt, params) for prompt in prompts]
        together = llm.generate(prompts, params)
    for alone, one in zip(apart, together, strict=True):
        assert one.tokens == alone.tokens and one.levels[0].accepted == alone.levels[0].accepted


def test_the_demo_head_is_often_right() -> None:
    prompt = "It was a cold evening, and the old man sat before the fire with his daughter. He had been to"
    overrides: dict[str, object] = {"speculation.levels": ["head"], "speculation.gamma2": 4}
    overrides["speculation.step_down"] = False
    with LLM(config="heads", dtype="float32", overrides=overrides) as llm:
        text, params = llm.read(prompt), SamplingParams(max_tokens=64, ignore_eos=True)
        result = again(text, params)
        assert again(text, params, "plain").tokens == result.tokens
    assert result.rounds < 32


def test_nan_logits_name_the_head(folder: Path, target: PreTrainedModel) -> None:
    runner = CausalModel(target, "tiny")
    model = HeadModel(load_head(folder, runner), "head")
    runner.restore()
    with pytest.raises(NotANumber, match="head: its logits are NaN"):
        model.raise_nan(PassInput(cache_of(model.head), NewTokens.chain(1), 1))


# ---------------------------------------------------------------------------------------- its files


def without(*names: str) -> Change:
    return lambda config, tensors: [tensors.pop(name) for name in names]


def stated(**settings: Any) -> Change:
    return lambda config, tensors: config.update(settings)


def having(name: str, tensor: Tensor) -> Change:
    return lambda config, tensors: tensors.update({name: tensor})


REFUSED: dict[str, tuple[Change, str]] = {
    "lacks": (without("midlayer.self_attn.q_proj.weight"), "layers.0.self_attn.q_proj.weight is missing"),
    "no map": (without("d2t"), "d2t is missing"),
    "more": (having("bias", torch.zeros(1)), "bias has no place in an EAGLE-3 head"),
    "misshapen": (
        having("fc.weight", torch.zeros(64, 64)),
        "fc.weight is [64, 64] in the files and [64, 192] by",
    ),
    "NaN": (having("norm.weight", torch.full((64,), torch.nan)), "norm.weight has NaN or infinite entries"),
    "beyond": (having("d2t", torch.full((128,), 200)), "d2t names tokens twice or beyond the vocabulary"),
    "other maps": (having("t2d", torch.arange(256) < 128), "d2t and t2d name other tokens"),
    "another vocabulary": (
        stated(vocab_size=300),
        "is for a vocabulary of 300 tokens, and the target's has 256",
    ),
    "wider": (stated(target_hidden_size=96), "is for a hidden size of 96, and the target's is 64"),
    "deeper": (stated(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}), "has 2 layers"),
    "another kind": (stated(architectures=["MedusaModel"]), "is no EAGLE-3 head by its config.json"),
    "whole": (stated(draft_vocab_size=None), "d2t is [128] in the files and [256] by the config"),
    "parallel": (stated(parallel_drafting=True), "drafts several tokens in a pass"),
    "speculators": (
        stated(speculators_model_type="dflash"),
        "is of kind 'dflash', and only eagle3 is supported",
    ),
    "sizes": (stated(hidden_size="wide"), "config.json cannot be a head's"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_no_head_for_the_target_are_refused(
    target: PreTrainedModel, tmp_path: Path, name: str
) -> None:
    change, message = REFUSED[name]
    folder = write_head(target, tmp_path / "harmed", drafted=128, change=change)
    with pytest.raises(UsageError) as refused:
        LLM.from_models(target, config="heads", overrides={"head.path": str(folder)})
    assert message in str(refused.value) and str(folder) in str(refused.value)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "there is no config.json in it"),
    "no object": (lambda folder: (folder / "config.json").write_text("[]"), "config.json is no object"),
    "torn": (
        lambda folder: (folder / "model.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:-9]
        ),
        "model.safetensors is truncated or corrupt",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "there are no weights in it"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused(
    target: PreTrainedModel, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    harm, message = BROKEN[name]
    folder = write_head(target, tmp_path / "harmed", drafted=128)
    harm(folder)
    with pytest.raises(UsageError) as refused:
        LLM.from_models(target, config="heads", overrides={"head.path": str(folder)})
    assert message in str(refused.value) and str(folder) in str(refused.value)


def test_a_target_without_a_head_says_how_to_name_one(target: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="has no draft head .* name one with --head"):
        LLM.from_models(target, config="heads")
    with pytest.raises(UsageError, match="has no draft head"):
        LLM.from_models(target, config="heads", overrides={"head.path": "none"})
    with LLM.from_models(target, config="plain") as llm:
        text, params = llm.read(PROMPT), SamplingParams(max_tokens=4)
        expected = again(text, params).tokens
        with pytest.raises(UsageError, match="has no draft head"):
            text.generate((), PARAMS, "heads")
        assert again(text, params).tokens == expected


def test_a_head_is_found_by_its_sizes_and_its_name(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    settings_file = tmp_path / "settings.toml"
    settings_file.write_text(f'folders = ["{models}"]\n')
    monkeypatch.setenv("OFFLOAD_RT_CONFIG", str(settings_file))
    name = str(models / "Some-Model-7B")
    assert find_head(name, target.config) is None
    write_head(target, models / "some_model_7b_eagle3", drafted=128)
    write_head(tiny_target(hidden=32), models / "some_model_7b_narrow_eagle3")
    write_head(target, models / "other_model_3b_eagle3")
    assert find_head(name, target.config) == str(models / "some_model_7b_eagle3")
    verifier = {"verifier": {"name_or_path": "hub/Some-Model-7B"}}
    write_head(target, models / "speculator", SPECULATORS, change=stated(speculators_config=verifier))
    assert find_head(name, target.config) == str(models / "speculator")
    assert find_head("demo", target.config) == str(DEMO_HEAD)


# ------------------------------------------------------------------------------------------ training


@torch.inference_mode()
def test_training_unrolls_what_drafting_computes(target: PreTrainedModel) -> None:
    torch.manual_seed(0)
    runner = CausalModel(target, "tiny")
    head = train_head.new_head(runner, torch.arange(TOKENS))
    head.ready()
    tokens = torch.tensor([byte_ids(12), byte_ids(40)[20:32]])
    states, _ = train_head.target_states(runner, tokens, head.tap.layers)
    model = HeadModel(head, "head")
    steps = list(train_head.unrolled(head, tokens, states))
    assert len(steps) == train_head.STEPS
    for window in range(2):
        given = head.tap.join([state[window] for state in states])
        for at in range(train_head.STEPS, 11):
            cache = cache_of(head)
            cache.reset()
            text, first = tokens[window].tolist(), at - train_head.STEPS + 1
            new = NewTokens.below(cache.speculative, range(-1, at - 1), text[1 : at + 1])
            (output,) = model.forward(
                [PassInput(cache, new, train_head.STEPS, states=True, before=given[:first])]
            )
            assert output.states is not None
            for step, found in enumerate(steps):
                torch.testing.assert_close(
                    found[window, first - 1 + step], output.states[step], rtol=1e-3, atol=1e-4
                )
    runner.restore()


def test_training_teaches(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_head, "LENGTH", 100)
    torch.manual_seed(0)
    model = CausalModel(target, "tiny")
    target.requires_grad_(False)
    tokens = torch.tensor(byte_ids(20_000))
    sampler = WindowSampler([tokens], 0, 256, 8192, torch.Generator().manual_seed(0))
    head = train_head.new_head(model, torch.arange(TOKENS))
    head.ready()
    evaluated = [tokens[:200], tokens[900:1100]]
    before = train_head.acceptance(head, model, evaluated)
    train_head.train(head, model, sampler, [(step, 0.0) for step in range(40)])
    after = train_head.acceptance(head, model, evaluated)
    model.restore()
    assert all(late > early + 0.05 for late, early in zip(after, before, strict=True)), (before, after)


def test_the_script_trains_a_head_for_any_model(
    target: PreTrainedModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: True)  # it would hold for all tests
    monkeypatch.setattr(train_head, "LENGTH", 100)
    model, corpus, out = tmp_path / "model", tmp_path / "corpus", tmp_path / "head"
    target.save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    corpus.mkdir()
    (corpus / "text.txt").write_text(real_text()[:20_000])
    arguments = ["--corpus", str(corpus), "--eval", str(corpus), "--model", str(model), "--minutes", "0.01"]
    arguments += ["--vocabulary", "90", "--device", "cpu"]
    assert train_head.main([*arguments, "--out", str(out)]) == 0
    assert "acceptance by depth 0." in capsys.readouterr().out
    overrides: dict[str, object] = {"head.path": str(out), "speculation.levels": ["head"]}
    with LLM(model, config="heads", overrides=overrides) as llm:
        assert llm.generate("It was", SamplingParams(max_tokens=8)).levels[0].name == "head"
    with pytest.raises(SystemExit) as refused:
        train_head.main([*arguments, "--out", str(corpus)])
    assert refused.value.code == 2 and "name a file in it" in capsys.readouterr().err
