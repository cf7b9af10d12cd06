"""Text of documents: plain text, Markdown, HTML, PDF and EPUB. What cannot be read is refused by name."""

from __future__ import annotations

import codecs
import io
import logging
import posixpath
import re
import zipfile
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

from offload_rt.errors import UsageError, first_line

MOST_EXPANDED = 2**28
"""Bytes that the texts of an EPUB may have without compression."""
BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, with which it begins
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
HTML = (".html", ".htm", ".xhtml")
EPUB = b"application/epub+zip"
KINDS = "a txt, md, html, pdf or epub file"


def documents(paths: Sequence[str | Path], encoding: str | None = None) -> str:
    """Returns the text of one document, or of several in order, each under a heading with its file name.

    Raises:
        UsageError: see `read_document`.
    """
    texts = [read_document(path, encoding) for path in paths]
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(f"# {Path(path).name}\n\n{text}" for path, text in zip(paths, texts, strict=True))


def read_document(path: str | Path, encoding: str | None = None, source: str | None = None) -> str:
    """Returns the text of a document; see `document_text`.

    Args:
        source: names the document in error messages.

    Raises:
        UsageError: it cannot be read, is broken or encrypted, or has no text.
    """
    source = source or f"file {path}"
    return document_text(str(path), read_bytes(source, path), encoding, source)


def document_text(name: str, data: bytes, encoding: str | None = None, source: str | None = None) -> str:
    """Returns the text of a document's content; its kind is told by that, else by the end of its name.

    Args:
        encoding: of text and HTML; None: by its byte order mark or HTML's own word, else UTF-8.
        source: names the document in error messages.

    Raises:
        UsageError: it is broken or encrypted, or has no text.
    """
    source = source or f"file {name}"
    if data.startswith(b"%PDF-"):
        text = _pdf_text(source, data)
    elif data.startswith(b"PK\x03\x04") or name.lower().endswith(".epub"):
        text = _epub_text(source, data)
    elif name.lower().endswith(HTML):
        text = html_text(decode(source, data, encoding or _html_encoding(data)))
    else:
        text = decode(source, data, encoding)
    if not text.strip():
        raise UsageError(f"{source}: has no text; give {KINDS} with text in it")
    return text


def read_bytes(source: str, path: str | Path, remedy: str = f"give {KINDS}") -> bytes:
    """Returns the content of a file. Raises UsageError, which names `source`, where it cannot be read."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{source}: cannot be read ({reason}); {remedy}") from None


def decode(source: str, data: bytes, encoding: str | None = None) -> str:
    """Returns bytes as text.

    Args:
        encoding: None: by the byte order mark, else UTF-8.

    Raises:
        UsageError: there are none, or they are no text of that encoding.
    """
    if not data:
        raise UsageError(f"{source}: is empty; give at least one character")
    marked = next((name for mark, name in BOMS if data.startswith(mark)), None)
    name = encoding or marked or "utf-8"
    if name == "utf-8" and b"\0" in data:
        at = data.index(b"\0")
        wrong = f"byte {at} is zero, so it is not a text in UTF-8"
        raise UsageError(f"{source}: {wrong}; give {KINDS}, or name its encoding: --encoding utf-16-le")
    try:
        return data.decode(name).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        told = "UTF-8" if name.startswith("utf-8") else name
        wrong = f"not {told} (byte {error.start} is 0x{data[error.start]:02x})"
        raise UsageError(f"{source}: {wrong}; name its encoding: --encoding cp1252, say") from None
    except (LookupError, UnicodeError):  # UnicodeError: UTF-16 without a byte order mark, say
        raise UsageError(
            f"{source}: cannot be read as {name}; name its encoding: --encoding cp1252, say"
        ) from None


# ------------------------------------------------------------------------------------------------ HTML

_DROPPED = ("script", "style", "template", "noscript")
_PARAGRAPH = re.compile(
    "address|article|aside|blockquote|body|center|dialog|div|dl|fieldset|figcaption|figure|footer|form|h[1-6]"
    "|header|hr|html|main|nav|ol|p|pre|section|table|title|ul"
)
_LINE = re.compile("br|caption|dd|dt|legend|li|option|summary|tr")
_CHARSET = re.compile(
    rb"""(?:<meta[^>]*?charset|<\?xml[^>]*?encoding)\s*=\s*["']?\s*([\w:.-]+)""", re.IGNORECASE
)
_CHARSET_WITHIN = 4096
"""Bytes within which HTML names its encoding."""
_AS_WINDOWS = ("iso-8859-1", "latin-1", "latin1", "us-ascii", "ascii")
"""Names that stand for cp1252 on the web."""


def _html_encoding(data: bytes) -> str | None:
    """Returns the encoding that HTML names for itself; None where a byte order mark or nothing tells."""
    found = _CHARSET.search(data[:_CHARSET_WITHIN])
    if found is None or any(data.startswith(mark) for mark, _ in BOMS):
        return None
    name = found[1].decode("ascii", "replace").lower()
    if name.startswith("utf-16"):
        return None  # which bytes in which this was legible cannot be
    return "cp1252" if name in _AS_WINDOWS else name


class _HtmlText(HTMLParser):
    """Collects the text of HTML."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._dropped: list[str] = []
        self._kept = 0  # elements under way whose white space counts

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in _DROPPED:
            self._dropped.append(tag)
        self._kept += tag == "pre"
        if _PARAGRAPH.fullmatch(tag):
            self.pieces.append("\n\n")
        elif _LINE.fullmatch(tag):
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._dropped:
            del self._dropped[self._dropped.index(tag) :]
        self._kept -= tag == "pre" and self._kept > 0
        if _PARAGRAPH.fullmatch(tag):
            self.pieces.append("\n\n")
        elif tag in ("td", "th"):
            self.pieces.append("\t")

    def handle_data(self, data: str) -> None:
        if not self._dropped:
            data = data.replace("\N{SOFT HYPHEN}", "").replace("\N{NO-BREAK SPACE}", " ")
            self.pieces.append(data if self._kept else re.sub(r"\s+", " ", data))


def html_text(html: str) -> str:
    """Returns the text of HTML, with a line or paragraph for a block element; drops scripts and styles."""
    parser = _HtmlText()
    parser.feed(html)
    parser.close()
    text = "".join(parser.pieces)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n (?=\S)", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?<=\S) {2,}", " ", text)).strip()


# ------------------------------------------------------------------------------------------------- PDF


def _pdf_text(source: str, data: bytes) -> str:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it tells of every oddity that it can read over
    try:
        pages = [page.extract_text() for page in PdfReader(io.BytesIO(data)).pages]
    except (DependencyError, FileNotDecryptedError):
        remedy = "take its password off first, e.g. qpdf --decrypt IN OUT"
        raise UsageError(f"{source}: this PDF is encrypted; {remedy}") from None
    except Exception as error:  # pypdf raises many types for a broken file
        remedy = "save it anew, or give its text, e.g. the output of pdftotext"
        raise UsageError(f"{source}: this PDF cannot be read ({first_line(error)}); {remedy}") from None
    text = "\n".join(pages).replace("\0", "")
    if not text.strip():
        remedy = "its pages are pictures, perhaps: recognise their text first, e.g. with ocrmypdf"
        raise UsageError(f"{source}: this PDF has no text; {remedy}")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # joins halves of characters


# ------------------------------------------------------------------------------------------------ EPUB

_READABLE_ENCRYPTION = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")
"""Methods that hide fonts alone."""


class _Epub:
    """The files of an EPUB. They are read until `MOST_EXPANDED` bytes."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._left = MOST_EXPANDED

    def __contains__(self, name: str) -> bool:
        return name in self._archive.NameToInfo

    def read(self, name: str) -> bytes:
        """Returns the content of a file. Raises KeyError without one, OverflowError beyond the limit."""
        entry = self._archive.getinfo(name)  # zipfile reads no more than the size that it states
        self._left -= entry.file_size
        if self._left < 0:
            raise OverflowError
        return self._archive.read(entry)

    def elements(self, name: str, tag: str) -> Iterator[ElementTree.Element]:
        """Yields the elements of an XML file with this name, of whatever namespace."""
        return ElementTree.fromstring(self.read(name)).iterfind(f".//{{*}}{tag}")


def _epub_text(source: str, data: bytes) -> str:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            book = _Epub(archive)
            if "mimetype" not in book or not book.read("mimetype").startswith(EPUB):
                raise UsageError(f"{source}: is a zip archive, but no EPUB; give {KINDS}")
            if _encrypted(book) or any(entry.flag_bits & 1 for entry in archive.infolist()):
                remedy = "give one without copy protection"
                raise UsageError(f"{source}: this EPUB is encrypted; {remedy}")
            chapters = list(_chapters(source, book))
    except OverflowError:
        most = f"more than {MOST_EXPANDED // 2**20} MiB of text"
        raise UsageError(f"{source}: this EPUB holds {most}; give the part that matters") from None
    except UsageError:
        raise
    except Exception as error:  # zipfile, zlib and the XML parser raise many types for a broken file
        remedy = "get it again, or save it anew"
        raise UsageError(f"{source}: this EPUB cannot be read ({first_line(error)}); {remedy}") from None
    text = "\n\n".join(filter(None, chapters))
    if not text:
        raise UsageError(f"{source}: this EPUB has no text; its pages are pictures, perhaps")
    return text


def _encrypted(book: _Epub) -> bool:
    """Returns whether more than fonts is encrypted."""
    name = "META-INF/encryption.xml"
    methods = (
        [method.get("Algorithm") for method in book.elements(name, "EncryptionMethod")]
        if name in book
        else []
    )
    return any(method not in _READABLE_ENCRYPTION for method in methods)


def _chapters(source: str, book: _Epub) -> Iterator[str]:
    """Yields the texts of a book in its reading order, the spine of its package file."""
    root = next(book.elements("META-INF/container.xml", "rootfile"), None)
    if root is None:
        raise UsageError(f"{source}: this EPUB names no package file; save it anew")
    package = root.attrib["full-path"]
    files = {item.get("id"): item for item in book.elements(package, "item")}
    spine = [files[one.attrib["idref"]] for one in book.elements(package, "itemref")]
    if not spine:
        raise UsageError(f"{source}: this EPUB has no reading order (an empty spine); save it anew")
    for item in spine:
        if "html" in item.get("media-type", "html"):
            href = unquote(item.attrib["href"].partition("#")[0])
            name = posixpath.normpath(posixpath.join(posixpath.dirname(package), href))
            data = book.read(name)
            if data:
                yield html_text(decode(f"{source}, {name}", data, _html_encoding(data)))
