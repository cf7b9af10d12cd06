"""`Context.save` and `LLM.load`: a restored context is as if never saved, or it is refused in a line."""

from __future__ import annotations

import copy
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from support.contexts import CONFIGS_AND_PLACES, HOT, NEXT, OTHER, TEXT, Make, check, fresh, rewritten
from support.small_engine import DEVICES, PAGE, SIZES, again
from support.tiny_models import LONGROPE_BORDER, byte_ids, byte_tokenizer, noisy_copy, tiny_target

from offload_rt import LLM, Context, GenerationResult, SamplingParams, UsageError
from offload_rt.engine import saved_context
from offload_rt.engine.saved_context import SavedContext
from offload_rt.system.checked_tensors import CheckedFile, Part, write_checked

LONG = SamplingParams(max_tokens=16)


@DEVICES
@CONFIGS_AND_PLACES
def test_a_restored_context_goes_on_as_one_that_was_never_saved(
    make: Make, config: str, place: str, device: torch.device, tmp_path: Path
) -> None:
    """After an append, generation and a rewind; greedily and sampled."""
    path = tmp_path / "a.safetensors"
    llm, other = make(config, place, device), make(config, place, device)
    context = llm.read(TEXT[:80])
    context.append(TEXT[80:120])
    context.generate((), NEXT)
    context.rewind(121)
    context.save(path)
    restored = other.load(path)
    assert restored.tokens == context.tokens
    if place != "in place":  # which a GPU plans for the length that there is at first
        assert restored.placement == context.placement
    assert again(restored, HOT).tokens == again(context, HOT).tokens
    restored.append(OTHER[:9])
    check(llm, restored, [*context.tokens, *OTHER[:9]])
    restored.close()
    assert other.engine.store.used_bytes == 0
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


def test_what_is_drafted_is_what_would_have_been(make: Make, tmp_path: Path) -> None:
    """The caches of drafting levels are filled from tokens and KV: nothing of them is in the file."""
    llm, other, path = make("triforce"), make("triforce"), tmp_path / "a.safetensors"
    context = llm.read(TEXT[:150])
    context.messages = [{"role": "user", "content": "Wer ist Ahab?"}]
    for question, params in (((), LONG), (OTHER[:20], HOT)):
        context.generate(question, NEXT) if question else None
        context.save(path)
        restored = other.load(path)
        assert restored.messages == context.messages
        found, kept = (one.engine.sequences[-1].full.last_queries for one in (other, llm))
        assert found is kept is None or torch.equal(found, kept)  # type: ignore[arg-type]
        made, expected = again(restored, params), again(context, params)
        assert made.tokens == expected.tokens
        assert drafted(made) == drafted(expected) and drafted(made)[0][1] > 0


def drafted(result: GenerationResult) -> list[tuple[str, int, int]]:
    return [(one.name, one.proposed, one.accepted) for one in result.levels]


@pytest.fixture(scope="module")
def saved(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "b.safetensors"
    with open_llm(models[0]) as llm, llm.read(TEXT[:105]) as context:
        context.append(TEXT[105:130])
        context.save(path)
    return path


@pytest.fixture(scope="module")
def plain_llm(models: Any) -> Iterator[LLM]:
    with open_llm(models[0]) as llm:
        yield llm


def open_llm(target: Any, tokenizer: Any = "bytes", **overrides: object) -> LLM:
    tokenizer = byte_tokenizer() if tokenizer == "bytes" else tokenizer
    return LLM.from_models(target, None, tokenizer, config="plain", overrides=SIZES | overrides)


def test_the_file_is_a_safetensors_file(saved: Path) -> None:
    with safe_open(saved, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        assert opened.metadata()["kind"] == "offload-rt context" and opened.metadata()["page_size"] == "16"
    assert tensors["tokens"].tolist() == TEXT[:130]
    assert tensors["pages.1"].shape == (8, 2, 2, PAGE, 16) and tensors["tail"].shape == (2, 2, 2, 1, 16)
    assert saved.stat().st_size < sum(tensor.nbytes for tensor in tensors.values()) + 4096


@pytest.mark.parametrize(("page", "piece"), [(4, 2**24), (16, 1), (64, 1)])
def test_pages_of_any_size_are_loaded(
    models: Any, saved: Path, page: int, piece: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And as many tokens as begin a prompt."""
    monkeypatch.setattr(saved_context, "PIECE_BYTES", piece)
    with open_llm(models[0], **{"store.page": page, "retrieval.chunk": 4}) as llm:
        restored, again_saved = llm.load(saved), tmp_path / "again.safetensors"
        check(llm, restored, TEXT[:130])
        restored.save(again_saved)
        for path in (saved, again_saved):
            for kept in (0, 1, 65, 130) if path == saved else (65,):
                tokens = [*TEXT[:kept], *OTHER[:20]]
                with SavedContext(path) as file:
                    context, there = Context.load(llm, file, 10, tokens)
                assert there == kept and context.generate((), NEXT).tokens == fresh(llm, tokens)
                context.close()


@settings(
    derandomize=True,
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(where=st.integers(0, 2**16), bit=st.none() | st.integers(0, 7), early=st.booleans())
def test_a_torn_or_damaged_file_is_refused(
    plain_llm: LLM, saved: Path, tmp_path: Path, where: int, bit: int | None, early: bool
) -> None:
    """Cut off anywhere, or with any bit flipped."""
    data = bytearray(saved.read_bytes())
    where %= 2500 if early else len(data)  # the header is short
    if bit is None:
        del data[where:]
    else:
        data[where] ^= 1 << bit
    path = tmp_path / "torn.safetensors"
    path.write_bytes(data)
    check_refused(plain_llm, path)


def check_refused(llm: LLM, path: Path) -> None:
    with pytest.raises(UsageError, match="is corrupt or no saved context") as told:
        llm.load(path)
    assert str(path) in str(told.value) and "\n" not in str(told.value)
    assert llm.engine.store.used_bytes == 0 and not llm.engine.sequences


EXABYTE = 2**60


def enlarge(header: dict[str, Any], about: dict[str, str]) -> None:
    about["piece_bytes"] = "1"
    start = header["pages.1"]["data_offsets"][0]
    header["pages.1"] |= {"data_offsets": [start, start + EXABYTE], "shape": [EXABYTE // 4]}


def overlap(header: dict[str, Any], about: dict[str, str]) -> None:
    header["pages.1"]["data_offsets"] = header["pages.0"]["data_offsets"]


def few_checksums(header: dict[str, Any], about: dict[str, str]) -> None:
    start = header["checksums"]["data_offsets"][0]
    header["checksums"] |= {"data_offsets": [start, start + 16], "shape": [2]}


@pytest.mark.parametrize(
    "change",
    [
        enlarge,
        overlap,
        few_checksums,
        lambda header, about: about.update(piece_bytes="0"),
        lambda header, about: about.update(piece_bytes="-1"),
        lambda header, about: about.update(piece_bytes="100"),
        lambda header, about: header["tail"].update(shape=[-1 * one for one in header["tail"]["shape"][:4]]),
        lambda header, about: header["tail"].update(shape=[header["tail"]["shape"][0] * 64]),
        lambda header, about: header["tail"].update(shape=[float("inf")]),
        lambda header, about: header["pages.1"].update(shape=[16, 2, 2, 8, 16]),
        lambda header, about: header["pages.0"].update(dtype="I32"),
        lambda header, about: header.update({"tai1": header.pop("tail")}),
        lambda header, about: about.update(page_size="0"),
        lambda header, about: about.update(page_size="-16"),
        lambda header, about: about.update(reads='["a"]'),
        lambda header, about: about.update(fingerprint="[]"),
    ],
)
def test_a_header_that_was_written_to_do_harm(
    plain_llm: LLM, saved: Path, tmp_path: Path, change: Callable[..., object]
) -> None:
    path = tmp_path / "harm.safetensors"
    path.write_bytes(rewritten(saved.read_bytes(), change))
    check_refused(plain_llm, path)


def test_tokens_that_the_model_does_not_have(models: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with open_llm(models[0]) as llm:
        with llm.read(TEXT[:40]).snapshot() as prefix:
            other = replace(prefix, tokens=[*TEXT[:39], 10**6])
            saved_context.save_prefix(path, other, llm.fingerprint(prefix.target))
        with pytest.raises(UsageError, match="prompt token 1000000 is outside the vocabulary of 128"):
            llm.load(path)


def test_more_places_than_one_read_fills(tmp_path: Path) -> None:
    """As in a store whose free pages lie apart."""
    data, path = torch.arange(2000, dtype=torch.int32), tmp_path / "a"
    with path.open("wb") as file:
        write_checked(file, [Part.of("a", data)], {}, 2**20, lambda done, total: None)
    read = torch.empty_like(data)
    with CheckedFile(path) as checked:
        for _ in checked.fill("a", data.nbytes, lambda start, end: list(read.split(1))):
            pass
    assert torch.equal(read, data)


def test_any_dtype_is_saved(models: Any, tmp_path: Path) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        with open_llm(copy.deepcopy(models[0]).to(dtype)) as llm, llm.read(TEXT[:40]) as context:
            context.save(tmp_path / "a")
            restored = llm.load(tmp_path / "a")
            assert again(restored, NEXT).tokens == again(context, NEXT).tokens


def test_what_a_model_cannot_go_on_from(models: Any, saved: Path, tmp_path: Path) -> None:
    target = models[0]
    stretched = copy.deepcopy(target.config)
    stretched.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 8192,
    }
    yarn = type(target)(stretched).eval()
    yarn.load_state_dict(target.state_dict())
    words = byte_tokenizer().__class__(tokenizer_object=copy.deepcopy(byte_tokenizer().backend_tokenizer))
    words.add_tokens(["Ahab"])
    one_weight = copy.deepcopy(target)
    with torch.no_grad():
        one_weight.model.norm.weight[0] += 1
    for other, tokenizer, message in (
        (noisy_copy(target), "bytes", "was saved by another model; the model was LlamaForCausalLM"),
        (one_weight, "bytes", "another model"),
        (tiny_target("qwen2", vocabulary=128), "bytes", "another model"),
        (copy.deepcopy(target).bfloat16(), "bytes", r"another dtype \(float32, here bfloat16\)"),
        (yarn, "bytes", "other rotary settings"),
        (target, words, "another tokenizer"),
        (
            tiny_target("llama", vocabulary=128),
            "bytes",
            r"another KV layout \(.*\(2, 2, 16\), here \(2, 4, 16\)\)",
        ),
    ):
        with open_llm(other, tokenizer) as llm:
            with pytest.raises(UsageError, match=message) as told:
                llm.load(saved)
            assert "\n" not in str(told.value) and llm.engine.store.used_bytes == 0
    with open_llm(target, None) as llm:  # token ids are all that it needs
        assert llm.load(saved).tokens == TEXT[:130]


def test_kv_of_other_rotary_frequencies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with open_llm(tiny_target("phi3"), None) as llm:
        context = llm.read(byte_ids(LONGROPE_BORDER + 10), 10)
        context.save(path)
        check(llm, llm.load(path), context.tokens)
        with SavedContext(path) as file, pytest.raises(UsageError, match="longrope's original context"):
            Context.load(llm, file, 10, byte_ids(100))


def test_files_that_cannot_be_loaded(
    models: Any, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = tmp_path / "newer.safetensors"
    other = tmp_path / "model.safetensors"
    models[0].save_pretrained(tmp_path)
    with open_llm(models[0]) as llm:
        llm.read(TEXT[:20]).save(newer)
        newer.write_bytes(rewritten(newer.read_bytes(), lambda _, about: about.update(version="3")))
        for path, message in (
            (tmp_path / "none", "there is no such file"),
            (tmp_path, "corrupt or no saved context .it is a folder"),
            (other, "corrupt or no saved context .its header cannot be read"),
            (newer, r"saved by a newer version of offload-rt \(format 3, this one reads 2\)"),
        ):
            with pytest.raises(UsageError, match=message):
                llm.load(path)
        monkeypatch.setattr("offload_rt.planning.sequence_planner.available_memory", lambda: 0)
        with pytest.raises(UsageError, match=r"the KV of \d+ tokens needs"):
            llm.load(saved)
        monkeypatch.undo()
        with pytest.raises(UsageError, match="room must be an integer"):
            llm.load(saved, 1.5)  # type: ignore[arg-type]


def test_a_context_outlives_a_failure_to_save_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was there before stays, too."""
    reports: list[tuple[str, int, int]] = []
    raised: list[BaseException] = []

    def told(phase: str, done: int, total: int) -> None:
        reports.append((phase, done, total))
        if raised and phase == "save" and done > total // 2:
            raise raised.pop()

    llm = make("triforce", "tiers", on_progress=told)
    context, path = llm.read(TEXT[:105]), tmp_path / "a.safetensors"
    context.save(path)
    phase, done, total = reports[-1]
    assert phase == "save" and done == total
    before = path.read_bytes()
    context.append(OTHER[:50])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(UsageError, match=r"cannot be saved \(File too large\); free up space"):
            context.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
        with pytest.raises(UsageError, match=r"needs 0\.00 GiB, but 0\.00 GiB are free there"):
            context.save(path)
    for error in (KeyboardInterrupt, ValueError):
        raised.append(error())
        with pytest.raises(error):
            context.save(path)
    for unwritable, message in (
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "none" / "a", "its folder does not exist"),
    ):
        with pytest.raises(UsageError, match=message):
            context.save(unwritable)
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"] and path.read_bytes() == before
    used = llm.engine.store.used_bytes
    check(llm, context, [*TEXT[:105], *OTHER[:50]])
    context.save(path)
    reports.clear()
    restored = llm.load(path)
    assert {phase for phase, *_ in reports} == {"load"} and reports[-1][1] == reports[-1][2]
    check(llm, restored, context.tokens)
    restored.close()
    assert llm.engine.store.used_bytes == used
    context.close()
    with pytest.raises(UsageError, match="this context is closed"):
        context.save(path)


def test_saving_ends_an_open_stream(make: Make, tmp_path: Path) -> None:
    llm = make("triforce", "tiers")
    context = llm.read(TEXT[:100])
    stream = context.stream((), LONG)
    taken = [next(stream).token for _ in range(3)]
    context.save(tmp_path / "a")
    assert stream.result is not None and stream.result.tokens == taken
    restored = llm.load(tmp_path / "a")
    check(llm, restored, [*TEXT[:100], *taken])


def test_a_full_context_is_forked_and_restored(models: Any, tmp_path: Path) -> None:
    """There is no room for a token more, but it may be rewound."""
    target = copy.deepcopy(models[0])
    target.config.max_position_embeddings = 64
    with open_llm(target) as llm:
        context = llm.read(TEXT[:56])
        context.generate((), NEXT)
        context.save(tmp_path / "a")
        for other in (context.fork(), llm.load(tmp_path / "a")):
            assert len(other) == 64 and other.tokens == context.tokens
            other.rewind(56)
            check(llm, other, TEXT[:56])


def test_a_link_stays_and_a_device_is_refused(make: Make, tmp_path: Path) -> None:
    disk, link, pipe = tmp_path / "disk", tmp_path / "link", tmp_path / "pipe"
    disk.mkdir()
    link.symlink_to(disk / "a")
    os.mkfifo(pipe)
    llm = make("plain")
    context = llm.read(TEXT[:40])
    for _ in range(2):
        context.save(link)
        assert link.is_symlink() and [one.name for one in disk.iterdir()] == ["a"]
    assert llm.load(link).tokens == TEXT[:40]
    with pytest.raises(UsageError, match="is a pipe or a device; name a file"):
        context.save(pipe)
    assert pipe.is_fifo()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError):
        llm.load(tmp_path / "loop")


def test_an_llm_that_is_closed_while_it_saves(make: Make, tmp_path: Path) -> None:
    llm: LLM = make("plain", on_progress=lambda phase, done, total: llm.close() if phase == "save" else None)
    with pytest.raises(UsageError, match="was not saved, as the KV store is closed"):
        llm.read(TEXT[:100]).save(tmp_path / "a")
    assert not list(tmp_path.iterdir())
