"""Draft heads: their computation, the states they begin at, their drafts, training, and bad files."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_engine import LINKS, PARAMS, PROMPT, again, engine_overrides
from support.table_models import VOCABULARY, HeadTable, random_head
from support.tiny_models import byte_ids, byte_tokenizer, real_text, tiny_target
from torch import Tensor
from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.commands import cli
from offload_rt.config.draft_shape import DraftShape
from offload_rt.drafting import head_drafter
from offload_rt.drafting.base import HiddenState, Proposal, TokenView
from offload_rt.drafting.head_drafter import HeadDrafter, HeadModel, HeadStates
from offload_rt.errors import UsageError
from offload_rt.model.decoder import NotANumber
from offload_rt.model.draft_head import DEMO_HEAD, KIND, Head, load_head, save_head
from offload_rt.model.embedded import demo_model
from offload_rt.model.loading import load_model
from offload_rt.model.passes import PassInput
from offload_rt.model.runner import CausalModel
from tools.demo_training import train_head
from tools.demo_training.windows import WindowSampler

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def file(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for `target`."""
    path = tmp_path_factory.mktemp("head") / "head.safetensors"
    save_head(random_head(64, 96, seed=1), CausalModel(target, "tiny"), path)
    return path


# ---------------------------------------------------------------------------------- its computation


def head_model() -> HeadModel:
    table: Any = HeadTable(0, VOCABULARY)
    return HeadModel(random_head(VOCABULARY, 7, seed=0).double(), table, "head")


def along(model: HeadModel, state: Tensor, tokens: Sequence[int]) -> Tensor:
    """The state after `tokens`, computed one token after the other."""
    for token in tokens:
        state = model.head(model.target.embed(torch.tensor([token]))[0, 0], state)
    return state


@torch.inference_mode()
def test_a_pass_over_trees_of_two_sequences_is_the_recurrence_along_every_path() -> None:
    model, draw = head_model(), random.Random(0)
    roots = [torch.randn(VOCABULARY, dtype=torch.float64) for _ in range(2)]
    caches = [HeadStates(HiddenState(9, root)) for root in roots]
    held: list[list[tuple[int, ...]]] = [[], []]  # path of every entry
    for _ in range(40):
        parts, ways = [], []
        for cache, entries in zip(caches, held, strict=True):
            count = draw.randint(1, 5)
            parents = [draw.randrange(-1, len(entries) + at) for at in range(count)]
            tokens = [draw.randrange(VOCABULARY) for _ in range(count)]
            way = list(entries)
            for parent, token in zip(parents, tokens, strict=True):
                way.append((*(way[parent] if parent >= 0 else ()), token))
            ways.append(way[len(entries) :])
            new = NewTokens.below(cache.speculative, parents, tokens)
            parts.append(PassInput(cache, new, draw.randint(1, count), hidden=True))
        outputs = model.forward(parts)
        for part, output, way, root in zip(parts, outputs, ways, roots, strict=True):
            assert output.hidden is not None
            expected = torch.stack([along(model, root, one) for one in way[-part.rows :]])
            torch.testing.assert_close(output.hidden, expected)
            torch.testing.assert_close(output.logits, model.target.logits(expected[None]))
        for number, (cache, way, root) in enumerate(zip(caches, ways, roots, strict=True)):
            kept = sorted(draw.sample(range(len(way)), draw.randint(0, len(way))))
            kept = [at for at in kept if way[at][:-1] in ((), *held[number], *(way[one] for one in kept))]
            cache.commit(kept)
            held[number] += [way[at] for at in kept]
            if len(held[number]) > 6:
                roots_only = [at for at in range(len(held[number])) if len(held[number][at]) == 1]
                cache.keep(roots_only)
                held[number] = [held[number][at] for at in roots_only]
            assert len(cache.speculative) == len(held[number])
            for state, one in zip(cache.states[1:], held[number], strict=True):
                torch.testing.assert_close(state, along(model, root, one))


def test_training_unrolls_what_drafting_computes() -> None:
    model, tokens = head_model(), torch.tensor([[1, 4, 0, 2, 3, 1, 2]])
    states = torch.randn(1, 7, VOCABULARY, dtype=torch.float64)
    steps = list(train_head.unrolled(model.head, model.target, tokens, states))
    assert len(steps) == train_head.STEPS
    for step, found in enumerate(steps, 1):
        for at in range(step, 7):
            chain = tokens[0, at - step + 1 : at + 1].tolist()
            torch.testing.assert_close(found[0, at - step], along(model, states[0, at - step], chain))


# ------------------------------------------------------------------------- the states it begins at


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("levels", [["head"], ["head", "target:retrieved"]], ids=["alone", "hierarchy"])
def test_drafts_begin_at_the_targets_own_hidden_states(
    target: PreTrainedModel,
    plain_tokens: list[int],
    file: Path,
    levels: list[str],
    link: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the hierarchy also at those of the middle level's unverified rounds."""
    states: list[HiddenState] = []
    begun: list[tuple[TokenView, HiddenState]] = []
    proposal = HeadDrafter.proposal

    class NotedStates(HeadStates):
        def __init__(self, known: HiddenState) -> None:
            super().__init__(known)
            states.append(known)

    def noted(drafter: HeadDrafter, view: TokenView, shape: DraftShape) -> Proposal:
        states.clear()
        made = proposal(drafter, view, shape)
        begun.extend((view, known) for known in states)
        return made

    monkeypatch.setattr(head_drafter, "HeadStates", NotedStates)
    monkeypatch.setattr(HeadDrafter, "proposal", noted)
    overrides = engine_overrides(ahead=2) | {"speculation.levels": levels, "head.path": str(file)}
    overrides |= {"retrieval.budget": 512}
    with LLM.from_models(target, config="heads", overrides=overrides, link=LINKS[link]()) as llm:
        result = llm.generate(PROMPT, PARAMS)
    assert result.tokens == plain_tokens
    # The middle level sees the whole sequence here, so that all its drafts are accepted.
    assert (result.timings.accepted_tokens == result.timings.drafted_tokens) == (len(levels) == 2)
    reference = CausalModel(target, "tiny")
    lags = []
    for view, known in begun:
        text, speculated = view.part(0), view.state is not None
        expected = train_head.target_states(reference, torch.tensor([text]))[0, known.length - 1]
        torch.testing.assert_close(known.hidden, expected, rtol=1e-3, atol=1e-3)
        lags.append(len(text) - known.length)
        assert lags[-1] == 1 or (link == "link" and not speculated)
    assert len(lags) >= len(result.tokens) / (6 if len(levels) == 1 else 2) and 1 in lags
    assert any(view.state is not None for view, _ in begun) == (len(levels) == 2)


# ------------------------------------------------------------------------------ drafts and training

LEVELS: dict[str, list[object]] = {
    "grown": [{"model": "head", "draft": "grown:12"}],
    "merged": [{"model": "head", "merge": "suffix"}],
    "tree, streaming": [{"model": "head", "draft": "tree:2,2"}, "target:streaming"],
    "three": ["head", "target:streaming", "target:retrieved"],
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)
def test_greedy_tokens_are_those_of_plain_decoding(
    target: PreTrainedModel, plain_tokens: list[int], file: Path, levels: list[object], link: str
) -> None:
    overrides = engine_overrides(ahead=2) | {"speculation.levels": levels, "head.path": str(file)}
    with LLM.from_models(target, config="heads", overrides=overrides, link=LINKS[link]()) as llm:
        result = llm.generate(PROMPT, PARAMS)
    assert result.tokens == plain_tokens
    assert result.levels[0].name == "head" and result.levels[0].proposed > 0


def test_the_demo_head_is_often_right() -> None:
    prompt = "It was a cold evening, and the old man sat before the fire with his daughter. He had been to"
    overrides: dict[str, object] = {"speculation.levels": ["head"], "speculation.gamma2": 4}
    overrides["speculation.step_down"] = False
    with LLM(config="heads", dtype="float32", overrides=overrides) as llm:
        text, params = llm.read(prompt), SamplingParams(max_tokens=64, ignore_eos=True)
        result = again(text, params)
        assert again(text, params, "plain").tokens == result.tokens
    assert result.rounds < 36 and DEMO_HEAD.stat().st_size < 2 * 2**20


def test_training_teaches(target: PreTrainedModel) -> None:
    torch.manual_seed(0)
    model = CausalModel(target, "tiny")
    target.requires_grad_(False)
    tokens = torch.tensor(byte_ids(20_000))
    sampler = WindowSampler([tokens], 0, 256, 8192, torch.Generator().manual_seed(0))
    head, evaluated = train_head.new_head(64), [tokens[:200], tokens[900:1100]]
    before = train_head.acceptance(head, model, evaluated)
    train_head.train(head, model, sampler, [(step, 0.0) for step in range(60)])
    after = train_head.acceptance(head, model, evaluated)
    assert all(late > early + 0.05 for late, early in zip(after, before, strict=True)), (before, after)


def test_the_script_trains_a_head_for_any_model(
    target: PreTrainedModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: True)  # it would hold for all tests
    model, corpus, out = tmp_path / "model", tmp_path / "corpus", tmp_path / "head.safetensors"
    target.save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    corpus.mkdir()
    (corpus / "text.txt").write_text(real_text()[:20_000])
    arguments = ["--corpus", str(corpus), "--eval", str(corpus), "--model", str(model), "--minutes", "0.01"]
    assert train_head.main([*arguments, "--out", str(out), "--device", "cpu"]) == 0
    assert "acceptance by depth 0." in capsys.readouterr().out
    overrides: dict[str, object] = {"head.path": str(out), "speculation.levels": ["head"]}
    with LLM(model, config="heads", overrides=overrides) as llm:
        assert llm.generate("It was", SamplingParams(max_tokens=8)).levels[0].name == "head"
    with pytest.raises(SystemExit) as refused:
        train_head.main([*arguments, "--out", str(corpus)])
    assert refused.value.code == 2 and "is a folder; name a file in it" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- bad files


def test_a_head_knows_its_target_in_any_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        head = load_head(DEMO_HEAD, CausalModel(load_model(demo_model("target"), CPU, dtype), "demo"))
        assert head.join.weight.dtype == dtype


def changed(**tensors: Tensor | None) -> Callable[[Path, Path], None]:
    """The file with other tensors, or without some."""

    def write(file: Path, path: Path) -> None:
        stored = load_file(file) | {name.replace("_", "."): value for name, value in tensors.items()}
        kept = {name: value for name, value in stored.items() if value is not None}
        save_file(kept, path, {"kind": KIND, "model": "tiny"})

    return write


def torn(file: Path, path: Path) -> None:
    path.write_bytes(file.read_bytes()[:-9])


REFUSED: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "missing": (lambda file, path: None, "cannot be read (no such file); train one"),
    "a pipe": (lambda file, path: os.mkfifo(path), "is no file but a folder, a pipe or a device; train one"),
    "torn": (torn, "is corrupt or not a safetensors file"),
    "another kind": (
        lambda file, path: save_file(load_file(file), path),
        "is no head of this version; train one",
    ),
    "narrower": (
        changed(target=torch.zeros(5, 8)),
        "whose hidden states here are [5, 8], and those of LlamaFor",
    ),
    "a scalar": (changed(target=torch.tensor(1.0)), "whose hidden states here are []"),
    "no probe": (changed(target=None), "was trained for tiny"),
    "other sizes": (
        changed(join_weight=torch.zeros(64, 64)),
        "join.weight is [64, 64] and should be [64, 128]",
    ),
    "scalar": (changed(gate_weight=torch.tensor(1.0)), "gate.weight is [] and should be [1, 64]"),
    "inner": (changed(up_weight=torch.zeros(9, 64)), "up.weight is [9, 64] and should be [96, 64]"),
    "lacks": (changed(gate_weight=None), "gate.weight is missing"),
    "more": (changed(bias=torch.zeros(1)), "bias has no place in a head"),
    "NaN": (changed(down_weight=torch.full((64, 96), torch.nan)), "down.weight has NaN or infinite entries"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_no_head_are_refused(
    target: PreTrainedModel, file: Path, tmp_path: Path, name: str
) -> None:
    harm, message = REFUSED[name]
    path = tmp_path / "harmed.safetensors"
    harm(file, path)
    with pytest.raises(UsageError) as refused:
        LLM.from_models(target, config="heads", overrides={"head.path": str(path)})
    assert message in str(refused.value) and str(path) in str(refused.value)


def test_a_head_for_another_model_is_refused(file: Path, target: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was trained for tiny, and Llama.* is another model .* head.path"):
        LLM.from_models(tiny_target("llama-gqa", seed=5), config="heads", overrides={"head.path": str(file)})
    with pytest.raises(UsageError, match=r"trained for demo, whose hidden states here are \[5, 256\]"):
        LLM.from_models(target, config="heads")
    with LLM.from_models(target, config="plain") as llm:
        text, params = llm.read(PROMPT), SamplingParams(max_tokens=4)
        expected = again(text, params).tokens
        with pytest.raises(UsageError, match="trained for demo"):
            text.generate((), PARAMS, "heads")
        assert again(text, params).tokens == expected


def test_nan_logits_name_the_head() -> None:
    model = head_model()
    with pytest.raises(NotANumber, match="head: its logits are NaN"):
        model.raise_nan(PassInput(HeadStates(HiddenState(1, torch.zeros(VOCABULARY))), NewTokens.chain(1), 1))


def test_a_plan_counts_the_head(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    flags = "plan --model llama2-7b --context 60000 --gpu rtx4090 --verbose --json"
    assert cli.main([*flags.split(), str(out), "--config", "heads"]) == 0
    report = json.loads(out.read_text())
    assert report["memory"]["gpus"][0]["head_weights"] == 2 * 14 * 4096**2
    assert report["predicted"]["draft_ms"] > 0 and "head 0." in capsys.readouterr().out
    assert Head(4096, 4 * 4096).weight_bytes == 4 * (14 * 4096**2 + 3 * 4096)
