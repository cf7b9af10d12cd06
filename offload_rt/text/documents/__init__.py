"""Text of documents: plain text, Markdown, HTML, PDF and EPUB.

What is broken of a document costs a notice that names it; a document whose text cannot be read is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from offload_rt.errors import UsageError
from offload_rt.text.documents.decoding import KINDS, check_encoding, decode, decode_markup, read_bytes
from offload_rt.text.documents.epub import epub_text
from offload_rt.text.documents.html_text import ENDINGS, html_text
from offload_rt.text.documents.pdf import pdf_text

__all__ = [
    "check_encoding",
    "decode",
    "document_text",
    "documents",
    "html_text",
    "read_bytes",
    "read_document",
]


def documents(
    paths: Sequence[str | Path], on_notice: Callable[[str], None], encoding: str | None = None
) -> str:
    """Returns the text of one document, or of several in order, each under a heading with its file name.

    Raises:
        UsageError: see `read_document`.
    """
    texts = [read_document(path, on_notice, encoding) for path in paths]
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(f"# {Path(path).name}\n\n{text}" for path, text in zip(paths, texts, strict=True))


def read_document(
    path: str | Path, on_notice: Callable[[str], None], encoding: str | None = None, source: str | None = None
) -> str:
    """Returns the text of a document; see `document_text`.

    Raises:
        UsageError: it cannot be read, is broken or encrypted, or has no text.
    """
    source = source or f"file {path}"
    return document_text(str(path), read_bytes(source, path), on_notice, encoding, source)


def document_text(
    name: str,
    data: bytes,
    on_notice: Callable[[str], None],
    encoding: str | None = None,
    source: str | None = None,
) -> str:
    """Returns the text of a document's content, which determines its kind, as the end of its name does.

    Args:
        on_notice: called with a line for the user about each part that is left out or may be wrong.
        encoding: of text and HTML; None: by a byte order mark or HTML's own word, else UTF-8.
        source: names the document in messages.

    Raises:
        UsageError: it is broken or encrypted, or has no text, or the encoding is unknown.
    """
    if encoding is not None:  # also where the kind of document does not need it
        check_encoding(encoding)
    source, ending = source or f"file {name}", Path(name.lower()).suffix

    def tell(fault: str) -> None:
        on_notice(f"{source}: {fault}")

    def tell_encoding(fault: str) -> None:
        tell(f"{fault}; name its encoding if that is wrong (--encoding NAME)")

    if data.startswith(b"%PDF-") or ending == ".pdf":
        text = pdf_text(source, data, tell)
    elif data.startswith(b"PK\x03\x04") or ending == ".epub":
        text = epub_text(source, data, tell)
    elif ending in ENDINGS:
        text = html_text(decode_markup(source, data, tell_encoding, encoding))
    else:
        text = decode(source, data, encoding, tell_encoding)
    if not text.strip():
        raise UsageError(f"{source}: has no text; give {KINDS} with text in it")
    return text
