"""Text of HTML, with a line or paragraph for each block element."""

from __future__ import annotations

import re

from offload_rt.text.documents.markup import Start, tokens

ENDINGS = (".html", ".htm", ".xhtml")
"""How the names of HTML files end."""

_PARAGRAPH = re.compile(
    "address|article|aside|blockquote|body|center|dialog|div|dl|fieldset|figcaption|figure|footer|form|h[1-6]"
    "|header|hr|html|main|nav|ol|p|pre|section|table|title|ul"
)
_LINE = re.compile("caption|dd|dt|legend|li|option|summary|tr")
_AS_SPACES = str.maketrans({"\N{SOFT HYPHEN}": None, "\N{NO-BREAK SPACE}": " "})


def html_text(html: str) -> str:
    """Returns the text of HTML, however broken; without comments, scripts, styles and templates.

    Takes time proportional to its length.
    """
    writer = _Writer()
    for token in tokens(html):
        if isinstance(token, str):
            writer.text(token)
        elif isinstance(token, Start):
            writer.start(token.name)
        else:
            writer.end(token.name)
    return "".join(writer.pieces).strip()


class _Writer:
    """Writes text with the white space that elements ask for.

    Attributes:
        pieces: what is written so far.
    """

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._gap: list[str] = []  # the white space in front of the next text
        self._verbatim = 0  # open elements whose white space counts
        self._cells = 0  # of the table's row so far
        self._templates: list[
            tuple[int, list[str], int]
        ] = []  # pieces, gap and its length at each one's start

    def text(self, text: str) -> None:
        text = text.translate(_AS_SPACES)
        if self._verbatim:
            if self._gap == ["\n\n"]:
                text = text.removeprefix("\n")
            written = text.rstrip()
            white = [text[len(written) :]]
        else:
            if text[:1].isspace() and not self._gap:
                self._gap = [" "]
            written = " ".join(text.split())
            white = [" "] if written and text[-1].isspace() else []
        if written:
            self.pieces += [*self._gap, written]
            self._gap = white
        else:
            self._gap += white

    def start(self, name: str) -> None:
        if name == "template":
            self._templates.append((len(self.pieces), self._gap, len(self._gap)))
        elif _PARAGRAPH.fullmatch(name):
            self._gap = ["\n\n"]
        elif _LINE.fullmatch(name):
            self._gap = self._gap[:1] if self._gap[:1] == ["\n\n"] else ["\n"]
        elif name == "br":
            self._gap = ["\n\n" if self._gap[:1] in (["\n"], ["\n\n"]) else "\n"]
        elif name in ("td", "th"):
            if self._cells and self._gap == [" "]:
                self._gap = ["\t"]
            elif self._cells:
                self._gap.append("\t")
            self._cells += 1
        if name in ("tr", "table"):
            self._cells = 0
        self._verbatim += name == "pre"

    def end(self, name: str) -> None:
        if name == "template" and self._templates:
            written, self._gap, length = self._templates.pop()
            del self.pieces[written:], self._gap[length:]
        elif _PARAGRAPH.fullmatch(name):
            self._gap = ["\n\n"]
        self._verbatim -= name == "pre" and self._verbatim > 0
