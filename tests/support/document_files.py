"""PDF and EPUB files for tests."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence

from pypdf import PdfWriter

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
    data = pdf_of(objects)
    if password is None:
        return data
    writer, out = PdfWriter(clone_from=io.BytesIO(data)), io.BytesIO()
    writer.encrypt(password, "owner", algorithm="RC4-128")
    writer.write(out)
    return out.getvalue()


def pdf_of(objects: Sequence[bytes]) -> bytes:
    """A PDF of these objects, of which the first is the catalog."""
    data, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    start = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    return data + b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)


def epub(changes: Mapping[str, str | bytes | None] = {}) -> bytes:
    """An EPUB of two chapters; `changes` are other files by their names, None for none."""
    files: dict[str, str | bytes] = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "O/b.opf": PACKAGE,
        "O/one.xhtml": PAGE.format("utf-8", "One", "Call me Ishmael."),
        "O/two .xhtml": PAGE.format("iso-8859-1", "Two", "Caf\xe9").encode("cp1252"),
        "O/cover.svg": "<svg/>",
    }
    for name, content in changes.items():
        if content is None:
            del files[name]
        else:
            files[name] = content
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()
