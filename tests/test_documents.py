"""Documents of every kind as text, and what is refused of them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from pypdf import PdfWriter

from offload_rt import UsageError, documents
from offload_rt.documents import html_text, read_document

PAGE = "<?xml version='1.0' encoding='{}'?><html><head><title>{}</title></head><body><p>{}</p></body></html>"
CONTAINER = '<container xmlns="urn:c"><rootfiles><rootfile full-path="O/b.opf"/></rootfiles></container>'
PACKAGE = """<package xmlns="http://www.idpf.org/2007/opf"><manifest>
<item id="b" href="two%20.xhtml#start" media-type="application/xhtml+xml"/>
<item id="a" href="one.xhtml" media-type="application/xhtml+xml"/>
<item id="cover" href="cover.svg" media-type="image/svg+xml"/></manifest>
<spine><itemref idref="cover"/><itemref idref="a"/><itemref idref="b"/></spine></package>"""
FONT = '<e xmlns="urn:e"><EncryptionMethod Algorithm="{}"/></e>'


def pdf(*pages: str, password: str | None = None) -> bytes:
    """A PDF with a line a page."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"", b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]
    kids = []
    for line in pages:
        stream = f"BT /F1 12 Tf 20 100 Td ({line}) Tj ET".encode() if line else b""
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream))
        page = (
            "<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents {} 0 R/Resources<</Font<</F1 3 0 R>>>>>>"
        )
        objects.append(page.format(len(objects)).encode())
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<</Type/Pages/Kids[{' '.join(kids)}]/Count {len(kids)}>>".encode()
    data, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    start = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    data += b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    if password is None:
        return data
    writer, out = PdfWriter(clone_from=io.BytesIO(data)), io.BytesIO()
    writer.encrypt(password, "owner", algorithm="RC4-128")
    writer.write(out)
    return out.getvalue()


def epub(**changes: str | bytes | None) -> bytes:
    """An EPUB of two chapters; `changes` are other files by their names: __ is a slash and _ a dot."""
    files: dict[str, str | bytes] = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "O/b.opf": PACKAGE,
        "O/one.xhtml": PAGE.format("utf-8", "One", "Call me Ishmael."),
        "O/two .xhtml": PAGE.format("iso-8859-1", "Two", "Caf\xe9").encode("cp1252"),
        "O/cover.svg": "<svg/>",
    }
    for name, content in changes.items():
        name = name.replace("__", "/").replace("_", ".").replace("META/INF", "META-INF")
        if content is None:
            del files[name]
        else:
            files[name] = content
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def text_of(folder: Path, name: str, data: bytes, encoding: str | None = None) -> str:
    path = folder / name
    path.write_bytes(data)
    return read_document(path, encoding)


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
        ("wide.html", "<meta charset=utf-16><p>\xe9".encode("utf-16"), None, "\xe9"),
        ("paper.pdf", pdf("Call me Ishmael.", "Whale"), None, "Call me Ishmael.\nWhale"),
        ("paper", pdf("Whale"), None, "Whale"),
        ("open.pdf", pdf("Whale", password=""), None, "Whale"),
        ("book.epub", epub(), None, "One\n\nCall me Ishmael.\n\nTwo\n\nCafé"),
        ("book.zip", epub(), None, "One\n\nCall me Ishmael.\n\nTwo\n\nCafé"),
        (
            "fonts.epub",
            epub(META__INF__encryption_xml=FONT.format("http://www.idpf.org/2008/embedding")),
            None,
            "One\n\nCall me Ishmael.\n\nTwo\n\nCafé",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_documents_of_every_kind(
    tmp_path: Path, name: str, data: bytes, encoding: str | None, text: str
) -> None:
    assert text_of(tmp_path, name, data, encoding) == text


def test_html_as_text() -> None:
    html = """<!DOCTYPE html><html><head><title>Moby&nbsp;Dick</title><style>p { color: red }</style>
    <script>if (1 < 2) alert("<p>no</p>");</script></head><body><h1>Loomings</h1>
    <p>Call  me\n <em>Ish</em>mael.<br>Some&shy;times &amp; <!-- no --> often</p><ul><li>one<li>two</ul>
    <pre>a
      b</pre><table><tr><td>1<td>2<tr><td>3</td><td>4</td></table>
    <template><p>no</template><p>end"""
    assert html_text(html) == (
        "Moby Dick\n\nLoomings\n\nCall me Ishmael.\nSometimes & often\n\none\ntwo\n\na\n      b\n\n"
        "12\n3\t4\n\nend"
    )
    assert html_text("<script>never closed <p>no") == html_text("") == ""
    assert html_text("</script></pre>fine < fine") == "fine < fine"


def test_several_documents_have_headings(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("one\n")
    (tmp_path / "a.html").write_text("<p>two")
    paths = [tmp_path / "b.txt", tmp_path / "a.html"]
    assert documents.documents(paths) == "# b.txt\n\none\n\n\n# a.html\n\ntwo"
    assert documents.documents(paths[:1]) == "one\n"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", ": is empty"),
        ("a.txt", b" \n", ": has no text; give a txt, md, html, pdf or epub file"),
        ("a.html", b"<style>p</style>", ": has no text"),
        ("a.txt", b"caf\xe9", ": not UTF-8 (byte 3 is 0xe9); name its encoding: --encoding cp1252"),
        ("a.txt", b"a\0b", ": byte 1 is zero, so it is not a text in UTF-8"),
        ("a.txt", b"\xff\xfea", ": not utf-16 (byte 2 is 0x61)"),
        ("a.html", b"<meta charset=klingon>a", ": cannot be read as klingon; name its encoding"),
        ("a.html", b"<meta charset=hex>a", ": cannot be read as hex; name its encoding"),
        ("a.pdf", pdf("")[:150], ": this PDF cannot be read ("),
        ("a.pdf", pdf(""), ": this PDF has no text; its pages are pictures, perhaps"),
        ("a.pdf", pdf("Whale", password="x"), ": this PDF is encrypted; take its password off first"),
        ("a.docx", epub(mimetype=None), ": is a zip archive, but no EPUB"),
        ("a.epub", epub(mimetype="application/zip"), ": is a zip archive, but no EPUB"),
        ("a.epub", epub()[:300], ": this EPUB cannot be read (File is not a zip file)"),
        ("a.epub", b"none", ": this EPUB cannot be read (File is not a zip file)"),
        ("a.epub", epub(META__INF__encryption_xml=FONT.format("aes")), ": this EPUB is encrypted"),
        ("a.epub", epub(META__INF__encryption_xml="<"), ": this EPUB cannot be read (unclosed token"),
        ("a.epub", epub(META__INF__container_xml=None), ": this EPUB cannot be read (KeyError"),
        ("a.epub", epub(META__INF__container_xml="<a/>"), ": this EPUB names no package file"),
        ("a.epub", epub(O__one_xhtml=None), ": this EPUB cannot be read (KeyError"),
        ("a.epub", epub(O__b_opf="<package><spine/></package>"), ": this EPUB has no reading order"),
        ("a.epub", epub(O__one_xhtml=b"caf\xe9"), ", O/one.xhtml: not UTF-8 (byte 3 is 0xe9)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_of_documents(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(UsageError) as told:
        text_of(tmp_path, name, data)
    line = str(told.value)
    assert line.startswith(f"file {tmp_path / name}{message}") and "\n" not in line


def test_an_epub_does_not_expand_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = epub(O__one_xhtml=2**20 * "a")
    assert len(bomb) < 2**12 < len(text_of(tmp_path, "a.epub", bomb))
    monkeypatch.setattr(documents, "MOST_EXPANDED", 2**20)
    with pytest.raises(UsageError, match="this EPUB holds more than 1 MiB of text"):
        text_of(tmp_path, "a.epub", bomb)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "no", "No such file")):
        with pytest.raises(UsageError, match=f"cannot be read .{reason}"):
            read_document(path)
