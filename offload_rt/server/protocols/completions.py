"""Requests of OpenAI's completions, with some fields of llama.cpp's and vLLM's, and of the page."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from offload_rt.errors import UsageError, briefly
from offload_rt.sampling.params import MOST_ALTERNATIVES, SamplingParams, with_changes
from offload_rt.server.protocols.errors import ApiError
from offload_rt.text.tools import Tools

MOST_CHOICES = 16
IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"prompt_cache_options", "prompt_cache_retention", "cache_prompt", "timings_per_token"}
)
"""OpenAI's and llama.cpp's fields that change nothing about an answer here."""
UNSUPPORTED = frozenset(
    {"functions", "function_call", "logit_bias", "audio", "modalities", "prediction", "moderation"}
    | {"verbosity", "web_search_options", "best_of", "suffix", "json_schema", "grammar", "guided_json"}
    | {"guided_regex", "min_tokens", "stop_token_ids"}
)
REMEDIES = {
    "functions": "give them in tools",
    "function_call": "give it in tool_choice",
    "json_schema": "give it in response_format",
    "guided_json": "give it in response_format",
}
"""What to do about an unsupported field, other than to leave it out."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "modalities": (["text"],),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
}
"""Values of unsupported fields that ask for nothing, beside null, false, 0, an empty text, list or object."""
NO_EFFORT = "none"
"""The `reasoning_effort` of an answer without thoughts."""
EFFORTS = {
    NO_EFFORT: None,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""What chat templates know of each `reasoning_effort`; None: nothing."""
BUDGETS = ("thinking_budget", "thinking_budget_tokens")
"""Names of the most tokens of thoughts: Qwen's, and llama.cpp's."""
SWITCHES = ("enable_thinking", "thinking")
"""Names by which chat templates are told whether the model shall think."""
UNLIMITED = ("seed", "max_tokens", "max_completion_tokens", "top_k")
"""Fields whose value -1 asks for nothing: for any seed, and for no limit."""

GIVEN = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "stop", "seed", "ignore_eos", "json_schema"),
)
"""Fields of `SamplingParams` that a request may set."""

Number = StrictFloat | StrictInt
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Items of long lists are checked where they are used: pydantic keeps an error for each of a million.


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False  # answers are not padded, whatever it says


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")

    content: dict[str, Any] = Field(alias="schema")
    name: StrictStr | None = None
    description: StrictStr | None = None
    strict: StrictBool | None = None  # an answer fits the schema, whatever it says


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SampledRequest(BaseModel):
    """The fields of a request for generated text that all of OpenAI's protocols share."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stop: StrictStr | list[Any] | None = None
    seed: StrictInt | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: StrictBool | None = None


class GenerationRequest(SampledRequest):
    """The fields that both kinds of completion have."""

    max_tokens: StrictInt | None = Field(None, ge=1)
    n: StrictInt = Field(1, ge=1, le=MOST_CHOICES)
    response_format: ResponseFormat | None = None
    return_progress: StrictBool = False
    prompt_logprobs: StrictInt | None = Field(None, ge=0, le=MOST_ALTERNATIVES)

    @property
    def scored(self) -> int | None:
        """Number of alternatives that are asked for with each token of the prompt; None: it is not scored."""
        return self.prompt_logprobs

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives whose log probabilities are asked for with each token's; None: none are."""
        return None

    @property
    def limit(self) -> int | None:
        """Most new tokens that are asked for; None: nothing is said."""
        return self.max_tokens

    @property
    def thinking(self) -> bool | None:
        """Whether the model is to think before it answers; None: as its chat template has it."""
        return None

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the text must fit; None: any text.

        Raises:
            UsageError: one is announced and not given.
        """
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "object"}
        if form.json_schema is None:
            raise UsageError("response_format of type json_schema has no json_schema: give one")
        return form.json_schema.content

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that are given."""
        return {name: value for name in GIVEN if (value := getattr(self, name)) is not None}

    def params(self, suggested: SamplingParams, max_tokens: int) -> list[SamplingParams]:
        """Returns the parameters of each choice: the request's, and `suggested` ones for all else.

        A seed of several choices counts up, so that they differ.

        Raises:
            UsageError: a value is out of range.
        """
        params = with_changes(
            suggested, self.settings | {"max_tokens": max_tokens, "logprobs": self.alternatives}
        )
        params = params.seeded()
        assert params.seed is not None
        return [replace(params, seed=(params.seed + choice) % 2**63) for choice in range(self.n)]


class ChatRequest(GenerationRequest):
    """The body of a request for a chat completion."""

    messages: list[Any]
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: StrictStr | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: StrictBool | None = None
    thinking_budget: StrictInt | None = Field(None, ge=0, validation_alias=AliasChoices(*BUDGETS))
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None

    @property
    def alternatives(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise UsageError("top_logprobs is given without logprobs: add logprobs=true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def settings(self) -> dict[str, Any]:
        chat = {"tools": self.called, "thinking_budget": self.budget}
        return super().settings | {name: value for name, value in chat.items() if value is not None}

    @cached_property
    def called(self) -> Tools | None:
        """The tools that an answer may call; None: there are none.

        Raises:
            ApiError: they are not valid; names the field.
        """
        try:
            return Tools.of(self.tools, self.tool_choice, self.parallel_tool_calls)
        except UsageError as error:  # begins with the name of the field
            raise ApiError(400, str(error), "invalid_value", str(error).split()[0]) from None

    @property
    def continued(self) -> bool:
        """Whether the last message is the beginning of the answer, as it is by default if it is an answer.

        Raises:
            ApiError: an answer is to be continued and to be begun.
        """
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt are both true: set one of them"
            raise ApiError(400, message, "invalid_value", "continue_final_message")
        if self.continue_final_message is not None or self.add_generation_prompt:
            return bool(self.continue_final_message)
        last = self.messages[-1] if self.messages else None
        return isinstance(last, Mapping) and last.get("role") == "assistant" and not last.get("tool_calls")

    @property
    def effort(self) -> str | None:
        """How much the model is to think, for templates that ask; None: as the template has it."""
        return EFFORTS[self._template_variables.get("reasoning_effort") or NO_EFFORT]

    @property
    def budget(self) -> int | None:
        """Most tokens of thoughts; None: any number."""
        budget: int | None = self._template_variables.get("thinking_budget")
        return budget

    @property
    def thinking(self) -> bool | None:
        variables = self._template_variables
        given = [value for name in SWITCHES if (value := variables.get(name)) is not None]
        return given[0] if given else False if variables.get("reasoning_effort") == NO_EFFORT else None

    @cached_property
    def _template_variables(self) -> dict[str, Any]:
        """What is said of thoughts, by the names of the chat template's variables.

        Raises:
            ApiError: `chat_template_kwargs` has another key, or a value of the wrong kind.
        """
        names = ("reasoning_effort", "enable_thinking", "thinking_budget")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        for key, value in (self.chat_template_kwargs or {}).items():
            if key in SWITCHES:
                valid, remedy = isinstance(value, bool), "use true or false"
            elif key == "reasoning_effort":
                valid, remedy = value in EFFORTS, f"use {', '.join(EFFORTS)}"
            elif key == "thinking_budget":
                valid, remedy = type(value) is int and value >= 0, "use 0 or more"
            else:
                known = ", ".join((*SWITCHES, "reasoning_effort", "thinking_budget"))
                valid, remedy = False, f"use {known}, or leave it out"
            if not valid:
                message = f"chat_template_kwargs {key}={briefly(value)} is not supported: {remedy}"
                raise ApiError(400, message, "invalid_value", "chat_template_kwargs")
            given.setdefault(key, value)
        return given


class CompletionRequest(GenerationRequest):
    """The body of a request for a completion of a text or of token IDs."""

    prompt: StrictStr | list[Any]
    max_tokens: StrictInt | None = Field(None, ge=0)
    logprobs: StrictInt | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    echo: StrictBool = False

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def scored(self) -> int | None:
        wanted = (self.logprobs if self.echo else None, self.prompt_logprobs)
        return max((count for count in wanted if count is not None), default=None)

    @property
    def continues(self) -> bool:
        """Whether text is generated behind the prompt.

        Raises:
            ApiError: neither text nor anything about the prompt is asked for.
        """
        if self.max_tokens == 0 and not self.echo and self.scored is None:
            message = "max_tokens 0 generates nothing: use 1 or more, or add echo or prompt_logprobs"
            raise ApiError(400, message, "invalid_value", "max_tokens")
        return self.max_tokens != 0

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.continues else 1

    @property
    def prompts(self) -> list[Any]:
        """The prompts, of which there may be several."""
        prompt = self.prompt
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        return list(prompt) if several else [prompt]


class TokenizeRequest(BaseModel):
    """The body of a request for the tokens of a text, as llama.cpp has it."""

    model_config = ConfigDict(extra="forbid")

    content: StrictStr
    add_special: StrictBool = False


class DocumentRequest(BaseModel):
    """The body of a request for the text of a file."""

    model_config = ConfigDict(extra="forbid")

    name: StrictStr
    data: StrictStr  # base64
    encoding: StrictStr | None = Field(None, max_length=64)  # Python remembers every unknown name


def supported(
    body: Mapping[str, Any],
    *,
    ignored: Collection[str] = IGNORED,
    unsupported: Collection[str] = UNSUPPORTED,
) -> dict[str, Any]:
    """Returns a request without the fields that change nothing, and those that are null.

    Args:
        ignored: fields that change nothing, whatever their value.
        unsupported: fields that are refused, unless their value asks for nothing.

    Raises:
        ApiError: it asks for something that is not supported; names the field.
    """
    values = {}
    for name, value in body.items():
        if name in unsupported:
            if value and value not in NEUTRAL.get(name, ()):
                message = f"{name} is not supported by this server: {REMEDIES.get(name, 'leave it out')}"
                raise ApiError(400, message, "unsupported_parameter", name)
        elif name in ignored or value is None or (name in UNLIMITED and value == -1):
            continue
        elif name != "stop" or value != "":
            values[name] = value
    return values


def text_length(prompt: object) -> int:
    """Returns the number of characters of a text, or of all contents of messages."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):
        return sum(map(text_length, prompt))
    if isinstance(prompt, Mapping):
        return text_length(prompt.get("content")) + text_length(prompt.get("text"))
    return 0
