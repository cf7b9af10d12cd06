"""The command line: what it asks of the runtime, what it writes where, and what it says about mistakes."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn, TextIO

import pytest
import torch

import bench.__main__
from cpu_kv import CopyFailed, PacedLink
from offload_rt.commands import cli, demo, prompts, running
from offload_rt.commands import console as console_module
from offload_rt.commands.console import Console
from offload_rt.commands.exits import run_program
from offload_rt.commands.prompts import BUILT_IN_TOKENS
from offload_rt.errors import UsageError
from offload_rt.machine.other_work import OtherWork
from offload_rt.model import loading
from offload_rt.sampling.params import SamplingParams

WORDS = ["some", " words", " written", " by", " a", " model", " that", " is", " none"]
TEXT = "".join(WORDS)


class FakeLLM:
    """Always writes `TEXT`, a word a token; where `stops_with` is set, an error or a signal after three."""

    made: FakeLLM
    plan: SimpleNamespace | None = None
    model_sampling: SamplingParams | None = None
    stops_with: BaseException | signal.Signals | None = None

    def __init__(self, model: str | None, **options: Any) -> None:
        type(self).made = self
        self.options = {"model": model, **options}
        self.closed = False
        options["on_notice"]("memory is not pinned")

    def read(self, prompt: Sequence[int], room: int) -> FakeLLM:
        """It is its own context."""
        self.prompt, self.room = prompt, room
        self.options["on_progress"]("prefill", 1, 1)
        return self

    def stream(self, *, params: SimpleNamespace) -> FakeStream:
        self.params = params
        return FakeStream(self)

    def rewind(self, length: int) -> None:
        assert length == len(self.prompt)

    def result(self, made: int, finish_reason: str, decoding_ms: float = 8.0) -> SimpleNamespace:
        tokens, prompt = list(range(made)), len(self.prompt)
        rate = {"new_tokens": 4, "decode_ms": decoding_ms, "tokens_per_second": 500.0}
        return SimpleNamespace(
            tokens=tokens,
            text="".join(WORDS[:made]) + " (held)" * (finish_reason == "interrupted"),
            finish_reason=finish_reason,
            timings=SimpleNamespace(prefill_tokens=prompt, prefill_ms=500.0, **rate),
            rounds=2,
            levels=[
                SimpleNamespace(name="draft:streaming", proposed=0, accepted=0),
                SimpleNamespace(name="target:full", proposed=8, accepted=6),
            ],
            memory=SimpleNamespace(kv_bytes=2**30, host_peak_bytes=3 * 2**29, device_peak_bytes=0),
            notices=["memory is not pinned", "5 of 9 tokens used plain decoding"],
            seed=self.params.seed,
            prompt_tokens=prompt,
            to_json=lambda: {"tokens": tokens, "finish_reason": finish_reason},
        )

    def generate(self, *, params: SimpleNamespace, config: str) -> SimpleNamespace:
        assert config == "plain"
        return self.result(len(WORDS), "length", decoding_ms=20.0)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


class FakeStream(Iterator[SimpleNamespace]):
    """Words of a `FakeLLM`."""

    def __init__(self, llm: FakeLLM) -> None:
        self.result: SimpleNamespace | None = None
        self._llm = llm
        self._made = 0

    def __next__(self) -> SimpleNamespace:
        stops_with = self._llm.stops_with
        if self._made == 3 and isinstance(stops_with, signal.Signals):
            signal.raise_signal(stops_with)
        elif self._made == 3 and isinstance(stops_with, BaseException):
            raise stops_with
        if self._made == len(WORDS):
            self.result = self._llm.result(len(WORDS), "length")
            raise StopIteration
        self._made += 1
        return SimpleNamespace(token=self._made - 1, text=WORDS[self._made - 1])

    def close(self) -> None:
        self.result = self.result or self._llm.result(3, "interrupted")


Shown = Callable[[], str]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Shown]]:
    """Makes stderr a terminal of 100 columns; what it returns returns what was written there since."""
    reading, writing = os.openpty()
    stderr = os.fdopen(writing, "w")

    def shown() -> str:
        data = b""
        while select.select([reading], [], [], 0)[0]:
            data += os.read(reading, 2**20)
        written = data.decode()
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", lambda code: "<hide>" * (code[0] == "\x1b[?25l"), written)

    def begin() -> Shown:  # not before the test runs: pytest sets stderr until then
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr(sys, "stderr", stderr)
        return shown

    with stderr:
        yield begin
        monkeypatch.undo()
    os.close(reading)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """The runtime is replaced by a class of its own for each test."""

    class LLM(FakeLLM):
        pass

    api: Any = ModuleType("offload_rt.api.llm")
    api.LLM, api.SamplingParams = LLM, SimpleNamespace
    monkeypatch.setitem(sys.modules, "offload_rt.api.llm", api)
    monkeypatch.setattr(loading, "load_tokenizer", lambda source: CharacterTokenizer())
    monkeypatch.setattr("offload_rt.model.hub.located", lambda source: source)  # the hub has any model
    return LLM


class CharacterTokenizer:
    """Encodes a character as a token."""

    bos_token_id = None
    added_tokens_decoder: dict[int, object] = {}  # noqa: RUF012

    def __call__(self, text: str, verbose: bool, **options: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def get_vocab(self) -> dict[str, int]:
        return {}


Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def run(llm: type[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line, in which F is a folder of the test's own: exit code, stdout, stderr."""

    def run(line: str) -> tuple[int, str, str]:
        return cli.main(shlex.split(line.replace("F/", f"{tmp_path}/"))), *capsys.readouterr()

    return run


COMPARED = "generate --prompt abc --compare-plain --json F/out.json"
SMALLER = "give a shorter prompt, fewer new tokens or a smaller --retrieval-budget"


def test_text_goes_to_stdout_and_the_summary_to_stderr(llm: type[FakeLLM], run: Run) -> None:
    code, out, err = run("generate --prompt abc --seed 7")
    assert (code, out) == (0, TEXT + "\n")
    for said in [
        "prompt     3 tokens, prefill 0.5 s (6 tokens/s)",
        "9 tokens, 2.0 ms/token, 500.0 tokens/s; finish: length; seed 7",
        "2, 4.50 tokens per round; target:full accepted 75% of 8",
        "KV 1.00 GiB; peak on the host 1.50 GiB",
        "5 of 9 tokens used plain decoding",
    ]:
        assert said in err
    assert err.count("memory is not pinned") == 1
    assert llm.made.closed


def test_what_is_asked_of_the_runtime(llm: type[FakeLLM], run: Run) -> None:
    run(
        "generate --model m --draft none --config lookup --prompt abc --max-prompt-tokens 2 -n 5 --quiet"
        " --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 --repetition-penalty 1.2"
        " --presence-penalty -1 --frequency-penalty 0.5 --seed 1 --stop x --stop yz --ignore-eos"
        " --device cpu --dtype float32 --retrieval-budget 512 --chunk-size 16 --gamma1 3 --gamma2 4"
        " --refresh stride:2 --set streaming.window=100 --set retrieval.budget=1024"
        """ --json-schema '{"enum": [1]}'"""
    )
    made = llm.made
    expected = {"model": "m", "draft": "none", "config": "lookup", "device": "cpu", "dtype": "float32"}
    assert expected.items() <= made.options.items()
    assert made.options["overrides"] == {
        "retrieval.budget": 1024,
        "retrieval.chunk": 16,
        "speculation.gamma1": 3,
        "speculation.gamma2": 4,
        "retrieval.refresh": "stride:2",
        "streaming.window": 100,
    }
    assert made.prompt == [ord("b"), ord("c")]
    assert vars(made.params) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.5,
        "max_tokens": 5,
        "stop": ("x", "yz"),
        "seed": 1,
        "ignore_eos": True,
        "json_schema": '{"enum": [1]}',
        "logprobs": None,
        "tools": None,
        "thinking_budget": None,
    }


def test_without_a_seed_one_is_drawn_and_told(llm: type[FakeLLM], run: Run) -> None:
    seeds = set()
    for _ in range(3):
        _, _, err = run("generate --prompt abc")
        seeds.add(llm.made.params.seed)
        assert f"seed {llm.made.params.seed}" in err
    assert len(seeds) > 1  # the same one three times: 1 in 2**64


def test_quiet(run: Run) -> None:
    assert run("generate --prompt abc --max-prompt-tokens 1 --quiet") == (0, TEXT + "\n", "")


def test_the_built_in_prompt_is_long_and_cut(llm: type[FakeLLM], run: Run) -> None:
    told = run("generate")[2]
    assert re.search(r"kept the last 32,768 of [\d,]+ tokens of Moby-Dick, chapters 1 to 48\n", told)
    assert len(llm.made.prompt) == BUILT_IN_TOKENS
    run("generate --max-prompt-tokens 1000000")
    whole = "".join(map(chr, llm.made.prompt))
    assert whole.startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert whole.endswith("an oar or a lance pole.\n")


def test_prompts_from_a_file_and_from_stdin(
    llm: type[FakeLLM], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_bytes("é\r\n".encode())
    run("generate --prompt-file F/prompt.txt")
    assert llm.made.prompt == [0xE9, 13, 10]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ß\n".encode())))
    run("generate -")
    assert llm.made.prompt == [0xDF, 10]


def test_what_cannot_be_read_of_a_prompt_is_told(
    llm: type[FakeLLM], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 1000 * b"a" + b"\xff"
    (tmp_path / "prompt.txt").write_bytes(text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    for command, source in (("generate --prompt-file F/prompt.txt", "/prompt.txt"), ("generate -", "stdin")):
        _, _, err = run(command)
        assert llm.made.prompt == [97] * 1000 + [0xFFFD]
        notice = f"{source}: not UTF-8 (byte 1000 is 0xff): 1 character of 1,001 replaced by \ufffd"
        assert notice in " ".join(err.split())


def test_several_prompts_are_joined_in_order(
    llm: type[FakeLLM], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "book.txt").write_text("a\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"z")))
    run("generate - --prompt-file F/book.txt --prompt 'Who is b?' --prompt c")
    assert "".join(map(chr, llm.made.prompt)) == "a\nWho is b?\nc\nz"
    (tmp_path / "ids").write_text("7 8")
    run("generate --prompt-tokens F/ids --prompt-tokens F/ids")
    assert llm.made.prompt == [7, 8, 7, 8]


@pytest.mark.parametrize(
    "ids", ["1 2\n300", "1,2,\n 300,", " [1, 2, 300]\n"], ids=["spaces", "commas", "list"]
)
def test_token_ids_in_and_out(
    llm: type[FakeLLM], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: str
) -> None:
    monkeypatch.setattr(loading, "load_tokenizer", lambda source: None)
    (tmp_path / "ids").write_text(ids)
    code, out, _ = run("generate --model m --prompt-tokens F/ids")
    assert (code, out) == (0, "0 1 2 3 4 5 6 7 8\n")
    assert llm.made.prompt == [1, 2, 300]
    assert "kept the last 2 of 3 tokens\n" in run("generate --prompt-tokens F/ids --max-prompt-tokens 2")[2]
    assert llm.made.prompt == [2, 300]


def test_a_long_prompt_is_encoded_once_and_says_so(
    llm: type[FakeLLM], run: Run, terminal: Callable[[], Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, encoded = CharacterTokenizer.__call__, []

    def counted(self: CharacterTokenizer, text: str, verbose: bool, **options: bool) -> dict[str, list[int]]:
        encoded.append(text)
        return encode(self, text, verbose)

    monkeypatch.setattr(CharacterTokenizer, "__call__", counted)
    shown = terminal()
    run("generate --prompt abcd --max-prompt-tokens 2")
    assert "encode     4 characters" in shown()
    assert encoded.count("abcd") == 1 and llm.made.prompt == [ord("c"), ord("d")]


SUGGESTED = SamplingParams(0.6, 0.9, min_p=0.05, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", True),
        ("--temperature 0", False),
        ("--top-p 0.5", False),
        ("--top-k 3", False),
        ("--repetition-penalty 1", False),
    ],
)
def test_the_models_own_sampling_is_not_ignored_in_silence(
    llm: type[FakeLLM], run: Run, flags: str, told: bool
) -> None:
    llm.model_sampling = SUGGESTED
    _, _, err = run(f"generate --prompt abc {flags}")
    note = "note       decoding is greedy; the model's generation_config.json suggests "
    assert (f"{note}--temperature 0.6 --top-p 0.9 --min-p 0.05 --repetition-penalty 1.1\n" in err) == told
    llm.model_sampling = None
    assert "decoding is greedy" not in run("generate --prompt abc")[2]


@pytest.mark.parametrize(
    ("predicted", "load", "told"),
    [
        (2.0, 99.0, None),
        (1.1, 99.0, None),
        (3.9, 99.0, None),
        (None, 99.0, None),
        (0.1, 0.0, "2.0 ms/token, 20 times the 0.1 of the plan; offload-rt doctor --refresh measures"),
        (
            0.1,
            9.25,
            "20 times the 0.1 of the plan; other work slows it down: the load average was 9.2 on 2 cores",
        ),
        (0.001, 0.0, "2.0 ms/token, 2,000 times the 0.0 of the plan"),
        (8.0, 99.0, "2.0 ms/token, 0.25 times the 8.0 of the plan; offload-rt doctor --refresh"),
    ],
)
def test_a_run_far_from_its_plan_says_so(
    llm: type[FakeLLM],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    predicted: float | None,
    load: float,
    told: str | None,
) -> None:
    monkeypatch.setattr("offload_rt.machine.other_work.SHORTEST_S", float("inf"))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(console_module, "COMPARABLE_TOKENS", 4)
    hardware = SimpleNamespace(measured=True)
    plan = SimpleNamespace(ms_per_token=predicted, request=SimpleNamespace(hardware=hardware))
    llm.plan = None if predicted is None else plan
    _, _, err = run("generate --prompt abc")
    assert ("of the plan" in err) == (told is not None) and (told or "") in err
    hardware.measured = False  # the rates of a usual desktop say nothing about this machine
    assert "of the plan" not in run("generate --prompt abc")[2]


def telling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the model give a notice before each token."""
    following = FakeStream.__next__

    def told(stream: FakeStream) -> SimpleNamespace:
        stream._llm.options["on_notice"](f"at {stream._made}")
        return following(stream)

    monkeypatch.setattr(FakeStream, "__next__", told)


def test_progress_and_notices_stay_out_of_a_text_on_the_same_terminal(
    llm: type[FakeLLM], terminal: Callable[[], Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    telling(monkeypatch)
    streaming = FakeLLM.stream

    def reading(llm: FakeLLM, *, params: SimpleNamespace) -> FakeStream:
        llm.options["on_progress"]("prefill", 1, 2)  # still shown when the text begins
        return streaming(llm, params=params)

    monkeypatch.setattr(FakeLLM, "stream", reading)
    shown = terminal()
    monkeypatch.setattr(sys, "stdout", sys.stderr)
    assert cli.main(["generate", "--prompt", "abc"]) == 0
    written = shown().replace("\r\n", "\n")
    assert f"\r{TEXT}\nnote       at 0\nnote       at 1\n" in written
    assert "prefill " in written and "decode  " not in written and "note       at 9\n" in written


def test_notices_stay_out_of_a_text_that_goes_to_the_same_file(
    llm: type[FakeLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with 2>&1."""
    telling(monkeypatch)
    with (tmp_path / "both").open("w+") as both:
        monkeypatch.setattr(sys, "stdout", both)
        monkeypatch.setattr(sys, "stderr", both)
        assert cli.main(["generate", "--prompt", "abc"]) == 0
        monkeypatch.undo()
    assert f"\n{TEXT}\nnote       at 0\nnote       at 1\n" in (tmp_path / "both").read_text()


def test_progress_is_shown_while_text_goes_to_another_place(run: Run, terminal: Callable[[], Shown]) -> None:
    shown = terminal()
    assert run("generate --prompt abc")[1] == TEXT + "\n"
    assert re.search(r"decode .* \d+%", shown())


def test_an_error_is_written_where_the_progress_was(
    run: Run, terminal: Callable[[], Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(llm: FakeLLM, **options: object) -> None:
        llm.options["on_progress"]("prefill", 1, 2)
        raise UsageError("no room")

    monkeypatch.setattr(FakeLLM, "stream", failing)
    shown = terminal()
    assert run("generate --prompt abc")[0] == 2
    *_, last = shown().split("<hide>")
    assert re.search(r"prefill .* 50%", last) and last.endswith("\roffload-rt: error: no room\r\n")


def test_json_and_the_comparison(run: Run, tmp_path: Path) -> None:
    code, _, err = run(COMPARED)
    assert code == 0 and "2.50 times as fast as plain decoding; tokens equal" in err
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "tokens": list(range(9)),
        "finish_reason": "length",
        "plain": {"decode_ms": 20.0, "ratio": 2.5, "tokens_equal": True},
    }
    assert os.listdir(tmp_path) == ["out.json"]
    assert "same output distribution, samples may differ" in run(f"{COMPARED} --temperature 1")[2]


@pytest.mark.parametrize(
    ("stops_with", "code", "said"),
    [
        (signal.SIGINT, 130, None),
        (signal.SIGTERM, 143, None),
        (CopyFailed("copy to the device of 4,096 bytes failed: unplugged"), 2, "nvidia-smi"),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "give a shorter prompt"),
        (MemoryError("no memory for 4096 more tokens of KV"), 2, "no memory for 4096 more tokens"),
    ],
)
def test_what_was_written_before_an_interrupt_or_a_failure_stands(
    llm: type[FakeLLM],
    run: Run,
    tmp_path: Path,
    stops_with: BaseException | signal.Signals,
    code: int,
    said: str | None,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    llm.stops_with = stops_with
    status, out, err = run(COMPARED)
    assert (status, out) == (code, "some words written (held)\n")
    assert "finish: interrupted" in err and "compared" not in err
    assert json.loads((tmp_path / "out.json").read_text())["tokens"] == [0, 1, 2]
    assert llm.made.closed and signal.getsignal(signal.SIGTERM) is before
    if said is not None:
        last = err.splitlines()[-1]
        assert last.startswith("offload-rt: error: ") and said in last
        assert last.endswith("the text ends after 3 tokens, which are valid")


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def call(*arguments: object, **more: object) -> NoReturn:
        raise error

    return call


def test_ctrl_c_while_comparing_keeps_the_result(
    llm: type[FakeLLM], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "generate", raising(KeyboardInterrupt()))
    assert run(COMPARED)[0] == 130
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == {"tokens": list(range(9)), "finish_reason": "length"}
    assert llm.made.closed


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (UsageError("the prompt\nis too long"), 2, "error: the prompt is too long"),
        (MemoryError("no slab"), 2, f"error: out of memory: no slab; {SMALLER}"),
        (torch.OutOfMemoryError("CUDA out.\nmore"), 2, f"error: out of memory: CUDA out.; {SMALLER}"),
        (CopyFailed("unplugged"), 2, "error: unplugged; check the GPU and its driver (nvidia-smi)"),
    ],
)
@pytest.mark.parametrize("place", [(CharacterTokenizer, "__call__"), (FakeLLM, "stream")])
def test_what_ends_a_command_before_its_text_is_one_line_and_leaves_no_file(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: tuple[type, str],
    error: BaseException,
    code: int,
    told: str,
) -> None:
    monkeypatch.setattr(*place, raising(error))
    assert run(f"{COMPARED} --quiet") == (code, "", f"offload-rt: {told}\n")
    assert not os.listdir(tmp_path)


def test_nothing_is_loaded_for_a_prompt_that_cannot_be_read(llm: type[FakeLLM], run: Run) -> None:
    """The lines themselves are in test_bad_input.py."""
    assert run("generate --prompt-file F/")[0] == 2
    assert not hasattr(llm, "made")


def failing(kind: str) -> TextIO:
    """A stdout whose reader is gone, or that is full."""
    if kind == "full":
        return Path("/dev/full").open("w")
    read_end, write_end = os.pipe()
    os.close(read_end)
    return os.fdopen(write_end, "w")


FULL = "stdout: cannot be written (No space left on device); send it elsewhere"
FAILING = pytest.mark.parametrize(("stdout", "code", "said"), [("gone", 141, ""), ("full", 2, FULL)])


@FAILING
def test_a_stdout_that_fails_leaves_the_json(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdout: str, code: int, said: str
) -> None:
    with failing(stdout) as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        status, _, err = run("generate --prompt abc --quiet --json F/out.json")
    assert status == code and err.startswith(f"offload-rt: error: {said}; the text ends" if said else "")
    assert bool(err) == bool(said)
    assert json.loads((tmp_path / "out.json").read_text())["tokens"] == [0, 1, 2]


def test_json_into_a_device_leaves_the_device(run: Run) -> None:
    assert run(f"generate --prompt abc --json {os.devnull}")[0] == 0
    assert not Path(os.devnull).is_file()


ROOT = Path(__file__).parents[2]


def test_the_command_line_is_read_without_torch() -> None:
    """Importing it takes seconds: help, and what is wrong with a flag, a key or a file, need not wait."""
    script = "import sys; from offload_rt.commands import cli\n"
    script += "assert cli.main(['plan', '--context', '9', '--set', 'retrieval.budget=-1']) == 2\n"
    script += "assert cli.main(['generate', '--prompt-file', '/no/such/file']) == 2\n"
    for arguments in (["--help"], ["config", "show"], ["config", "path"], ["completion", "bash"]):
        script += f"assert cli.main({arguments}) == 0\n"
    script += "sys.exit(bool({'torch', 'transformers', 'rich'} & {*sys.modules}))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr


def completed(words: list[str]) -> list[str]:
    """What bash offers for the last of `words`."""
    script = subprocess.run(
        [sys.executable, "-m", "offload_rt", "completion", "bash"], capture_output=True, text=True, cwd=ROOT
    ).stdout
    line = shlex.join(words)
    script += f"\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words) - 1}\nCOMP_LINE={shlex.quote(line)}\n"
    script += 'COMP_POINT=${#COMP_LINE}\n$(complete -p offload-rt | sed "s/.*-F \\([^ ]*\\).*/\\1/")\n'
    script += 'printf "%s\\n" "${COMPREPLY[@]}"'
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert ended.stderr == ""
    return ended.stdout.split()


def test_a_shell_completes_commands_flags_choices_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").touch()
    assert {"generate", "models", "config", "completion"} <= {*completed(["offload-rt", ""])}
    assert completed(["offload-rt", "generate", "--max-new"]) == ["--max-new-tokens"]
    assert completed(["offload-rt", "generate", "--dtype", "b"]) == ["bfloat16"]
    within = f"{tmp_path}/"
    assert completed(["offload-rt", "generate", "--model", within]) == [f"{within}folder"]
    both = [f"{within}file.txt", f"{within}folder"]
    assert sorted(completed(["offload-rt", "generate", "--prompt-file", within])) == both
    assert completed(["offload-rt", "models", within]) == [f"{within}folder"]


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "datastore" in out and "max-new-tokens" in out


@pytest.mark.parametrize("arguments", ["", "generate --prompt a", "plan --context 9", "doctor"])
def test_a_closed_stdout_is_a_line(arguments: str) -> None:
    command = f'"{sys.executable}" -m offload_rt {arguments} >&-'
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT)
    told = "offload-rt: error: stdout: is closed; send it to a file, or to /dev/null\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", told)


@FAILING
def test_a_stdout_that_fails_ends_a_process_as_its_help_says(stdout: str, code: int, said: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "offload_rt", "--help"]
    with failing(stdout) as broken:
        ended = subprocess.run(
            command, stdout=broken, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
    assert (ended.returncode, ended.stderr) == (code, said and f"offload-rt: error: {said}\n")


@FAILING
@pytest.mark.parametrize(
    ("name", "main", "arguments"),
    [("offload-rt", cli.main, "plan --context 9 --gpu none"), ("bench", bench.__main__.main, "--help")],
)
def test_a_stdout_that_fails_ends_every_program_alike(
    name: str,
    main: Callable[[list[str]], int],
    arguments: str,
    stdout: str,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with failing(stdout) as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        assert main(arguments.split()) == code
    assert capsys.readouterr().err == (said and f"{name}: error: {said}\n")


def test_what_is_meant_for_a_closed_stderr_goes_nowhere(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert run("generate --prompt abc") == (0, TEXT + "\n", "")
    assert run("chatter") == (2, "", "")


def test_work_goes_on_where_nobody_reads_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("gone", "full"):
        monkeypatch.setattr(sys, "stderr", broken := failing(kind))
        console = Console(quiet=False)
        console.say("request")
        console.say("request")
        with suppress(OSError):
            broken.close()


def test_what_fails_with_a_closed_stdout_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = FileNotFoundError(errno.ENOENT, "No such file", "book.txt")
    monkeypatch.setattr(sys, "stdout", None)
    assert run_program("bench", raising(missing)) == 2
    assert capsys.readouterr().err == "bench: error: [Errno 2] No such file: 'book.txt'\n"


def test_a_stdout_that_lacks_characters_is_told_of_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "WORDS", ["na", "\xef", "ve \N{EN DASH}", " text"])
    with io.BytesIO() as written, io.TextIOWrapper(written, "ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        code, _, err = run("generate --prompt abc")
        assert (code, written.getvalue()) == (0, b"na?ve ? text\n")
    told = r"stdout is ascii, which lacks '\xef': missing characters are written as '?'; set PYTHONUTF8=1"
    assert err.count(told) == 1


def test_an_interrupt_while_the_program_is_imported_leaves_no_traceback(tmp_path: Path) -> None:
    """The import of a module that takes a while is interrupted, before anything could handle it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'offload_rt.commands.exits':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "offload_rt", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_too_little_address_space_for_torch_is_a_line() -> None:
    command = f'ulimit -v 500000; exec "{sys.executable}" -m offload_rt plan --context 9 --gpu none'
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT)
    told = (
        "offload-rt: error: the shell limits this process to 488 MiB of address space, but torch itself needs"
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(told) and ended.stderr.count("\n") == 1


def test_a_person_who_begins_is_told_how(run: Run) -> None:
    code, told, _ = run("")
    for words in ("COMMAND", "--version", "to begin:", "offload-rt demo ", "--prompt-file FILE"):
        assert words in told
    command = [sys.executable, "-m", "offload_rt", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert code == ended.returncode == 0 and re.fullmatch(r"offload-rt \d+\.\d+\.\d+\n", ended.stdout)


SWITCHES = (
    *("--help", "--ignore-eos", "--compare-plain", "--quiet", "--refresh", "--no-ahead", "--context"),
    *("--list", "--verbose"),
)
"""Flags without a default; a plan needs its context."""


@pytest.mark.parametrize(
    "command", ["generate", "score", "ask", "chat", "serve", "demo", "models", "plan", "doctor"]
)
def test_help_says_what_every_flag_does_and_its_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--help"]) == 0
    helped = " ".join(capsys.readouterr().out.split("\n\n", 1)[1].split()).partition(" A first run: ")[0]
    flags = re.split(r" (?=-n N,|(?<!N, )--[a-z])", helped)[1:]
    assert len(flags) > (20 if command == "generate" else 2)
    for flag in flags:
        name, *words = flag.split()
        switch = name in SWITCHES
        assert len(words) > 3 and (switch or "default: " in flag), flag


def test_progress_on_a_terminal_has_the_time_left(terminal: Callable[[], Shown]) -> None:
    shown = terminal()
    console = Console(quiet=False)
    console.tokens["prefill"] = 1000
    for done in (1, 2, 3):
        console.progress("prefill", done, 4)
    console.clear()
    first, *_, last = [line for line in shown().split("\r") if "prefill" in line]
    assert re.search(r"prefill +━.* 25% +$", first), "a rate needs two reports"
    assert re.search(r"prefill +━.* 75% [\d,]+ tokens/s \d\d:\d\d left$", last)
    console.tokens["save"] = 1000
    for done in (1, 2, 3, 0):
        console.progress("save", done, 4)
    console.clear()
    *_, last = [line for line in shown().split("\r") if "save" in line]
    assert re.search(r"save +━.* 0% +$", last), "it began anew"
    console.progress("decode", 1, 2)
    console.progress("decode", 2, 2)
    assert shown().endswith("\r\n\r"), "a line ends with its phase"
    console.progress("measure", 1, 1)
    assert shown() == ""


def test_progress_is_for_terminals_alone(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(quiet=False)
    for done in range(3):
        console.progress("prefill", done, 2)
    console.working("encode", "9 characters")
    console.clear()
    assert capsys.readouterr().err == ""


def test_quiet_has_no_progress(terminal: Callable[[], Shown]) -> None:
    shown = terminal()
    Console(quiet=True).progress("prefill", 1, 2)
    assert shown() == ""


@pytest.mark.parametrize("columns", ["40", "20"])
def test_a_progress_line_is_one_line(
    columns: str, terminal: Callable[[], Shown], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = terminal()
    monkeypatch.setenv("COLUMNS", columns)
    console = Console(quiet=False)
    console.tokens["prefill"] = 1000
    for done in (1, 2, 3):
        console.progress("prefill", done, 4)
    console.clear()
    assert shown().count("\n") == 1  # where it ends


@pytest.mark.parametrize("columns", [100, 40, 12])
def test_lines_wrap_at_words_on_a_terminal(columns: int, terminal: Callable[[], Shown]) -> None:
    shown = terminal()
    size = struct.pack("HHHH", 40, columns, 0, 0)
    fcntl.ioctl(sys.stderr.fileno(), termios.TIOCSWINSZ, size)
    address = "https://example.org/a-long-address-that-no-line-of-these-has-room-for-but-is-copied-whole"
    words = (
        f"one line of many words, with numbers as 1,234 and -n N, which goes on and on; see {address} there"
    )
    console = Console(quiet=False)
    console.progress("prefill", 1, 2)
    console.notice(words)
    written = shown()
    *_, lines = written.partition("note")
    told = f"note{lines}".splitlines()
    assert " ".join(" ".join(told).split()) == f"note {words}"
    assert all(len(line) < columns for line in told if address not in line)
    indent = " " * 11 if columns > 22 else ""
    assert all(re.match(rf"{indent}\S", line) for line in told[1:])
    console.error(words)
    assert " ".join(shown().split()) == f"error {words}"
    run_program("bench", raising(UsageError(words)))
    refused = shown()
    assert " ".join(refused.split()) == f"bench: error: {words}" and refused.count("\n") > 1


def test_lines_elsewhere_are_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    Console(quiet=False).notice("word " * 100)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_chosen_config_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--prompt", "It was", "-n", "4", "--draft", "none"]) == 0
    err = capsys.readouterr().err
    assert re.search(r"^run .*; (\w+); expected", err) and "config auto" not in err


def test_what_cannot_fit_is_refused_before_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload_rt.machine.inspection.available_memory", lambda: 3 * 2**29)
    monkeypatch.setattr(
        "offload_rt.api.opening.load_model", lambda *arguments: pytest.fail("weights were read")
    )
    arguments = ["generate", "--max-prompt-tokens", "60000", "--set", "retrieval.budget=8192"]
    arguments += ["--dtype", "float32"]
    assert cli.main([*arguments, "--json", str(tmp_path / "out.json")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "at 60000 tokens does not fit: host memory has" in last
    assert re.search(r"what fits: --dtype bfloat16; the longest context that fits is \d+ tokens$", last)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("busy", [False, True])
def test_the_demo_compares_over_a_link_and_in_memory(
    busy: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "other work slows it down: the load average was 99.0 on 2 cores before it"
    monkeypatch.setattr(OtherWork, "note", lambda other_work: told if busy else None)
    monkeypatch.setattr(demo, "NEW_TOKENS", 8)
    links: list[PacedLink] = []

    class RecordedLink(PacedLink):
        def __init__(self, bytes_per_second: float) -> None:
            super().__init__(bytes_per_second)
            self.record()
            links.append(self)

    monkeypatch.setattr("cpu_kv.PacedLink", RecordedLink)
    book = tmp_path / "book.txt"
    book.write_text("It was a dark night. " * 60)
    assert cli.main(["demo", "--prompt-file", str(book), "--max-prompt-tokens", "300"]) == 0
    out, err = capsys.readouterr()
    assert "note       prompt: kept the last 300 of " in err
    times = r"\(\d+\.\d against \d+\.\d ms/token\)"
    speed = rf"\d+\.\d\d times as fast as plain decoding {times}"
    if busy:
        speed = rf"speed not comparable {times}: {re.escape(told)}"
    lines = (rf"over link  {speed}; tokens equal", rf"in memory  {speed}; same output distribution, samples")
    assert re.search(r"an emulated PCIe link of 2 GB/s.*\n" + ".*\n".join(lines), err)
    assert [link.bytes_per_second for link in links] == [demo.LINK_RATE]
    assert any(not copy.to_host for copy in links[0].recorded())

    passage = prompts.built_in().partition(demo.PASSAGE)[2].partition("\n\n")[0]
    recited = out.split()
    assert len(recited) > 30 and " ".join(recited) in " ".join(passage.split()) and recited[-1] == "thing;"
    assert f"checked    all {len(recited)} words are the book's, compared one by one\n" in err
    assert len(re.findall(r"\n {11}rtx\S+: .* \d+ ms/token \(\d+ with plain decoding\)", err)) == 3
    command = re.search(r" {11}offload-rt (plan .*) shows the last one in full\n$", err)
    assert command is not None and cli.main(command[1].split()) == 0


def test_a_recital_is_compared_word_by_word() -> None:
    assert demo.recital_verdict(" a whale\nof", "\na whale of").startswith("all 3 words are")
    for text in ("a whale off the bow", "a whale", "a whale and of"):
        assert demo.recital_verdict(text, "a whale of").startswith("the first 2 of 3 words are")
    assert demo.recital_verdict("", "a whale").startswith("the first 0 of 2 words are")


def test_differing_tokens_are_told_at_temperature_zero() -> None:
    result, plain = (SimpleNamespace(tokens=[1, last], exactness="bits") for last in (2, 3))
    greedy, sampled = SimpleNamespace(temperature=0), SimpleNamespace(temperature=0.7)
    verdict: Any = running.tokens_verdict  # of stand-ins
    verdicts = [verdict(result, other, greedy) for other in (result, plain)]
    assert verdicts == ["tokens equal", "TOKENS DIFFER after 1: a defect of offload-rt, please report it"]
    near = SimpleNamespace(tokens=[1, 2], exactness="distribution", exactness_reason="the weather")
    tie = "the first 1 tokens equal; a near tie may be rounded otherwise by the weather"
    assert verdict(near, plain, greedy) == tie
    assert verdict(result, plain, sampled).startswith("same output distribution")
