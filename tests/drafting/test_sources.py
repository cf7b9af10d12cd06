"""Token sources against searches through the whole text, and the trees made from what they find."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import byte_ids, byte_tokenizer, tiny_target

import offload_rt.commands.cli as command_line
from cpu_kv import PacedLink
from offload_rt import LLM, SamplingParams
from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.drafting import datastore
from offload_rt.drafting.base import TokenView
from offload_rt.drafting.datastore import END, Datastore, build, suffix_order
from offload_rt.drafting.merged import joined
from offload_rt.drafting.sources import NGrams, Source, SuffixAutomaton, heaviest
from offload_rt.errors import UsageError
from offload_rt.model.embedded import demo_model
from offload_rt.model.loading import load_tokenizer
from offload_rt.sampling.rejection import Draft
from offload_rt.sampling.tokens import Tokens
from offload_rt.sampling.trees import ROOT, forest

FEW = st.integers(0, 3)
TEXTS = st.lists(FEW, max_size=60)


def earlier(text: Sequence[int], end: Sequence[int]) -> list[int]:
    """Ends of the occurrences of `end` in `text`, without one at the very end."""
    size = len(end)
    return [at for at in range(size, len(text)) if text[at - size : at] == end]


@pytest.mark.parametrize("kind", ["n-grams", "suffix automaton"])
@given(
    portions=st.lists(TEXTS, max_size=8),
    speculated=st.lists(FEW, max_size=5),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    depth=st.integers(1, 12),
)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_the_longest_end_that_occurred_is_found(
    kind: str, portions: list[list[int]], speculated: list[int], sizes: list[int], depth: int
) -> None:
    """Whatever was looked up before. Of n-grams it is the newest occurrence, where nothing is speculated.

    Of a suffix no more follows than matched.
    """
    (shortest, longest), ngrams, text = sizes, kind == "n-grams", list[int]()
    source: Source = NGrams(shortest, longest) if ngrams else SuffixAutomaton(shortest)
    for portion in portions:
        text = text + portion
        for _ in range(2):  # twice says nothing new
            source.extend(TokenView(text))
        for view in (TokenView(text), TokenView(text, speculated)):
            whole = view.part(0)
            # The text's own end is an occurrence of what is speculated behind it.
            settled = text if whole == text else [*text, END]
            most = min(longest, len(whole)) if ngrams else len(whole)
            lengths = range(most, shortest - 1, -1)
            occurrences = ((size, earlier(settled, whole[len(whole) - size :])) for size in lengths)
            matched, places = next((one for one in occurrences if one[1]), (0, []))
            follows = depth if ngrams else min(depth, matched)
            allowed = [whole[at : at + follows] for at in places]
            found = [list(one) for one in source.find(view, depth)]
            assert len(found) == bool(allowed)
            assert not found or found[0] in (allowed[-1:] if ngrams and whole == text else allowed)


@given(TEXTS.filter(bool))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_suffixes_are_in_order(text: list[int]) -> None:
    order = suffix_order(torch.tensor(text, dtype=torch.int32)).tolist()
    assert order == sorted(range(len(text)), key=lambda at: text[at:])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "store.safetensors"


@given(texts=st.lists(TEXTS, min_size=1, max_size=4), asked=st.lists(FEW, min_size=1, max_size=8))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_a_datastore_finds_every_occurrence_of_the_longest_end(
    store: Path, texts: list[list[int]], asked: list[int]
) -> None:
    assert build(texts, byte_tokenizer(), store) == sum(map(len, texts))
    found = Datastore(store, 6, 10**6).find(TokenView([], asked), 3)
    for size in range(min(6, len(asked)), 0, -1):
        end = asked[-size:]
        places = [
            (text, at) for text in texts for at in range(size, len(text) + 1) if text[at - size : at] == end
        ]
        expected = [text[at : at + 3] for text, at in places if at < len(text)]
        if expected:
            assert sorted(map(list, found)) == sorted(expected)
            return
    assert not found


def test_a_few_of_many_occurrences_are_looked_at(store: Path) -> None:
    build([[8, value % 7] for value in range(700)], byte_tokenizer(), store)
    found = Datastore(store, 4, 14).find(TokenView([8]), 2)
    assert [one[0] for one in found] == [value for value in range(7) for _ in range(2)]


FOUND = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 7], [5]]


@pytest.mark.parametrize(
    ("shape", "tokens", "parents"),
    [
        (CHAIN.deep(2), [1, 2], [ROOT, 0]),
        (CHAIN.deep(9), [1, 2, 3], [ROOT, 0, 1]),
        (DraftShape("grown", nodes=4).deep(8), [1, 2, 5, 3], [ROOT, 0, ROOT, 1]),
        (DraftShape("grown", nodes=99).deep(8), [1, 2, 5, 3, 4, 6, 7], [ROOT, 0, ROOT, 1, 1, 2, 0]),
    ],
)
def test_what_most_continuations_share_is_proposed(
    shape: DraftShape, tokens: list[int], parents: list[int]
) -> None:
    draft = heaviest(FOUND, shape)
    assert draft.tokens.known == tokens and draft.tree.parents == tuple(parents) and draft.probs is None


def test_what_is_in_a_draft_already_is_not_joined_twice() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    draft = Draft(Tokens([1, 2]), forest([2]), probs)
    assert joined(draft, [1, 2]) is draft
    more = joined(draft, [1, 3, 0])
    assert more.tokens.known == [1, 2, 3, 0] and more.tree.parents == (ROOT, 0, 0, 2)
    assert more.probs is not None
    assert torch.equal(more.probs[2:], torch.eye(4)[[3, 0]]) and torch.equal(more.probs[:2], probs)
    assert more.source_nodes == 2 and more.tree.tries([0, 1], 2) == [(2, 0)]
    assert joined(Draft(Tokens([1]), forest([1])), [1, 3]).probs is None


# ---------------------------------------------------------------------------------------- in an LLM


SMALL: dict[str, object] = {"speculation.gamma2": 4, "speculation.step_down": False, "retrieval.budget": 64}
SMALL |= {"retrieval.recent": 16, "retrieval.refresh": "stride:16"}
LEVELS: dict[str, list[object]] = {
    "suffix": ["suffix"],
    "datastore": [{"model": "datastore", "draft": "grown:12"}],
    "suffix below retrieval": ["suffix", {"model": "target", "cache": "retrieved"}],
    "merged": [{"model": "target", "cache": "retrieved", "merge": "datastore"}],
    "tree, merged": [{"model": "target", "cache": "retrieved", "draft": "grown:8", "merge": "suffix"}],
}


@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)
def test_greedy_tokens_are_those_of_plain_decoding(levels: list[object], store: Path) -> None:
    target, tokenizer, prompt = tiny_target("llama-gqa", seed=3), byte_tokenizer(), byte_ids(300)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM.from_models(target, config="plain") as llm:
        plain = llm.generate(prompt, params).tokens
    build([prompt + plain[:20], plain[3:]], tokenizer, store)
    settings = SMALL | {"speculation.levels": levels, "datastore.path": str(store)}
    with LLM.from_models(target, None, tokenizer, "plain", settings) as llm:
        result = llm.generate(prompt, params)
    assert result.tokens == plain
    assert result.rounds < len(plain), "nothing was ever accepted"


def test_what_most_occurrences_say_is_merged(store: Path) -> None:
    """Over a link, where rounds are drafted ahead and joined when they are verified."""
    target, tokenizer, prompt = tiny_target("llama-gqa", seed=3), byte_tokenizer(), byte_ids(300)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM.from_models(target, config="plain") as llm:
        plain = llm.generate(prompt, params).tokens
    # The most frequent continuation is right; the first in the order of suffixes is not.
    wrong = [[*prompt[-4:], 0, at] for at in range(3)]
    build([*wrong, *5 * [prompt[-20:] + plain]], tokenizer, store)
    levels = [{"model": "target", "cache": "streaming", "merge": "datastore"}]
    small: dict[str, object] = {
        "streaming.sinks": 0,
        "streaming.window": 8,
        "store.page": 16,
        "offload.ahead": 2,
    }
    small |= {"store.slab_tokens": 64, "store.segment_bytes": 16384}
    settings = SMALL | small | {"speculation.levels": levels, "datastore.path": str(store)}
    with LLM.from_models(target, None, tokenizer, "plain", settings, link=PacedLink(1e9)) as llm:
        result = llm.generate(prompt, params)
    assert result.tokens == plain and result.rounds < 10


def test_a_datastore_is_built_from_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    (folder / "one.txt").write_text("It was the best of times, it was the worst of times.")
    (folder / "below" / "two.md").write_text("It was the age of wisdom.")
    (folder / "picture.png").write_bytes(b"\xff\xfe")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "locked.txt").symlink_to("/proc/self/mem")
    assert command_line.main(["datastore", "build", str(folder)]) == 0
    out = tmp_path / "texts.datastore.safetensors"
    printed = capsys.readouterr()
    assert f"{out}: " in printed.out and "of 2 files" in printed.out and out.stat().st_size > 100
    assert f"skipped {folder / 'latin.txt'}: not UTF-8 (byte 3 is 0xe9)" in printed.err
    assert f"skipped {folder / 'locked.txt'}: cannot be read (" in printed.err
    latin = [str(folder), "--out", str(tmp_path / "latin.safetensors"), "--encoding", "cp1252"]
    assert command_line.main(["datastore", "build", *latin]) == 0
    assert "of 3 files" in capsys.readouterr().out
    settings: dict[str, object] = {"speculation.levels": ["datastore"], "datastore.path": str(out)}
    with LLM(config="plain", overrides=settings) as llm:
        result = llm.generate("It was the age", SamplingParams(max_tokens=4))
        assert result.levels[0].name == "datastore" and result.levels[0].proposed > 0


def test_bad_input(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "a.txt").write_bytes(b"\xff")
    for arguments, message in (
        ([str(tmp_path / "none")], "is not a folder"),
        ([str(tmp_path / "empty")], "holds no text in files of .txt"),
        ([str(tmp_path / "binary")], "a.txt: not UTF-8 (byte 0 is 0xff); name its encoding"),
        ([str(tmp_path / "binary")], "holds no text in files of .txt"),
        ([str(tmp_path), "--out", str(tmp_path)], "is a folder"),
    ):
        assert command_line.main(["datastore", "build", *arguments]) == 2
        assert message in capsys.readouterr().err
    build([[1, 2, 3]], byte_tokenizer(), store)
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(store.read_bytes()[:-3])
    other = tmp_path / "other.safetensors"
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, other)
    level: dict[str, object] = {"speculation.levels": ["datastore"]}
    target, demo = tiny_target(), load_tokenizer(demo_model("target"))
    for path, message in (
        ("", "datastore.path = '': names no file: build one"),
        (str(tmp_path / "none"), "no such file"),
        (str(torn), "is corrupt or not a safetensors file"),
        (str(other), "is no datastore of this version"),
        (str(store), "was built with another tokenizer"),
    ):
        with pytest.raises(UsageError, match=message):
            LLM.from_models(target, None, demo, "plain", level | {"datastore.path": path})
    level["datastore.path"] = str(store)
    with pytest.raises(UsageError, match="needs the model's tokenizer"):
        LLM.from_models(target, config="plain", overrides=level)
    build([[1, 2, 300]], byte_tokenizer(), store)
    with pytest.raises(UsageError, match="token IDs beyond the model's vocabulary of 256"):
        LLM.from_models(target, None, byte_tokenizer(), "plain", level)


@pytest.mark.parametrize("tensor", ["tokens", "order"])
def test_a_damaged_datastore_is_refused_when_it_is_opened(store: Path, tensor: str) -> None:
    """A single bit, wherever in its body."""
    build([byte_ids(300), byte_ids(50, start=700)], byte_tokenizer(), store)
    Datastore(store, 8, 4)
    whole = store.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    start, end = json.loads(whole[8 : 8 + header])[tensor]["data_offsets"]
    for place in (start, (start + end) // 2, end - 1):
        damaged = bytearray(whole)
        damaged[8 + header + place] ^= 1
        store.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"is damaged \(its checksum differs\); build it again: offload"):
            Datastore(store, 8, 4)
    store.write_bytes(whole)
    Datastore(store, 8, 4)


def test_a_datastore_is_checked_once_for_all_sequences(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    build([[1, 2, 3]], byte_tokenizer(), store)
    monkeypatch.setattr(datastore, "_checksum", lambda stored: checked.append(stored))
    with pytest.raises(UsageError, match="is damaged"):
        Datastore(store, 8, 4)
    monkeypatch.undo()
    first = Datastore(store, 8, 4)
    monkeypatch.setattr(datastore, "_checksum", lambda stored: checked.append(stored))
    assert Datastore(store, 8, 4)._tokens is first._tokens and len(checked) == 1


def test_a_build_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("It was the best of times.")
    arguments = ["datastore", "build", str(tmp_path / "texts")]
    assert command_line.main(arguments) == 0
    out = tmp_path / "texts.datastore.safetensors"
    before = out.read_bytes()
    for more in ([], ["--out", str(out)]):
        assert command_line.main([*arguments, *more]) == 2
        assert f"--out {out}: exists; name another file, or remove it" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_a_build_leaves_out_hidden_folders_and_environments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    files = ["one.txt", "below/two.txt", ".git/no.txt", "below/.cache/no.txt"]
    files += ["env/pyvenv.cfg", "env/lib/no.py", "below/conda/conda-meta/no.json", "below/conda/no.txt"]
    for name in files:
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        (texts / name).write_bytes(b"\xff" if "no." in name else b"a text")
    assert command_line.main(["datastore", "build", str(texts)]) == 0
    assert "tokens of 2 files" in capsys.readouterr().out
