"""Grammars of texts that fit a JSON schema or call tools: which tokens may follow, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offload_rt.errors import UsageError, briefly, first_line, shortened
from offload_rt.system.installation import install_extra
from offload_rt.text.lark import WHITESPACE
from offload_rt.text.tokenize import common_beginning

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase

END = "<|offload-rt end of JSON|>"
"""A token added to the vocabulary of the grammars, by which a text ends in llguidance; never generated."""


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        needing = "json-schema, and tools whose calls must fit a schema"
        raise UsageError(f"{needing}, need the package llguidance: {install_extra('json')}") from None
    return llguidance


def checked_schema(schema: object, name: str = "json-schema") -> str:
    """Returns a JSON schema, an object or its text, as a text.

    Args:
        name: names it in messages to the user.

    Raises:
        UsageError: it is no JSON object, llguidance refuses it, or llguidance is not installed.
    """
    try:
        values = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(values, dict):
            raise UsageError(f"{name} must be a JSON object, got {briefly(schema)}")
        text = json.dumps(values, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} {briefly(schema)} is not JSON: {first_line(error)}") from None
    if (reason := _refusal(text)) is not None:
        raise UsageError(f"{name} is refused by llguidance: {reason}")
    return text


@lru_cache(maxsize=256)
def _refusal(schema: str) -> str | None:
    """Returns why llguidance refuses a schema; None: it does not."""
    matcher = _llguidance().LLMatcher
    try:
        refused, reasons = matcher.validate_grammar_with_warnings(_grammar(schema))
    except ValueError as error:
        refused, reasons = True, [str(error)]
    return shortened(" ".join(reasons[0].split())) if refused else None


def _grammar(schema: str) -> str:
    """Returns a schema as llguidance's grammar; its "x-guidance" may have options of llguidance."""
    options = None if "x-guidance" in json.loads(schema) else WHITESPACE
    grammar: str = _llguidance().LLMatcher.grammar_from_json_schema(schema, defaults=options)
    return grammar


class JsonGrammars:
    """Grammars over the vocabulary of one model. Making it takes about a second.

    Args:
        vocabulary: number of the model's tokens; those that the tokenizer lacks are never allowed.

    Raises:
        UsageError: llguidance is not installed, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int) -> None:
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise UsageError(
                "json-schema needs a model with a fast tokenizer, a tokenizer.json, and so do tools whose"
                " calls must fit a schema: leave them out"
            )
        extended = copy(fast)
        extended.no_padding()
        extended.no_truncation()
        extended.add_special_tokens([END])
        self._end: int = extended.token_to_id(END)
        self._vocabulary = vocabulary
        size = max(vocabulary, extended.get_vocab_size(), self._end + 1)
        try:
            self._tokens = _llguidance().LLTokenizer(extended.to_str(), n_vocab=size, eos_token=self._end)
        except ValueError as error:
            raise UsageError(f"grammars: llguidance cannot read the tokenizer: {first_line(error)}") from None

    def grammar(self, schema: str, ends: Collection[int]) -> JsonGrammar:
        """Returns the grammar of one continuation.

        Args:
            schema: as `checked_schema` returned it.
            ends: tokens that end the text.
        """
        return self._grammar(_grammar(schema), ends, "json-schema")

    def calls(self, lark: str, ends: Collection[int]) -> JsonGrammar:
        """Returns the grammar of one continuation with calls of tools, as `call_grammar` wrote it.

        Raises:
            UsageError: llguidance refuses the schema of a tool.
        """
        return self._grammar(_llguidance().LLMatcher.grammar_from_lark(lark), ends, "tools")

    def _grammar(self, grammar: str, ends: Collection[int], name: str) -> JsonGrammar:
        matcher = _llguidance().LLMatcher(self._tokens, grammar, log_level=0)
        return JsonGrammar(matcher, self._end, ends, self._vocabulary, name)


class JsonGrammar:
    """The texts of one grammar (a `drafting.logits.Grammar`).

    Args:
        name: what the user gave, for messages.

    Raises:
        UsageError: llguidance refuses the grammar.
    """

    def __init__(
        self, matcher: LLMatcher, end: int, ends: Collection[int], vocabulary: int, name: str = "json-schema"
    ) -> None:
        self._matcher = matcher
        self._name = name
        self._tokens: list[int] = []  # that the matcher has consumed
        self._end = end
        self._ends = [token for token in ends if token < vocabulary]
        self._words = -(-vocabulary // 64)
        # Tokens that the tokenizer has and the model has not, in the last word; `end` may be among them.
        self._beyond = range(vocabulary, 64 * self._words)
        self._check()

    def allowed(self, tokens: Sequence[int]) -> Tensor | None:
        if not self._follow(tokens):
            return None
        words, _ = self._mask()
        return words if words.any() else None

    def complete(self, tokens: Sequence[int]) -> bool:
        if not self._follow(tokens):
            written = briefly(list(tokens[len(self._tokens) - 1 :]))
            raise UsageError(
                f"{self._name}: the model's vocabulary cannot write what must follow here, at token"
                f" {len(self._tokens)} of the text, {written}: change the schema"
            )
        if self._ends:
            return False
        words, whole = self._mask()
        return whole and not words.any()

    def _follow(self, tokens: Sequence[int]) -> bool:
        """Brings the matcher behind `tokens`; returns False where they begin no text of the grammar."""
        common = common_beginning(self._tokens, tokens)
        self._matcher.rollback(len(self._tokens) - common)
        consumed = self._matcher.try_consume_tokens(list(tokens[common:]))
        self._tokens = list(tokens[: common + consumed])
        self._check()
        return len(self._tokens) == len(tokens)

    def _mask(self) -> tuple[Tensor, bool]:
        """Returns which tokens may follow, and whether the text may end here."""
        bits = bytearray(self._matcher.compute_bitmask()) + bytes(8)
        self._check()

        def take(token: int) -> bool:
            was = bool(bits[token >> 3] >> (token & 7) & 1)
            bits[token >> 3] &= ~(1 << (token & 7))
            return was

        whole = take(self._end)
        for token in self._ends:  # a token that is also one of the text ends it no less
            take(token)
            bits[token >> 3] |= whole << (token & 7)
        for token in self._beyond:
            take(token)
        return torch.frombuffer(bits, dtype=torch.long, count=self._words), whole

    def _check(self) -> None:
        """Raises UsageError where llguidance has given up."""
        if self._matcher.is_error():
            reason = first_line(ValueError(self._matcher.get_error()))
            raise UsageError(f"{self._name}: llguidance cannot follow it any further: {reason}")
