"""Chats with tools by the Python API, with models that write what they are made to write."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat_templates import LLAMA, tokenizer, user
from support.small_engine import SIZES
from support.tiny_models import tiny_target
from support.word_models import chain, words

from offload_rt import LLM, SamplingParams, UsageError
from offload_rt.text.answers import CallArguments, CallBegin, Content, Thought
from offload_rt.text.tools import ToolCall, Tools

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ASKED = "{# tools <tool_call> </tool_call> #}{% for m in messages %}{{ m.content }} {% endfor %}[user]"
MISTRAL = "{# tools [TOOL_CALLS] #}{% for m in messages %}{{ m.content }} {% endfor %}[user]"
HERMES_CALL = ["<tool_call>", '{"name":"look",', '"arguments":{}}', "</tool_call>"]
MISTRAL_CALL = ["[TOOL_CALLS]", '[{"name":"look",', '"arguments":{}}]']


def writing(pieces: list[str], template: str, special: tuple[str, ...] = ()) -> tuple[Any, Any]:
    made = words(*dict.fromkeys(pieces), template=template, special=special)
    return chain(made, ["[user]", *pieces, "</s>"]), made


@pytest.mark.parametrize(
    ("pieces", "template", "special"),
    [
        (HERMES_CALL, ASKED, ()),
        (HERMES_CALL, ASKED, ("<tool_call>",)),
        (MISTRAL_CALL, MISTRAL, ("[TOOL_CALLS]",)),
    ],
)
def test_calls_are_in_the_result_and_in_the_stream(
    pieces: list[str], template: str, special: tuple[str, ...]
) -> None:
    model, made = writing(["<think>", "well", "</think>", "aye", *pieces], template, special)
    with LLM.from_models(model, None, made, "plain", SIZES) as llm:
        result = llm.chat([user("Who?")], tools=[LOOK], max_tokens=20)
        assert (result.thoughts, result.answer.strip(), result.finish_reason) == ("well ", "aye", "eos")
        (call,) = result.tool_calls
        assert call.name == "look" and call.arguments == "{}"
        assert result.to_json()["tool_calls"] == [{"name": "look", "arguments": "{}"}]
        stream = llm.stream_chat([user("Who?")], tools=[LOOK], max_tokens=20)
        splitter = stream.answers()
        parts = [part for event in stream for part in splitter.push(event.text)] + splitter.finish()
        kinds = [type(part) for part in parts if not isinstance(part, Thought)]
        assert kinds[-2:] == [CallBegin, CallArguments] and Content in kinds
        for tools in ([LOOK], None):
            plain = llm.chat([user("Who?")], max_tokens=20, tools=tools, tool_choice="none")
            assert plain.tool_calls == [] and plain.answer.startswith("aye")
            assert ("look" in plain.answer) and "tool_calls" not in plain.to_json()
        tools_of = Tools.of([LOOK])
        for same in (
            llm.generate([user("Who?")], max_tokens=20, tools=tools_of),
            *llm.generate(2 * [[user("Who?")]], max_tokens=20, tools=tools_of),
        ):
            assert (same.tokens, same.tool_calls) == (result.tokens, result.tool_calls)
        with llm.read([user("Who?")]) as context, pytest.raises(UsageError, match="asked without tools"):
            context.ask(None, tools=tools_of)
        named = llm.chat([user("Who?")], max_tokens=20, tools=Tools.of([LOOK], "auto"))
        assert named.tool_calls == [ToolCall("look", "{}")]


def test_a_token_that_ends_a_turn_behind_a_call_ends_the_text() -> None:
    template = "{# tools <|python_tag|> #}{% for m in messages %}{{ m.content }} {% endfor %}[user]"
    pieces = ["<|python_tag|>", '{"name":"look",', '"parameters":{}}', "<|eom_id|>", "aye"]
    model, made = writing(pieces, template, ("<|python_tag|>", "<|eom_id|>"))
    with LLM.from_models(model, None, made, "plain", SIZES) as llm:
        result = llm.chat([user("Who?")], tools=[LOOK], max_tokens=20)
        assert (result.finish_reason, result.tool_calls) == ("eos", [ToolCall("look", "{}")])
        assert llm.chat([user("Who?")], max_tokens=20).text.endswith("aye")


def test_an_answer_is_continued() -> None:
    made = tokenizer(LLAMA, bos_token="<s>")
    with LLM.from_models(tiny_target("llama-gqa", vocabulary=257), None, made, "plain", SIZES) as llm:
        whole = llm.chat([user("Who?")], max_tokens=12)
        begun = [user("Who?"), {"role": "assistant", "content": llm.decode(whole.tokens[:4])}]
        rest = llm.chat(begun, max_tokens=8, continue_final=True)
        if llm.encode(begun[1]["content"], special=False) == whole.tokens[:4]:
            assert rest.tokens == whole.tokens[4:]
        assert rest.prompt_tokens == whole.prompt_tokens + len(llm.encode(begun[1]["content"], special=False))


def test_what_is_wrong_with_tools_is_told() -> None:
    made = tokenizer(LLAMA, bos_token="<s>")
    with LLM.from_models(tiny_target("llama-gqa", vocabulary=257), None, made, "plain", SIZES) as llm:
        with pytest.raises(UsageError, match=r"tools\[0\].function.name is None"):
            llm.chat([user("Who?")], tools=[{"type": "function", "function": {}}])
        with pytest.raises(UsageError, match="tool_choice 'fly' is no tool"):
            llm.chat([user("Who?")], tools=[LOOK], tool_choice="fly")
        assert llm.chat([user("Who?")], SamplingParams(max_tokens=3), tools=[]).tool_calls == []
