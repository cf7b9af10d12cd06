"""The thoughts in an answer: how models mark them, and how they come apart from the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from offload_rt.text.tokenize import mark_token, mark_tokens, overlap

BLANK = " \t\r\n"
LAST_TOKENS = 32
"""Tokens of a prompt that are looked at for a mark at its end."""

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ThoughtFormat:
    """The marks that a family of models writes around its thoughts.

    Attributes:
        opening_mark: begins thoughts, at the beginning of a text only.
        closing_mark: ends them.
        answer: marks that begin and end the answer; empty where it has none.
        channels: thoughts and answers are messages of channels, each with a header that names the channel.
    """

    opening_mark: str
    closing_mark: str
    answer: tuple[str, ...] = ()
    channels: bool = False

    @property
    def telling(self) -> tuple[str, ...]:
        """The marks by which the format is recognised: `END` is in other templates too."""
        return (CHANNEL + "analysis",) if self.channels else (self.opening_mark, self.closing_mark)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        if self.channels:
            return CHANNEL, MESSAGE, START, END
        return self.opening_mark, self.closing_mark, *self.answer

    @property
    def closing(self) -> str:
        """What a model writes between its thoughts and its answer."""
        return self.closing_mark + "".join(self.answer[:1])


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
        known: the format is in the chat template or the vocabulary, so that the model is one that thinks.
        special: texts of the special tokens in marks, which texts keep.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self.format, self.known, self.special = THINK, False, dict[int, str]()
        if tokenizer is not None:
            template = str(getattr(tokenizer, "chat_template", None) or "")
            written = [form for form in FORMATS if any(mark in template for mark in form.telling)]
            formats = (form for form in FORMATS if all(self.token(mark) is not None for mark in form.telling))
            found = written or list(formats)
            self.format, self.known = (found or [THINK])[0], bool(found)
            self.special = special_texts(tokenizer, self.format.marks)

    def token(self, mark: str) -> int | None:
        """Returns the token that a mark is; None: it is several, or none."""
        assert self._tokenizer is not None
        return mark_token(self._tokenizer, mark)

    def ends_with(self, prompt: Sequence[int], mark: str) -> bool:
        """Returns whether a prompt ends with a mark, but for white space."""
        if self._tokenizer is None:
            return False
        return str(self._tokenizer.decode(list(prompt[-LAST_TOKENS:]))).rstrip().endswith(mark)

    def encoded(self, marks: str) -> list[int]:
        """Returns the tokens of marks in a row."""
        assert self._tokenizer is not None
        return mark_tokens(self._tokenizer, marks)

    def opened(self, prompt: Sequence[int]) -> bool:
        """Returns whether a prompt ends within thoughts: no control token follows their opening mark."""
        form = self.format
        if self._tokenizer is None or self.ends_with(prompt, form.opening_mark):
            return self._tokenizer is not None
        opening, size = self.encoded(form.opening_mark), len(self.encoded(form.opening_mark))
        for at in range(len(prompt) - 1, -1, -1):
            if prompt[at] in self.control:
                starts = (at, at - size + 1)
                return any(start >= 0 and list(prompt[start : start + size]) == opening for start in starts)
        return False

    def is_blank(self, tokens: Sequence[int]) -> bool:
        """Returns whether the text of tokens is white space."""
        assert self._tokenizer is not None
        return not str(self._tokenizer.decode(list(tokens))).strip()

    @cached_property
    def control(self) -> set[int]:
        """The special tokens, and marks that are tokens."""
        assert self._tokenizer is not None
        added = self._tokenizer.added_tokens_decoder.items()
        marks = {token for mark in self.format.marks if (token := self.token(mark)) is not None}
        return {token for token, entry in added if entry.special} | marks

    def can_come_first(self, prompt: Sequence[int]) -> bool:
        """Returns whether thoughts may come first after a prompt, and then end with a token of their own."""
        if self.format.channels:
            return self.ends_with(prompt, f"{START}assistant") or self.opened(prompt)
        has_tokens = all(self.token(mark) is not None for mark in self.format.telling)
        return has_tokens and not self.ends_with(prompt, self.format.closing_mark)

    def splitter(self, prompt: Sequence[int]) -> ThoughtSplitter:
        """Returns the splitter of the text behind a prompt, which may have opened thoughts."""
        opened = self.opened(prompt)
        begun = opened and not self.ends_with(prompt, self.format.opening_mark)
        return ThoughtSplitter(opened, self.format, begun)


def special_texts(tokenizer: PreTrainedTokenizerBase, marks: Iterable[str]) -> dict[int, str]:
    """Returns the texts of the special tokens in marks; a mark may be a special token and a word."""
    special = dict[int, str]()
    for mark in marks:
        for token in mark_tokens(tokenizer, mark):
            text = str(tokenizer.decode([token]))
            if text in mark and not tokenizer.decode([token], skip_special_tokens=True):
                special[token] = text
    return special


class Part(Enum):
    """What the text under way is."""

    BEGINNING = auto()
    THOUGHTS = auto()
    ANSWER = auto()
    HEADER = auto()
    NOTHING = auto()


class ThoughtSplitter:
    """Splits a text that arrives in pieces into its thoughts and the answer after them, without marks.

    White space behind the marks is dropped, and white space before the first one.

    Args:
        inside: the text begins within thoughts, as the prompt has opened them.
        begun: the prompt has some text of these thoughts.
    """

    def __init__(self, inside: bool = False, form: ThoughtFormat = THINK, begun: bool = False) -> None:
        self._form = form
        self._part = Part.THOUGHTS if inside else Part.BEGINNING
        self._open_text = ""
        self._header = ""
        self._blank = {Part.THOUGHTS: not begun, Part.ANSWER: True}  # nothing of it has been returned

    def push(self, text: str) -> tuple[str, str]:
        """Returns the thoughts and the part of the answer that are certain with this piece."""
        text, self._open_text = self._open_text + text, ""
        shown = {Part.THOUGHTS: "", Part.ANSWER: ""}
        while text:
            marks = self._marks()
            if self._part is Part.BEGINNING:
                begun = text.lstrip(BLANK)
                if not any(begun.startswith(mark[: len(begun)]) for mark in marks):
                    self._part = Part.ANSWER
                    self._blank[Part.ANSWER] = False
                    continue
                if not any(map(begun.startswith, marks)):
                    self._open_text = text
                    break
                text = begun
            at, mark = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=(-1, ""))
            end = (
                at if mark else len(text) - max((overlap(text, open_mark) for open_mark in marks), default=0)
            )
            self._take(text[:end], shown)
            if not mark:
                self._open_text = text[end:]
                break
            self._enter(mark)
            text = text[end + len(mark) :]
        return shown[Part.THOUGHTS], shown[Part.ANSWER]

    def finish(self) -> tuple[str, str]:
        """Returns what was held back, as no text follows."""
        rest, self._open_text = self._open_text, ""
        answers = self._part in (Part.ANSWER, Part.BEGINNING)
        return (rest, "") if self._part is Part.THOUGHTS else ("", rest if answers else "")

    def _marks(self) -> tuple[str, ...]:
        """Returns the marks that end the part under way."""
        form = self._form
        if form.channels:
            return (CHANNEL, START, END, *((MESSAGE,) if self._part is Part.HEADER else ()))
        if self._part is Part.ANSWER:
            return form.answer
        return (
            *((form.opening_mark,) if self._part is Part.BEGINNING else ()),
            form.closing_mark,
            *form.answer,
        )

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
            self._part = Part.THOUGHTS if mark == self._form.opening_mark else Part.ANSWER

    def _take(self, text: str, shown: dict[Part, str]) -> None:
        if self._part is Part.HEADER:
            self._header += text
        if self._part in shown:
            text = text.lstrip(BLANK) if self._blank[self._part] else text
            self._blank[self._part] &= not text
            shown[self._part] += text


class Splitter(Protocol):
    """Takes a text in pieces, and returns two parts of it as they become certain."""

    def push(self, text: str) -> tuple[str, str]: ...

    def finish(self) -> tuple[str, str]: ...


class ReadableThoughts:
    """Writes thoughts and the answer as a text that looks alike for all formats.

    It has the interface of a splitter, and no thoughts are left in what it returns. The text begins without
    white space.
    """

    def __init__(self, splitter: ThoughtSplitter) -> None:
        self._splitter = splitter
        self._space = ""  # at the end of the thoughts so far
        self._part = Part.BEGINNING

    def push(self, text: str) -> tuple[str, str]:
        """Returns nothing, and what is certain with this piece."""
        return "", self._written(*self._splitter.push(text))

    def finish(self) -> tuple[str, str]:
        """Returns nothing, and what was held back, as no text follows."""
        return "", self._written(*self._splitter.finish())

    def _written(self, thought: str, answer: str) -> str:
        text = ""
        if thought:
            text = f"{THINK.opening_mark}\n" if self._part is Part.BEGINNING else ""
            self._part, thought = Part.THOUGHTS, self._space + thought
            text += thought.rstrip(BLANK)
            self._space = thought[len(thought.rstrip(BLANK)) :]
        if self._part is Part.BEGINNING:
            answer = answer.lstrip(BLANK)
        if answer:
            text += f"\n{THINK.closing_mark}\n\n" if self._part is Part.THOUGHTS else ""
            self._part = Part.ANSWER
        return text + answer
