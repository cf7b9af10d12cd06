"""The frontend of an engine: prompts become token IDs, parameters continuations, and rounds text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from offload_rt.api.opening import check_files
from offload_rt.config.schema import Config
from offload_rt.drafting.datastore import fingerprint as vocabulary_digest
from offload_rt.drafting.levels.configs import load_config
from offload_rt.drafting.logits import Grammar
from offload_rt.drafting.thought_grammar import thoughts_first
from offload_rt.drafting.verifier import Sampling
from offload_rt.engine.engine import Engine
from offload_rt.engine.output import OutputProcessor
from offload_rt.engine.prefix import KVPrefix
from offload_rt.engine.results import PromptScore
from offload_rt.engine.scoring import PromptScorer
from offload_rt.engine.sequence import Continuation, TokenSequence
from offload_rt.errors import UsageError
from offload_rt.model.fingerprint import Fingerprint
from offload_rt.model.generation import GenerationDefaults
from offload_rt.model.runner import CausalModel
from offload_rt.model.weights_digest import fingerprint_of
from offload_rt.sampling.params import SamplingParams, token_ids, with_changes
from offload_rt.sampling.sampler import GeneratorDraws
from offload_rt.text.answers import AnswerMarks
from offload_rt.text.call_grammar import call_grammar
from offload_rt.text.chat import ChatTemplate, Messages, is_messages
from offload_rt.text.json_grammar import JsonGrammars
from offload_rt.text.tokenize import decode, encode, encoded
from offload_rt.text.tools import Tools

GREEDY = SamplingParams()
Prompt = str | Sequence[int] | Messages


class Notices:
    """Lines for the user, in order.

    Args:
        on_notice: called with each line.
    """

    def __init__(self, on_notice: Callable[[str], None] | None) -> None:
        self.lines: list[str] = []
        self._on_notice = on_notice

    def add(self, line: str) -> None:
        self.lines.append(line)
        if self._on_notice is not None:
            self._on_notice(line)


class Frontend:
    """What an `LLM` is to its contexts, batches and sessions: an engine with what the model's files say.

    Attributes:
        engine: runs sequences of token IDs.
        tokenizer: None: prompts are token IDs, and there is no text.
    """

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase | None, notices: Notices) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._notices = notices
        self._fingerprints: dict[CausalModel, Fingerprint] = {}
        for notice in self._defaults.notices:
            notices.add(notice)

    @property
    def model_sampling(self) -> SamplingParams | None:
        """Sampling that the model's generation_config.json suggests; None: greedy decoding, or nothing."""
        suggested = self._defaults.sampling
        return None if suggested == GREEDY else suggested

    @property
    def end_tokens(self) -> frozenset[int]:
        """End-of-text tokens of the model's generation config, its config and its tokenizer."""
        return self._defaults.end_tokens

    @property
    def _defaults(self) -> GenerationDefaults:
        """What the model's files say about generation."""
        return GenerationDefaults(self.engine.target.module, self.tokenizer)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the model's tokenizer. Raises UsageError where there is none."""
        return ChatTemplate(self.tokenizer, self.engine.target.name, self._notices.add)

    @cached_property
    def _marks(self) -> AnswerMarks:
        """How the model marks its thoughts and its calls of tools."""
        return AnswerMarks(self.tokenizer)

    @cached_property
    def _json_grammars(self) -> JsonGrammars:
        """Grammars over the model's tokens. Raises UsageError where there can be none."""
        return JsonGrammars(self.tokenizer, self.engine.target.vocabulary)

    def encode(self, text: str, last: int | None = None, *, special: bool = True) -> list[int]:
        """Returns the token IDs of a text.

        Args:
            last: keep this many of the last tokens, and a beginning-of-text token in front of them.
            special: add the special tokens that the tokenizer puts around a text.
        """
        return encode(self._prompt_tokenizer, text, last, special=special)

    def encoded(self, text: str, *, special: bool = True, most: int | None = None) -> Iterator[list[int]]:
        """Yields what `encode` returns, in pieces each of which takes a moment.

        Args:
            most: number of tokens beyond which the caller refuses the text; see `offload_rt.text.pieces`.
        """
        return encoded(self._prompt_tokenizer, text, special=special, most=most)

    @property
    def _prompt_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            name = self.engine.target.name
            raise UsageError(f"model {name} has no tokenizer: give the prompt as token ids")
        return self.tokenizer

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Returns the text of token IDs (also a tensor), without special tokens: what `encode` was given.

        Args:
            special: write special tokens as well.

        Raises:
            UsageError: a token is outside the vocabulary, or the model has no tokenizer.
        """
        if self.tokenizer is None:
            name = self.engine.target.name
            raise UsageError(f"model {name} has no tokenizer: its tokens have no text")
        return decode(self.tokenizer, self._in_vocabulary(token_ids(tokens), "token"), special=special)

    def _in_vocabulary(self, tokens: list[int], noun: str) -> list[int]:
        """Returns token IDs that are in the vocabulary. Raises UsageError, which begins with `noun`."""
        vocabulary = self.engine.target.vocabulary
        outside = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if outside is not None:
            raise UsageError(f"{noun} {outside} is outside the vocabulary of {vocabulary}")
        return tokens

    # What contexts, batches, sessions and the server use.

    def prompt_ids(
        self,
        prompt: Prompt,
        *,
        behind: bool = False,
        date: datetime | None = None,
        tools: Tools | None = None,
    ) -> list[int]:
        """Returns the token IDs of a prompt, checked.

        Args:
            behind: the prompt is appended to others, so that no beginning-of-text token goes before it.
            date: the one that a chat template writes; None: now.
            tools: those that a chat template writes.
        """
        if is_messages(prompt):
            if behind:
                raise UsageError(
                    "chat messages cannot be appended: give all of them to Context.update, or ask"
                )
            tokens = self.chat_template.dated(date).encode(prompt, tools=tools)
        else:
            tokens = self.encode(prompt, special=not behind) if isinstance(prompt, str) else token_ids(prompt)
        if not tokens or (isinstance(prompt, str) and not prompt):
            raise UsageError("the prompt is empty: give it at least one token")
        return self._in_vocabulary(tokens, "prompt token")

    def checked_params(self, params: SamplingParams, changes: Mapping[str, Any] = {}) -> SamplingParams:
        """Returns `params` with other values of some fields, checked for this model."""
        params = with_changes(params, changes)
        if params.stop and self.tokenizer is None:
            name = self.engine.target.name
            raise UsageError(f"model {name} has no tokenizer: stop strings cannot be used")
        if _constrained(params):
            _ = self._json_grammars
        return params

    def chat_params(self, params: SamplingParams | None, changes: Mapping[str, Any]) -> SamplingParams:
        """Like `checked_params`; None is the sampling that the model suggests, else greedy decoding."""
        return self.checked_params((self.model_sampling or GREEDY) if params is None else params, changes)

    def with_thoughts(
        self, thinking: bool | None, params: SamplingParams
    ) -> tuple[bool | None, SamplingParams]:
        """Returns whether the model shall think in a chat, for its template, and parameters that allow it.

        Raises:
            UsageError: thoughts are wanted before an answer that fits a schema, and cannot be told from it.
        """
        thinking = self.chat_template.thoughts(thinking, params.json_schema)
        if thinking and params.json_schema is not None and params.thinking_budget is None:
            params = replace(params, thinking_budget=params.max_tokens // 2)
        return thinking, params

    def output(self, sequence: TokenSequence, params: SamplingParams, start: int = 0) -> OutputProcessor:
        """Returns the output processor of a sequence, which turns rounds into events.

        The model's own stop strings end a text like its end tokens, unless it must fit a grammar.
        """
        if not params.ignore_eos and not _constrained(params):
            params = replace(params, stop=(*params.stop, *self._defaults.stop_strings))
        return OutputProcessor(
            self.engine, sequence, params, self.tokenizer, self._notices.lines, start, self._marks
        )

    def continuation(self, params: SamplingParams, prompt: Sequence[int] = ()) -> Continuation:
        """Returns the settings of a continuation of a prompt; `params` must have a seed."""
        self.checked_params(params)
        assert params.seed is not None
        draws = GeneratorDraws(params.seed, self.engine.target.device)
        ends = frozenset[int]()
        if not params.ignore_eos:
            calling = params.tools is not None and bool(params.tools.callable)
            ends = self.end_tokens | (self._marks.calls.ends if calling else frozenset())
        sampling = Sampling(params, draws, ends, self._grammar(params, prompt, ends))
        return Continuation(sampling, params.max_tokens)

    def scored(
        self, tokens: Sequence[int], top: int, start: int, prefix: KVPrefix | None = None
    ) -> PromptScore:
        """Returns the score of token IDs, and keeps nothing of them; see `LLM.score`.

        Args:
            prefix: KV of its tokens before `start` is not computed again.
        """
        engine = self.engine
        scorer = PromptScorer(engine.target, tokens, top, start)
        engine.close_sequence(engine.open(tokens, 0, prefix=prefix, scorer=scorer))
        return scorer.score()

    def _grammar(self, params: SamplingParams, prompt: Sequence[int], ends: frozenset[int]) -> Grammar | None:
        """Returns what a continuation of a prompt may be; None: any text."""
        grammar: Grammar | None = None
        tools = params.tools if params.tools is not None and params.tools.constrained else None
        if tools is not None:
            lark = call_grammar(self._marks.calls, tools, params.json_schema)
            grammar = self._json_grammars.calls(lark, ends)
        elif params.json_schema is not None:
            grammar = self._json_grammars.grammar(str(params.json_schema), ends)
        budget = params.thinking_budget
        if self.tokenizer is None or (grammar is None and budget is None):
            return grammar
        return thoughts_first(
            self._marks.thoughts,
            grammar,
            prompt,
            params.max_tokens // 2 if budget is None else budget,
            ends,
            self.engine.target.vocabulary,
            may_open=budget is not None or tools is not None,
            gated=tools is None or not self._marks.calls.format.messages,
        )

    def composition(self, config: str | None, overrides: Mapping[str, object] = {}) -> Config | None:
        """Returns the config of that name or file; None, the LLM's own, where no name is given."""
        if config is None:
            if overrides:
                raise UsageError(f"overrides {', '.join(overrides)}: name the config that they are for")
            return None
        composition = load_config(config, overrides)
        check_files([composition], self.tokenizer, self.engine.target.vocabulary)
        return self.engine.available(composition)

    def fingerprint(self, target: CausalModel) -> Fingerprint:
        """Returns what a model must have in common with a runner of this one to go on from its KV."""
        with self.engine.lock:
            if target not in self._fingerprints:
                digest = None if self.tokenizer is None else vocabulary_digest(self.tokenizer)
                self._fingerprints[target] = fingerprint_of(target, digest)
            return self._fingerprints[target]


def _constrained(params: SamplingParams) -> bool:
    """Returns whether llguidance decides what a text may be."""
    return params.json_schema is not None or (params.tools is not None and params.tools.constrained)
