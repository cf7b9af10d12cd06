"""Folders of saved contexts: names, the cache of prefixes, processes that share one, and the command line."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.contexts import NEXT, OTHER, TEXT, fresh
from support.small_engine import SIZES
from support.tiny_models import LONGROPE_BORDER, byte_ids, byte_tokenizer, noisy_copy, tiny_target

from offload_rt import LLM, UsageError
from offload_rt.api import sessions
from offload_rt.api.session_files import PREFIX, SUFFIX
from offload_rt.api.sessions import SessionFolder
from offload_rt.commands import cli
from offload_rt.system.files import PARTIAL, remove_partials, synced


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(tiny_target("llama-gqa", vocabulary=128)) as llm:
        yield llm


def open_llm(target: Any) -> LLM:
    return LLM.from_models(target, None, byte_tokenizer(), config="plain", overrides=SIZES)


@pytest.fixture
def least(monkeypatch: pytest.MonkeyPatch) -> int:
    """Fewest tokens that are kept."""
    monkeypatch.setattr(sessions, "LEAST_TOKENS", 40)
    return 40


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_named_sessions(llm: LLM, tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path / "new" / "folder")
    assert folder.entries() == []
    with llm.read(TEXT[:50]) as context:
        for name in ("b.2", "Moby-Dick_1"):
            folder.save(context, name)
        for name in ("", ".a", "a/b", "..", "a b", "ä", "a" * 101):
            with pytest.raises(UsageError, match="a name has up to 100 letters, digits"):
                folder.save(context, name)
            with pytest.raises(UsageError):
                folder.remove(name)
        with pytest.raises(UsageError, match="cannot be created"):
            SessionFolder(tmp_path / "new" / "folder" / "b.2.safetensors").save(context, "a")
    assert names(folder.folder) == ["Moby-Dick_1.safetensors", "b.2.safetensors"]
    os.utime(folder.path("b.2"), (10, 10))
    assert [(one.name, one.tokens, one.cached) for one in folder.entries()] == [
        ("Moby-Dick_1", 50, False),
        ("b.2", 50, False),
    ]
    with folder.load(llm, "b.2") as restored:
        assert restored.tokens == TEXT[:50] and restored.generate((), NEXT).tokens == fresh(llm, TEXT[:50])
    assert folder.entries()[0].name == "b.2", "it was used last"
    folder.remove("b.2")
    with pytest.raises(UsageError, match=r"session b.2: cannot be removed \(No such file.*: Moby-Dick_1"):
        folder.remove("b.2")
    with pytest.raises(UsageError, match="there is no such file"):
        folder.load(llm, "b.2")


def test_a_prompt_is_read_on_from_the_longest_file_that_fits(llm: LLM, tmp_path: Path, least: int) -> None:
    folder = SessionFolder(tmp_path)
    assert folder.longest(llm, TEXT) is None
    with llm.read(TEXT[:100]) as context, llm.read([*TEXT[:60], *OTHER[:60]]) as branch:
        kept, other = folder.keep(context), folder.keep(branch)
    assert kept is not None and other is not None
    with open_llm(noisy_copy(llm.engine.target.module)) as stranger, stranger.read(TEXT[:150]) as context:
        assert folder.longest(stranger, TEXT) is None
        folder.save(context, "stranger")
    assert folder.longest(llm, TEXT[:150]) == (kept, 100)
    assert folder.longest(llm, TEXT[:70]) == (kept, 70)
    assert folder.longest(llm, [*TEXT[:60], *OTHER]) == (other, 120)
    assert folder.longest(llm, OTHER) is None
    for prompt, there in (
        (TEXT[:150], 100),
        (TEXT[:70], 70),
        ([*TEXT[:60], *OTHER[:80]], 120),
        (TEXT[:30], 0),
    ):
        os.utime(kept, (10, 10))
        context, found = folder.open(llm, prompt, 10)
        assert found == there
        result = context.generate((), NEXT)
        assert result.tokens == fresh(llm, prompt) and result.timings.prefill_tokens == len(prompt) - there
        assert (kept.stat().st_mtime > 10) == (there in (100, 70))
        context.close()
    with pytest.raises(UsageError, match="was saved by another model"):
        folder.open(llm, TEXT[:150], 10, "stranger")
    context, found = folder.open(llm, TEXT[:120], 10, "mine", cache=False)
    assert found == 0 and folder.open(llm, TEXT[:120], 10, "mine")[1] == 100
    folder.save(context, "mine")
    assert folder.open(llm, TEXT[:130], 10, "mine")[1] == 120
    assert folder.open(llm, TEXT[:130], 10)[1] == 120, "named sessions are looked at too"
    with pytest.raises(UsageError, match="outside the vocabulary"):
        folder.open(llm, [*TEXT[:130], 128], 10)


def test_what_is_worth_keeping(llm: LLM, tmp_path: Path, least: int) -> None:
    folder = SessionFolder(tmp_path)

    def keep(tokens: list[int]) -> Path | None:
        with llm.read(tokens) as context:
            return folder.keep(context)

    assert keep(TEXT[: least - 1]) is None and not tmp_path.joinpath("x").exists()
    first = keep(TEXT[:100])
    assert first is not None and keep(TEXT[:100]) is None and keep(TEXT[:50]) is None
    assert keep(TEXT[: 100 + least - 1]) is None, "nearly all of it is there"
    branch = keep([*TEXT[:60], *OTHER[:60]])
    with llm.read(TEXT[:100]) as context:
        folder.save(context, "named")
    longer = keep(TEXT[:150])
    assert longer is not None and branch is not None
    assert names(tmp_path) == sorted(["named.safetensors", branch.name, longer.name]), "it extends the first"
    (tmp_path / f".torn.safetensors.0{PARTIAL}").touch()
    assert folder.clear() == 2 and names(tmp_path) == ["named.safetensors"]


def test_the_least_recently_used_go_first(llm: LLM, tmp_path: Path, least: int) -> None:
    token_bytes = llm.engine.store.layout.token_bytes
    folder = SessionFolder(tmp_path, limit_bytes=250 * token_bytes + 30_000)
    kept = []
    for start in range(3):
        with llm.read(TEXT[start : start + 100]) as context:
            folder.save(context, f"named{start}")
            for named in tmp_path.glob("named*"):
                named.rename(named.with_suffix(".hidden"))  # so that its tokens are not there already
            path = folder.keep(context)
            assert path is not None
            kept.append(path)
            for number, one in enumerate(kept):
                if one.exists():
                    os.utime(one, (number, number))
            if start == 1:
                os.utime(kept[0], (10, 10))
    assert [path.exists() for path in kept] == [True, False, True]
    assert len(list(tmp_path.glob("named*"))) == 3
    with llm.read(TEXT[50:230] + TEXT[50:230]) as context:
        assert folder.keep(context) is None, "larger than all of the cache"
    assert [path.exists() for path in kept] == [True, False, True]


def test_files_that_are_gone_or_damaged_do_not_matter(
    llm: LLM, tmp_path: Path, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SessionFolder(tmp_path)
    with llm.read(TEXT[:100]) as context:
        path = folder.keep(context)
        assert path is not None
        folder.save(context, "named")
    data = bytearray(path.read_bytes())
    data[-500] ^= 1  # of the KV: the header is right
    path.write_bytes(data)
    files = folder._files
    monkeypatch.setattr(folder, "_files", lambda: [tmp_path / "gone.safetensors", *files()])
    context, there = folder.open(llm, TEXT[:120], 10)
    assert there == 100 and names(tmp_path) == ["named.safetensors"], "what is damaged is removed"
    folder.path("named").write_bytes(bytes(data))
    with pytest.raises(UsageError, match="corrupt"):
        folder.open(llm, TEXT[:120], 10, "named")
    folder.path("named").write_bytes(b"none")
    assert [(one.name, one.tokens, one.model) for one in folder.entries()] == [("named", None, "corrupt")]
    assert folder.longest(llm, TEXT) is None


def test_another_file_in_the_place_of_one_that_was_found(llm: LLM, tmp_path: Path, least: int) -> None:
    """Another process saves a session of that name meanwhile, by another model."""
    folder = SessionFolder(tmp_path)
    with llm.read(TEXT[:100]) as context:
        folder.save(context, "named")
    found = folder.longest(llm, TEXT)
    assert found == (folder.path("named"), 100)
    with open_llm(noisy_copy(llm.engine.target.module)) as stranger, stranger.read(TEXT[:150]) as context:
        folder.save(context, "named")
    used = llm.engine.store.used_bytes
    assert folder.read(llm, found[0], llm.engine.target, 100) is None
    assert llm.engine.store.used_bytes == used


def test_a_damaged_session_that_nobody_asked_for(llm: LLM, tmp_path: Path, least: int) -> None:
    folder = SessionFolder(tmp_path)
    with llm.read(TEXT[:100]) as context:
        folder.save(context, "damaged")
    data = bytearray(folder.path("damaged").read_bytes())
    data[-500] ^= 1  # of the KV: the header is right
    folder.path("damaged").write_bytes(data)
    for name in (None, "other"):
        context, there = folder.open(llm, TEXT[:120], 10, name)
        assert there == 0 and context.tokens == TEXT[:120]
        context.close()
    assert names(tmp_path) == ["damaged.safetensors"], "a session is the user's"


def test_what_cannot_be_removed_stays(llm: LLM, tmp_path: Path, least: int) -> None:
    (tmp_path / f"{PREFIX}a{SUFFIX}").mkdir()
    folder = SessionFolder(tmp_path, limit_bytes=100 * llm.engine.store.layout.token_bytes)
    with llm.read(TEXT[:100]) as context:
        assert folder.keep(context) is not None
    assert folder.clear() == 1 and len(names(tmp_path)) == 1


def test_prompts_near_the_border_of_longrope(tmp_path: Path, least: int) -> None:
    """They are read, with less room, and each prefix is for its own frequencies."""
    folder = SessionFolder(tmp_path)
    tokens = byte_ids(LONGROPE_BORDER + 10)
    with open_llm(tiny_target("phi3")) as llm:
        for count, there in ((LONGROPE_BORDER - 10, 0), (LONGROPE_BORDER + 10, 0), (LONGROPE_BORDER - 5, 5)):
            context, found = folder.open(llm, tokens[:count], 2048)
            assert found == (LONGROPE_BORDER - 10 if there else 0) and len(context) == count
            assert (folder.keep(context) is None) == bool(there)
            context.close()
        assert len(names(tmp_path)) == 2


# ---------------------------------------------------------------------------------- several processes

WRITER = """
import sys
from pathlib import Path
from offload_rt.system.files import remove_partials, synced
path, letter, times = Path(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3])
for _ in range(times or 1):
    remove_partials(path.parent)
    with synced(path) as file:
        for _ in range(40):
            file.write(letter * 1000)
        if not times:
            file.flush()
            print("begun", flush=True)
            sys.stdin.read()
"""


def writer(path: Path, letter: str, times: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), letter, str(times)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_writers_that_race_and_readers_between_them(tmp_path: Path) -> None:
    """Both clear up what killed writers left, all the time, and neither loses its own file."""
    path, seen = tmp_path / "a", set[bytes]()
    racing = [writer(path, letter, 100) for letter in "ab"]
    while any(one.poll() is None for one in racing):
        if path.exists():
            data = path.read_bytes()
            assert data in (b"a" * 40_000, b"b" * 40_000)
            seen.add(data[:1])
    for one in racing:
        one.communicate()
        assert one.returncode == 0
    assert seen and names(tmp_path) == ["a"]


def test_a_killed_writer_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"before")
    living, killed = writer(path, "a", 0), writer(path, "b", 0)
    for one in (living, killed):
        assert one.stdout is not None and one.stdout.readline() == "begun\n"
    assert len(names(tmp_path)) == 3
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    remove_partials(tmp_path)
    assert len(names(tmp_path)) == 2 and path.read_bytes() == b"before", "that of the living writer stays"
    living.communicate("go on")
    assert names(tmp_path) == ["a"] and path.read_bytes() == b"a" * 40_000


def test_a_file_that_is_removed_before_its_writer_has_locked_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, cleared = fcntl.flock, list[str]()

    def late(file: Any, operation: int) -> None:
        if not cleared:
            cleared.extend(names(tmp_path))
            (tmp_path / cleared[0]).unlink()  # by another writer, which has found no lock
        lock(file, operation)

    monkeypatch.setattr("offload_rt.system.files.fcntl.flock", late)
    with synced(tmp_path / "a") as file:
        file.write(b"whole")
    assert cleared and (tmp_path / "a").read_bytes() == b"whole" and names(tmp_path) == ["a"]


def test_a_file_that_is_removed_while_its_writer_waits_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has locked it first, and removes it only then."""
    lock, removing = fcntl.flock, list[threading.Thread]()

    def late(file: Any, operation: int) -> None:
        if not removing:
            (partial,) = tmp_path.iterdir()
            other, locked = partial.open("rb"), threading.Event()

            def remove() -> None:
                with other:
                    lock(other, fcntl.LOCK_EX)
                    locked.set()
                    time.sleep(0.05)  # a writer that does not wait for the lock goes on meanwhile
                    partial.unlink()

            removing.append(threading.Thread(target=remove))
            removing[0].start()
            locked.wait()
        lock(file, operation)

    monkeypatch.setattr("offload_rt.system.files.fcntl.flock", late)
    with synced(tmp_path / "a") as file:
        removing[0].join()
        file.write(b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole" and names(tmp_path) == ["a"]


def test_an_interrupt_of_a_writer_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("offload_rt.system.files.fcntl.flock", interrupted)
    with pytest.raises(KeyboardInterrupt), synced(tmp_path / "a"):
        raise AssertionError
    assert names(tmp_path) == []


# ------------------------------------------------------------------------------------ the command line


def generate(*arguments: str) -> int:
    return cli.main(["generate", "--config", "plain", "-n", "4", *arguments])


def test_generate_reads_on_from_a_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book, cache = tmp_path / "book.txt", tmp_path / "cache"
    book.write_text("Call me Ishmael. " * 20)
    report = tmp_path / "report.json"
    flags = ("--cache", str(cache), "--cache-limit", "1", "--session", "book", "--json", str(report))
    assert generate("--prompt-file", str(book), *flags) == 0
    first = capsys.readouterr()
    tokens = json.loads(report.read_text())["prompt_tokens"]
    assert f"session    book: 0 of {tokens:,} tokens were there" in first.err
    assert names(cache) == ["book.safetensors"]
    assert generate("--prompt-file", str(book), *flags) == 0
    second = capsys.readouterr()
    assert second.out == first.out and json.loads(report.read_text())["timings"]["prefill_tokens"] == 0
    assert f"session    book: {tokens:,} of {tokens:,} tokens were there" in second.err
    assert cli.main(["sessions", "list", "--cache", str(cache), "--json", str(report)]) == 0
    assert f"{tokens + 4:,} tokens" in capsys.readouterr().out
    (entry,) = json.loads(report.read_text())["sessions"]
    assert entry["name"] == "book" and entry["tokens"] == tokens + 4 and not entry["cached"]
    assert cli.main(["sessions", "rm", "book", "--cache", str(cache)]) == 0 and names(cache) == []
    assert cli.main(["sessions", "clear", "--cache", str(cache)]) == 0
    assert cli.main(["sessions", "list", "--cache", str(cache)]) == 0
    assert capsys.readouterr().out == f"removed 0 cached prefixes\nno sessions in {cache}\n"


def test_text_is_not_lost_where_it_cannot_be_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **options: Any) -> None:
        raise UsageError("session a: cannot be saved (No space left on device); free up space")

    monkeypatch.setattr("offload_rt.api.sessions.save_prefix", full)
    report = tmp_path / "report.json"
    flags = ("--prompt", "Call me", "--session", "a", "--cache", str(tmp_path / "c"), "--json", str(report))
    assert generate(*flags) == 2
    ended = capsys.readouterr()
    assert len(ended.out) > 1 and json.loads(report.read_text())["text"] == ended.out[:-1]
    assert ended.err.splitlines()[-1].startswith("offload-rt: error: session a: cannot be saved (No space")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--session", "a/b", "--prompt", "a"], "a name has up to 100 letters"),
        (["generate", "--cache", __file__, "--prompt", "a"], "cannot be created (File exists); name another"),
        (["generate", "--cache-limit", "none", "--prompt", "a"], "is not a size in GiB above 0"),
        (["sessions", "rm", "none", "--cache", "/nowhere"], "session none: cannot be removed"),
        (["sessions"], "the following arguments are required: list|rm|clear"),
    ],
)
def test_bad_flags(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
