"""`offload-rt chat`: questions about documents at a prompt line, one after the other."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from offload_rt.commands.ask import Chat, add_chat
from offload_rt.commands.exits import INTERRUPTED, REFUSED, Terminated, status_of
from offload_rt.commands.running import MachineError, ended_early, machine_errors_in_a_line, open_llm
from offload_rt.errors import UsageError
from offload_rt.text.documents import decode

if TYPE_CHECKING:
    from offload_rt.api.context import Context
    from offload_rt.commands.console import Console
    from offload_rt.engine.results import GenerationResult
    from offload_rt.sampling.params import SamplingParams
    from offload_rt.text.tool_messages import Message

QUESTIONS = 4
"""Questions with answers of full length that a chat is planned for; it may grow beyond, as memory allows."""
QUESTION_TOKENS = 128
"""Tokens of such a question and of what the template puts around it."""
PROMPT = "> "


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    chat = commands.add_parser(
        "chat",
        help="ask several questions about documents",
        description="Reads documents once and answers questions about them, by an instruct model: a line a"
        " question. Answers go to stdout, everything else to stderr. Ctrl-C ends an answer, /quit the chat;"
        " /help lists the other commands.",
        epilog="A first run: offload-rt chat --model FOLDER --file book.txt.",
        allow_abbrev=False,
    )
    chat.set_defaults(run=run)
    add_chat(chat)


def run(arguments: argparse.Namespace) -> int:
    chat = Chat.of(arguments)
    prompt = chat.encoded(chat.messages, answer=False)
    chat.warn_of_demo()
    if arguments.files:
        chat.template.shared_beginning(chat.messages, chat.thinking)  # tells where nothing is shared
    room = _room(chat, len(prompt))
    with machine_errors_in_a_line(), open_llm(arguments, chat.console, (len(prompt), room)) as llm:
        context = chat.open(llm, prompt, room)
        chat.describe(context, chat.messages)
        chat.console.tokens.pop("prefill")  # what a question reads is short
        status = Conversation(chat, context, chat.params(llm)).run()
        chat.sessions.save(context)
    return status


def _room(chat: Chat, prompt_tokens: int) -> int:
    """Returns the new tokens to plan for: several questions, as far as the model's positions go."""
    from offload_rt.model.named_shapes import find_shape

    arguments = chat.arguments
    positions = find_shape(arguments.model or "demo", None, arguments.rope).max_positions
    max_tokens: int = arguments.max_new_tokens
    room = QUESTIONS * (QUESTION_TOKENS + max_tokens)
    return max(max_tokens, min(room, positions - prompt_tokens))


class Conversation:
    """Questions and commands from stdin, and answers to stdout, until the end of the input or `/quit`.

    An error or an interrupt ends what was asked for, and not the conversation.
    """

    def __init__(self, chat: Chat, context: Context, params: SamplingParams) -> None:
        self._chat = chat
        self._say = chat.console.say
        self._context = context
        self._params = params
        self._before: list[list[Message] | None] = []  # messages before each question that was answered
        self._newest: GenerationResult | None = None
        self._ended = False
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/rewind": (self._rewind, "take the last question and its answer back"),
            "/save": (self._save, "NAME: save what was read and answered, for --session NAME"),
            "/stats": (self._stats, "show the statistics of the last answer"),
            "/help": (
                self._help,
                "show this; a question that begins with / is written with a space before it",
            ),
            "/quit": (self._quit, "end the chat, as Ctrl-D does"),
        }

    def run(self) -> int:
        """Returns the exit code."""
        try:
            for line in _lines(self._chat.console):
                status = self._do(line) if line.strip() else 0
                if status or self._ended:
                    return status
        except Terminated as end:
            return status_of(end)
        return 0

    def _do(self, line: str) -> int:
        """Obeys a line; returns an exit code other than 0 where the conversation ends with it."""
        try:
            with machine_errors_in_a_line():
                if not line.startswith("/"):
                    return self._answer(line.strip())
                name, _, argument = line.strip().partition(" ")
                if name not in self._commands:
                    raise UsageError(f"unknown command {name}; /help lists those that there are")
                self._commands[name][0](argument.strip())
        except UsageError as error:
            self._chat.console.error(str(error))
        except Terminated:
            raise
        except KeyboardInterrupt:
            self._say("note       interrupted")
        return 0

    def _answer(self, question: str) -> int:
        before = self._context.messages
        answer = self._context.stream_ask(question, self._params, thinking=self._chat.thinking)
        status, failure = self._chat.write(answer, self._params)
        if self._context.messages is not before:
            self._before.append(before)
        self._newest = result = answer.result
        assert result is not None
        if failure is not None:
            self._chat.console.error(str(ended_early(failure, result)))
            return 0 if isinstance(failure, MachineError) else REFUSED  # else stdout cannot be written
        if not result.tokens:
            self._say("note       ended before an answer: the question is taken back")
            return 0 if status == INTERRUPTED else status
        timings = result.timings
        prefilled = min(timings.prefill_tokens, result.prompt_tokens)
        self._say(
            f"answered   {len(result.tokens)} tokens, {timings.tokens_per_second:.1f} tokens/s; read"
            f" {prefilled:,} of {result.prompt_tokens:,} tokens in {timings.prefill_ms / 1e3:.1f} s"
        )
        return 0 if status == INTERRUPTED else status

    def _rewind(self, argument: str) -> None:
        if not self._before:
            raise UsageError("/rewind: no question was answered yet")
        self._context.messages = self._before.pop()
        self._say("rewound    the last question and its answer are taken back")

    def _save(self, name: str) -> None:
        if not name:
            raise UsageError("/save: give a name, as in /save moby-dick")
        self._chat.sessions.save_as(self._context, name)
        self._say(f"saved      {name}")

    def _stats(self, argument: str) -> None:
        if self._newest is None:
            raise UsageError("/stats: no question was answered yet")
        self._chat.console.summary(self._newest)

    def _quit(self, argument: str) -> None:
        self._ended = True

    def _help(self, argument: str) -> None:
        for name, (_, meaning) in self._commands.items():
            self._say(f"{name:10} {meaning}")


def _lines(console: Console) -> Iterator[str]:
    """Yields lines of stdin; on a terminal with a prompt and a history, where Ctrl-C says how to end."""
    if sys.stdin is None:
        return
    if not sys.stdin.isatty():
        yield from _piped(console)
        return
    import readline  # noqa: F401  # gives `input` its history

    prompt = PROMPT if sys.stdout.isatty() else ""
    while True:
        try:
            if not prompt:  # answers alone go to stdout
                print(PROMPT, end="", file=sys.stderr, flush=True)
            yield input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return
        except Terminated:
            raise
        except KeyboardInterrupt:
            print(file=sys.stderr)
            console.say("note       /quit or Ctrl-D ends the chat")


def _piped(console: Console) -> Iterator[str]:
    try:
        for number, line in enumerate(sys.stdin.buffer, 1):
            try:
                yield decode(f"stdin, line {number}", line)
            except UsageError as error:
                console.error(str(error))
    except OSError as error:
        raise UsageError(
            f"stdin: cannot be read ({error.strerror or error}); pipe questions into it"
        ) from None
