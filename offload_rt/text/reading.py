"""Reading a text that arrives in pieces: marks, names and JSON values, each as soon as it is complete."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

BLANK = " \t\r\n"
Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""A function that reads a `Cursor`: yields where it needs more text, and returns what it has read."""


class Mismatch(Exception):
    """The text is not what a reading expects."""


class Cursor:
    """A text that grows, and how far it has been read.

    Attributes:
        text: all of it that has arrived.
        at: number of characters that have been read.
        ended: no text follows.
    """

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False

    def _more(self) -> Reading[None]:
        """Waits for more text. Raises Mismatch where there is none."""
        if self.ended:
            raise Mismatch
        yield

    def blanks(self) -> Reading[None]:
        """Reads white space, and waits for what follows, unless the text ends."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in BLANK:
                self.at += 1
            if self.at < len(self.text) or self.ended:
                return
            yield

    def take(self, mark: str) -> Reading[bool]:
        """Reads a mark if it comes next; returns whether it does."""
        while not self.text.startswith(mark, self.at):
            rest = self.text[self.at :]
            if self.ended or not mark.startswith(rest):
                return False
            yield
        self.at += len(mark)
        return True

    def expect(self, mark: str) -> Reading[None]:
        """Reads a mark. Raises Mismatch where something else comes."""
        if not (yield from self.take(mark)):
            raise Mismatch

    def until(self, mark: str, most: int | None = None) -> Reading[str]:
        """Reads up to a mark and past it; returns the text before it.

        Args:
            most: characters before the mark; None: any number. Raises Mismatch for more.
        """
        start = searched = self.at
        while (end := self.text.find(mark, searched)) < 0:
            searched = max(start, len(self.text) - len(mark) + 1)
            if most is not None and searched - start > most:
                raise Mismatch
            yield from self._more()
        if most is not None and end - start > most:
            raise Mismatch
        self.at = end + len(mark)
        return self.text[start:end]

    def word(self, letter: re.Pattern[str]) -> Reading[str]:
        """Reads characters that fit `letter`, perhaps none, and waits for one that does not."""
        start = self.at
        while True:
            while self.at < len(self.text) and letter.match(self.text[self.at]):
                self.at += 1
            if self.at < len(self.text) or self.ended:
                return self.text[start : self.at]
            yield

    def json(self) -> Reading[str]:
        """Reads a JSON object or array; returns its text. Raises Mismatch at the first wrong character."""
        start, scanner = self.at, JsonScanner()
        while True:
            self.at += scanner.push(self.text[self.at :])
            if scanner.complete:
                return self.text[start : self.at]
            yield from self._more()


WORD = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
"""Characters of a string that mean themselves."""
BETWEEN = re.compile(r"[\s:,]*")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)


class JsonScanner:
    """Finds the end of a JSON object or array in a text that arrives in pieces.

    Attributes:
        complete: the end has been found.
    """

    def __init__(self) -> None:
        self.complete = False
        self._open: list[str] = []
        self._next = "root"  # what may come: root, value, first (or the end), key, colon, separator
        self._string = self._key = False
        self._escape = ""
        self._word = ""

    def push(self, text: str) -> int:
        """Returns the number of characters of `text` that belong to the value.

        Raises:
            Mismatch: no value of JSON goes on like this.
        """
        at = 0
        while at < len(text) and not self.complete:
            if self._string and not self._escape:
                at = PLAIN.match(text, at).end()  # type: ignore[union-attr]
                if at == len(text):
                    break
            self._take(text[at])
            at += 1
        return at

    def _take(self, character: str) -> None:
        if self._string:
            self._in_string(character)
        elif character.isascii() and (character.isalnum() or character in "+-."):
            if self._next not in ("value", "first value") and not self._word:
                raise Mismatch
            self._word += character
            self._next = "separator"
            if len(self._word) > 400:  # no number is as long
                raise Mismatch
        else:
            if self._word and not WORD.fullmatch(self._word):
                raise Mismatch
            self._word = ""
            if character not in BLANK:
                self._structure(character)
            elif self._next == "root":
                raise Mismatch

    def _structure(self, character: str) -> None:
        expected = self._next
        values = expected in ("root", "value", "first value")
        if character in "{[" and values:
            self._open.append("}" if character == "{" else "]")
            self._next = "first key" if character == "{" else "first value"
        elif character in "}]" and self._open[-1:] == [character] and expected.startswith(("first", "sep")):
            self._open.pop()
            self._next = "separator"
            self.complete = not self._open
        elif character == "," and expected == "separator":
            self._next = "key" if self._open[-1] == "}" else "value"
        elif character == ":" and expected == "colon":
            self._next = "value"
        elif character == '"' and expected in ("value", "first value", "key", "first key"):
            self._string, self._key = True, expected.endswith("key")
        else:
            raise Mismatch

    def _in_string(self, character: str) -> None:
        if self._escape:
            self._escape += character
            if len(self._escape) == 2 and character not in '"\\/bfnrtu':
                raise Mismatch
            if len(self._escape) > 2 and character not in "0123456789abcdefABCDEF":
                raise Mismatch
            if len(self._escape) == (6 if self._escape[1] == "u" else 2):
                self._escape = ""
        elif character == "\\":
            self._escape = "\\"
        elif character == '"':
            self._string, self._next = False, "colon" if self._key else "separator"
        else:
            raise Mismatch  # a control character


def members(text: str) -> dict[str, str]:
    """Returns the texts of the members of a JSON object, by their names.

    Raises:
        Mismatch: it is no JSON object, or too deep to be read.
    """
    if not text.startswith("{"):
        raise Mismatch
    items = list(_items(text, "}"))
    return {decoded(name): value for name, value in zip(items[::2], items[1::2], strict=True)}


def elements(text: str) -> list[str]:
    """Returns the texts of the elements of a JSON array. Raises Mismatch as `members` does."""
    if not text.startswith("["):
        raise Mismatch
    return list(_items(text, "]"))


def _items(text: str, end: str) -> Iterator[str]:
    """Yields the texts of the values, and of the names, in a JSON value whose end is `end`."""
    at = 1
    try:
        while not text.startswith(end, at := BETWEEN.match(text, at).end()):  # type: ignore[union-attr]
            start = at
            _, at = DECODER.raw_decode(text, start)
            yield text[start:at]
    except (ValueError, RecursionError):
        raise Mismatch from None


def decoded(text: str) -> Any:
    """Returns the value of a JSON text. Raises Mismatch where it is none."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        raise Mismatch from None
