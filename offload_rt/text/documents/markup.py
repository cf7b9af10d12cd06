"""Markup (HTML, XHTML, XML) as texts and tags, in time proportional to its length.

Tags, comments and quotes are recognised as browsers do, with one difference: an opening without its end is
text, so that it hides nothing behind it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import NamedTuple


class Start(NamedTuple):
    """A start tag; names of tags and attributes are in lower case."""

    name: str
    attributes: dict[str, str]


class End(NamedTuple):
    """An end tag, or the end of an element without content (`<br/>`)."""

    name: str


_FLAGS = re.ASCII | re.IGNORECASE
_OPENING = re.compile(r"<(?:!--|!\[CDATA\[|!DOCTYPE|/?[a-z][^\s/<>]*|[!?/])", _FLAGS)
_ATTRIBUTE = re.compile(r"[\s/]*(?:(>)|([^\s/>][^\s/>=]*)(\s*=\s*)?)")
_UNQUOTED = re.compile(r"[^\s>]*")
_BRACKET, _SUBSET_END = re.compile(r"\["), re.compile(r"\]\s*>")
_COMMENT_END, _CDATA_END, _TAG_END = re.compile("--!?>"), re.compile("]]>"), re.compile(">")
_QUOTES = {quote: re.compile(quote) for quote in "\"'"}
_PLAIN = {name: re.compile(f"</{name}(?=[\\s/>])", _FLAGS) for name in ("textarea", "title")}
"""Elements in which tags are text."""
_UNREAD = {name: re.compile(f"</{name}(?=[\\s/>])", _FLAGS) for name in ("script", "style")}
"""Elements whose content is no text."""
_TOO_LARGE = re.compile("&#(?!0*[0-9]{1,7}(?![0-9]))[0-9]+;?")
"""References to characters with numbers beyond any character's, which Python may refuse to convert."""


def tokens(markup: str) -> Iterator[str | Start | End]:
    """Yields the texts, start tags and end tags of markup; no comments, declarations, scripts and styles."""
    return _Reader(markup.replace("\r\n", "\n").replace("\r", "\n")).tokens()


def search(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
    """Returns the next match. Reading searches with nothing else, so tests can count how far it looks."""
    return pattern.search(text, start)


def _text(markup: str) -> str:
    return html.unescape(_TOO_LARGE.sub("\N{REPLACEMENT CHARACTER}", markup))


class _Reader:
    def __init__(self, markup: str) -> None:
        self._markup = markup
        self._matches: dict[re.Pattern[str], re.Match[str] | None] = {}
        self._quotes = True  # False: they do not pair up, so none is an attribute's

    def tokens(self) -> Iterator[str | Start | End]:
        at = 0
        while opening := self._find(_OPENING, at):
            if opening.start() > at:
                yield _text(self._markup[at : opening.start()])
            at, parts = self._construct(opening)
            yield from parts
        if at < len(self._markup):
            yield _text(self._markup[at:])

    def _find(self, pattern: re.Pattern[str], start: int) -> re.Match[str] | None:
        """Returns the next match at or behind `start`.

        A match counts until reading has passed it, and a missing one for good. So all searches for a pattern
        together look at each character once, however many openings have no end.
        """
        if pattern in self._matches:
            match = self._matches[pattern]
            if match is None or match.start() >= start:
                return match
        self._matches[pattern] = search(pattern, self._markup, start)
        return self._matches[pattern]

    def _construct(self, opening: re.Match[str]) -> tuple[int, list[str | Start | End]]:
        """Returns where an opening's construct ends, and its tokens."""
        kind, start = opening[0].lower(), opening.end()
        if kind[1:2].isalpha():
            return self._start_tag(opening)
        if kind == "<!--":
            end = self._find(_COMMENT_END, start - 2)  # <!--> is a comment, too
        elif kind == "<![cdata[":
            end = self._find(_CDATA_END, start)
        else:
            end = self._find(_TAG_END, start)
            bracket = self._find(_BRACKET, start) if kind == "<!doctype" else None
            if end and bracket and bracket.start() < end.start():
                end = self._find(_SUBSET_END, start)
        if end is None:
            return opening.start() + 1, ["<"]
        if kind == "<![cdata[":
            return end.end(), [self._markup[start : end.start()]]
        return end.end(), [End(kind[2:])] if kind[:2] == "</" and len(kind) > 2 else []

    def _start_tag(self, opening: re.Match[str]) -> tuple[int, list[str | Start | End]]:
        name, attributes, at = opening[0][1:].lower(), dict[str, str](), opening.end()
        if self._find(_TAG_END, at) is None:
            return opening.start() + 1, ["<"]
        while match := _ATTRIBUTE.match(self._markup, at):
            at = match.end()
            if match[1]:
                return self._content(Start(name, attributes), at, closed=match[0].endswith("/>"))
            value = ""
            if match[3]:
                value, at = self._value(at)
            attributes.setdefault(match[2].lower(), _text(value))
        # A quote without its partner has hidden the tag's end. Tags end at the next > from here on; as this
        # happens once, no tag is read more than twice.
        self._quotes = False
        self._matches.clear()
        return self._start_tag(opening)

    def _value(self, at: int) -> tuple[str, int]:
        """Returns the value of an attribute that begins at `at`, and where it ends."""
        quote = self._markup[at : at + 1]
        if self._quotes and quote in _QUOTES and (end := self._find(_QUOTES[quote], at + 1)):
            # A quote does not belong to this value if another attribute begins right behind it, and the tag
            # can end before it.
            tag_end = self._find(_TAG_END, at)
            behind = self._markup[end.end() : end.end() + 1]
            if tag_end is None or tag_end.start() > end.start() or behind in "/>" or behind.isspace():
                return self._markup[at + 1 : end.start()], end.end()
        unquoted = _UNQUOTED.match(self._markup, at)
        assert unquoted is not None
        return unquoted[0], unquoted.end()

    def _content(self, start: Start, at: int, closed: bool) -> tuple[int, list[str | Start | End]]:
        """Returns the tokens of a start tag that ends at `at`, with a content that holds no tags."""
        if closed:
            return at, [start, End(start.name)]
        if start.name in _UNREAD and (end := self._find(_UNREAD[start.name], at)):
            return end.start(), [start]
        if start.name in _PLAIN and (end := self._find(_PLAIN[start.name], at)):
            return end.start(), [start, _text(self._markup[at : end.start()])]
        return at, [start]
