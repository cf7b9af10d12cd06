"""Control tokens of a chat: real where the template writes them, plain text inside messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from offload_rt.text.pieces import can_be_cut, pieces
from offload_rt.text.tokenize import check_unicode, encoded

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

GUARD = "\U0010ffff"
"""Breaks the name of a control token in a message. Unicode keeps it for programs, so no text needs it."""


class ControlTokens:
    """Encodes rendered chats so that control tokens act only where the template wrote them.

    Control tokens are the special tokens, and the other added tokens that the template names (`<tool_call>`).
    Added tokens that only shorten a text, such as runs of spaces, stay what they are.

    Args:
        template: the source of the chat template.
        thought_marks: control tokens that stay real in what the model wrote, as templates look for them.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str, thought_marks: Iterable[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        control = [token for token in added if token.special or token.content in template]
        self._names = {token.content for token in control}
        self._normalized = [token.content for token in control if token.normalized]
        self._names_in_answers = self._names.difference(thought_marks)

    def guard(self, content: str, *, answer: bool = False) -> str:
        """Returns the content of a message with the names of control tokens broken by `GUARD`.

        Args:
            answer: the model wrote it: marks of thoughts, which templates look for, stay whole.
        """
        content = content.replace(GUARD, "")
        names = _present(self._names_in_answers if answer else self._names, content)
        guarded = _starts(names).sub(rf"\g<0>{GUARD}", content) if names else content
        if guarded == content and self._emerges(content):
            guarded = re.sub(r"\S", rf"\g<0>{GUARD}", content, count=1)
        return guarded

    def _emerges(self, content: str) -> bool:
        """Returns whether normalization makes a control token of another spelling (full-width `＜s＞`)."""
        if not self._normalized or self._backend is None or (normalizer := self._backend.normalizer) is None:
            return False
        normal = normalizer.normalize_str(content)
        return any(normalizer.normalize_str(name) in normal for name in self._normalized)

    def encoded(self, rendered: str, most: int | None = None) -> Iterator[list[int]]:
        """Yields the token IDs of a rendered chat whose messages went through `guard`, in pieces.

        A chat without guards is encoded as it is. Otherwise a copy of the tokenizer encodes it, in which
        control tokens have secret names, and only the template's are written with these: so the text around
        a guard is cut into tokens like any other.

        Args:
            most: number of tokens beyond which the caller refuses the chat; see `pieces`.

        Raises:
            UsageError: the text is not valid Unicode.
        """
        if GUARD not in rendered:
            yield from encoded(self._tokenizer, rendered, special=False, most=most)
            return
        check_unicode(rendered)
        if self._backend is None:  # a tokenizer in Python
            for piece in rendered.split(GUARD):
                yield from encoded(self._tokenizer, piece, special=False, most=most)
            return
        names_or_guards = re.compile(f"{_any_of(_present(self._names, rendered))}|{GUARD}")
        secret = names_or_guards.sub(lambda at: "" if at[0] == GUARD else _secret(at[0]), rendered)
        yield from pieces(secret, self._encode_secret, cuts=can_be_cut(self._tokenizer), most=most)

    def _encode_secret(self, text: str) -> list[int]:
        tokens: list[int] = self._with_secret_names.encode(text, add_special_tokens=False).ids
        return tokens

    @cached_property
    def _with_secret_names(self) -> Tokenizer:
        from tokenizers import Tokenizer

        assert self._backend is not None
        description: dict[str, Any] = json.loads(self._backend.to_str())
        description |= {"truncation": None, "padding": None, "post_processor": None}
        for token in description["added_tokens"]:
            if token["content"] in self._names:
                token |= {"content": _secret(token["content"]), "normalized": False}
        model = description["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._renamed(name): number for name, number in model["vocab"].items()}
        else:  # Unigram: names with scores
            model["vocab"] = [[self._renamed(name), score] for name, score in model["vocab"]]
        if model.get("unk_token"):
            model["unk_token"] = self._renamed(model["unk_token"])
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if _merged(pair) not in self._names]
        return Tokenizer.from_str(json.dumps(description))

    def _renamed(self, name: str) -> str:
        return _secret(name) if name in self._names else name


def _secret(name: str) -> str:
    """Returns a name that no message can contain, as `guard` removes `GUARD` from it."""
    return GUARD + name[::-1] + GUARD


def _present(names: Iterable[str], text: str) -> set[str]:
    """Returns the names that a text has. A search for each is much faster than a pattern of all."""
    return {name for name in names if name in text}


def _any_of(names: Iterable[str]) -> str:
    """Returns a pattern that matches the longest of the names at a place."""
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    return "|".join(map(re.escape, longest_first)) or "(?!)"  # which matches nothing


def _starts(names: set[str]) -> re.Pattern[str]:
    """Returns a pattern of the first character of each name, also of names that overlap."""
    return re.compile(
        "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in sorted(names)) or "(?!)"
    )


def _merged(pair: str | list[str]) -> str:
    return "".join(pair.split(" ") if isinstance(pair, str) else pair)
