"""Calls of tools in an answer: which format a model uses, and how calls come apart from the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from offload_rt.text.call_formats import CALL_FORMATS, CallFormat, HermesCalls
from offload_rt.text.reading import BLANK, Cursor, Mismatch, Reading
from offload_rt.text.thoughts import special_texts
from offload_rt.text.tokenize import mark_token, overlap
from offload_rt.text.tools import ToolCall, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CallMarks:
    """The format in which a model writes calls of tools, and its tokens.

    The format is the first of `CALL_FORMATS` with all its telling marks in the chat template, else with all
    of them in the vocabulary. A model whose template takes no tools, or that calls them in a format that is
    not known, is told about them in the system message, and is asked for calls in that of Hermes.

    Attributes:
        described: the model is told about tools in the system message.
        special: texts of the special tokens in marks, which texts keep.
        ends: tokens that end an answer behind a call.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.format: CallFormat = HermesCalls()
        self.described = True
        self.special, self.ends = dict[int, str](), frozenset[int]()
        self._tokenizer = tokenizer
        if tokenizer is None:
            return
        template = str(getattr(tokenizer, "chat_template", None) or "")
        if re.search(r"\btools\b", template):
            written = (form for form in CALL_FORMATS if all(mark in template for mark in form.telling))
            known = (
                form
                for form in CALL_FORMATS
                if all(mark_token(tokenizer, mark) is not None for mark in form.telling)
            )
            if (form := next(written, None) or next(known, None)) is not None:
                self.format, self.described = form, False
        self.special = special_texts(tokenizer, (*self.format.marks, *self.format.ends))
        ends = (mark_token(tokenizer, mark) for mark in self.format.ends)
        self.ends = frozenset(token for token in ends if token is not None)

    def token(self, mark: str) -> int | None:
        """Returns the added token that a mark is; None: it is written with others, as any text is."""
        token = None if self._tokenizer is None else mark_token(self._tokenizer, mark)
        return (
            token if self._tokenizer is not None and token in self._tokenizer.added_tokens_decoder else None
        )


class CallSplitter:
    """Takes the calls out of a text that arrives in pieces.

    A call is returned when it is complete, so that what only looks like one stays text: a call of no tool
    that was given, JSON that is not valid, and a call that has not ended when the text ends. All of the text
    that is no call is returned, in order, but for white space between calls and an end of the text.
    """

    def __init__(self, form: CallFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._text = ""  # that has arrived and is not yet returned
        self._first = True  # nothing but calls and white space has been returned
        self._blanks = ""  # white space behind the text that was returned
        self._behind_call = False  # behind that text there was a call
        self._reading: Reading[list[ToolCall]] | None = None
        self._cursor = Cursor()
        self._mark = ""  # with which the call begins that is being read

    def push(self, text: str) -> list[str | ToolCall]:
        """Returns the text and the calls that are certain with this piece."""
        if self._reading is None:
            self._text += text
        else:
            self._cursor.text += text
        return list(self._advance(ended=False))

    def finish(self) -> list[str | ToolCall]:
        """Returns what was held back, as no text follows."""
        parts = list(self._advance(ended=True))
        blanks, self._blanks = self._blanks, ""
        return [*parts, blanks] if blanks and not self._behind_call else parts

    def _advance(self, ended: bool) -> Iterator[str | ToolCall]:
        while True:
            if self._reading is None:
                at, mark = self._opening(ended)
                yield from self._released(self._text[:at])
                self._text = self._text[at:]
                if not mark:
                    return
                self._cursor, self._mark = Cursor(), mark
                self._cursor.text, self._text = self._text, ""
                self._reading = self._form.read(self._cursor, self._tools)
            self._cursor.ended = ended
            try:
                next(self._reading)
                return
            except StopIteration as complete:
                yield from complete.value
                self._text = self._cursor.text[self._cursor.at :]
                self._behind_call = True
            except Mismatch:
                yield from self._released(self._mark)
                self._text = self._cursor.text[len(self._mark) :]
            self._reading = None

    def _opening(self, ended: bool) -> tuple[int, str]:
        """Returns where a call may begin and its mark; without one, how far the text is certain."""
        text = self._text
        blanks = len(text) - len(text.lstrip(BLANK))
        first = self._form.openings(True) if self._first else ()
        anywhere = self._form.openings(False)
        found = [(blanks, mark) for mark in first if text.startswith(mark, blanks)]
        found += [(at, mark) for mark in anywhere if (at := text.find(mark)) >= 0]
        if found:
            return min(found, key=lambda one: (one[0], -len(one[1])))
        if ended:
            return len(text), ""
        if any(mark.startswith(text[blanks:]) for mark in first):
            return blanks, ""
        return len(text) - max(overlap(text, mark) for mark in anywhere), ""

    def _released(self, text: str) -> Iterator[str]:
        """Yields text, and holds back the white space at its end, which may be between it and a call."""
        text = self._blanks + text
        if self._behind_call and self._first:
            text = text.lstrip(BLANK)
        certain = text.rstrip(BLANK)
        self._blanks = text[len(certain) :]
        if certain:
            self._first = self._behind_call = False
            yield certain
