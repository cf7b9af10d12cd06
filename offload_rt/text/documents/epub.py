"""Text of EPUB books. What is broken or missing of one costs a notice, not the book."""

from __future__ import annotations

import io
import posixpath
import re
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import unquote

from offload_rt.errors import UsageError, first_line
from offload_rt.text.documents.decoding import KINDS, decode_markup
from offload_rt.text.documents.html_text import ENDINGS, html_text
from offload_rt.text.documents.markup import Start, tokens
from offload_rt.text.documents.notices import listed
from offload_rt.text.documents.zip_rescue import rebuilt, rescued

MOST_EXPANDED = 2**26
"""Bytes that the texts of an EPUB may have without compression; long novels have 2 MB."""
MIMETYPE = b"application/epub+zip"


def epub_text(source: str, data: bytes, on_notice: Callable[[str], None]) -> str:
    """Returns the text of an EPUB, in its reading order.

    Args:
        on_notice: called with what the user is told of its faults, without the source.

    Raises:
        UsageError: it is no EPUB, is encrypted or too large, or no text of it can be read.
    """
    try:
        try:
            faults = _Faults()
            text = _text_of(source, _opened(data), data, faults)
        except (_NoText, zipfile.BadZipFile) as error:
            try:
                faults = _Faults("its archive is damaged; read what is left")
                text = _text_of(source, rebuilt(data, len(data) + MOST_EXPANDED), data, faults)
            except (_NoText, zipfile.BadZipFile, OverflowError):
                raise error from None
    except OverflowError:
        amount = f"more than {MOST_EXPANDED // 2**20} MiB of text"
        raise UsageError(f"{source}: this EPUB holds {amount}; give the part that matters") from None
    except _NoText as error:
        raise UsageError(f"{source}: {error}") from None
    except zipfile.BadZipFile as error:
        remedy = "get it again, or save it anew"
        raise UsageError(f"{source}: this EPUB cannot be read ({first_line(error)}); {remedy}") from None
    for line in faults.lines():
        on_notice(line)
    return text


class _NoText(Exception):
    """A book without text, or no book; the message is for the user."""


def _text_of(source: str, archive: zipfile.ZipFile, data: bytes, faults: _Faults) -> str:
    """Returns the text of the book in an archive. Raises _NoText where there is none."""
    with archive:
        text = "\n\n".join(filter(None, _Book(source, _Files(archive, data, faults), faults).texts()))
    if not text:
        why = next(faults.lines(), "its pages are pictures, perhaps")
        raise _NoText(f"this EPUB has no text ({why}); get it again, or give its text")
    return text


def _opened(data: bytes) -> zipfile.ZipFile:
    """Opens an archive. Raises zipfile.BadZipFile where it has no directory that can be read."""
    for encoding in ("utf-8", None):  # EPUB prescribes the first
        try:
            return zipfile.ZipFile(io.BytesIO(data), metadata_encoding=encoding)
        except UnicodeDecodeError:
            continue
        except zipfile.BadZipFile:
            raise
        except Exception as error:  # zipfile raises many types for a broken directory
            raise zipfile.BadZipFile(first_line(error)) from None
    raise zipfile.BadZipFile("its names are in no encoding")


_Part = tuple[str, zipfile.ZipInfo | None]
"""The name of a part, and its file if there is one."""


class _Faults:
    """What is wrong with a book: what the user is told, with the names of all parts that it is true of."""

    def __init__(self, *faults: str) -> None:
        self._names: dict[str, list[str]] = {fault: [] for fault in faults}

    def add(self, fault: str, name: str | None = None) -> None:
        names = self._names.setdefault(fault, [])
        if name is not None and name not in names[-1:]:
            names.append(name)

    def lines(self) -> Iterator[str]:
        """Yields a line for each fault."""
        for fault, names in self._names.items():
            yield f"{fault}: {listed(names)}" if names else fault


class _Files:
    """The files of an archive: found by names that differ in form, and read up to `MOST_EXPANDED` bytes."""

    def __init__(self, archive: zipfile.ZipFile, data: bytes, faults: _Faults) -> None:
        self._archive = archive
        self._data = data
        self._faults = faults
        self._free_bytes = MOST_EXPANDED
        self._rescued: dict[str | int, bytes] | None = None  # by names, and by places of headers
        self.entries = [info for info in archive.infolist() if info.filename and not info.is_dir()]
        self._exact = {entry.filename: entry for entry in self.entries}
        self._alike = {_plain(entry.filename): entry for entry in reversed(self.entries)}
        self._by_base: dict[str, list[zipfile.ZipInfo]] = {}
        for entry in self.entries:
            self._by_base.setdefault(posixpath.basename(_plain(entry.filename)), []).append(entry)

    def find(self, name: str) -> zipfile.ZipInfo | None:
        """Returns the file of this name, else one whose name is the same but for its case, form or folder."""
        names = (name, unquote(name))
        for candidate in names:
            if entry := self._exact.get(candidate):
                return entry
        for candidate in names:
            entry = self._alike.get(_plain(candidate))
            same = self._by_base.get(posixpath.basename(_plain(candidate)), [])
            if entry or len(same) == 1:
                return entry or same[0]
        return None

    def read(self, entry: zipfile.ZipInfo) -> bytes:
        """Returns the content of a file, as far as it can be read.

        Raises:
            OverflowError: it is beyond the limit.
            Exception: nothing of it can be read.
        """
        stated, entry.CRC = entry.CRC, None  # type: ignore[assignment]  # zipfile refuses all for a wrong one
        try:
            with self._archive.open(entry) as file:
                content = file.read(self._free_bytes + 1)
        except Exception:  # a broken file raises many types
            content = self._rescue(entry)
            if not content:
                raise
            self._faults.add("damaged, read up to the damage", entry.filename)
        else:
            if zlib.crc32(content) != stated:
                self._faults.add("wrong checksum, so parts may be wrong or missing", entry.filename)
        finally:
            entry.CRC = stated
        self._free_bytes -= len(content)
        if self._free_bytes < 0:
            raise OverflowError
        return content

    def _rescue(self, entry: zipfile.ZipInfo) -> bytes:
        """Returns what is left of a damaged file."""
        if self._rescued is None:
            self._rescued = {}
            with suppress(OverflowError):  # it is in the first files, or lost
                for file in rescued(self._data, len(self._data) + MOST_EXPANDED):
                    self._rescued |= {file.start: file.content, file.name: file.content}
        content = self._rescued.get(entry.filename)
        return self._rescued.get(entry.header_offset, b"") if content is None else content


def _plain(name: str) -> str:
    """Returns a name without what broken books get wrong in names: case, slashes, composed characters."""
    name = unicodedata.normalize("NFC", name.replace("\\", "/")).casefold()
    return posixpath.normpath(name).lstrip("./")


class _Book:
    """A book: its package file, and the parts that it names in reading order.

    Raises:
        _NoText: it is no book.
        UsageError: it is encrypted.
    """

    def __init__(self, source: str, files: _Files, faults: _Faults) -> None:
        self._source = source
        self._files = files
        self._faults = faults
        self._encrypted = set[str]()
        self._read_names = set[str]()
        mimetype = files.find("mimetype")
        marked = mimetype is not None and self._data(mimetype).startswith(MIMETYPE)
        self._package = self._find_package()
        if not marked and self._package is None:
            raise _NoText(f"is a zip archive, but no EPUB; give {KINDS}")
        if not marked:
            faults.add("its mimetype file is missing or wrong")
        references = self._elements(files.find("META-INF/encryption.xml"), "cipherreference")
        encrypted = [files.find(start.attributes.get("uri", "")) for start in references]
        self._encrypted = {entry.filename for entry in encrypted if entry}

    def texts(self) -> Iterator[str]:
        """Yields the texts of the parts in reading order, then of those that it does not name.

        Raises:
            UsageError: a part is encrypted.
        """
        order, navigation = self._order()
        for path, entry in order:
            yield self._text(path, entry)
        if not order:
            self._faults.add("no reading order, read in the order of file names")
        for entry in sorted(self._files.entries, key=_by_number):
            name = entry.filename
            if not name.lower().endswith(ENDINGS) or name.startswith("__MACOSX/") or name in navigation:
                continue
            text = self._text(name, entry)
            if text and order:
                self._faults.add("not in the reading order, read at the end", name)
            yield text

    def _find_package(self) -> zipfile.ZipInfo | None:
        container = self._files.find("META-INF/container.xml")
        for start in self._elements(container, "rootfile"):
            if package := self._files.find(start.attributes.get("full-path", "")):
                return package
        packages = [entry for entry in self._files.entries if entry.filename.lower().endswith(".opf")]
        package = min(packages, key=lambda entry: len(entry.filename), default=None)
        if package:
            fault = "META-INF/container.xml is missing or wrong; found its package file"
            self._faults.add(fault, package.filename)
        return package

    def _order(self) -> tuple[list[_Part], set[str]]:
        """Returns the parts in reading order, and the names of files that only help to navigate."""
        items, documents, refs, navigation = dict[str, _Part](), list[_Part](), list[str](), set[str]()
        folder = posixpath.dirname(self._package.filename) if self._package else ""
        for start in self._elements(self._package, "item", "itemref"):
            of = start.attributes
            if start.name.endswith("itemref"):
                refs.append(of.get("idref", ""))
                continue
            path = posixpath.normpath(posixpath.join(folder, of.get("href", "").partition("#")[0]))
            entry = self._files.find(path)
            items.setdefault(of.get("id", ""), (path, entry))
            if path.lower().endswith(ENDINGS) or "html" in of.get("media-type", ""):
                documents.append((path, entry))
            if entry and "nav" in of.get("properties", "").split():
                navigation.add(entry.filename)
        if refs:
            return [items.get(ref) or self._unlisted(ref) for ref in refs], navigation
        if documents:
            self._faults.add("no reading order, read in the order of the manifest")
        return documents, navigation

    def _unlisted(self, ref: str) -> _Part:
        """Returns a part that the manifest lacks: the file that is named like its ID."""
        entry = next(filter(None, (self._files.find(f"{ref}{end}") for end in ("", *ENDINGS))), None)
        if entry is None:
            return f"{ref} (not in the manifest)", None
        self._faults.add("not in the manifest, found by ID", entry.filename)
        return entry.filename, entry

    def _text(self, path: str, entry: zipfile.ZipInfo | None) -> str:
        """Returns the text of a part, once."""
        if entry is None:
            self._faults.add("skipped, missing", path)
            return ""
        name = entry.filename
        if name in self._read_names:
            return ""
        self._read_names.add(name)
        if name not in (path, unquote(path)):
            self._faults.add("found under another name", f"{path} is {name}")
        return html_text(self._markup(entry))

    def _elements(self, entry: zipfile.ZipInfo | None, *names: str) -> Iterator[Start]:
        """Yields the start tags with these names, of whatever namespace, in an XML file."""
        for token in tokens(self._markup(entry) if entry else ""):
            if isinstance(token, Start) and token.name.rpartition(":")[2] in names:
                yield token

    def _markup(self, entry: zipfile.ZipInfo) -> str:
        """Returns the content of a file; an empty string where it cannot be read, which is a fault."""
        name = entry.filename
        data = self._data(entry)
        try:
            return decode_markup(name, data, lambda fault: self._faults.add(fault, name)) if data else ""
        except UsageError:
            self._faults.add("skipped, not text", name)
            return ""

    def _data(self, entry: zipfile.ZipInfo) -> bytes:
        name = entry.filename
        if name in self._encrypted or entry.flag_bits & 1:
            remedy = "give one without copy protection"
            raise UsageError(f"{self._source}: this EPUB is encrypted ({name} is); {remedy}")
        try:
            data = self._files.read(entry)
        except OverflowError:
            raise
        except Exception as error:  # zipfile raises many types for a broken part
            self._faults.add(f"skipped, unreadable ({first_line(error)})", name)
            return b""
        if not data:
            self._faults.add("skipped, empty", name)
        return data


def _by_number(entry: zipfile.ZipInfo) -> str:
    """Sorts chapter 2 before chapter 10."""
    return re.sub(r"[0-9]+", lambda number: number[0].zfill(20), entry.filename)
