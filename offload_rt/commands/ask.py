"""`offload-rt ask`: one question about documents; the answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload_rt.commands import prompts, sessions
from offload_rt.commands.console import Console
from offload_rt.commands.exits import INTERRUPTED
from offload_rt.commands.options import (
    add_configuration,
    add_json,
    add_model,
    add_sampling,
    check_early,
    distribution,
    given_distribution,
)
from offload_rt.commands.running import ended_early, machine_errors_in_a_line, open_llm, write_text
from offload_rt.errors import UsageError
from offload_rt.system import clock
from offload_rt.system.files import write_json
from offload_rt.text.chat import with_question
from offload_rt.text.documents import documents
from offload_rt.text.thoughts import ReadableThoughts, Splitter

if TYPE_CHECKING:
    from offload_rt.api.context import Context, TokenStream
    from offload_rt.api.llm import LLM
    from offload_rt.sampling.params import SamplingParams
    from offload_rt.text.chat import ChatTemplate
    from offload_rt.text.tool_messages import Message

ANSWER_TOKENS = 1024
"""Most tokens of an answer where nothing is said."""
DEMO_TOKENS = 60
"""Most tokens of an answer of the demo model by default: enough to see that it has none."""
THINKING = {None: None, "on": True, "off": False, "hidden": True}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    ask = commands.add_parser(
        "ask",
        help="ask a question about documents",
        description="Answers a question about documents, which are read in full, by an instruct model. The"
        " answer goes to stdout, everything else to stderr.",
        epilog='A first run: offload-rt ask --model FOLDER --file book.txt "Who is Ahab?".',
        allow_abbrev=False,
    )
    ask.set_defaults(run=run)
    ask.add_argument("question", metavar="QUESTION", help="the question; - reads it from stdin")
    add_chat(ask)
    add_json(ask.add_argument_group("output").add_argument, "the result and its statistics")


def add_chat(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a chat about documents."""
    add_model(parser)
    add = parser.add_argument_group("chat").add_argument
    meaning = "a document to ask about: txt, md, html, pdf or epub; may be repeated (default: none)"
    add("--file", action="append", default=[], metavar="FILE", dest="files", help=meaning)
    prompts.add_encoding(add)
    add("--system", metavar="TEXT", help="what the model is told about its part (default: nothing)")
    meaning = (
        "whether the model thinks before it answers; hidden: its thoughts are not shown (default: as its"
    )
    add("--thinking", choices=["on", "off", "hidden"], help=f"{meaning} chat template has it, and shown)")
    add("--quiet", action="store_true", help="print nothing but errors on stderr")
    sessions.add_arguments(parser)
    title = "sampling (default: as the model suggests, else as is said here)"
    add_sampling(parser, ANSWER_TOKENS, title, f", or {DEMO_TOKENS} for the demo")
    parser.set_defaults(max_new_tokens=None)  # depends on the model
    add_configuration(parser)


@dataclass(frozen=True)
class Chat:
    """A chat that is about to begin: checked and in tokens, before a model is loaded.

    Attributes:
        sessions: where its context comes from, and where it is kept afterwards.
        messages: what the model is told first, and the documents; or those of the session.
    """

    arguments: argparse.Namespace
    console: Console
    template: ChatTemplate
    sessions: sessions.Sessions
    messages: list[Message]

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Chat:
        """Reads the documents and the tokenizer. Raises UsageError for whatever is wrong by then."""
        console = Console(arguments.quiet)
        chat_sessions = sessions.Sessions(arguments, console)
        if not arguments.files:
            chat_sessions.check_exists("name a document, --file FILE")
        for path in arguments.files:
            console.working("read", path)
        text = documents(arguments.files, console.notice, arguments.encoding) if arguments.files else ""
        console.clear()
        check_early(arguments)
        if arguments.max_new_tokens is None:
            arguments.max_new_tokens = DEMO_TOKENS if _on_demo(arguments) else ANSWER_TOKENS
        stop, schema = tuple(arguments.stop), arguments.json_schema
        distribution(arguments, stop=stop, seed=arguments.seed, json_schema=schema)  # refuses bad values
        from offload_rt.model.embedded import model_source
        from offload_rt.model.loading import load_tokenizer
        from offload_rt.text.chat import ChatTemplate

        tokenizer = load_tokenizer(model_source(arguments.model))
        earlier, date = chat_sessions.chat()
        template = ChatTemplate(tokenizer, arguments.model or "demo", console.notice, date or clock.date())
        messages = (None if arguments.files else earlier) or [{"role": "user", "content": text}]
        if arguments.system is not None:
            rest = [message for message in messages if message["role"] != "system"]
            messages = [{"role": "system", "content": arguments.system}, *rest]
        return cls(arguments, console, template, chat_sessions, messages)

    @property
    def thinking(self) -> bool | None:
        """Returns whether the model shall think; None: as its template has it."""
        return self.template.thoughts(THINKING[self.arguments.thinking], self.arguments.json_schema)

    def warn_of_demo(self) -> None:
        """Says on the demo model that it cannot answer."""
        if _on_demo(self.arguments):
            self.console.notice(
                "the demo model continues old novels and cannot answer: it writes up to"
                f" {self.arguments.max_new_tokens} tokens to show the commands; name an instruct model with"
                " --model (offload-rt models lists those on this machine)"
            )

    def encoded(self, messages: Sequence[Message], answer: bool = True) -> list[int]:
        """Returns the token IDs of messages, and tells of a wait for them; see `ChatTemplate.encode`."""
        self.console.working("encode", f"{sum(len(message['content']) for message in messages):,} characters")
        with machine_errors_in_a_line():
            tokens = self.template.encode(messages, answer=answer, thinking=self.thinking)
        self.console.clear()
        self.console.tokens["prefill"] = len(tokens)
        return tokens

    def open(self, llm: LLM, prompt: Sequence[int], room: int) -> Context:
        """Opens the context of a prompt; see `Sessions.open`."""
        return self.sessions.open(llm, prompt, room, self.messages, self.template.date)

    def describe(self, context: Context, messages: list[Message]) -> None:
        """Tells a context that was opened from tokens what messages these are."""
        context.messages = messages
        context.date = self.template.date or context.date

    def params(self, llm: LLM) -> SamplingParams:
        """Returns the model's own sampling, as far as no flag says anything else, and greedy without one."""
        from offload_rt.sampling.params import SamplingParams

        arguments = self.arguments
        return replace(
            llm.model_sampling or SamplingParams(),
            **given_distribution(arguments),
            max_tokens=arguments.max_new_tokens,
            stop=tuple(arguments.stop),
            seed=arguments.seed,
            ignore_eos=arguments.ignore_eos,
            json_schema=arguments.json_schema,
        )

    def write(self, answer: TokenStream, params: SamplingParams) -> tuple[int, UsageError | None]:
        """Streams an answer to stdout; see `write_text`."""
        thoughts: Splitter = answer.splitter()
        if self.arguments.thinking == "hidden" or params.json_schema is not None:
            self.console.working("thinking", "its thoughts are hidden")
        else:
            thoughts = ReadableThoughts(answer.splitter())
        self.console.tokens["decode"] = params.max_tokens
        status, failure = write_text(answer, params, self.console, thoughts=thoughts)
        if answer.result is not None and answer.result.finish_reason == "length":
            self.console.say(
                f"note       the answer is cut after {params.max_tokens} tokens: -n N allows more"
            )
        return status, failure


def _on_demo(arguments: argparse.Namespace) -> bool:
    from offload_rt.model.embedded import DEMO

    return arguments.model in (None, DEMO)


def run(arguments: argparse.Namespace) -> int:
    question = (prompts.stdin_text() if arguments.question == "-" else arguments.question).strip()
    with_question([], question)  # refuses an empty one before documents are read
    chat = Chat.of(arguments)
    messages = with_question(chat.messages, question)
    prompt = chat.encoded(messages)
    chat.warn_of_demo()
    console, max_tokens = chat.console, arguments.max_new_tokens
    with machine_errors_in_a_line(), open_llm(arguments, console, (len(prompt), max_tokens)) as llm:
        params = chat.params(llm)
        context = chat.open(llm, prompt, max_tokens)
        chat.describe(context, messages)
        answer = context.stream_ask(None, params, thinking=chat.thinking)
        status, failure = chat.write(answer, params)
        result = answer.result
        assert result is not None
        try:
            console.summary(result)
            console.compare_with_plan(result, llm.plan)
            if failure is None and status in (0, INTERRUPTED):
                context.messages = chat.messages  # the next question is about the documents alone
                chat.sessions.save(context)
        finally:
            if arguments.json is not None:
                write_json("--json", arguments.json, result.to_json())
        if failure is not None:
            raise ended_early(failure, result)
    return status
