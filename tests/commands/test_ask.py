"""The commands `ask` and `chat` with a tiny model: what they write where, and what ends what."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.chat_templates import BOOK, LLAMA, tokenizer, user
from support.tiny_models import tiny_target
from transformers import GenerationConfig

from offload_rt import LLM, Context, SamplingParams
from offload_rt.commands import chat as chat_command
from offload_rt.commands import cli
from offload_rt.commands.console import Console
from offload_rt.commands.running import write_text
from offload_rt.engine.engine import Engine
from offload_rt.engine.saved_context import SavedContext
from offload_rt.system import clock
from offload_rt.text.chat import with_question
from offload_rt.text.thoughts import FORMATS, ReadableThoughts, ThoughtSplitter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that chats, and a book."""
    folder = tmp_path_factory.mktemp("chat")
    model = tiny_target("llama-gqa", vocabulary=257)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.8, top_k=50)
    model.save_pretrained(folder)
    tokenizer(LLAMA, bos_token="<s>").save_pretrained(folder)
    (folder / "book.txt").write_text(BOOK)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, config="plain") as llm:
        yield llm


Run = Callable[..., tuple[int, str, str]]


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command with the model, and with stdin, or at a terminal: exit code, stdout, stderr."""

    def run(command: str, *arguments: str, stdin: str | None = "") -> tuple[int, str, str]:
        source = Terminal() if stdin is None else io.BytesIO(stdin.encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(source))
        own = [command, "--model", str(folder), "--config", "plain", "-n", "8"]
        capsys.readouterr()
        return cli.main([*own, *arguments]), *capsys.readouterr()

    return run


def book(folder: Path) -> tuple[str, str]:
    return "--file", str(folder / "book.txt")


GREEDY = ("--temperature", "0")


def test_an_answer_goes_to_stdout_and_the_rest_to_stderr(
    run: Run, llm: LLM, folder: Path, tmp_path: Path
) -> None:
    out_file = str(tmp_path / "out.json")
    code, out, err = run("ask", *GREEDY, *book(folder), "--json", out_file, "Who is it?")
    messages = with_question([user(BOOK)], "Who is it?")
    answer = llm.chat(messages, SamplingParams(max_tokens=8))
    assert (code, out) == (0, answer.text + "\n")
    assert f"prompt     {answer.prompt_tokens} tokens" in err
    assert "note       the answer is cut after 8 tokens: -n N allows more\n" in err
    assert json.loads(Path(out_file).read_text())["tokens"] == answer.tokens
    assert run("ask", *GREEDY, *book(folder), "--quiet", "-", stdin=" Who is it?\n") == (0, out, "")
    code, plain, _ = run("ask", *GREEDY, "--system", "Be brief.", "Who is it?")
    messages = [{"role": "system", "content": "Be brief."}, user("Who is it?")]
    assert plain == llm.chat(messages, SamplingParams(max_tokens=8)).text + "\n"


def test_the_models_own_sampling_and_flags(run: Run, llm: LLM) -> None:
    own = SamplingParams(temperature=0.8, top_k=50, seed=3, max_tokens=8)
    for flags, params in (
        ((), own),
        (("--top-k", "2"), SamplingParams(temperature=0.8, top_k=2, seed=3, max_tokens=8)),
        (GREEDY, SamplingParams(max_tokens=8)),
    ):
        _, out, _ = run("ask", "--quiet", "--seed", "3", *flags, "Who?")
        assert out == llm.chat([user("Who?")], params).text + "\n"


def test_an_answer_that_fits_a_schema(run: Run, tmp_path: Path) -> None:
    schema = '{"enum": ["whale"]}'
    (tmp_path / "schema.json").write_text(schema)
    for given in (schema, str(tmp_path / "schema.json")):
        assert run("ask", "--quiet", "--json-schema", given, "Who?") == (0, '"whale"\n', "")
    assert run("chat", "--json-schema", schema, stdin="Who?\nWhat?\n")[:2] == (0, '"whale"\n"whale"\n')
    code, out, err = run("generate", "--json-schema", schema, "--prompt", "Who?", "--quiet")
    assert (code, out.endswith('"whale"\n'), err) == (0, True, "")


def test_hidden_thoughts_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    class Stream(list[Any]):
        result = None

        def close(self) -> None:  # the last piece was held back
            self.result = SimpleNamespace(text="".join(pieces), tokens=[1] * len(pieces))

    thinking = ["<thi", "nk>we", "ll\n</think", ">\n\ny", "es", ", yes"]
    for thoughts, pieces, shown in (
        (ThoughtSplitter(), thinking, "yes, yes"),
        (None, thinking, "<think>well\n</think>\n\nyes, yes"),
        (ThoughtSplitter(), ["<", "thin"], "<thin"),
        (ReadableThoughts(ThoughtSplitter()), thinking, "<think>\nwell\n</think>\n\nyes, yes"),
        (ReadableThoughts(ThoughtSplitter()), [" ye", "s"], "yes"),
        (
            ReadableThoughts(ThoughtSplitter(form=FORMATS[0])),
            [
                "<|channel|>analysis<|message|>we",
                "ll<|e",
                "nd|><|start|>assistant<|channel|>final",
                "<|message|>yes",
            ],
            "<think>\nwell\n</think>\n\nyes",
        ),
    ):
        events: Any = Stream(SimpleNamespace(text=piece) for piece in pieces[:-1])
        assert write_text(events, SamplingParams(), Console(quiet=True), thoughts=thoughts) == (0, None)
        assert capsys.readouterr().out == shown + "\n"


def test_questions_come_from_a_pipe(run: Run, llm: LLM, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.html").write_text("<p>Ahab")
    lines = ["Who is it?", "", "Whose name?", "/rewind", "Why so?", "/save moby dick", "/save moby", "/stats"]
    files = (*book(folder), "--file", str(tmp_path / "notes.html"), "--cache", str(tmp_path / "cache"))
    code, out, err = run("chat", *GREEDY, *files, stdin="\n".join(lines))
    document = f"# book.txt\n\n{BOOK}\n\n# notes.html\n\nAhab"
    params, answers = SamplingParams(max_tokens=8), list[str]()
    with llm.read([user(document)]) as context:
        for question in ("Who is it?", "Whose name?", "Why so?"):
            before = context.messages
            answers.append(context.ask(question, params).text)
            messages = context.messages
            if question == "Whose name?":
                context.messages = before
    assert (code, out) == (0, "".join(f"{answer}\n" for answer in answers))
    with SavedContext(tmp_path / "cache" / "moby.safetensors") as saved:
        assert saved.messages == messages and "saved      moby\n" in err
    assert "error      session 'moby dick': a name has up to 100 letters" in err
    read = [int(count.replace(",", "")) for count in re.findall(r"read ([\d,]+) of", err)]
    assert len(read) == 3 and read[0] > len(document) > 3 * max(read[1:])
    assert "rewound    the last question" in err and err.count("\nprompt     ") == 1


def test_a_session_is_read_once_and_asked_again(run: Run, llm: LLM, folder: Path, tmp_path: Path) -> None:
    given = (*GREEDY, "--session", "moby", "--cache", str(tmp_path / "sessions"))
    questions = ["Who is it?", "Whose name?", "Why so?"]

    def there(err: str) -> int:
        return int(re.search(r"session    moby: ([\d,]+) of", err)[1].replace(",", ""))  # type: ignore[index]

    # Without the file, the documents are those of the session.
    for question, files in zip(questions, (book(folder), book(folder), ()), strict=True):
        code, out, err = run("ask", *given, *files, question)
        whole = llm.chat(with_question([user(BOOK)], question), SamplingParams(max_tokens=8))
        assert (code, out) == (0, whole.text + "\n")
        assert there(err) > len(BOOK) or question == questions[0]
    code, first, err = run("chat", *given, stdin=questions[0])
    assert there(err) >= len(BOOK)
    code, second, err = run("chat", *given, stdin=questions[1])
    with llm.read([user(BOOK)]) as context:
        answers = [context.ask(question, SamplingParams(max_tokens=8)).text for question in questions[:2]]
    assert [first, second] == [f"{answer}\n" for answer in answers]
    assert there(err) > len(BOOK) + len(questions[0])
    (tmp_path / "other.txt").write_text("It was the best of times.")
    code, out, err = run("ask", *given, "--file", str(tmp_path / "other.txt"), "Who?")
    assert (code, out) == (2, "") and re.search(r"begins like \d+ of them: name another session", err)
    _, listed, _ = run_sessions("list", "--cache", str(tmp_path / "sessions"))
    assert listed.startswith("moby ")


@pytest.mark.parametrize("command", ["ask", "chat"])
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_was_read_before_an_interrupt_is_not_read_again(
    run: Run,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    number: signal.Signals,
    status: int,
) -> None:
    """A chat that goes on from there needs no file: its messages are kept too."""
    given = (*GREEDY, "--session", "moby", "--cache", str(tmp_path / "sessions"), "--set", "prefill.piece=64")
    question, answers = (("Who?",), {}) if command == "ask" else ((), {"stdin": "Who?"})
    _, whole, _ = run(command, *GREEDY, *book(folder), *question, **answers)
    reports, shown = itertools.count(), Console.progress

    def interrupted(console: Console, phase: str, done: int, of: int) -> None:
        if phase == "prefill" and next(reports) == 8:
            signal.raise_signal(number)
        shown(console, phase, done, of)

    with monkeypatch.context() as patch:
        patch.setattr(Console, "progress", interrupted)
        code, out, err = run(command, *given, *book(folder), *question, **answers)
    assert (code, out) == (status, "")
    kept = re.search(r"session    moby: the first (\d+) of (\d+) tokens are kept: the same command", err)
    assert kept and 0 < int(kept[1]) < int(kept[2])
    code, out, err = run(command, *given, *question, **answers)
    assert (code, out) == (0, whole)
    assert f"session    moby: {kept[1]} of" in err


def test_a_session_keeps_its_date(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that writes the date goes on writing the one at which the session was rendered first."""
    dated = tmp_path / "model"
    shutil.copytree(folder, dated)
    tokenizer(f"{{{{ strftime_now('%d %b %Y') }}}} {LLAMA}", bos_token="<s>").save_pretrained(dated)
    given = ("--model", str(dated), *GREEDY, "--session", "moby", "--cache", str(tmp_path / "sessions"))
    for day, command in ((4, "ask"), (5, "ask"), (6, "chat"), (7, "ask")):
        monkeypatch.setattr(clock, "date", lambda day=day: datetime(2024, 7, day))
        question = ("Who is it?",) if command == "ask" else ()
        code, _, err = run(command, *given, *(book(folder) if day == 4 else ()), *question, stdin="Who?")
        there = int(re.search(r"session    moby: ([\d,]+) of", err)[1].replace(",", ""))  # type: ignore[index]
        assert code == 0 and (there > len(BOOK) or day == 4)
    with SavedContext(tmp_path / "sessions" / "moby.safetensors") as saved:
        assert saved.date == datetime(2024, 7, 4)


def test_a_session_that_does_not_exist_needs_something_to_read(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    cache = ("--cache", str(tmp_path / "sessions"))
    assert run("ask", *GREEDY, "--session", "moby", *cache, *book(folder), "Who?")[0] == 0
    for command, question in (("ask", ("Who?",)), ("chat", ()), ("generate", ())):
        code, out, err = run(command, "--session", "mobi", *cache, *question)
        where = f"session mobi: there is none of that name in {tmp_path / 'sessions'}; there are: moby."
        remedy = (
            "name a prompt, --prompt-file FILE" if command == "generate" else "name a document, --file FILE"
        )
        assert (code, out) == (2, "") and f"{where} To begin it, {remedy}\n" in err
    assert [path.name for path in (tmp_path / "sessions").iterdir()] == ["moby.safetensors"]


def test_the_embedded_model_may_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    written = []
    for named in ((), ("--model", "demo")):
        assert cli.main(["ask", *named, *GREEDY, "-n", "3", "--quiet", "Who is Ahab?"]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1] != "\n"


@pytest.mark.parametrize("command", [["ask", "Who is Ahab?"], ["chat"]])
@pytest.mark.parametrize("model", [(), ("--model", "demo")])
def test_the_demo_says_that_it_cannot_answer_and_stops(
    command: list[str],
    model: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Who is Ahab?\n")))
    assert cli.main([*command, *model, "--temperature", "0", "--ignore-eos"]) == 0
    err = capsys.readouterr().err
    assert err.startswith(
        "note       the demo model continues old novels and cannot answer: it writes up to 60"
    )
    assert re.search(r"(generated|answered)   ?60 tokens", err)


def run_sessions(*arguments: str) -> tuple[int, str, str]:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = cli.main(["sessions", *arguments])
    return code, out.getvalue(), err.getvalue()


def test_what_goes_wrong_in_a_chat_is_a_line_and_the_chat_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, failing = Context.stream_ask, [MemoryError("no slab"), None, KeyboardInterrupt()]

    def stream_ask(context: Context, *arguments: Any, **more: Any) -> Any:
        if (error := failing.pop(0)) is not None:
            raise error
        return ask(context, *arguments, **more)

    monkeypatch.setattr(Context, "stream_ask", stream_ask)
    lines = ["/stats", "/rewind", "/save", "/rewnd now", "Who?", "Who?", "Who?", "a\0", "/quit", "Who?"]
    code, out, err = run("chat", *GREEDY, "--quiet", stdin="\n".join(lines))
    assert code == 0 and out.count("\n") >= 1 and not failing
    assert err.splitlines() == [
        "error      /stats: no question was answered yet",
        "error      /rewind: no question was answered yet",
        "error      /save: give a name, as in /save moby-dick",
        "error      unknown command /rewnd; /help lists those that there are",
        "error      out of memory: no slab; give a shorter prompt, fewer new tokens or a smaller"
        " --retrieval-budget",
        "error      stdin, line 8: byte 1 is zero, so it is not a text in UTF-8; give a txt, md, html, pdf or"
        " epub file, or name its encoding (--encoding utf-16-le)",
    ]
    assert "/rewind    take the last" in run("chat", stdin="/help\n")[2]


def test_the_room_of_a_chat_ends_with_the_positions(folder: Path) -> None:
    def room(most: int, prompt: int) -> int:
        arguments = SimpleNamespace(model=str(folder), rope=None, max_new_tokens=most)
        return chat_command._room(SimpleNamespace(arguments=arguments), prompt)  # type: ignore[arg-type]

    assert [room(100, 1000), room(100, 7500), room(100, 8150)] == [4 * 228, 692, 100]


def test_a_termination_ends_a_chat(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "stream_ask", lambda *given, **more: signal.raise_signal(signal.SIGTERM))
    assert run("chat", "--quiet", stdin="Who?\nWho?\n") == (143, "", "")


def test_ctrl_c_ends_an_answer_and_not_the_chat(run: Run, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal."""
    typed: list[Any] = ["Who is it?", KeyboardInterrupt(), "Whose name?", EOFError()]
    step, steps = Engine.step, itertools.count(1)

    def type_line(prompt: str) -> str:
        if isinstance(line := typed.pop(0), BaseException):
            raise line
        return str(line)

    def interrupted(engine: Engine, sequences: Any) -> Any:
        if next(steps) == 4:
            signal.raise_signal(signal.SIGINT)
        return step(engine, sequences)

    monkeypatch.setattr(chat_command, "input", type_line, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", interrupted)
        code, out, err = run("chat", *GREEDY, "--ignore-eos", stdin=None)
    first = llm.chat([user("Who is it?")], SamplingParams(max_tokens=3, ignore_eos=True)).text
    messages = [user("Who is it?"), {"role": "assistant", "content": first}, user("Whose name?")]
    second = llm.chat(messages, SamplingParams(max_tokens=8, ignore_eos=True)).text
    assert (code, out, typed) == (0, f"{first}\n{second}\n", [])
    assert re.findall(r"answered   (\d+) tokens", err) == ["3", "8"]
    assert "note       /quit or Ctrl-D ends the chat\n" in err
