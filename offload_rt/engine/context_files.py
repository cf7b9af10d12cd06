"""Files of saved contexts, read without torch: what they hold, and the model that read it.

`saved_context` writes them, and loads their KV.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Self

from cpu_kv import ElementType, KVSizes
from offload_rt.errors import UsageError
from offload_rt.model.fingerprint import Fingerprint
from offload_rt.system.checked_headers import DTYPES, CheckedHeader, CorruptFile

KIND = "offload-rt context"
VERSION = 2
"""Of files with packed pages; others are written as version 1, which knows none."""

Messages = list[dict[str, Any]] | None


class CorruptContext(UsageError):
    """Raised for a file that is no saved context, or is not as it was written."""


class ContextFile:
    """A saved context, open for reading; its header and tokens are read and checked, without torch.

    Attributes:
        tokens: token IDs.
        messages: the chat messages that they stand for; None: there are none.
        date: when the messages were rendered; None: the file does not say it.
        model: name of the model that read them.
        fingerprint: of that model.

    Raises:
        UsageError: there is no such file, it is corrupt, or of another kind or a newer version.
    """

    _opens: ClassVar[type[CheckedHeader]] = CheckedHeader

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._errors_in_a_line():
            if path.exists() and not path.is_file():
                raise CorruptFile("it is a folder, a pipe or a device")
            self._file = self._opens(path)
            try:
                self._read_header()
            except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
                self.close()
                raise CorruptFile("its metadata cannot be read") from None
            except BaseException:
                self.close()
                raise

    def _read_header(self) -> None:
        about = self._file.about
        if about.get("kind") != KIND:
            raise CorruptFile("it is no saved context")
        if int(about["version"]) > VERSION:
            raise UsageError(
                f"session {self.path}: was saved by a newer version of offload-rt (format {about['version']},"
                f" this one reads {VERSION}); install that version, or read the text again"
            )
        self.model = about["model"]
        self.fingerprint = Fingerprint.from_json(about["fingerprint"])
        self.messages: Messages = json.loads(about["messages"])
        self.date = datetime.fromisoformat(about["date"]) if about.get("date") else None
        self._lengths = [int(at) for at in json.loads(about["reads"])]
        self._described: list[Any] = json.loads(about.get("local", "null")) or [None] * len(self._lengths)
        self.tokens: list[int] = self._file.integers("tokens")
        _, (pages, *_) = self._file.form("pages.0")
        kind, (*_, tail, _) = self._file.form("tail")
        layers, heads, dim = self.fingerprint.layout
        page, packed = int(about["page_size"]), about.get("code") == "packed"
        self._sizes = sizes = KVSizes(layers, heads, dim, ElementType(self.fingerprint.dtype), page, packed)
        unpacked = json.loads(about.get("unpacked", "{}"))
        self._unpacked = {int(layer): [int(at) for at in places] for layer, places in unpacked.items()}
        form = ("U8", (pages, sizes.page_bytes)) if packed else (kind, sizes.pages_shape(pages))
        self._in_pages = pages * sizes.page_size
        self._length = self._in_pages + tail
        if (
            DTYPES[kind][0] != self.fingerprint.dtype
            or self._file.piece_bytes % sizes.page_bytes
            or self._file.form("tail") != (kind, (layers, 2, heads, tail, dim))
            or any(self._file.form(f"pages.{n}") != form for n in range(layers))
            or any(
                self._file.form(f"unpacked.{n}") != (kind, sizes.pages_shape(len(places)))
                or not all(0 <= at < pages for at in places)
                for n, places in self._unpacked.items()
            )
        ):
            raise CorruptFile("its KV has another layout than its model")

    @contextmanager
    def _errors_in_a_line(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise UsageError(
                f"session {self.path}: there is no such file; save a context there first"
            ) from None
        except OSError as error:
            raise UsageError(
                f"session {self.path}: cannot be read ({error.strerror}); check the file, or read the text"
                " again"
            ) from None
        except CorruptFile as error:
            raise CorruptContext(
                f"session {self.path}: is corrupt or no saved context ({error}); remove it and read the text"
                " again"
            ) from None

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
