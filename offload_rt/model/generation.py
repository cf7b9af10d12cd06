"""What a checkpoint says about generation: how to sample, and what ends a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from offload_rt.errors import UsageError, briefly, first_line
from offload_rt.sampling.params import SamplingParams

FILE = "generation_config.json"
DRAWN = ("temperature", "top_p", "top_k", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NOT_APPLIED: dict[str, object] = {
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "force_words_ids": None,
    "constraints": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "guidance_scale": 1.0,
    "penalty_alpha": None,
    "dola_layers": None,
    "watermarking_config": None,
    "token_healing": False,
}
"""Settings that change what transformers generates and are ignored here, with the value that is off."""


def load_generation_config(source: str | Path, config: PretrainedConfig) -> GenerationConfig:
    """Returns the generation config of a checkpoint; without a file, what its config says.

    Values are as in the file, those that transformers refuses too: see `GenerationDefaults.notices`.

    Raises:
        UsageError: the file holds no JSON object.
    """
    file: str | None = None
    with suppress(OSError):  # the hub cannot be reached
        file = cached_file(source, FILE, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return GenerationConfig.from_model_config(config)
    try:
        values = json.loads(Path(file).read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"it holds {briefly(values)}")
    except (OSError, ValueError, RecursionError) as error:
        wrong = f"{FILE} is no JSON object ({first_line(error)}); download it again, or remove it"
        raise UsageError(f"model {source}: {wrong}") from None
    generation = GenerationConfig()
    for name, value in values.items():
        if not name.startswith("_"):
            setattr(generation, name, value)
    return generation


class GenerationDefaults:
    """The defaults that a checkpoint's generation_config.json, config.json and tokenizer suggest.

    Attributes:
        sampling: temperature, top-p, top-k, min-p and penalties; without `do_sample` only the penalties.
            A value that is not valid is left out, and the others are kept.
        end_tokens: the tokens that any of the three names as an end of text.
        stop_strings: strings that end a text.
        notices: lines for the user about values that are not valid or not supported, and so are ignored.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._suggested = model.generation_config
        self.notices: list[str] = []
        self.sampling = self._sampling()
        self.end_tokens = self._end_tokens(model)
        self.stop_strings = self._stop_strings()
        for name, neutral in NOT_APPLIED.items():
            value = self._value(name)
            if value not in (None, neutral, [], {}):
                self._ignored(f"{name} {briefly(value)} is not supported")

    def _value(self, name: str) -> Any:
        return getattr(self._suggested, name, None)

    def _ignored(self, wrong: str, file: str = FILE) -> None:
        self.notices.append(f"{file}: {wrong}; it is ignored")

    def _sampling(self) -> SamplingParams:
        settings = DRAWN if self._value("do_sample") else ()
        valid: dict[str, Any] = {"temperature": 1.0} if settings else {}
        for name in (*settings, *PENALTIES):
            if (value := self._value(name)) is not None:
                try:
                    SamplingParams(**{name: value})
                except UsageError as error:
                    self._ignored(str(error))
                else:
                    valid[name] = value
        return SamplingParams(**valid)

    def _end_tokens(self, model: PreTrainedModel) -> frozenset[int]:
        text_config = model.config.get_text_config()
        named = [(self._value("eos_token_id"), FILE)]
        named += [
            (getattr(part, "eos_token_id", None), "config.json") for part in (model.config, text_config)
        ]
        own = None if self._tokenizer is None else self._tokenizer.eos_token_id
        named.append((own, "tokenizer_config.json"))
        vocabulary = getattr(text_config, "vocab_size", None)
        tokens = set()
        for value, file in named:
            for end in _flat(value):
                token = self._token(end)
                if token is None:
                    self._ignored(f"eos_token_id {briefly(end)} is not a token", file)
                elif token >= 0 and (vocabulary is None or token < vocabulary):
                    tokens.add(token)
        return frozenset(tokens)

    def _token(self, end: object) -> int | None:
        """Returns the token ID that a value means: an integer, also as a float or text, or a token's text."""
        if isinstance(end, bool):
            return None
        if isinstance(end, int | float) and end == end // 1:
            return int(end)
        if not isinstance(end, str):
            return None
        if re.fullmatch("[0-9]{1,18}", end):
            return int(end)
        vocabulary: dict[str, int] = {} if self._tokenizer is None else self._tokenizer.get_vocab()
        return vocabulary.get(end)

    def _stop_strings(self) -> tuple[str, ...]:
        value = self._value("stop_strings")
        if value is None or self._tokenizer is None:
            return ()
        try:
            return tuple(SamplingParams(stop=value).stop)
        except UsageError as error:
            self._ignored(f"stop_strings: {error}")
            return ()


def _flat(value: object) -> Iterator[object]:
    """Yields the values in nested lists, without None."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    elif value is not None:
        yield value
