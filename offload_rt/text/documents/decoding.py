"""Bytes of documents as text: by their mark, by what they say of themselves, else as UTF-8."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from pathlib import Path

from offload_rt.errors import UsageError

KINDS = "a txt, md, html, pdf or epub file"
BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, with which it begins
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
TEXT_PER_FAULT, MARKUP_PER_FAULT = 1000, 100
"""Characters of a document for each one that cannot be read; with fewer, it is in another encoding."""

_QUADRATIC = ("idna", "punycode")
"""Encodings of domain names, which take quadratic time to decode."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Halves of characters, which some codecs write."""


def read_bytes(source: str, path: str | Path, remedy: str = f"give {KINDS}") -> bytes:
    """Returns the content of a file. Raises UsageError, which names `source`, where it cannot be read."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{source}: cannot be read ({reason}); {remedy}") from None


def check_encoding(name: str) -> None:
    """Raises UsageError, which names the encoding, where Python knows no such encoding of text.

    Those in which nobody writes texts are refused if decoding takes quadratic time.
    """
    try:
        b"a".decode(name)
        known = codecs.lookup(name).name not in _QUADRATIC
    except UnicodeDecodeError:  # UTF-16, say: "a" is half a character
        known = True
    except (LookupError, ValueError):  # ValueError: the name holds a zero, say
        known = False
    if not known:
        raise UsageError(f"encoding {name!r} is unknown; name one of Python's, such as cp1252 or utf-16-le")


def decode(
    source: str,
    data: bytes,
    encoding: str | None = None,
    on_notice: Callable[[str], None] | None = None,
    per_fault: int = TEXT_PER_FAULT,
) -> str:
    """Returns bytes as text.

    Args:
        encoding: None: by the byte order mark, else UTF-8.
        on_notice: called with what the user is told, without the source, where a few characters cannot be
            read and are replaced. None: these are refused, too.
        per_fault: characters for each one that may be replaced.

    Raises:
        UsageError: there are no bytes, they are not text of that encoding, or it is unknown.
    """
    if not data:
        raise UsageError(f"{source}: is empty; give at least one character")
    if encoding is not None:
        check_encoding(encoding)
    name = encoding or _marked(data) or "utf-8"
    shown = "UTF-8" if name.startswith("utf-8") else name
    remedy = "name its encoding (--encoding cp1252)"
    wrong, replaced = "", 0
    try:
        text = data.decode(name)
    except UnicodeDecodeError as error:
        wrong = f"not {shown} (byte {error.start} is 0x{data[error.start]:02x})"
        text = data.decode(name, "replace")
        replaced = text.count(_REPLACEMENT)
    except ValueError:  # UTF-16 without a byte order mark, say
        raise UsageError(f"{source}: cannot be read as {name}; {remedy}") from None
    text, halves = _SURROGATE.subn(_REPLACEMENT, text)
    zeros = text.count("\0")
    if zeros:  # compressed files and pictures have some, too
        wrong = f"byte {data.index(0)} is zero, so it is not a text in {shown}"
        remedy = f"give {KINDS}, or name its encoding (--encoding utf-16-le)"
    elif halves and not wrong:
        wrong = f"not {shown} (it holds halves of characters)"
    replaced += halves + zeros
    # One wrong byte spoils up to four characters of UTF-8.
    slight = len(text) >= per_fault and replaced <= 3 + len(text) / per_fault
    if replaced and (on_notice is None or not slight):
        raise UsageError(f"{source}: {wrong}; {remedy}")
    if replaced and on_notice is not None:
        number = "1 character" if replaced == 1 else f"{replaced:,} characters"
        on_notice(f"{wrong}: {number} of {len(text):,} replaced by {_REPLACEMENT}")
        text = text.replace("\0", _REPLACEMENT)
    return text.removeprefix("\ufeff")


def _marked(data: bytes) -> str | None:
    """Returns the encoding that a byte order mark names."""
    return next((name for mark, name in BOMS if data.startswith(mark)), None)


# ---------------------------------------------------------------------------------------------- markup

_CHARSET = re.compile(
    rb"""(?:<meta[^>]*?charset|<\?xml[^>]*?encoding)\s*=\s*["']?\s*([\w:.-]+)""", re.IGNORECASE
)
_CHARSET_WITHIN = 4096
"""Bytes within which markup names its encoding."""
_ON_THE_WEB = {
    **dict.fromkeys(("iso-8859-1", "latin-1", "latin1", "us-ascii", "ascii"), "cp1252"),
    **dict.fromkeys(("gb2312", "gb_2312-80", "gbk", "x-gbk"), "gb18030"),
    **dict.fromkeys(("shift_jis", "shift-jis", "sjis", "x-sjis"), "cp932"),
    **dict.fromkeys(("euc-kr", "ks_c_5601-1987"), "cp949"),
    "iso-8859-9": "cp1254",
    "iso-8859-11": "cp874",
    "tis-620": "cp874",
}
"""Larger encodings that names stand for on the web."""
_OF_NO_PAGE = (*_QUADRATIC, "raw-unicode-escape", "unicode-escape", "utf-7")
"""Encodings of Python in which nobody writes pages."""


def decode_markup(
    source: str, data: bytes, on_notice: Callable[[str], None], encoding: str | None = None
) -> str:
    """Returns the bytes of HTML or XML as text.

    Args:
        encoding: None: UTF-8 where characters beyond ASCII prove it, else the first that fits of what a byte
            order mark or the markup itself names, UTF-8 and cp1252.
        on_notice: called as by `decode`, and where this is not what is named.

    Raises:
        UsageError: none fits.
    """
    if encoding is not None:
        return decode(source, data, encoding, on_notice, MARKUP_PER_FAULT)
    marked = _marked(data)
    named = marked or _declared(data) or "utf-8"
    possible = marked is not None or _writes_markup(named)
    first = named if possible and not _is_utf8(data) else "utf-8"
    refusal: UsageError | None = None
    for name in dict.fromkeys((first, "utf-8", "cp1252")):
        notices = list[str]()
        try:
            text = decode(source, data, name, notices.append, MARKUP_PER_FAULT)
        except UsageError as error:
            refusal = refusal or error
            continue
        if name != "cp1252" and notices and _mostly_replaced(text):
            continue
        if name != named:
            on_notice(f"is not {named}; read as {name}")
        for notice in notices:
            on_notice(notice)
        return text
    assert refusal is not None
    raise refusal


def _is_utf8(data: bytes) -> bool:
    """Returns whether bytes are in UTF-8 for certain: in other encodings, hardly any text fits its rules."""
    if data.isascii():
        return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _mostly_replaced(text: str) -> bool:
    """Returns whether most characters beyond ASCII could not be read."""
    beyond = len(text) - len(text.encode("ascii", "ignore"))
    return 2 * text.count(_REPLACEMENT) > beyond


def _declared(data: bytes) -> str | None:
    """Returns the encoding that markup names for itself."""
    match = _CHARSET.search(data[:_CHARSET_WITHIN])
    if match is None:
        return None
    declared = match[1].decode("ascii").lower()
    return _ON_THE_WEB.get(declared, declared)


def _writes_markup(encoding: str) -> bool:
    """Returns whether markup that names this encoding in ASCII can be in it."""
    try:
        return b"<meta".decode(encoding) == "<meta" and codecs.lookup(encoding).name not in _OF_NO_PAGE
    except (LookupError, ValueError):
        return False
