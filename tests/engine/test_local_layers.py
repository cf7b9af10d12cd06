"""Models with sliding windows and recurrent states: lossless, and contexts of them are as good as any.

Their greedy tokens are those of transformers' `generate`, whatever drafts, and whatever was read, taken
back, forked or saved before.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_templates import BOOK, LLAMA, tokenizer, user
from support.contexts import rewritten
from support.small_engine import CUDA, PAGE, SIZES, again, engine_overrides, link_to
from support.tiny_models import (
    LOCAL_ARCHITECTURES,
    WINDOW,
    byte_ids,
    local_model,
    noisy_copy,
    to,
    transformers_greedy,
)
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from cpu_kv import PacedLink
from offload_rt import LLM, Context, SamplingParams, UsageError
from offload_rt.caches.prompt_writer import PromptWriter
from offload_rt.caches.sizes import MOST_POINTS
from offload_rt.caches.tiers import Tail
from offload_rt.commands import cli
from offload_rt.engine.prefill import LAST_PORTION
from offload_rt.text.chat import with_question

COUNT = 20
PARAMS = SamplingParams(max_tokens=COUNT)
NOISE = {"gpt-oss": 0.002, "falcon-h1": 0.004}
"""Of drafts of models that a little noise changes much."""
ALL = tuple(LOCAL_ARCHITECTURES)
KINDS = ("gemma3", "gpt-oss", "qwen3.5", "falcon-h1")
"""A window, one with sinks, a recurrent state beside full attention, and one in the same layer."""


@cache
def pair(arch: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft that it often agrees with."""
    target = local_model(arch)
    return target, noisy_copy(target, noise=NOISE.get(arch, 0.02))


@cache
def expected(arch: str, prompt: tuple[int, ...], count: int = COUNT) -> list[int]:
    return transformers_greedy(pair(arch)[0], list(prompt), count)


def check(arch: str, prompt: Sequence[int], found: Sequence[int]) -> None:
    assert list(found) == expected(arch, tuple(prompt), len(found))


def open_llm(arch: str, config: str = "triforce", *, link: bool = False, **overrides: object) -> LLM:
    given = engine_overrides(ahead=2) if link else SIZES
    given = given | {"prefill.chunk": 40, "streaming.window": 12, "speculation.gamma1": 2} | overrides
    return LLM.from_models(*pair(arch), config=config, overrides=given, link=PacedLink(1e9) if link else None)


# ------------------------------------------------------------------------------ transformers' tokens

RETRIEVED, STREAMING = (
    {"model": "target", "cache": "retrieved"},
    {"model": "draft", "cache": "streaming"},
)
SEQUENCES = RETRIEVED | {"draft": "sequences:2"}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "lookup": ("lookup", {}),
    "retrieval": ("retrieval", {}),
    "triforce": ("triforce", {}),
    "naive": ("naive", {}),
    "trees": ("trees", {"speculation.levels": [RETRIEVED | {"draft": "tree:2,2,1"}]}),
    "sequences": ("naive", {"speculation.levels": [STREAMING | {"draft": "sequences:3"}]}),
    "trees below": ("triforce", {"speculation.levels": [STREAMING | {"draft": "tree:2,1"}, SEQUENCES]}),
}
PROMPTS = {"long": byte_ids(100), "short": byte_ids(WINDOW - 3, start=40), "one": byte_ids(1, start=7)}
CASES = [
    (arch, shape, ("long", "short", "long", "one")[(row + column) % 4], bool((row + column // 2) % 2))
    for row, arch in enumerate(ALL)
    for column, shape in enumerate(SHAPES)
    if (row + column) % 2 or arch in KINDS
]


@pytest.fixture(scope="module")
def drafted() -> Iterator[dict[str, tuple[int, int]]]:
    """Drafted tokens that were accepted and proposed, of all cases of an architecture."""
    counts: dict[str, tuple[int, int]] = {}
    yield counts
    for arch, (accepted, proposed) in counts.items():
        if proposed > 150:
            assert accepted > 20 and proposed - accepted > 20, f"{arch}'s drafts teach nothing"


@pytest.mark.parametrize(("arch", "shape", "prompt", "link"), CASES)
def test_tokens_are_those_of_generate(
    arch: str, shape: str, prompt: str, link: bool, drafted: dict[str, tuple[int, int]]
) -> None:
    config, overrides = SHAPES[shape]
    chunk = WINDOW - 2 if len(shape) % 2 else 5 * WINDOW
    with open_llm(arch, config, link=link, **overrides, **{"prefill.chunk": chunk}) as llm:
        result = llm.generate(PROMPTS[prompt], PARAMS)
    check(arch, PROMPTS[prompt], result.tokens)
    assert len(set(result.tokens)) > 5
    before = drafted.get(arch, (0, 0))
    drafted[arch] = before[0] + result.timings.accepted_tokens, before[1] + result.timings.drafted_tokens


@pytest.mark.parametrize("arch", KINDS)
def test_nothing_deprecated_is_passed_to_transformers(arch: str) -> None:
    """transformers 5.24 renamed caches of attention and of mixers, and warns of the old names."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        with open_llm(arch) as llm:
            assert len(llm.generate(PROMPTS["one"], SamplingParams(max_tokens=3)).tokens) == 3


def test_members_of_a_batch_are_their_single_runs() -> None:
    """Also where one of a batch ends, and where drafts of several sequences are one pass."""
    prompts = [*PROMPTS.values(), byte_ids(50, start=300)]
    params = [SamplingParams(max_tokens=count) for count in (14, 6, 9, 12)]
    for arch, shape in zip(KINDS, ("naive", "sequences", "triforce", "retrieval"), strict=True):
        config, overrides = SHAPES[shape]
        with open_llm(arch, config, **overrides) as llm:
            for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
                check(arch, prompt, result.tokens)


# --------------------------------------------------------------------------------------- contexts

TEXT, OTHER = byte_ids(120, start=90), byte_ids(120, start=900)
NEXT = SamplingParams(max_tokens=6)
HOT = SamplingParams(temperature=0.9, max_tokens=12, seed=3)
PLACES = pytest.mark.parametrize(
    ("arch", "link"), [("gemma3", True), ("gpt-oss", False), ("qwen3.5", True), ("falcon-h1", False)]
)


def check_end(arch: str, context: Context, tokens: Sequence[int]) -> None:
    """The context is these tokens, and is continued as they are."""
    assert context.tokens == list(tokens)
    check(arch, tokens, again(context, NEXT).tokens)


@PLACES
def test_a_context_returns_to_any_length(arch: str, link: bool) -> None:
    """Behind the newest point that is kept and before the oldest, and at both edges of a window."""
    with open_llm(arch, link=link) as llm:
        context = llm.read(TEXT[:41])
        tokens = TEXT[:41]
        for start, end in ((41, 42), (42, 50), (50, 95)):
            context.append(TEXT[start:end])
            tokens = [*tokens, *TEXT[start:end]]
            tokens += context.generate((), NEXT).tokens
            assert context.tokens == tokens
        check_end(arch, context, tokens)
        context.rewind(len(tokens) - 2)  # of what was generated
        check_end(arch, context, tokens[:-2])
        for length in (len(tokens) - 6, 60, 42, 41, 41 - WINDOW, WINDOW, WINDOW - 1, 1):
            context.rewind(length)
            check_end(arch, context, tokens[:length])
            context.append(OTHER[:3])
            check_end(arch, context, [*tokens[:length], *OTHER[:3]])
            context.rewind(length)


def test_more_appends_than_lengths_that_are_kept() -> None:
    arch = "qwen3.5"
    with open_llm(arch, "plain") as llm:
        context = llm.read(TEXT[:5])
        ends = [5 * number for number in range(1, MOST_POINTS + 5)]
        for start, end in itertools.pairwise(ends):
            context.append(TEXT[start:end])
        (sequence,) = llm.engine.sequences
        assert len(sequence.full.points(ends[-1])) <= MOST_POINTS
        for length in (ends[-1], ends[-2], ends[4] + 1, ends[4], 3):
            context.rewind(length)
            check_end(arch, context, TEXT[:length])


@PLACES
def test_forks_share_a_history_that_neither_changes(arch: str, link: bool) -> None:
    with open_llm(arch, link=link) as llm:
        context = llm.read(TEXT[:50])
        fork, end = context.fork(), TEXT[:50]
        twin = fork.fork()
        ours, theirs = [*end, *TEXT[50:53]], [*end, *OTHER[:2]]
        context.append(ours[50:])
        fork.append(theirs[50:])
        check_end(arch, twin, end)
        check_end(arch, context, ours)
        check_end(arch, fork, theirs)
        theirs += fork.generate((), NEXT).tokens
        context.close()
        late = fork.fork()
        check_end(arch, late, theirs)
        late.rewind(55)
        check_end(arch, late, theirs[:55])
        check_end(arch, fork, theirs)
        fork.rewind(48)
        check_end(arch, fork, end[:48])
        check_end(arch, twin, end)
        for one in (fork, twin, late):
            one.close()
        assert llm.engine.store.used_bytes == 0


@pytest.mark.parametrize("arch", [*KINDS, "lfm2", "bamba"])
def test_a_restored_context_goes_on_as_one_that_was_never_saved(arch: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with open_llm(arch) as llm, open_llm(arch, link=True) as other:
        context = llm.read(TEXT[:40])
        context.append(TEXT[40:75])
        tokens = [*TEXT[:75], *context.generate((), NEXT).tokens]
        for kept in (len(tokens), 78):
            context.rewind(kept)
            context.save(path)
            for place in (llm, other):
                restored = place.load(path)
                if place is llm:  # over a link, drafts that are made ahead draw numbers, too
                    assert again(restored, HOT).tokens == again(context, HOT).tokens
                check_end(arch, restored, tokens[:kept])
                restored.rewind(40)
                restored.append(OTHER[:9])
                check_end(arch, restored, [*TEXT[:40], *OTHER[:9]])
                restored.close()
        check_end(arch, context, tokens[:78])


@pytest.mark.parametrize("arch", [*KINDS, "lfm2", "bamba"])
def test_a_context_without_a_verified_token_is_restored(arch: str, tmp_path: Path) -> None:
    """Of one token, or rewound before the first length that it can return to."""
    path = tmp_path / "a.safetensors"
    with open_llm(arch) as llm, open_llm(arch, link=True) as other:
        ways = [*product((llm, other), (False, True))]
        for number, (read, kept) in enumerate(((1, 1), (40, 1), (40, 2), (40, 10))):
            with llm.read(TEXT[:read]) as context:
                context.rewind(kept)
                with context.fork() as fork:
                    fork.save(path)
                    check_end(arch, fork, TEXT[:kept])
                for place, again_saved in (ways[number], ways[3 - number]):  # each of them twice
                    with place.load(path) as restored:
                        if again_saved:
                            restored.save(path)
                        restored.append(OTHER[:9])
                        check_end(arch, restored, [*TEXT[:kept], *OTHER[:9]])
                        restored.rewind(kept)
                        check_end(arch, restored, TEXT[:kept])
                context.save(path)
                check_end(arch, context, TEXT[:kept])
                with llm.load(path) as restored:
                    check_end(arch, restored, TEXT[:kept])


@PLACES
def test_a_turn_after_an_end_token_in_the_middle_of_a_round(arch: str, link: bool, tmp_path: Path) -> None:
    """The cache has verified tokens behind it, whose part of the state must go, also from what is saved."""
    target, rounds = pair(arch)[0], 0
    whole = expected(arch, tuple(TEXT[:60]))
    try:
        for at in (2, 3, 4, 7):
            target.generation_config.eos_token_id = whole[at]
            end = whole.index(whole[at]) + 1
            with open_llm(arch, "retrieval", link=link, **{"retrieval.budget": 512}) as llm:
                context = llm.read(TEXT[:60])
                result = context.generate((), PARAMS)
                assert result.finish_reason == "eos" and result.tokens == whole[:end]
                (sequence,) = llm.engine.sequences
                rounds += sequence.full.verified_length >= len(context.tokens)
                target.generation_config.eos_token_id = None
                tokens = [*TEXT[:60], *whole[:end], *OTHER[:4]]
                context.save(tmp_path / "a.safetensors")
                for one in (context.fork(), llm.load(tmp_path / "a.safetensors"), context):
                    one.append(OTHER[:4])
                    check_end(arch, one, tokens)
                    one.close()
    finally:
        target.generation_config.eos_token_id = None
    assert rounds, "no round went on behind the end token"


@pytest.mark.parametrize("arch", ["gemma3", "qwen3.5", "falcon-h1"])
def test_an_interrupt_within_a_commit(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local layers took the tokens of the round, and the tail did not."""
    commit, count = Tail.commit, 0

    def interrupted(tail: Tail, kept: Sequence[int]) -> Tensor:
        nonlocal count
        count -= 1
        if not count:
            raise KeyboardInterrupt
        return commit(tail, kept)

    with open_llm(arch, "lookup") as llm:
        for number in (1, 2, 3):
            context, count = llm.read(TEXT[:50]), number
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                patched.setattr(Tail, "commit", interrupted)
                context.generate((), PARAMS)
            tokens = [*context.tokens, *OTHER[:4]]
            context.append(OTHER[:4])
            check_end(arch, context, tokens)
            context.close()


def test_memory_that_is_short_where_a_prefill_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    start = PromptWriter.start

    def short(self: PromptWriter) -> None:
        start(self)
        raise torch.OutOfMemoryError("short")

    with open_llm("qwen3.5", "plain") as llm:
        context = llm.read(TEXT[:1])
        with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
            patched.setattr(PromptWriter, "start", short)
            context.append(TEXT[1:20])
        check_end("qwen3.5", context, TEXT[:1])


def test_another_end_of_a_prompt_is_all_that_is_read() -> None:
    arch, end = "qwen3.5", LAST_PORTION + 40
    prompt = byte_ids(3 * LAST_PORTION)
    other = [*prompt[:-30], *OTHER[:30]]
    with open_llm(arch, "plain") as llm:
        context = llm.read(prompt)
        assert len(other) - end < context.update(other) < len(other)
        check_end(arch, context, other)
        context.close()
        with llm.read(prompt).snapshot() as prefix:
            assert len(prompt) - end < prefix.begins(other, llm.engine.target) < len(prompt)
            assert prefix.begins(prompt[:5], llm.engine.target) == 0


def test_what_an_owner_has_put_in_the_place_of_a_mixers_forward_stays() -> None:
    model = deepcopy(pair("qwen3.5")[0])
    first, second = (model.model.layers[layer].linear_attn for layer in (0, 1))
    own = first.forward = partial(type(first).forward, first)
    with LLM.from_models(model, config="plain") as llm:
        check("qwen3.5", TEXT[:20], llm.generate(TEXT[:20], NEXT).tokens)
    assert vars(first)["forward"] is own and "forward" not in vars(second)


# ------------------------------------------------------------------------------------ a GPU's tiers


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["gemma3", "qwen3.5"])
def test_tokens_over_tiers_of_a_gpu(arch: str) -> None:
    given = engine_overrides(resident_tokens=2 * PAGE, cpu_tokens=PAGE, ahead=2) | {"streaming.window": 12}
    target, draft = (to(model, CUDA) for model in map(deepcopy, pair(arch)))
    with LLM.from_models(target, draft, config="triforce", overrides=given, link=link_to(CUDA)) as llm:
        context = llm.read(TEXT[:100])
        assert sum(map(bool, context.placement.values())) >= 3
        result = context.generate((), NEXT)
    check(arch, TEXT[:100], result.tokens)
    assert result.timings.drafted_tokens


@pytest.mark.gpu
def test_kernels_that_recurrent_layers_lack_on_a_gpu_are_named() -> None:
    logging.warning_once.cache_clear()  # transformers says it once in a process
    with LLM.from_models(to(deepcopy(pair("qwen3.5")[0]), CUDA), config="lookup", link=link_to(CUDA)) as llm:
        told = [notice for notice in llm.generate([1], PARAMS).notices if "pip install" in notice]
    if find_spec("fla") is None:
        assert len(told) == 1 and "flash-linear-attention" in told[0]


# ------------------------------------------------------------------------------ files that are corrupt


@pytest.mark.parametrize("arch", ["gemma3", "qwen3.5"])
def test_a_file_whose_states_were_written_to_do_harm(arch: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with open_llm(arch, "plain") as llm:
        llm.read(TEXT[:40]).save(path)
        data, refused = path.read_bytes(), 0
        for change in (
            lambda points: points.clear(),
            lambda points: points.append(None),
            lambda points: points.__setitem__(0, 3),
            lambda points: points.__setitem__(0, {}),
            lambda points: points[0].update(states=[1]),
            lambda points: points[0].update(states={"0": {}}),
            lambda points: points[0].update(states={"9": {"tensors": [], "values": {}}}),
            lambda points: points[0].update(states={"a": {"tensors": [], "values": {}}}),
            lambda points: points[0].update(states={"0": {"tensors": ["none"], "values": {}}}),
            lambda points: points[0].update(states={"0": {"tensors": [], "values": {"device": {"a": 1}}}}),
        ):

            def changed(header: object, about: dict[str, str], change: Any = change) -> None:
                points = json.loads(about["local"])
                change(points)
                about["local"] = json.dumps(points)

            path.write_bytes(rewritten(data, changed))
            with pytest.raises(UsageError, match="is corrupt or no saved context") as told:
                llm.load(path)
            assert "\n" not in str(told.value)
            refused += 1
        assert refused == 10


# ---------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("arch", ["gemma3", "gpt-oss", "qwen3.5"])
def test_an_answer_has_the_tokens_of_generate(arch: str, tmp_path: Path) -> None:
    model, chat = local_model(arch, vocabulary=257), tokenizer(LLAMA, bos_token="<s>")
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    chat.save_pretrained(tmp_path)
    (tmp_path / "book.txt").write_text(BOOK)
    given = ["--model", str(tmp_path), "--file", str(tmp_path / "book.txt"), "--json", str(tmp_path / "out")]
    assert cli.main(["ask", *given, "--config", "lookup", "-n", "8", "--temperature", "0", "Who is it?"]) == 0
    messages = with_question([user(BOOK)], "Who is it?")
    encoded: Any = chat.apply_chat_template(messages, add_generation_prompt=True)
    answered = json.loads((tmp_path / "out").read_text())["tokens"]
    assert answered == transformers_greedy(model, encoded["input_ids"], 8)
