"""Documents of every kind as text, and what is refused of them."""

from __future__ import annotations

import gzip
from itertools import count
from pathlib import Path

import pytest
from support.document_files import epub, pdf, pdf_of

from offload_rt import UsageError
from offload_rt.system import clock
from offload_rt.text import documents
from offload_rt.text.documents import document_text, read_document


def refused(notice: str) -> None:
    raise AssertionError(notice)


def text_of(folder: Path, name: str, data: bytes, encoding: str | None = None) -> str:
    """The text of a document without a fault."""
    path = folder / name
    path.write_bytes(data)
    return read_document(path, refused, encoding)


@pytest.mark.parametrize(
    ("name", "data", "encoding", "text"),
    [
        ("a.txt", b"a\r\n\xc3\xa9 ", None, "a\r\n\xe9 "),
        ("a.md", b"# A\n\n*b*\n", None, "# A\n\n*b*\n"),
        ("bom.txt", b"\xef\xbb\xbfa", None, "a"),
        ("wide.txt", "\xe9".encode("utf-16"), None, "\xe9"),
        ("big.txt", b"\xfe\xff" + "\xe9".encode("utf-16-be"), None, "\xe9"),
        ("wider.txt", "\xe9".encode("utf-32"), None, "\xe9"),
        ("named.txt", b"caf\xe9", "cp1252", "caf\xe9"),
        ("unmarked.txt", "\xe9".encode("utf-16-le"), "utf-16-le", "\xe9"),
        ("a.html", b"<p>caf\xc3\xa9", None, "caf\xe9"),
        ("meta.HTM", b'<meta charset="ISO-8859-1"><p>\x93caf\xe9\x94', None, "“café”"),
        ("old.html", b'<meta http-equiv=a content="text/html; charset=koi8-r"><p>\xc1', None, "а"),
        ("given.html", b"<meta charset=utf-8><p>caf\xe9", "cp1252", "caf\xe9"),
        ("chinese.html", "<meta charset=gb2312><p>\u9b42".encode("gbk"), None, "\u9b42"),
        ("bom.html", b"\xef\xbb\xbf<meta charset=koi8-r><p>caf\xc3\xa9", None, "caf\xe9"),
        ("wide.html", "<meta charset=utf-16><p>\xe9".encode("utf-16"), None, "\xe9"),
        ("paper.pdf", pdf("Call me Ishmael.", "Whale"), None, "Call me Ishmael.\nWhale"),
        ("paper", pdf("Whale"), None, "Whale"),
        ("open.pdf", pdf("Whale", password=""), None, "Whale"),
        ("book.epub", epub(), None, "One\n\nCall me Ishmael.\n\nTwo\n\nCafé"),
        ("book.zip", epub(), None, "One\n\nCall me Ishmael.\n\nTwo\n\nCafé"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_documents_of_every_kind(
    tmp_path: Path, name: str, data: bytes, encoding: str | None, text: str
) -> None:
    assert text_of(tmp_path, name, data, encoding) == text


def test_several_documents_have_headings(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("one\n")
    (tmp_path / "a.html").write_text("<p>two")
    paths = [tmp_path / "b.txt", tmp_path / "a.html"]
    assert documents.documents(paths, refused) == "# b.txt\n\none\n\n\n# a.html\n\ntwo"
    assert documents.documents(paths[:1], refused) == "one\n"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", ": is empty"),
        ("a.txt", b" \n", ": has no text; give a txt, md, html, pdf or epub file"),
        ("a.html", b"<style>p</style>", ": has no text"),
        ("a.txt", b"caf\xe9", ": not UTF-8 (byte 3 is 0xe9); name its encoding (--encoding cp1252)"),
        (
            "a.txt.gz",
            gzip.compress(b"Call me Ishmael."),
            ": byte 3 is zero, so it is not a text in UTF-8; give a",
        ),
        ("a.txt", b"a\0b", ": byte 1 is zero, so it is not a text in UTF-8"),
        ("a.txt", b"\xff\xfea", ": not utf-16 (byte 2 is 0x61)"),
        ("a.txt", "a ".encode("utf-16-le"), ": byte 1 is zero"),
        ("a.txt", 998 * b"a" + b"\xff", ": not UTF-8 (byte 998 is 0xff); name its encoding"),
        ("a.txt", 998 * b"a" + b"\0", ": byte 998 is zero"),
        ("a.html", bytes(range(256)), ": byte 0 is zero"),
        ("a.html", b"\x81 a", ": not UTF-8 (byte 0 is 0x81)"),
        ("a.pdf", pdf("")[:150], ": this PDF cannot be read ("),
        ("a.pdf", pdf(""), ": this PDF has no text; its pages are pictures, perhaps"),
        ("a.pdf", pdf("Whale", password="x"), ": this PDF is encrypted; take its password off first"),
        ("a.pdf", b"Whale", ": this PDF cannot be read ("),
        (
            "a.docx",
            epub({"mimetype": None, "META-INF/container.xml": None, "O/b.opf": None}),
            ": is a zip archive",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_of_documents(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(UsageError) as told:
        text_of(tmp_path, name, data)
    line = str(told.value)
    assert line.startswith(f"file {tmp_path / name}{message}") and "\n" not in line


@pytest.mark.parametrize(
    ("name", "data", "text", "notice"),
    [
        (
            "stray.txt",
            999 * b"a" + b"\xff",
            999 * "a" + "\ufffd",
            "(byte 999 is 0xff): 1 character of 1,000 replaced by \ufffd; name its encoding if that is wrong"
            " (--encoding NAME)",
        ),
        (
            "zero.txt",
            999 * b"a" + b"\0",
            999 * "a" + "\ufffd",
            "byte 999 is zero, so it is not a text in UTF-8: 1 c",
        ),
        (
            "cut.txt",
            ("\ufeff" + 1999 * "a").encode("utf-16-le") + b"a",
            1999 * "a" + "\ufffd",
            "not utf-16 (byte 4000",
        ),
        (
            "mixed.html",
            ("<p>" + 200 * "\xe9").encode() + b"\xff",
            200 * "\xe9" + "\ufffd",
            "not UTF-8 (byte 403 is",
        ),
        ("western.html", b"<p>caf\xe9", "caf\xe9", "is not utf-8; read as cp1252"),
        ("wrong.html", b"<meta charset=utf-8><p>caf\xe9", "caf\xe9", "is not utf-8; read as cp1252"),
        (
            "wrong.xhtml",
            "<?xml encoding='euc-jp'?>caf\xe9".encode(),
            "caf\xe9",
            "is not euc-jp; read as utf-8",
        ),
        ("wrong.htm", "<meta charset=iso-8859-1>café".encode(), "café", "is not cp1252; read as utf-8"),
        ("narrow.html", b"<meta charset=utf-16>a", "a", "is not utf-16; read as utf-8"),
        ("odd.html", b"<meta charset=klingon>a", "a", "is not klingon; read as utf-8"),
        ("hex.html", b"<meta charset=hex>a", "a", "is not hex; read as utf-8"),
        ("slow.html", b"<meta charset=punycode>a", "a", "is not punycode; read as utf-8"),
        (
            "halves.html",
            b"<meta charset=unicode-escape>\\ud800",
            "\\ud800",
            "is not unicode-escape; read as utf-8",
        ),
        (
            "page.pdf",
            pdf("One", "Two", "Six").replace(b"(Two) Tj", b"(Two  Tj"),
            "One\n\nSix",
            "unreadable: page 2",
        ),
        ("form.pdf", pdf("One", "(Two"), "One\n", "unreadable: page 2"),
        ("blank.pdf", pdf("One", "", "Six", ""), "One\n\nSix\n", "perhaps pictures: page 2, 4"),
        ("named.pdf", b"\n" + pdf("One", "Two"), "One\nTwo", None),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value[:12] else "",
)
def test_what_cannot_be_read_of_a_document_is_told(
    name: str, data: bytes, text: str, notice: str | None
) -> None:
    notices = list[str]()
    assert document_text(name, data, notices.append) == text
    if notice is None:
        assert not notices
    else:
        (line,) = notices
        assert line.startswith(f"file {name}: ") and notice in line


def test_a_part_of_a_page_that_cannot_be_read_is_told() -> None:
    font, part = b"<</Font<</F1 3 0 R>>", b"BT /F1 9 Tf (Two  Tj ET"
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents 5 0 R/Resources%s/XObject<</X 6 0 R>>>>>>"
    stream = b"<</Length %d%s>>stream\n%s\nendstream"
    content = b"BT /F1 9 Tf (One) Tj ET /X Do"
    book = pdf_of(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[4 0 R]/Count 1>>",
            b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
            page % font,
            stream % (len(content), b"", content),
            stream % (len(part), b"/Subtype/Form/BBox[0 0 9 9]/Resources%s>>" % font, part),
        ]
    )
    notices = list[str]()
    assert document_text("a.pdf", book, notices.append).strip() == "One"
    assert notices == ["file a.pdf: skipped, unreadable: page 1 (in part)"]


def test_an_encoding_that_writes_halves_of_characters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="not unicode_escape .it holds halves of characters.; name its encoding"
    ):
        text_of(tmp_path, "a.txt", b"\\ud800", "unicode_escape")


def test_a_pdf_has_a_limit_of_time_for_all_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count()
    monkeypatch.setattr(clock, "now", lambda: float(next(seconds)))
    assert document_text("a.pdf", pdf("One", "Two"), refused) == "One\nTwo"
    message = (
        r"file a.pdf: this PDF takes longer than 31 s to read \([1-9] of 60 pages were read\); give its text"
    )
    with pytest.raises(UsageError, match=message):
        document_text("a.pdf", pdf(*["Whale"] * 60), refused)
    with pytest.raises(UsageError, match=r"30 s to read \(0 of 1 pages were read\)"):
        document_text("a.pdf", pdf("a) Tj (" * 60), refused)
    assert document_text("a.pdf", pdf("a) Tj (" * 60) + bytes(2**21), refused).startswith("a")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "no", "No such file")):
        with pytest.raises(UsageError, match=f"cannot be read .{reason}"):
            read_document(path, refused)
