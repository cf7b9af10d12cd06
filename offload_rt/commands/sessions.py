"""`offload-rt sessions`: lists and removes saved contexts; and the flags by which other commands use them."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from offload_rt.commands.console import Console
from offload_rt.commands.options import SETTING, Add, add_json
from offload_rt.config.settings import CACHE_OFF, CACHE_ON, SettingDefault
from offload_rt.errors import UsageError
from offload_rt.system.files import write_json
from offload_rt.system.hardware import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from offload_rt.api.context import Context
    from offload_rt.api.llm import LLM
    from offload_rt.api.session_files import SessionFiles
    from offload_rt.api.sessions import SessionFolder
    from offload_rt.text.tool_messages import Message

DEFAULT_FOLDER = "the folder sessions in the user's cache folder"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    sessions = commands.add_parser(
        "sessions",
        help="list and remove saved contexts",
        description="Lists and removes sessions (saved by --session NAME) and cached prefixes (by --cache).",
        allow_abbrev=False,
    )
    actions = sessions.add_subparsers(dest="action", metavar="list|rm|clear", required=True)
    for action, run, meaning in (
        ("list", _list, "what is there, the most recently used first"),
        ("rm", _remove, "remove sessions or cached prefixes by name"),
        ("clear", _clear, "remove all cached prefixes; named sessions stay"),
    ):
        parser = actions.add_parser(action, help=meaning, description=meaning, allow_abbrev=False)
        parser.set_defaults(run=run)
        help_text = f"the folder to look at (default: {SETTING}, or {DEFAULT_FOLDER})"
        parser.add_argument(
            "--cache", metavar="DIR", default=SettingDefault("cache", CACHE_ON), help=help_text
        )
        if action == "rm":
            parser.add_argument("names", nargs="+", metavar="NAME", help="as list shows it")
        elif action == "list":
            add_json(parser.add_argument, "the list")


def _list(arguments: argparse.Namespace) -> int:
    files = _files(arguments.cache)
    entries = files.entries()
    if arguments.json is not None:
        listed = [
            {"name": entry.name, "cached": entry.cached, "tokens": entry.tokens, "bytes": entry.nbytes}
            | {"model": entry.model, "last_used": entry.last_used}
            for entry in entries
        ]
        write_json("--json", arguments.json, {"folder": str(files.folder), "sessions": listed})
    if not entries:
        print(f"no sessions in {files.folder}")
        return 0
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        tokens = "corrupt" if entry.tokens is None else f"{entry.tokens:,} tokens"
        last_used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
        print(
            f"{entry.name:{width}}  {tokens:>17}  {entry.nbytes / GIB:7.2f} GiB  {last_used}  {entry.model}"
        )
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    folder = _files(arguments.cache)
    for name in arguments.names:
        folder.remove(name)
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    print(f"removed {_files(arguments.cache).clear()} cached prefixes")
    return 0


def _files(cache: str | Path) -> SessionFiles:
    """Returns the files of the folder that `--cache` names."""
    from offload_rt.api.session_files import SessionFiles

    return SessionFiles(_path(cache))


def _path(cache: str | Path) -> Path | None:
    return None if cache in (CACHE_ON, CACHE_OFF) else Path(cache)


def _folder(cache: str | Path, limit_gib: float | None) -> SessionFolder:
    """Returns the folder that `--cache` names."""
    from offload_rt.api.sessions import SessionFolder

    limit = None if limit_gib is None else int(limit_gib * GIB)
    return SessionFolder(_path(cache), limit)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `Sessions` looks at."""
    group = parser.add_argument_group("sessions")
    name = "go on from the session of that name as far as the prompt begins with it, and save it afterwards"
    group.add_argument("--session", metavar="NAME", help=f"{name} (default: none)")
    add_cache(group.add_argument)


def add_cache(add: Add) -> None:
    """Adds `--cache` and `--cache-limit`."""
    meaning = f"keep read prompts on disk, and read on from there; on: in {DEFAULT_FOLDER}"
    meaning += f" (default: {SETTING}, or off)"
    add("--cache", default=SettingDefault("cache", CACHE_OFF), metavar="DIR|on|off", help=meaning)
    limit = "most GiB of cached prompts, the least recently used go first"
    limit += f" (default: {SETTING}, or a tenth of the free disk)"
    add("--cache-limit", type=_gib, default=SettingDefault("cache_limit_gib"), metavar="GIB", help=limit)


def cache(arguments: argparse.Namespace) -> SessionFolder | None:
    """Returns the folder of cached prefixes that the arguments name; None where there is to be none."""
    return None if arguments.cache == CACHE_OFF else _folder(arguments.cache, arguments.cache_limit)


def _gib(text: str) -> float:
    """An argument type: a size in GiB above 0."""
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size < 2**30:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size in GiB above 0")
    return size


class Sessions:
    """Opens a command's context and keeps it afterwards, by the flags of `add_arguments`.

    Raises:
        UsageError: the name of the session is not allowed, or the folder cannot be created.
    """

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self._name: str | None = arguments.session
        self._cached = arguments.cache != CACHE_OFF
        self._console = console
        self._arguments = arguments
        self._folder = None
        if self._name is not None or self._cached:
            self._folder = _folder(arguments.cache, arguments.cache_limit)
            if self._name is not None:
                self._folder.path(self._name)
            self._folder.create()

    def check_exists(self, remedy: str) -> None:
        """Raises UsageError for a session that does not exist yet, where the user gave nothing to read."""
        if self._name is None or self._folder is None or self._folder.path(self._name).exists():
            return
        reason = f"there is none of that name in {self._folder.folder}"
        raise UsageError(f"session {self._name}: {reason}; {self._folder.listing()}. To begin it, {remedy}")

    def chat(self) -> tuple[list[Message] | None, datetime | None]:
        """Returns the chat messages of the session, and when they were rendered; None: it has none."""
        if self._folder is None or self._name is None or not self._folder.path(self._name).exists():
            return None, None
        from offload_rt.engine.context_files import ContextFile

        with ContextFile(self._folder.path(self._name)) as saved:
            return saved.messages, saved.date

    def open(
        self,
        llm: LLM,
        tokens: Sequence[int],
        room: int,
        messages: list[Message] | None = None,
        date: datetime | None = None,
    ) -> Context:
        """Opens a context of these tokens; reads those that are not there yet.

        Where reading is ended early, what was read is kept.

        Args:
            messages, date: of the session, where reading is ended early; None: it is no chat.

        Raises:
            UsageError: the session would lose most of what it holds, among others.
        """
        if self._folder is None:
            return llm.read(tokens, room)
        self._check_beginning(self._folder, list(tokens))
        name = "cache" if self._name is None else self._name
        try:
            context, common = self._folder.open(llm, tokens, room, self._name, cache=self._cached)
        except BaseException:
            if kept := self._folder.keep_unfinished(llm, self._name, messages, date, cache=self._cached):
                line = f"the first {kept:,} of {len(tokens):,} tokens are kept: the same command reads on"
                self._console.clear()
                self._console.say(f"session    {name}: {line}")
            raise
        self._console.say(f"session    {name}: {common:,} of {len(tokens):,} tokens were there")
        return context

    def _check_beginning(self, folder: SessionFolder, tokens: list[int]) -> None:
        """Refuses a prompt that shares less than half of the session, which it would take the place of."""
        if self._name is None or not (path := folder.path(self._name)).exists():
            return
        from offload_rt.engine.context_files import ContextFile
        from offload_rt.text.tokenize import common_beginning

        with ContextFile(path) as saved:
            length, common = len(saved.tokens), common_beginning(saved.tokens, tokens)
        if 2 * common < length:
            raise UsageError(
                f"session {self._name} holds {length:,} tokens, and the prompt begins like {common:,} of"
                f" them: name another session, or remove it, offload-rt sessions rm {self._name}"
            )

    def save(self, context: Context) -> None:
        """Saves the context as the session, and in the cache. Raises UsageError where that fails."""
        if self._name is not None:
            self.save_as(context, self._name)
        if self._cached and self._folder is not None:
            self._folder.keep(context)
            self._console.clear()

    def save_as(self, context: Context, name: str) -> None:
        """Saves the context as a session of any name. Raises UsageError where that fails."""
        folder = self._folder or _folder(self._arguments.cache, self._arguments.cache_limit)
        folder.save(context, name)
        self._console.clear()
