"""The thoughts in an answer: how models mark them, and how they come apart from the answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from offload_rt.drafting.logits import Grammar
from offload_rt.text import overlap

LAST_TOKENS = 32
"""Tokens of a prompt that are looked at for a mark at its end."""

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ThoughtFormat:
    """The marks that a family of models writes around its thoughts.

    Attributes:
        opened: begins thoughts, at the beginning of a text only.
        closed: ends them.
        answer: marks that begin and end the answer; empty where it has none.
        channels: thoughts and answers are messages of channels, each with a header that names the channel.
    """

    opened: str
    closed: str
    answer: tuple[str, ...] = ()
    channels: bool = False

    @property
    def telling(self) -> tuple[str, ...]:
        """The marks by which the format is recognised: `END` is in other templates too."""
        return (CHANNEL + "analysis",) if self.channels else (self.opened, self.closed)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        if self.channels:
            return CHANNEL, MESSAGE, START, END
        return self.opened, self.closed, *self.answer

    @property
    def closing(self) -> str:
        """What a model writes between its thoughts and its answer."""
        return self.closed + "".join(self.answer[:1])


CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
FINAL = "final"
"""The channel of answers; those of all other channels are thoughts."""

THINK = ThoughtFormat("<think>", "</think>")
FORMATS = (
    ThoughtFormat(  # harmony: gpt-oss
        f"{CHANNEL}analysis{MESSAGE}", END, (f"{START}assistant{CHANNEL}{FINAL}{MESSAGE}",), channels=True
    ),
    ThoughtFormat("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ThoughtFormat("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThoughtFormat("<|channel>thought", "<channel|>"),  # Gemma 4
    ThoughtFormat(  # Command A Reasoning
        "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    ThoughtFormat("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ThoughtFormat("◁think▷", "◁/think▷"),  # Kimi-VL
    ThoughtFormat("<thought>", "</thought>"),  # EXAONE Deep
    THINK,  # Qwen, DeepSeek, GLM and most others
)


class ThoughtMarks:
    """The thought format of a model, and its tokens.

    The format is the first of `FORMATS` with marks in the chat template, else with one in the vocabulary,
    else that of `<think>`.

    Attributes:
        special: texts of the marks that are special tokens, which texts keep.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self.format, self.special = THINK, dict[int, str]()
        if tokenizer is not None:
            template = str(getattr(tokenizer, "chat_template", None) or "")
            written = [one for one in FORMATS if any(mark in template for mark in one.telling)]
            known = (one for one in FORMATS if all(self._token(mark) is not None for mark in one.telling))
            self.format = (written or [*known, THINK])[0]
            tokens = {token: mark for mark in self.format.marks if (token := self._token(mark)) is not None}
            skipped = (token for token in tokens if not tokenizer.decode([token], skip_special_tokens=True))
            self.special = {token: tokens[token] for token in skipped}

    def _token(self, mark: str) -> int | None:
        """Returns the token that a mark is; None: it is several, or none."""
        assert self._tokenizer is not None
        token = self._tokenizer.convert_tokens_to_ids(mark)
        return token if isinstance(token, int) and token != self._tokenizer.unk_token_id else None

    def _ends_with(self, prompt: Sequence[int], mark: str) -> bool:
        if self._tokenizer is None:
            return False
        return str(self._tokenizer.decode(list(prompt[-LAST_TOKENS:]))).rstrip().endswith(mark)

    def come_first(self, prompt: Sequence[int]) -> bool:
        """Returns whether thoughts must come first after a prompt, and then end with a token of their own."""
        if self.format.channels:
            return self._ends_with(prompt, f"{START}assistant")
        opened = self._ends_with(prompt, self.format.opened)
        return opened and self._token(self.format.closed) is not None

    def splitter(self, prompt: Sequence[int]) -> ThoughtSplitter:
        """Returns the splitter of the text behind a prompt, which may have opened thoughts."""
        return ThoughtSplitter(self._ends_with(prompt, self.format.opened), self.format)

    def before(
        self, grammar: Grammar, prompt: Sequence[int], budget: int, ends: Collection[int], vocabulary: int
    ) -> Grammar:
        """Returns a grammar that begins behind the thoughts that must come first after a prompt, if any must.

        Thoughts that the prompt has opened are closed at once where their end is no token of its own.

        Args:
            budget: most tokens of thoughts.
            ends: tokens that end the text.
        """
        opened = self._ends_with(prompt, self.format.opened)
        if self._tokenizer is None or not (opened or self.come_first(prompt)):
            return grammar

        def encoded(text: str) -> list[int]:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[misc]

        closing = encoded(self.format.closing)
        gate, until, opening = closing, None, None
        if self.format.channels and not opened:
            gate, until, opening = encoded(CHANNEL + FINAL), self._token(MESSAGE), self._token(CHANNEL)
        elif not self.come_first(prompt):
            budget = 0
        elif self.format.answer:
            gate = encoded(self.format.answer[0])
        return ThoughtsFirst(grammar, closing, gate, until, budget, ends, vocabulary, opening)


class ThoughtsFirst:
    """Any thoughts, and behind them the texts of a grammar (a `drafting.logits.Grammar`).

    Args:
        closing: tokens that are forced where thoughts reach their budget.
        gate: tokens that begin the answer.
        until: the token behind them with which their header ends; None: they have no header.
        budget: most tokens of thoughts.
        ends: tokens that end the text; not allowed among thoughts.
        opening: the token that they begin with; None: they have begun, or begin with any.
    """

    def __init__(
        self,
        grammar: Grammar,
        closing: list[int],
        gate: list[int],
        until: int | None,
        budget: int,
        ends: Collection[int],
        vocabulary: int,
        opening: int | None = None,
    ) -> None:
        self._grammar = grammar
        self._closing, self._gate, self._until, self._budget = closing, gate, until, budget
        self._vocabulary = vocabulary
        self._opening = opening
        self._free = self._mask(set(range(vocabulary)) - set(ends))

    def allowed(self, tokens: Sequence[int]) -> Tensor | None:
        if (start := self._answer(tokens)) is not None:
            return self._grammar.allowed(tokens[start:])
        forced = list(tokens[self._budget :])
        if len(tokens) < self._budget:
            return self._free if tokens or self._opening is None else self._mask({self._opening})
        if forced != self._closing[: len(forced)]:
            return None
        return self._mask({self._closing[len(forced)]})

    def complete(self, tokens: Sequence[int]) -> bool:
        start = self._answer(tokens)
        return start is not None and self._grammar.complete(tokens[start:])

    def _answer(self, tokens: Sequence[int]) -> int | None:
        """Returns where the answer begins; None: it has not begun."""
        at, size = -1, len(self._gate)
        with suppress(ValueError):  # of `index`, where there is none
            while True:
                at = tokens.index(self._gate[0], at + 1)
                if list(tokens[at : at + size]) == self._gate:
                    at += size
                    return at if self._until is None else tokens.index(self._until, at) + 1
        return None

    def _mask(self, tokens: Collection[int]) -> Tensor:
        bits = torch.zeros(-(-self._vocabulary // 64) * 64, dtype=torch.bool)
        bits[[token for token in tokens if token < self._vocabulary]] = True
        words = numpy.packbits(bits.numpy(), bitorder="little")
        return torch.from_numpy(words).view(torch.long)


class Part(Enum):
    """What the text under way is."""

    BEGINNING = auto()
    THOUGHTS = auto()
    ANSWER = auto()
    HEADER = auto()
    NOTHING = auto()


class ThoughtSplitter:
    """Splits a text that arrives in pieces into its thoughts and the answer after them, without marks.

    White space at the beginning of both is dropped.

    Args:
        inside: the text begins within thoughts, as the template has opened them.
    """

    def __init__(self, inside: bool = False, form: ThoughtFormat = THINK) -> None:
        self._form = form
        self._part = Part.THOUGHTS if inside else Part.BEGINNING
        self._held = ""
        self._header = ""
        self._blank = {Part.THOUGHTS: True, Part.ANSWER: True}  # nothing of it has been returned

    def push(self, text: str) -> tuple[str, str]:
        """Returns the thoughts and the part of the answer that are certain with this piece."""
        text, self._held = self._held + text, ""
        shown = {Part.THOUGHTS: "", Part.ANSWER: ""}
        while text:
            marks = self._marks()
            if self._part is Part.BEGINNING:
                text = text.lstrip()
                if not any(text.startswith(mark[: len(text)]) for mark in marks):
                    self._part = Part.ANSWER
                    continue
            at, mark = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=(-1, ""))
            end = at if mark else len(text) - max((overlap(text, one) for one in marks), default=0)
            self._take(text[:end], shown)
            if not mark:
                self._held = text[end:]
                break
            self._enter(mark)
            text = text[end + len(mark) :]
        return shown[Part.THOUGHTS], shown[Part.ANSWER]

    def finish(self) -> tuple[str, str]:
        """Returns what was held back, as no text follows."""
        held, self._held = self._held, ""
        answers = self._part in (Part.ANSWER, Part.BEGINNING)
        return (held, "") if self._part is Part.THOUGHTS else ("", held if answers else "")

    def _marks(self) -> tuple[str, ...]:
        """Returns the marks that end the part under way."""
        form = self._form
        if form.channels:
            return (CHANNEL, START, END, *((MESSAGE,) if self._part is Part.HEADER else ()))
        if self._part is Part.ANSWER:
            return form.answer
        return (*((form.opened,) if self._part is Part.BEGINNING else ()), form.closed, *form.answer)

    def _enter(self, mark: str) -> None:
        """Begins the part that follows a mark."""
        if mark == CHANNEL:
            self._part, self._header = Part.HEADER, ""
        elif mark == MESSAGE:
            final = self._header.strip().startswith(FINAL)
            self._part = Part.ANSWER if final else Part.THOUGHTS
        elif self._form.channels:
            self._part = Part.NOTHING
        else:
            self._part = Part.THOUGHTS if mark == self._form.opened else Part.ANSWER

    def _take(self, text: str, shown: dict[Part, str]) -> None:
        if self._part is Part.HEADER:
            self._header += text
        if self._part in shown:
            text = text.lstrip() if self._blank[self._part] else text
            self._blank[self._part] &= not text
            shown[self._part] += text


def split(text: str, splitter: ThoughtSplitter) -> tuple[str, str]:
    """Returns the thoughts in a whole text and its answer."""
    thought, answer = ("".join(both) for both in zip(splitter.push(text), splitter.finish(), strict=True))
    return thought, answer
