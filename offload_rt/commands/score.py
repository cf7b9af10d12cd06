"""`offload-rt score`: how likely texts are to a model: perplexity on stdout, and values per token to JSON."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from offload_rt.commands import prompts
from offload_rt.commands.console import Console
from offload_rt.commands.options import add_computing, add_json, add_overrides, add_target, check_early
from offload_rt.commands.prompts import token_count
from offload_rt.commands.running import machine_errors_in_a_line, open_llm
from offload_rt.config.schema import NO_DRAFT
from offload_rt.errors import UsageError
from offload_rt.system import clock
from offload_rt.system.files import write_json
from offload_rt.text.documents import read_document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from offload_rt.api.llm import LLM
    from offload_rt.engine.results import PromptScore


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    score = commands.add_parser(
        "score",
        help="measure the perplexity of texts",
        description="Computes the log probability of every token of a text given those before it, and prints"
        " the perplexity of each text. Progress goes to stderr.",
        epilog="A first run: offload-rt score --model FOLDER book.txt. A text longer than the model's"
        " positions is scored in windows, by --context.",
        allow_abbrev=False,
    )
    score.set_defaults(run=run, config="plain", draft=NO_DRAFT)
    texts = score.add_argument_group("texts")
    meaning = "a document: txt, md, html, pdf or epub; - reads a text from stdin"
    texts.add_argument("files", nargs="*", metavar="FILE", help=meaning)
    add = texts.add_argument
    meaning = f"a text as {prompts.IDS}; may be repeated (default: none)"
    add(prompts.TOKENS, action="append", default=[], dest="token_files", metavar="FILE", help=meaning)
    prompts.add_encoding(add)
    limit = "keep the last N tokens of each text (default: all)"
    add("--max-prompt-tokens", type=token_count, metavar="N", help=limit)
    windows = score.add_argument_group("windows")
    add = windows.add_argument
    meaning = "score a text in windows of N tokens that overlap, each by itself (default: as a whole)"
    add("--context", type=token_count, metavar="N", help=meaning)
    meaning = (
        "tokens that each window counts: those that follow the window before (default: half of a window)"
    )
    add("--stride", type=token_count, metavar="N", help=meaning)
    add_model = score.add_argument_group("model").add_argument
    add_target(add_model)
    add_computing(add_model)
    add_overrides(score.add_argument_group("configuration"))
    add = score.add_argument_group("output").add_argument
    add_json(add, "the figures, and the values of each token,")
    meaning = "also write the N likeliest tokens in the place of each, 0 to 20 (default: 0)"
    add("--top", type=int, default=0, metavar="N", help=meaning)
    add("--quiet", action="store_true", help="print nothing but errors on stderr")


@dataclass(frozen=True)
class Figures:
    """What is printed of a text.

    Attributes:
        scored_tokens: tokens that have a log probability: all but the first one.
        logprob: sum of their log probabilities, in nats.
        bytes: of their text in UTF-8; None: the model has no tokenizer.
        read_tokens: tokens that were computed, those of all windows.
        seconds: time that it took.
    """

    name: str
    scored_tokens: int
    logprob: float
    bytes: int | None
    read_tokens: int
    seconds: float

    @property
    def nats_per_token(self) -> float:
        return -self.logprob / self.scored_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float | None:
        return -self.logprob / math.log(2) / self.bytes if self.bytes else None

    @property
    def tokens_per_second(self) -> float:
        return self.read_tokens / self.seconds if self.seconds else 0.0

    def line(self) -> str:
        """Returns the line that is printed."""
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        name = os.fsencode(self.name).decode(errors="replace")
        return (
            f"{name}: perplexity {self.perplexity:.4f} ({self.nats_per_token:.4f} nats per token{bits});"
            f" {self.scored_tokens:,} tokens scored, {self.tokens_per_second:,.0f} tokens/s"
        )


@dataclass(frozen=True)
class Scored:
    """A text that was scored.

    Attributes:
        texts: what each token adds to the text; None: the model has no tokenizer.
    """

    figures: Figures
    score: PromptScore
    texts: list[str] | None

    def to_json(self, *, alternatives: bool) -> dict[str, object]:
        """Returns the figures, and the values of each token in lists of equal length."""
        figures, score = self.figures, self.score
        values: dict[str, object] = {
            "name": figures.name,
            "tokens": len(score.tokens),
            "scored_tokens": figures.scored_tokens,
            "bytes": figures.bytes,
            "logprob": figures.logprob,
            "nats_per_token": figures.nats_per_token,
            "perplexity": figures.perplexity,
            "bits_per_byte": figures.bits_per_byte,
            "seconds": figures.seconds,
            "tokens_per_second": figures.tokens_per_second,
            "token_ids": score.tokens,
            "texts": self.texts,
            "logprobs": score.logprobs,
            "greedy": score.greedy,
        }
        return values | ({"top": score.alternatives} if alternatives else {})


def _together(figures: Sequence[Figures]) -> Figures:
    """Returns the figures of several texts as one."""
    sizes = [one.bytes for one in figures if one.bytes is not None]
    return Figures(
        f"all {len(figures)} texts",
        sum(one.scored_tokens for one in figures),
        math.fsum(one.logprob for one in figures),
        sum(sizes) if len(sizes) == len(figures) else None,
        sum(one.read_tokens for one in figures),
        math.fsum(one.seconds for one in figures),
    )


@dataclass(frozen=True)
class Window:
    """Tokens that are scored together, of which those from position `start` on are counted."""

    tokens: list[int]
    start: int


@dataclass(frozen=True)
class Text:
    """A text to score in windows, each of which counts the tokens that follow the window before.

    Attributes:
        tokens: its token IDs, at least two.
        context: most tokens of a window.
        stride: most tokens that a window counts, but for the first one, which counts all.
        beginning: number of beginning-of-text tokens at its beginning, with which every window begins.
    """

    name: str
    tokens: list[int]
    context: int
    stride: int
    beginning: int

    def windows(self) -> Iterator[Window]:
        """Yields the windows, which count each token once."""
        end = min(self.context, len(self.tokens))
        yield Window(self.tokens[:end], 0)
        while end < len(self.tokens):
            counted = min(self.stride, len(self.tokens) - end)
            end += counted
            own = self.tokens[end - self.context + self.beginning : end]
            yield Window([*self.tokens[: self.beginning], *own], self.context - counted)

    @property
    def longest(self) -> int:
        """Tokens of the longest window."""
        return min(self.context, len(self.tokens))

    @property
    def tokens_to_read(self) -> int:
        """Tokens of all windows together."""
        further = -(-(len(self.tokens) - self.longest) // self.stride)
        return self.longest * (1 + further)


def run(arguments: argparse.Namespace) -> int:
    console = Console(arguments.quiet)
    if not (arguments.files or arguments.token_files):
        raise UsageError(f"no text is given; name a FILE, - for stdin, or {prompts.TOKENS} FILE")
    if arguments.context is None and arguments.stride is not None:
        raise UsageError(f"--stride {arguments.stride} is of windows; give their length, --context N")
    if arguments.top and arguments.json is None:
        raise UsageError(f"--top {arguments.top}: the likeliest tokens are written to --json FILE; name it")
    contents = list[tuple[str, str | list[int]]]()
    for name in arguments.files:
        contents.append(("stdin" if name == "-" else name, _read(name, arguments.encoding, console)))
    contents += [(name, prompts.token_file(name)) for name in arguments.token_files]
    check_early(arguments)
    from offload_rt.model.embedded import model_source
    from offload_rt.model.loading import load_tokenizer
    from offload_rt.sampling.params import MOST_ALTERNATIVES

    if not 0 <= arguments.top <= MOST_ALTERNATIVES:
        raise UsageError(f"--top {arguments.top} is out of range; use 0 to {MOST_ALTERNATIVES}")
    with machine_errors_in_a_line():
        tokenizer = load_tokenizer(model_source(arguments.model))
        texts = [_text(*content, tokenizer, arguments, console) for content in contents]
    scored = list[Scored]()
    with machine_errors_in_a_line(), _open(arguments, console, max(text.longest for text in texts)) as llm:
        try:
            for text in texts:
                scored.append(_scored(llm, text, arguments, console))
                print(scored[-1].figures.line(), flush=True)
            if len(scored) > 1:
                print(_together([one.figures for one in scored]).line(), flush=True)
        finally:  # also what an interrupt leaves
            if arguments.json is not None:
                _write(arguments, llm, scored)
    return 0


def _read(name: str, encoding: str | None, console: Console) -> str:
    if name == "-":
        return prompts.stdin_text(encoding, lambda fault: console.notice(f"stdin: {fault}"))
    return read_document(name, console.notice, encoding)


def _text(
    name: str,
    content: str | list[int],
    tokenizer: PreTrainedTokenizerBase | None,
    arguments: argparse.Namespace,
    console: Console,
) -> Text:
    """Returns a text in tokens. Raises UsageError where it or its windows are too short."""
    from offload_rt.text.tokenize import beginning_tokens

    tokens = prompts.encoded(content, tokenizer, arguments.model, console)
    tokens = prompts.kept(tokens, arguments.max_prompt_tokens, tokenizer, console, name)
    if len(tokens) < 2:
        raise UsageError(f"{name}: has 1 token, and the first one has no probability; give at least 2")
    beginning = beginning_tokens(tokens, tokenizer)
    if arguments.context is None:
        return Text(name, tokens, len(tokens), len(tokens), beginning)
    context, most = arguments.context, arguments.context - max(1, beginning)
    if most < 1:
        raise UsageError(f"--context {context} is too short for a window; use at least {1 + context - most}")
    stride = min(max(1, context // 2), most) if arguments.stride is None else arguments.stride
    if stride > most:
        raise UsageError(f"--stride {stride} is too long for windows of {context} tokens; use 1 to {most}")
    return Text(name, tokens, context, stride, beginning)


def _open(arguments: argparse.Namespace, console: Console, longest: int) -> LLM:
    """Opens the model for windows of up to `longest` tokens."""
    from offload_rt.planning.request import ContextTooLong

    try:
        return open_llm(arguments, console, (longest, 0))
    except ContextTooLong as error:
        raise UsageError(f"{error}; or score the text in windows, --context N") from None


def _scored(llm: LLM, text: Text, arguments: argparse.Namespace, console: Console) -> Scored:
    """Scores a text, window by window."""
    from offload_rt.engine.results import PromptScore
    from offload_rt.text.tokenize import TokenTexts

    score, read, started = PromptScore([], [], [], []), 0, clock.now()
    console.tokens["score"] = text.tokens_to_read
    for window in text.windows():
        llm.engine.on_progress = partial(_progress, console, text, read, len(window.tokens))
        part = llm.score(window.tokens, top=arguments.top, start=window.start)
        score.tokens.extend(part.tokens[window.start :])
        score.logprobs.extend(part.logprobs[window.start :])
        score.greedy.extend(part.greedy[window.start :])
        score.alternatives.extend(part.alternatives[window.start :])
        read += len(window.tokens)
    seconds = clock.now() - started
    console.clear()
    texts = None if llm.tokenizer is None else TokenTexts(llm.tokenizer).split(score.tokens)
    byte_count = None
    if texts is not None:
        pairs = zip(texts, score.logprobs, strict=True)
        byte_count = sum(len(added.encode()) for added, logprob in pairs if logprob is not None)
    return Scored(Figures(text.name, score.scored, score.total, byte_count, read, seconds), score, texts)


def _progress(
    console: Console, text: Text, read: int, tokens: int, phase: str, done: int, total: int
) -> None:
    """Shows the progress of a prefill of `tokens` tokens as progress of its text."""
    if phase == "prefill":
        console.progress("score", read + tokens * done // total, text.tokens_to_read)
    else:
        console.progress(phase, done, total)


def _write(arguments: argparse.Namespace, llm: LLM, scored: Sequence[Scored]) -> None:
    """Writes the texts that were scored to `--json`."""
    from cpu_kv.sizes import dtype_name

    target = llm.engine.target
    report: dict[str, object] = {
        "model": target.name,
        "device": str(target.device),
        "dtype": dtype_name(target.dtype),
        "context": arguments.context,
        "texts": [one.to_json(alternatives=arguments.top > 0) for one in scored],
    }
    write_json("--json", arguments.json, report)
