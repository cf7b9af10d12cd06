"""Tokens with their log probabilities, as OpenAI's clients read them."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from offload_rt.engine.results import PromptScore, TokenEvent
from offload_rt.server.protocols.answer import Json
from offload_rt.text.tokenize import TokenTexts


class TokenEntries:
    """Writes the tokens of a text, in their order, so that their texts joined are the text.

    A character of several tokens is the text of the token that completes it; their bytes show each part.

    Args:
        tokenizer: None: tokens are written as their IDs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def text(self, event: TokenEvent) -> str:
        """Returns the text that the next token adds; a special one adds none where the text leaves it out."""
        if self._texts is None:
            return _id_name(event.token)
        added = self._texts.bytes(event.token)
        left_out = self._texts.is_special(event.token) and added.decode() not in event.text
        return "" if left_out else self._decoder.decode(added)

    def prompt_texts(self, tokens: Sequence[int], prompt: str) -> list[str]:
        """Returns the texts of all tokens of a prompt; a special one has its name where the prompt has it."""
        if self._texts is None:
            return list(map(_id_name, tokens))
        found, at = list[str](), 0
        for token, text in zip(tokens, self._texts.split(tokens), strict=True):
            if self._texts.is_special(token) and prompt.startswith(self._texts[token], at):
                text = self._texts[token]
            found.append(text)
            at += len(text)
        return found

    def names(self, tokens: Sequence[int]) -> list[str]:
        """Returns distinct names of different tokens, the likeliest first; see `TokenTexts.names`."""
        return [_id_name(token) for token in tokens] if self._texts is None else self._texts.names(tokens)

    def entry(self, event: TokenEvent) -> Json:
        """Returns the next token with its log probability, and the likeliest tokens in its place."""
        before, best = self._decoder.getstate(), list[Json]()
        for token, logprob in event.alternatives:
            text = "" if self._texts is None else self._decoder.decode(self._texts.bytes(token))
            best.append(self._entry(token, text, logprob))
            self._decoder.setstate(before)
        entry = self._entry(event.token, self.text(event), event.logprob)
        return entry | {"top_logprobs": best}

    def prompt_entry(self, token: int, logprob: float, rank: int | None) -> Json:
        """Returns a token of a prompt as vLLM writes it."""
        name = _id_name(token) if self._texts is None else self._texts[token]
        return {"logprob": logprob, "rank": rank, "decoded_token": name}

    def _entry(self, token: int, text: str, logprob: float | None) -> Json:
        if self._texts is None:
            return {"token": _id_name(token), "logprob": logprob, "bytes": None}
        return {"token": text, "logprob": logprob, "bytes": list(self._texts.bytes(token))}


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def prompt_logprobs(score: PromptScore, top: int, entries: TokenEntries) -> list[Json | None]:
    """Returns the log probabilities of a prompt as vLLM writes them: each token, and the likeliest by IDs.

    Args:
        top: number of likeliest tokens; the token of the prompt is there, too, if it is none of them.
    """
    found = list[Json | None]()
    for token, logprob, best in zip(score.tokens, score.logprobs, score.alternatives, strict=True):
        if logprob is None:
            found.append(None)
            continue
        ranks = {other: rank for rank, (other, _) in enumerate(best, 1)}
        shown = dict(best[:top]) | {token: logprob}
        found.append(
            {
                str(other): entries.prompt_entry(other, value, ranks.get(other))
                for other, value in shown.items()
            }
        )
    return found


@dataclass
class TokenTable:
    """The tokens of a text as OpenAI's completions write them: lists with an entry for each.

    Attributes:
        top_logprobs: log probabilities of the likeliest tokens by their names, and of the token itself.
        text_offset: characters before each token.
    """

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def extend(self, other: TokenTable) -> None:
        """Appends the tokens of another table."""
        for name, values in vars(other).items():
            getattr(self, name).extend(values)


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
