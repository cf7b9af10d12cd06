"""Calls that a grammar forces: of whole engines with random models, and what may follow, by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.chat_templates import TOOL_TEMPLATES, tokenizer, user
from support.small_engine import SIZES
from support.tiny_models import noisy_copy, tiny_target

from offload_rt import LLM, SamplingParams, UsageError
from offload_rt.text.call_formats import CALL_FORMATS
from offload_rt.text.call_grammar import call_grammar
from offload_rt.text.calls import CallMarks
from offload_rt.text.json_grammar import JsonGrammar, JsonGrammars
from offload_rt.text.tools import Tool, Tools, checked_tools

FORMATS = {
    "hermes": CALL_FORMATS[5],
    "coder": CALL_FORMATS[4],
    "llama": CALL_FORMATS[6],
    "mistral": CALL_FORMATS[1],
    "glm": CALL_FORMATS[3],
    "harmony": CALL_FORMATS[0],
}
DENSE = {"whitespace_flexible": False}  # tiny models like blanks


def strict(**properties: object) -> dict[str, Any]:
    required = [name for name in properties if not name.startswith("maybe_")]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        "x-guidance": DENSE,
    }


SAIL = Tool(
    "sail",
    "Sails.",
    strict(
        to={"type": "string", "maxLength": 8},
        knots={"type": "integer", "minimum": 1, "maximum": 9},
        rig={"enum": ["sloop", "brig"]},
        maybe_crew={"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    ),
)
LOOK = Tool("look")


def fits(name: str, arguments: str) -> bool:
    values = json.loads(arguments)
    if name == "look":
        return bool(values == {})
    assert name == "sail"
    crew = values.pop("maybe_crew", [])
    return bool(
        list(values) == ["to", "knots", "rig"]
        and isinstance(values["to"], str)
        and len(values["to"]) <= 8
        and values["knots"] in range(1, 10)
        and values["rig"] in ("sloop", "brig")
        and len(crew) <= 2
        and all(isinstance(member, bool) for member in crew)
    )


def with_tokens(name: str, *more: str) -> Any:
    made = tokenizer(TOOL_TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    form = FORMATS[name]
    marks = dict.fromkeys((*form.marks, *form.ends, *more))
    made.add_tokens(list(marks), special_tokens=True)
    return made


@contextmanager
def opened(made: Any, config: str = "naive") -> Iterator[LLM]:
    target = tiny_target("llama-gqa", vocabulary=len(made))
    with LLM.from_models(target, noisy_copy(target), made, config, SIZES) as llm:
        yield llm


@pytest.mark.parametrize(
    ("name", "tokens"), [*((name, True) for name in FORMATS), ("hermes", False), ("coder", False)]
)
def test_calls_that_are_required_fit_their_schemas(name: str, tokens: bool) -> None:
    """Whether marks are tokens or text."""
    made = with_tokens(name) if tokens else tokenizer(TOOL_TEMPLATES[name])
    choices = [Tools((LOOK, SAIL), choice, parallel=False) for choice in ("required", "sail", "sail")]
    params = [
        SamplingParams(1.0, max_tokens=250, seed=seed, tools=tools, thinking_budget=5)
        for seed, tools in enumerate(choices)
    ]
    with opened(made) as llm:
        prompt = llm.chat_template.encode([user("Go.")], tools=choices[0])
        for tools, result in zip(choices, llm.generate(3 * [prompt], params), strict=True):
            assert result.finish_reason in ("stop", "eos") and not result.answer, result.text
            (called,) = result.tool_calls
            assert fits(called.name, called.arguments), result.text
            assert tools.choice == "required" or called.name == "sail"


def test_speculation_writes_the_calls_of_plain_decoding() -> None:
    params = SamplingParams(max_tokens=140, tools=Tools((LOOK, SAIL), "sail"), thinking_budget=3)
    made = with_tokens("hermes", "<think>", "</think>")
    results = []
    for config in ("plain", "triforce"):
        with opened(made, config) as llm:
            results.append(llm.chat([user("Go.")], params))
    plain, drafted = results
    assert drafted.tokens == plain.tokens and drafted.timings.accepted_tokens > 0
    assert drafted.tool_calls == plain.tool_calls != []


def test_several_calls() -> None:
    tools = Tools((LOOK,), "required")
    with opened(with_tokens("hermes")) as llm:
        result = llm.chat([user("Go.")], max_tokens=250, tools=tools, ignore_eos=True)
    assert len(result.tool_calls) > 1
    assert all(fits(call.name, call.arguments) for call in result.tool_calls)


# --------------------------------------------------------------------------- what may follow, by hand


def grammar(name: str, tools: Tools, schema: Any = None) -> tuple[JsonGrammar, Any]:
    made = with_tokens(name)
    lark = call_grammar(CallMarks(made), tools, schema)
    return JsonGrammars(made, len(made)).calls(lark, (0,)), made


def following(grammar: JsonGrammar, made: Any, text: str) -> set[str]:
    words = grammar.allowed(made(text, add_special_tokens=False)["input_ids"])
    if words is None:
        return set()
    tokens = [at for at in range(64 * len(words)) if int(words[at // 64]) >> (at % 64) & 1]
    return {"end" if token == 0 else str(made.decode([token])) for token in tokens}


STRICT = checked_tools(
    [{"type": "function", "function": {"name": "look", "parameters": strict(), "strict": True}}]
)


def test_a_strict_tool_constrains_a_call_once_it_begins() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n'
    free, made = grammar("hermes", Tools(STRICT))
    assert {"a", "{", "<tool_call>", "end"} <= following(free, made, "Aye. ")
    assert following(free, made, "Aye.<tool_call>") == {"\n"}
    assert following(free, made, f"Aye.{call}") == {"</tool_call>"}
    assert following(free, made, f"Aye.{call}</tool_call>") == {"end", "\n"}
    single, made = grammar("hermes", Tools(STRICT, parallel=False))
    assert following(single, made, f"Aye.{call}</tool_call>") == {"end"}


def test_a_call_in_place_of_an_answer() -> None:
    free, made = grammar("llama", Tools(STRICT))
    assert {"a", "{", "end"} <= following(free, made, "")
    assert following(free, made, "{") == {'"'} and {"{", "x"} <= following(free, made, "a {")
    assert following(free, made, '{"name": "look", "parameters": {}}') == {"end"}


def test_a_schema_beside_calls() -> None:
    either, made = grammar("hermes", Tools(STRICT), {"enum": ["red"]})
    assert following(either, made, "") == {'"', "\n", "<tool_call>"}
    assert following(either, made, '"red"') == {"end"}
    harmony, made = grammar("harmony", Tools(STRICT), {"enum": ["red"]})
    assert following(harmony, made, "<|channel|>") == {"c", "f"}
    assert following(harmony, made, '<|channel|>final<|message|>"red"') == {"end"}


def test_without_a_constraint_there_is_no_grammar() -> None:
    for tools in (Tools((SAIL,)), Tools((SAIL,), "none"), Tools(STRICT, "none")):
        assert not tools.constrained
    for tools in (
        Tools(STRICT),
        Tools((SAIL,), parallel=False),
        Tools((SAIL,), "sail"),
        Tools((SAIL,), "required"),
    ):
        assert tools.constrained


def test_a_schema_that_cannot_be_enforced_is_refused() -> None:
    tool = Tool("look", parameters={"type": "object", "properties": {"a": {"type": "nope"}}})
    assert SamplingParams(tools=Tools((tool,)))
    with pytest.raises(
        UsageError, match="tool look: its parameters is refused by llguidance: Invalid type: nope"
    ):
        SamplingParams(tools=Tools((tool,), "required"))
    with pytest.raises(UsageError, match="tools must be of type Tools, got 7"):
        SamplingParams(tools=7)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="thinking-budget -1 is out of range: use 0 or more"):
        SamplingParams(thinking_budget=-1)
