"""Text of PDF files, page by page. What cannot be read of them costs a notice, not the document."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable

from offload_rt.errors import UsageError, first_line
from offload_rt.system import clock
from offload_rt.text.documents.notices import listed

LEAST_SECONDS, SECONDS_PER_BYTE, MOST_SECONDS = 30.0, 2.0**-14, 600.0
"""Seconds that the pages of a PDF may take together, by its size. A page of a book has at least 2 KiB and
takes less than 0.1 s; a file that takes longer repeats a few bytes very often."""


class _TooSlow(Exception):
    pass


def pdf_text(source: str, data: bytes, on_notice: Callable[[str], None]) -> str:
    """Returns the text of a PDF.

    Args:
        on_notice: called with what the user is told of parts without text, without the source.

    Raises:
        UsageError: it is encrypted or broken, takes too long, or has no text.
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    seconds = min(LEAST_SECONDS + SECONDS_PER_BYTE * len(data), MOST_SECONDS)
    deadline = clock.now() + seconds

    def check(*operator: object) -> None:
        if clock.now() > deadline:
            raise _TooSlow

    texts, empty, broken, reason = list[str](), list[str](), list[str](), ""
    number = count = 0
    with _Losses() as losses:
        try:
            pages = PdfReader(io.BytesIO(data)).pages
            count = len(pages)
            for number in range(1, count + 1):
                try:
                    text = pages[number - 1].extract_text(visitor_operand_before=check)
                except (DependencyError, FileNotDecryptedError, _TooSlow):
                    raise
                except Exception as error:  # pypdf raises many types for a broken page
                    text, reason = "", first_line(error)
                    broken.append(str(number))
                else:
                    if losses.pop():
                        broken.append(f"{number} (in part)")
                    elif not text.strip():
                        empty.append(str(number))
                check()  # pypdf passes over exceptions in a part of a page
                texts.append(text)
        except (DependencyError, FileNotDecryptedError):
            remedy = "take its password off first, e.g. qpdf --decrypt IN OUT"
            raise UsageError(f"{source}: this PDF is encrypted; {remedy}") from None
        except _TooSlow:
            wrong = f"takes longer than {seconds:.0f} s to read ({number - 1:,} of {count:,} pages were read)"
            remedy = "give its text, e.g. the output of pdftotext"
            raise UsageError(f"{source}: this PDF {wrong}; {remedy}") from None
        except Exception as error:
            reason = first_line(error)
    text = "\n".join(texts).replace("\0", "")
    if reason and not text.strip():
        remedy = "save it anew, or give its text, e.g. the output of pdftotext"
        raise UsageError(f"{source}: this PDF cannot be read ({reason}); {remedy}")
    if not text.strip():
        remedy = "its pages are pictures, perhaps: recognise their text first, e.g. with ocrmypdf"
        raise UsageError(f"{source}: this PDF has no text; {remedy}")
    if broken:
        on_notice(f"skipped, unreadable: page {listed(broken)}")
    if empty:
        on_notice(f"no text, perhaps pictures: page {listed(empty)}")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # joins halves of characters


class _Losses(logging.Handler):
    """Collects what pypdf logs of parts of pages that it leaves out, and keeps its other warnings quiet."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._has_losses = False

    def __enter__(self) -> _Losses:
        logger = logging.getLogger("pypdf")
        logger.propagate = False
        logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("pypdf").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread and "XFormObject" in record.getMessage():
            self._has_losses = True

    def pop(self) -> bool:
        """Returns whether a part was left out since the last call."""
        lost, self._has_losses = self._has_losses, False
        return lost
