"""Tokens with their log probabilities, as OpenAI's clients read them."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from offload_rt.engine.results import TokenEvent
from offload_rt.server.answers import Json
from offload_rt.text.tokenize import REPLACEMENT, TokenTexts


class TokenEntries:
    """Writes single tokens.

    Args:
        tokenizer: None: tokens are written as their IDs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)

    def text(self, token: int) -> str:
        """Returns the text of a token."""
        return f"token_id:{token}" if self._texts is None else self._texts[token]

    def entry(self, event: TokenEvent) -> Json:
        """Returns a token with its log probability, and the likeliest tokens in its place."""
        best = [self._entry(*alternative) for alternative in event.alternatives]
        return self._entry(event.token, event.logprob) | {"top_logprobs": best}

    def _entry(self, token: int, logprob: float | None) -> Json:
        text = self.text(token)
        utf8 = None if REPLACEMENT in text else list(text.encode())  # else a part of a character
        return {"token": text, "logprob": logprob, "bytes": utf8}


class TokensOfText:
    """Finds the tokens of parts of a generated text, which come in their order."""

    def __init__(self) -> None:
        self._text, self._start = "", 0
        self._tokens: list[tuple[int, int, TokenEvent]] = []  # with what became certain with each

    def push(self, event: TokenEvent) -> None:
        """Adds the next token."""
        start = self._start + len(self._text)
        self._text += event.text
        self._tokens.append((start, start + len(event.text), event))

    def take(self, part: str) -> list[TokenEvent]:
        """Returns the tokens of the next part, and forgets those before its end.

        Bytes of a character are tokens without a text of their own: they belong to the text that follows.
        """
        at = max(0, self._text.find(part))
        start, end = self._start + at, self._start + at + len(part)
        self._text, self._start = self._text[at + len(part) :], end
        before = [token for token in self._tokens if token[0] < end]
        self._tokens = self._tokens[len(before) :]
        return [event for first, last, event in before if first >= start or last > start]
