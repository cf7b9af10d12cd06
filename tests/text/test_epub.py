"""EPUB books, whole and broken: what is broken costs a notice, not the book."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import pytest
from support.document_files import CONTAINER, PACKAGE, PAGE, epub

from offload_rt import UsageError
from offload_rt.text.documents import document_text
from offload_rt.text.documents import epub as epub_module

ONE, TWO = "One\n\nCall me Ishmael.", "Two\n\nCafé"
BOTH = f"{ONE}\n\n{TWO}"
ENCRYPTED = (
    '<encryption xmlns:e="urn:e"><e:EncryptedData><e:EncryptionMethod Algorithm="{}"/><e:CipherData>'
    '<e:CipherReference URI="{}"/></e:CipherData></e:EncryptedData></encryption>'
)
IMAGE = bytes(range(256)) * 40


def read(data: bytes, name: str = "a.epub") -> tuple[str, list[str]]:
    """The text of a book and its notices."""
    notices = list[str]()
    return document_text(name, data, notices.append), notices


def changed(book: bytes, old: bytes, new: bytes) -> bytes:
    """A book with other bytes in one place."""
    assert book.count(old) == 1 and len(old) == len(new)
    return book.replace(old, new)


def stored(book: bytes, names: dict[str, str] | None = None, prefix: str = "") -> bytes:
    """A book without compression, in a folder or under other names."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(book)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            name = (names or {}).get(entry.filename, entry.filename)
            new.writestr(prefix + name, old.read(entry))
    return out.getvalue()


def package(old: str, new: str) -> bytes:
    """A book with another package file."""
    assert old in PACKAGE
    return epub({"O/b.opf": PACKAGE.replace(old, new)})


def damaged() -> bytes:
    """A book with a chapter whose compressed data ends in a block of no known type."""
    compressor = zlib.compressobj(wbits=-15)
    content = (
        compressor.compress(b"<p>Call me Ishmael." + b"\n") + compressor.flush(zlib.Z_FULL_FLUSH) + b"\x07"
    )
    book = bytearray(stored(epub({"O/one.xhtml": content})))
    with zipfile.ZipFile(io.BytesIO(book)) as archive:
        at = archive.getinfo("O/one.xhtml").header_offset
    listing = book.rfind(b"PK\x01\x02", 0, book.rfind(b"O/one.xhtml"))
    book[at + 8], book[listing + 10], book[listing + 25] = zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, 64
    return bytes(book)


BROKEN = {
    "no mimetype": (epub({"mimetype": None}), BOTH, "its mimetype file is missing or wrong"),
    "wrong mimetype": (
        epub({"mimetype": "application/zip"}),
        BOTH,
        "its mimetype file is missing or",
    ),
    "no container": (
        epub({"META-INF/container.xml": None}),
        BOTH,
        "container.xml is missing or wrong; found its package file: O/b.opf",
    ),
    "container without a package": (
        epub({"META-INF/container.xml": "<a/>"}),
        BOTH,
        "container.xml is missing or",
    ),
    "container that is cut": (
        epub({"META-INF/container.xml": CONTAINER[:60]}),
        BOTH,
        "container.xml is missing or",
    ),
    "container of another package": (
        epub({"META-INF/container.xml": CONTAINER.replace("b.opf", "none.opf")}),
        BOTH,
        "container.xml is missing or wrong; found its package file: O/b.opf",
    ),
    "container that is no text": (
        epub({"META-INF/container.xml": IMAGE}),
        BOTH,
        "skipped, not text: META",
    ),
    "undeclared entity": (package("<manifest>", "<title>&hero;</title><manifest>"), BOTH, None),
    "bare & in the title": (package("<manifest>", "<title>Moby & Dick <1></title><manifest>"), BOTH, None),
    "byte order marks": (
        epub({"O/b.opf": f"\ufeff{PACKAGE}", "META-INF/container.xml": f"\ufeff{CONTAINER}"}),
        BOTH,
        None,
    ),
    "UTF-16": (epub({"O/b.opf": PACKAGE.encode("utf-16")}), BOTH, None),
    "package in another encoding": (
        epub({"O/b.opf": PACKAGE.replace("<manifest>", "<title>caf\xe9</title><manifest>").encode("cp1252")}),
        BOTH,
        "is not utf-8; read as cp1252: O/b.opf",
    ),
    "prefixed elements": (
        epub({"O/b.opf": PACKAGE.replace("<", "<opf:").replace("<opf:/", "</opf:")}),
        BOTH,
        None,
    ),
    "package that is cut": (
        epub({"O/b.opf": PACKAGE[: PACKAGE.index("<spine>")]}),
        f"{TWO}\n\n{ONE}",
        "no reading order",
    ),
    "no package": (
        epub({"O/b.opf": None}),
        BOTH,
        "no reading order, read in the order of file names",
    ),
    "spine that is cut": (
        epub({"O/b.opf": PACKAGE[: PACKAGE.index('<itemref idref="b"')]}),
        BOTH,
        "not in the reading order, read at the end: O/two .xhtml",
    ),
    "navigation outside the spine": (
        epub(
            {
                "O/b.opf": PACKAGE.replace(
                    "<manifest>", '<manifest><item id="n" href="n.html" properties="nav"/>'
                ),
                "O/n.html": "<nav>Contents",
            }
        ),
        BOTH,
        None,
    ),
    "package that is no text": (epub({"O/b.opf": IMAGE}), BOTH, "skipped, not text: O/b.opf"),
    "no manifest": (
        epub({"O/b.opf": "<package><spine/></package>"}),
        BOTH,
        "no reading order, read in the order of file",
    ),
    "empty spine": (
        epub({"O/b.opf": PACKAGE[: PACKAGE.index("<spine>")] + "<spine/></package>"}),
        f"{TWO}\n\n{ONE}",
        "no reading order, read in the order of the manifest",
    ),
    "missing manifest entry": (
        package('<item id="a" href="one.xhtml" media-type="application/xhtml+xml"/>', ""),
        f"{TWO}\n\n{ONE}",
        "skipped, missing: a (not in the manifest)",
    ),
    "missing manifest entry with a telling ID": (
        epub(
            {
                "O/b.opf": PACKAGE.replace(
                    '<item id="a" href="one.xhtml" media-type="application/xhtml+xml"/>', ""
                ).replace('idref="a"', 'idref="one"')
            }
        ),
        BOTH,
        "not in the manifest, found by ID: O/one.xhtml",
    ),
    "missing chapter": (epub({"O/one.xhtml": None}), TWO, "skipped, missing: O/one.xhtml"),
    "chapter that nothing names": (
        epub({"O/notes.xhtml": "<p>Notes", "O/empty.xhtml": "<img/>", "__MACOSX/O/._one.xhtml": "Mac"}),
        f"{BOTH}\n\nNotes",
        "not in the reading order, read at the end: O/notes.xhtml",
    ),
    "other case in the package": (package("one.xhtml", "ONE.XHTML"), BOTH, "O/ONE.XHTML is O/one.xhtml"),
    "other case in the archive": (
        stored(
            epub(),
            {
                "O/one.xhtml": "o/One.xhtml",
                "O/b.opf": "O/B.opf",
                "META-INF/container.xml": "meta-inf/Container.XML",
            },
        ),
        BOTH,
        "found under another name: O/one.xhtml is o/One.xhtml",
    ),
    "backslashes": (stored(epub(), {"O/one.xhtml": "O\\one.xhtml"}), BOTH, "O/one.xhtml is O\\one.xhtml"),
    "in a folder": (stored(epub(), prefix="Moby/"), BOTH, None),
    "another folder": (package("one.xhtml", "text/one.xhtml"), BOTH, "O/text/one.xhtml is O/one.xhtml"),
    "path from the root": (package("one.xhtml", "/O/one.xhtml"), BOTH, "/O/one.xhtml is O/one.xhtml"),
    "composed characters": (
        stored(package("one.xhtml", "caf%C3%A9.xhtml"), {"O/one.xhtml": "O/cafe\u0301.xhtml"}),
        BOTH,
        "is O/cafe\u0301.xhtml",
    ),
    "percent sign in a name": (
        stored(package("one.xhtml", "1%20.xhtml"), {"O/one.xhtml": "O/1%20.xhtml"}),
        BOTH,
        None,
    ),
    "nothing in a chapter": (epub({"O/one.xhtml": b""}), TWO, "skipped, empty: O/one.xhtml"),
    "picture in the spine": (
        epub({"O/cover.svg": IMAGE}),
        BOTH,
        "skipped, not text: O/cover.svg",
    ),
    "picture with a wrong checksum": (
        changed(stored(epub({"O/a.jpg": b"picture"})), b"picture", b"pictura"),
        BOTH,
        None,
    ),
    "chapter with a wrong checksum": (
        changed(stored(epub()), b"Ishmael", b"Ismaehl"),
        BOTH.replace("Ishmael", "Ismaehl"),
        "wrong checksum, so parts may be wrong or missing: O/one.xhtml",
    ),
    "wrong encoding declared": (
        epub({"O/one.xhtml": PAGE.format("utf-8", "One", "Caf\xe9").encode("cp1252")}),
        f"One\n\nCafé\n\n{TWO}",
        "is not utf-8; read as cp1252: O/one.xhtml",
    ),
    "wrong bytes": (
        epub({"O/one.xhtml": f"<p>{20 * 'Café '}".encode() + b"\xff"}),
        f"{' '.join(20 * ['Café'])} \ufffd\n\n{TWO}",
        "1 character of 104 replaced by \ufffd",
    ),
    "unknown encoding declared": (
        epub({"O/one.xhtml": PAGE.format("klingon", "One", "Call me Ishmael.")}),
        BOTH,
        "is not klingon; read as utf-8: O/one.xhtml",
    ),
    "chapter of no well-formed XML": (
        epub({"O/one.xhtml": "<title>One</title><![foo]><p>Call me <b>Ishmael.</p>&nosuch"}),
        f"One\n\nCall me Ishmael.\n\n&nosuch\n\n{TWO}",
        None,
    ),
    "doubled chapter": (package("</spine>", '<itemref idref="a"/></spine>'), BOTH, None),
    "encryption of nothing": (epub({"META-INF/encryption.xml": "<"}), BOTH, None),
    "encrypted font": (
        epub({"O/a.otf": "x", "META-INF/encryption.xml": ENCRYPTED.format("urn:x", "O/a.otf")}),
        BOTH,
        None,
    ),
}


@pytest.mark.parametrize(("book", "text", "notice"), BROKEN.values(), ids=BROKEN)
def test_a_broken_book_is_read_and_what_is_broken_is_told(book: bytes, text: str, notice: str | None) -> None:
    got, notices = read(book)
    assert got == text
    assert all(one.startswith("file a.epub: ") and "\n" not in one for one in notices)
    assert any(notice in one for one in notices) if notice else not notices


def test_a_damaged_chapter_is_read_up_to_the_damage() -> None:
    text, (notice,) = read(damaged())
    assert text == f"Call me Ishmael.\n\n{TWO}"
    assert notice == "file a.epub: damaged, read up to the damage: O/one.xhtml"


class _Pipe(io.BytesIO):
    """A file that only goes forward, so that sizes are behind the content."""

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        raise OSError


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("piped", [False, True])
def test_a_damaged_archive_is_read_as_far_as_it_goes(method: int, piped: bool) -> None:
    with zipfile.ZipFile(io.BytesIO(epub())) as archive:
        files = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    files["O/one.xhtml"] = files["O/one.xhtml"].replace(b"Call", b"P" * 9000 + b" Call")
    out = _Pipe() if piped else io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    book, whole = out.getvalue(), BOTH.replace("Call", "P" * 9000 + " Call")
    damaged = "file a.epub: its archive is damaged; read what is left"
    assert read(book) == (whole, [])
    # The directory is cut off, then the last chapter, too.
    assert read(book[: book.index(b"PK\x01\x02")]) == (whole, [damaged])
    text, notices = read(book[: book.index(b"PK\x03\x04", book.index(b"O/one.xhtml"))])
    assert text == whole.removesuffix(f"\n\n{TWO}")
    assert notices == [damaged, "file a.epub: skipped, missing: O/cover.svg, O/two%20.xhtml"]
    # Bytes in front of it are no damage; one byte less shifts all that is behind it.
    assert read(b"more" + book) == (whole, [])
    at = book.index(b"PPP") if method == zipfile.ZIP_STORED else book.index(b"O/one.xhtml") - 20
    text, notices = read(book[:at] + book[at + 1 :])
    assert text.endswith(TWO) and notices


def test_wherever_a_byte_is_lost_a_book_is_read() -> None:
    book = epub()
    for at in range(0, len(book), 11):
        text, notices = read(book[:at] + book[at + 1 :])
        assert ONE in text or TWO in text, (at, notices)


def test_a_chapter_that_cannot_be_read_is_named() -> None:
    book = epub()
    with zipfile.ZipFile(io.BytesIO(book)) as archive:
        at = archive.getinfo("O/one.xhtml").header_offset
    text, (notice,) = read(book[:at] + b"XX" + book[at + 2 :])
    assert text == TWO
    assert notice == "file a.epub: skipped, unreadable (Bad magic number for file header): O/one.xhtml"


def test_a_notice_lists_all_parts_of_its_kind_and_the_number_of_very_many() -> None:
    refs = "".join(f'<itemref idref="{number}"/>' for number in range(60))
    text, notices = read(epub({"O/b.opf": PACKAGE.replace("</spine>", f"{refs}</spine>")}))
    assert text == BOTH and len(notices) == 1
    assert "0 (not in the manifest), 1 (not" in notices[0] and notices[0].endswith(
        "49 (not in the manifest) and 10 more"
    )


def test_chapters_without_an_order_are_sorted_by_their_numbers() -> None:
    text, _ = read(epub({"O/b.opf": None, "O/one.xhtml": None, "O/10.html": "<p>ten", "O/9.html": "<p>nine"}))
    assert text == f"nine\n\nten\n\n{TWO}"


@pytest.mark.parametrize(
    ("book", "message"),
    [
        (epub()[:300], ": this EPUB cannot be read (File is not a zip file); get it again"),
        (b"none", ": this EPUB cannot be read (File is not a zip file); get it again"),
        (b"PK\x03\x04", ": this EPUB cannot be read (File is not a zip file)"),
        (
            epub({"META-INF/encryption.xml": ENCRYPTED.format("aes", "O/one.xhtml")}),
            ": this EPUB is encrypted (O/one.xhtml is); give one without copy protection",
        ),
        (
            epub(
                {
                    "META-INF/encryption.xml": ENCRYPTED.format(
                        "http://www.idpf.org/2008/embedding", "O/ONE.xhtml"
                    )
                }
            ),
            ": this EPUB is encrypted (O/one.xhtml is)",
        ),
        (
            epub({"O/one.xhtml": IMAGE, "O/two .xhtml": None}),
            ": this EPUB has no text (skipped, not text: O/one.xhtml",
        ),
        (
            epub({"O/one.xhtml": None, "O/two .xhtml": None}),
            ": this EPUB has no text (skipped, missing",
        ),
        (
            epub({"O/one.xhtml": "<img/>", "O/two .xhtml": "<p>"}),
            ": this EPUB has no text (its pages are pictures",
        ),
        (
            epub({"mimetype": None, "META-INF/container.xml": None, "O/b.opf": None}),
            ": is a zip archive, but no EPUB",
        ),
        (
            epub({"mimetype": "application/vnd.oasis", "META-INF/container.xml": None, "O/b.opf": None}),
            ": is a zip archive",
        ),
    ],
)
def test_a_book_without_text_is_refused(book: bytes, message: str) -> None:
    with pytest.raises(UsageError) as told:
        read(book)
    line = str(told.value)
    assert line.startswith(f"file a.epub{message}") and "\n" not in line


def test_a_book_under_a_password_is_refused() -> None:
    book = bytearray(stored(epub()))
    for mark in (b"PK\x03\x04", b"PK\x01\x02"):
        at = -1
        while (at := book.find(mark, at + 1)) >= 0:
            book[at + (6 if mark == b"PK\x03\x04" else 8)] |= 1
    with pytest.raises(UsageError, match=r"this EPUB is encrypted \(mimetype is\)"):
        read(bytes(book))


def test_a_book_does_not_expand_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = epub({"O/one.xhtml": 2**20 * "a"})
    assert len(bomb) < 2**12 < len(read(bomb)[0])
    monkeypatch.setattr(epub_module, "MOST_EXPANDED", 2**20)
    with pytest.raises(UsageError, match="this EPUB holds more than 1 MiB of text"):
        read(bomb)


def test_the_name_of_a_book_is_no_matter(tmp_path: Path) -> None:
    assert read(epub(), "book.zip") == (BOTH, [])
