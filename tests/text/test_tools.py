"""Calls of tools in answers: their formats, whatever only looks like a call, and every cut of a text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from support.chat_templates import TOOL_TEMPLATES, tokenizer

from offload_rt import UsageError
from offload_rt.text.answers import (
    Answer,
    AnswerSplitter,
    CallArguments,
    CallBegin,
    Content,
    Thought,
    split_answer,
)
from offload_rt.text.call_formats import CALL_FORMATS, CallFormat
from offload_rt.text.calls import CallMarks, CallSplitter
from offload_rt.text.thoughts import FORMATS, THINK, ThoughtSplitter
from offload_rt.text.tokenize import mark_token
from offload_rt.text.tools import Tool, ToolCall, Tools, checked_tools

HARMONY, MISTRAL, MISTRAL_LIST, GLM, CODER, HERMES, LLAMA = CALL_FORMATS
CHANNELS = FORMATS[0]


def function(name: str, strict: bool | None = None, **properties: object) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    described = {"name": name, "description": f"the {name}", "parameters": parameters}
    return {"type": "function", "function": described if strict is None else described | {"strict": strict}}


SAIL = function("sail", to={"type": "string"}, knots={"type": "integer"}, crew={"type": ["array", "null"]})
TOOLS = Tools(checked_tools([SAIL, function("look")]))


def splitter(form: CallFormat, tools: Tools = TOOLS, inside: bool = False) -> AnswerSplitter:
    thoughts = ThoughtSplitter(inside, CHANNELS if form.messages else THINK)
    return AnswerSplitter(thoughts, CallSplitter(form, tools), form.messages)


def in_pieces(pieces: list[str], fresh: AnswerSplitter) -> Answer:
    """The parts of pieces, joined."""
    parts = [part for piece in pieces for part in fresh.push(piece)] + fresh.finish()
    texts = {kind: "".join(p.text for p in parts if isinstance(p, kind)) for kind in (Thought, Content)}
    begun = [part for part in parts if isinstance(part, CallBegin)]
    assert [part.index for part in begun] == list(range(len(begun)))
    calls = []
    for begin in begun:
        written = [p.text for p in parts if isinstance(p, CallArguments) and p.index == begin.index]
        calls.append(ToolCall(begin.name, "".join(written)))
    return Answer(texts[Thought], texts[Content], tuple(calls))


def answer(form: CallFormat, text: str, tools: Tools = TOOLS, inside: bool = False) -> Answer:
    """The parts of a text, which are the same however it is cut in two, and character by character."""
    whole = split_answer(text, splitter(form, tools, inside))
    for at in range(len(text) + 1):
        assert in_pieces([text[:at], text[at:]], splitter(form, tools, inside)) == whole, (
            text[:at],
            text[at:],
        )
    assert in_pieces(list(text), splitter(form, tools, inside)) == whole
    return whole


TO_PORT = '{"to": "Nantucket", "knots": 7}'
COMMENTARY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"

CALLS: list[tuple[CallFormat, str, str, list[tuple[str, Any]]]] = [
    (
        HERMES,
        f'<tool_call>\n{{"name": "sail", "arguments": {TO_PORT}}}\n</tool_call>',
        "",
        [("sail", TO_PORT)],
    ),
    (HERMES, 'Aye.\n\n<tool_call>{"arguments": {}, "name": "look"}</tool_call> ', "Aye.", [("look", "{}")]),
    (HERMES, '<tool_call>{"name": "look"}</tool_call>', "", [("look", "{}")]),
    (
        HERMES,
        '<tool_call>{"name": "look", "arguments": {}}</tool_call>\n<tool_call>'
        '{"name": "sail", "arguments": {"to": "</tool_call> {\\"\\\\"}}</tool_call> and more',
        "and more",
        [("look", "{}"), ("sail", '{"to": "</tool_call> {\\"\\\\"}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "sail", "arguments": "{\\"knots\\": 7}"}</tool_call>',
        "",
        [("sail", '{"knots": 7}')],
    ),
    (LLAMA, f'{{"name": "sail", "parameters": {TO_PORT}}}', "", [("sail", TO_PORT)]),
    (LLAMA, '\n<|python_tag|>{"name": "look", "parameters": {}}', "", [("look", "{}")]),
    (
        LLAMA,
        '{"name": "look", "parameters": {}}; {"name": "look", "arguments": {"a": [1, {}]}}',
        "",
        [("look", "{}"), ("look", '{"a": [1, {}]}')],
    ),
    (LLAMA, 'So: <|python_tag|>{"name": "look"} Aye.', "So:  Aye.", [("look", "{}")]),
    (MISTRAL, "[TOOL_CALLS]sail[ARGS]" + TO_PORT, "", [("sail", TO_PORT)]),
    (MISTRAL, "Aye.[TOOL_CALLS]look[CALL_ID]ab1[ARGS]{}[TOOL_CALLS]look{}", "Aye.", 2 * [("look", "{}")]),
    (
        MISTRAL_LIST,
        '[TOOL_CALLS] [{"name": "look", "arguments": {}, "id": "a"}, '
        f'{{"name": "sail", "arguments": {TO_PORT}}}]',
        "",
        [("look", "{}"), ("sail", TO_PORT)],
    ),
    (
        CODER,
        "<tool_call>\n<function=sail>\n<parameter=to>\n7\n</parameter>\n<parameter=knots>\n7\n</parameter>\n"
        "<parameter=crew>\n[1]\n</parameter>\n</function>\n</tool_call>",
        "",
        [("sail", '{"to": "7", "knots": 7, "crew": [1]}')],
    ),
    (
        CODER,
        "Aye. <function=sail><parameter=to>\na\n</parameter> b\n</parameter>\n<parameter=knots>fast"
        "</parameter></function>",
        "Aye.",
        [("sail", '{"to": "a\\n</parameter> b", "knots": "fast"}')],
    ),
    (CODER, "<tool_call>\n<function=look>\n</function>\n</tool_call>", "", [("look", "{}")]),
    (
        GLM,
        "<tool_call>sail\n<arg_key>to</arg_key>\n<arg_value>a\n</arg_value>\n<arg_key>crew</arg_key>\n"
        "<arg_value>null</arg_value>\n<arg_key>more</arg_key><arg_value>1</arg_value></tool_call>",
        "",
        [("sail", '{"to": "a\\n", "crew": null, "more": 1}')],
    ),
    (GLM, "<tool_call>look</tool_call>\n<tool_call>look\n</tool_call>", "", 2 * [("look", "{}")]),
    (HARMONY, COMMENTARY.format("sail", TO_PORT), "", [("sail", TO_PORT)]),
    (HARMONY, " to=functions.look<|channel|>commentary json<|message|>{}", "", [("look", "{}")]),
    (
        HARMONY,
        "<|channel|>final<|message|>Aye.<|end|><|start|>assistant" + COMMENTARY.format("look", "{}"),
        "Aye.",
        [("look", "{}")],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CALLS)
def test_calls(form: CallFormat, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert answer(form, text) == Answer("", content, tuple(ToolCall(*call) for call in calls))


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "look", "arguments": {}}'),
        (HERMES, '<tool_call>{"name": "look", "arguments": {}}</tool_call'),
        (HERMES, '<tool_call>{"name": "look", "arguments": {},}</tool_call> '),
        (HERMES, '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "look", "arguments": {"a": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "look", "arguments": {"a": 01}}</tool_call>'),
        (HERMES, "<tool_call>{'name': 'look'}</tool_call>"),
        (HERMES, '<tool_call>["look"]</tool_call>'),
        (HERMES, '<tool_call>{"name": "look", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
        (HERMES, '<tool_call>{"name": 7}</tool_call>'),
        (HERMES, "write <tool_call> and then </tool_call>, that is all"),
        (HERMES, '{"name": "look", "arguments": {}}'),
        (HERMES, "<tool_call>" + 20_000 * "["),
        (HERMES, '<tool_call>{"name": "look", "a": ' + 5000 * "[" + 5000 * "]" + "}</tool_call>"),
        (LLAMA, 'Aye: {"name": "look", "parameters": {}}'),
        (LLAMA, '{"name": "look", "parameters": {}'),
        (LLAMA, '{"sail": {"a": 1}} {'),
        (LLAMA, "<|python_tag|>print({})"),
        (MISTRAL, "[TOOL_CALLS]fly[ARGS]{}"),
        (MISTRAL, "[TOOL_CALLS]look[ARGS][]"),
        (MISTRAL, '[TOOL_CALLS][{"name": "look"}, {"name": "fly"}]'),
        (MISTRAL, "[TOOL_CALLS][]"),
        (MISTRAL, "[TOOL_CALLS]"),
        (CODER, "<tool_call>\n<function=look>\n</tool_call>"),
        (CODER, "<function=fly></function>"),
        (CODER, "<function=look><parameter=a>1</function>"),
        (GLM, "<tool_call>look at it</tool_call>"),
        (GLM, "<tool_call>look<arg_key>a</arg_key></tool_call>"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_only_looks_like_a_call_is_text(form: CallFormat, text: str) -> None:
    whole = split_answer(text, splitter(form))
    assert whole == Answer("", text, ())
    if len(text) < 200:
        answer(form, text)


def test_a_call_behind_what_only_looks_like_one() -> None:
    text = '<tool_call>{"name": "<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    assert answer(HERMES, text) == Answer("", '<tool_call>{"name": "', (ToolCall("look", "{}"),))


def test_harmony_messages_to_others_are_thoughts() -> None:
    """As are all that are in no channel of answers."""
    text = COMMENTARY.format("fly", "{}") + "<|start|>assistant" + COMMENTARY.format("look", "{")
    whole = answer(HARMONY, text)
    assert whole.tool_calls == () and "{}" in whole.thoughts and whole.content == ""


def test_thoughts_come_apart_and_calls_in_them_are_thoughts() -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    calls = (ToolCall("look", "{}"),)
    assert answer(HERMES, f"<think>\n{call}\n</think>\n\n{call}") == Answer(f"{call}\n", "", calls)
    assert answer(HERMES, f"well</think>\n\nAye.\n{call}", inside=True) == Answer("well", "Aye.", calls)
    assert answer(HERMES, f"<think>{call}") == Answer(call, "", ())
    harmony = f"<|channel|>analysis<|message|>well<|end|><|start|>assistant{COMMENTARY.format('look', '{}')}"
    assert answer(HARMONY, harmony) == Answer("well", "", calls)


def test_only_tools_that_may_be_called_are() -> None:
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    for tools, calls in (
        (Tools(TOOLS.tools, "look"), 1),
        (Tools(TOOLS.tools, "sail"), 0),
        (Tools(TOOLS.tools, "required"), 1),
    ):
        assert len(answer(HERMES, text, tools).tool_calls) == calls


# -------------------------------------------------------------------------------------- properties

FRAGMENTS = {
    HERMES: ["<tool_call>", "</tool_call>", '{"name": "look"', ', "arguments": {}}', "<tool", "\n", "{"],
    LLAMA: ["<|python_tag|>", '{"name": "look"', ', "parameters": {}}', "; ", "{", "}", "<|"],
    MISTRAL: ["[TOOL_CALLS]", "look", "[ARGS]", "{}", "[", "]", "[TOOL", '{"name": "look"}'],
    CODER: [
        "<tool_call>",
        "<function=look>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "</tool_call>",
        "<",
    ],
    GLM: ["<tool_call>", "look", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"],
    HARMONY: [
        "<|channel|>",
        "commentary",
        " to=functions.look",
        "<|message|>",
        "{}",
        "<|call|>",
        "<|start|>",
        "final",
    ],
}


@pytest.mark.parametrize("form", FRAGMENTS, ids=lambda form: type(form).__name__)
def test_any_text_gives_the_same_parts_however_it_is_cut(form: CallFormat) -> None:
    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(some.lists(some.sampled_from([*FRAGMENTS[form], "Aye", " ", "é"]), max_size=14), some.data())
    def check(fragments: list[str], data: some.DataObject) -> None:
        text = "".join(fragments)
        whole = split_answer(text, splitter(form))
        cuts = sorted(data.draw(some.lists(some.integers(0, len(text)), max_size=6)))
        pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        assert in_pieces(pieces, splitter(form)) == whole == in_pieces(list(text), splitter(form))
        for call in whole.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)
        if not whole.tool_calls and not form.messages:
            assert whole.content == text, "nothing is lost"

    check()


def test_all_text_around_calls_is_content() -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    words = some.sampled_from(["Aye", "<tool_call>", "{", " ", "\n", '"', "</tool_call>"])

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(some.lists(some.lists(words, max_size=4).map("".join), min_size=2, max_size=4))
    def check(texts: list[str]) -> None:
        whole = split_answer(call.join(texts), splitter(HERMES))
        assert len(whole.tool_calls) == len(texts) - 1
        assert whole.content.strip() == "".join(texts).strip()

    check()


# ----------------------------------------------------------------------------- which format it is


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("hermes", HERMES),
        ("coder", CODER),
        ("llama", LLAMA),
        ("mistral", MISTRAL),
        ("glm", GLM),
        ("harmony", HARMONY),
    ],
)
def test_the_format_is_that_of_the_template(name: str, form: CallFormat) -> None:
    marks = CallMarks(tokenizer(TOOL_TEMPLATES[name]))
    assert marks.format is form and not marks.described


def test_the_format_is_else_that_of_the_vocabulary() -> None:
    made = tokenizer("{{ tools }}")
    assert CallMarks(made).described and isinstance(CallMarks(made).format, type(HERMES))
    made.add_tokens(["[TOOL_CALLS]", "<|eom_id|>", "<|python_tag|>"], special_tokens=True)
    assert CallMarks(made).format is MISTRAL_LIST
    made.chat_template = "{{ tools }} <|python_tag|>"
    marks = CallMarks(made)
    tag, eom = (mark_token(made, mark) for mark in ("<|python_tag|>", "<|eom_id|>"))
    assert (
        tag is not None
        and marks.format is LLAMA
        and marks.special[tag] == "<|python_tag|>"
        and marks.ends == {eom}
    )
    made.chat_template = "no list of functions"
    assert CallMarks(made).described


# ------------------------------------------------------------------------------------ what is given


def test_tools_of_openai() -> None:
    tools = Tools.of([SAIL, {"type": "function", "function": {"name": "look", "strict": True}}], None)
    assert tools is not None and tools.choice == "auto" and tools.constrained
    assert tools.tools[0].json() == SAIL and hash(tools)
    assert tools.tools[1] == Tool("look", strict=True)
    named = Tools.of([SAIL], {"type": "function", "function": {"name": "sail"}}, False)
    assert named == Tools(checked_tools([SAIL]), "sail", False)
    assert Tools.of(None) is Tools.of([], "none") is None
    assert checked_tools(tools.tools) == tools.tools


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("look", "tools 'look': give a list of tools"),
        ([SAIL, 7], "tools[1] is 7: give a dict of type and function"),
        ([{"type": "search"}], "tools[0].type is 'search': only tools of type 'function' exist"),
        ([{"type": "function"}], "tools[0].function is None: give a dict"),
        ([function("a b")], "tools[0].function.name is 'a b': use 1 to 128 letters"),
        ([function("auto")], "tools[0].function.name 'auto' is a value of tool_choice: rename the tool"),
        ([SAIL, SAIL], "tools[1].function.name 'sail' is given twice"),
        (
            [{"type": "function", "function": {"name": "a", "description": 1}}],
            "tools[0].function.description is 1: give a text",
        ),
        (
            [{"type": "function", "function": {"name": "a", "parameters": []}}],
            "tools[0].function.parameters is []: give a JSON schema",
        ),
        (
            [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}],
            "tools[0].function.parameters.type is 'array': arguments are of type 'object'",
        ),
        (
            [{"type": "function", "function": {"name": "a", "parameters": {"x": {1}}}}],
            "tools[0].function.parameters {'x': {1}} is not JSON",
        ),
        ([function("a", strict="yes")], "tools[0].function.strict must be True or False, got 'yes'"),  # type: ignore[arg-type]
        (513 * [SAIL], "tools has 513 tools: give at most 512"),
    ],
)
def test_what_is_no_list_of_tools(tools: Any, message: str) -> None:
    with pytest.raises(UsageError) as told:
        checked_tools(tools)
    assert str(told.value).startswith(message)


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        (None, "required", "tool_choice 'required' needs tools: give them in tools"),
        ([SAIL], "fly", "tool_choice 'fly' is no tool: use none, auto, required, or one of sail"),
        ([SAIL], {"type": "function"}, "tool_choice {'type': 'function'}: give"),
        ([SAIL], 7, "tool_choice 7: give none, auto, required, or the name of a tool"),
    ],
)
def test_what_is_no_choice(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(UsageError) as told:
        Tools.of(tools, choice)
    assert str(told.value).startswith(message)
