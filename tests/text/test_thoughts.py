"""Thoughts and answers, however models mark them: apart in results, in the history and on the wire."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from support.chat_templates import QWEN, R1, user
from support.small_engine import SIZES
from support.tiny_models import byte_tokenizer, tiny_target
from support.word_models import chain, words
from transformers import PreTrainedTokenizerFast

from offload_rt import LLM, UsageError
from offload_rt.server.protocols.completion_answers import ChatReply
from offload_rt.text.thoughts import FORMATS, THINK, ThoughtMarks, ThoughtSplitter

HARMONY, MISTRAL, SEED, GEMMA, COHERE, *_ = FORMATS
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("form", "text", "inside", "thought", "answer"),
    [
        (THINK, "<think>\nwell\n</think>\n\nyes", False, "well", "yes"),
        (THINK, "well</think>yes", True, "well", "yes"),
        (THINK, " yes </think", False, "", "yes </think"),
        (THINK, "a <think> tag", False, "", "a <think> tag"),
        (THINK, "<thin", False, "", "<thin"),
        (THINK, "<think>well</thi", False, "well</thi", ""),
        (THINK, "<think></think> yes", False, "", "yes"),
        (THINK, "", True, "", ""),
        (MISTRAL, "[THINK]well[/THINK]yes [THINK]", False, "well", "yes [THINK]"),
        (SEED, "<seed:think>well</seed:think>yes", False, "well", "yes"),
        (GEMMA, "<|channel>thought\nwell\n<channel|>yes", False, "well", "yes"),
        (GEMMA, "<|channel>thought\n<channel|>yes", False, "", "yes"),
        (
            COHERE,
            "<|START_THINKING|>well<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>",
            False,
            "well",
            "yes",
        ),
        (COHERE, "<|START_RESPONSE|>yes<|END_RESPONSE|>", False, "", "yes"),
        (HARMONY, f"<|channel|>analysis<|message|>well<|end|>{FINAL}yes", False, "well", "yes"),
        (HARMONY, "<|channel|>final <|constrain|>json<|message|>{}<|end|>", False, "", "{}"),
        (
            HARMONY,
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
            f"{FINAL}yes<|end|>",
            False,
            "ab",
            "yes",
        ),
        (HARMONY, "<|channel|>analysis<|message|>well", False, "well", ""),
        (HARMONY, "<|channel|>ana", False, "", ""),
        (HARMONY, "yes", False, "", "yes"),
        (HARMONY, f"well<|end|>{FINAL}yes", True, "well", "yes"),
    ],
)
def test_thoughts(form: Any, text: str, inside: bool, thought: str, answer: str) -> None:
    """However the text is cut into pieces."""
    for size in (1, 2, 5, 1000):
        splitter, parts = ThoughtSplitter(inside, form), [["", ""]]
        for start in range(0, len(text), size):
            parts.append(list(splitter.push(text[start : start + size])))
        parts.append(list(splitter.finish()))
        assert ["".join(part).strip() for part in zip(*parts, strict=True)] == [thought, answer]


ASKED = "{% for m in messages %}{{ m.content }} {% endfor %}[user]"
CASES = {
    "mistral": (ASKED, ("[THINK]",), "[/THINK]"),
    "seed": ("{# <seed:think> #}" + ASKED, ("<seed:think>",), "</seed:think>"),
    "gemma": ("{# <|channel>thought #}" + ASKED, ("<|channel>", "thought"), "<channel|>"),
    "special think": (ASKED, ("<think>",), "</think>"),
}


@pytest.mark.parametrize("name", CASES)
def test_thoughts_between_special_tokens_are_no_part_of_the_answer(name: str) -> None:
    template, opened, closed = CASES[name]
    tokenizer = words("well", "yes", *opened, closed, template=template, special=(opened[0], closed))
    model = chain(tokenizer, ["[user]", *opened, "well", closed, "yes", "</s>"])
    with LLM.from_models(model, None, tokenizer, "plain", SIZES) as llm:
        result = llm.chat([user("Who?")], max_tokens=9)
        assert (result.thoughts, result.answer, result.finish_reason) == ("well", "yes", "eos")
        assert result.text == f"{opened[0]}{' '.join([*opened[1:], 'well'])}{closed}yes"
        with llm.read([user("Who?")]) as context:
            context.ask(None, max_tokens=9)
            assert context.messages == [user("Who?"), {"role": "assistant", "content": "yes"}]
        prompt = llm.chat_template.encode([user("Who?")])
        reply = ChatReply("id", "m", 0, tokenizer, None, splitter=llm.chat_template.answers(prompt))
        chunks = [chunk for event in llm.stream(prompt, max_tokens=9) for chunk in reply.token(event)]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        for name, text in (("reasoning_content", "well"), ("content", "yes")):
            assert "".join(delta.get(name, "") for delta in deltas) == text


def test_harmony_channels() -> None:
    marks = HARMONY.marks
    template = (
        "{# <|channel|>analysis #}{% for m in messages %}{{ m.content }} {% endfor %}<|start|>assistant"
    )
    names = ("analysis", "final", "assistant", "well", "yes", "so")
    tokenizer = words(*names, *marks, template=template, special=marks)
    text = ["<|channel|>", "analysis", "<|message|>", "well", "<|end|>"]
    model = chain(tokenizer, ["assistant", *text, "yes", "</s>"])
    with LLM.from_models(model, None, tokenizer, "plain", SIZES) as llm:
        result = llm.chat([user("Who?")], max_tokens=9)
        assert (result.thoughts, result.answer) == ("well", "")


@pytest.mark.parametrize(
    ("template", "tokens", "form"),
    [
        ("<|channel|>analysis<|message|>", (), HARMONY),
        ("[THINK]", (), MISTRAL),
        ("{{ '</think>' }} <|end|>", (), THINK),
        ("<|end|>", (), THINK),
        ("", ("[THINK]", "[/THINK]"), MISTRAL),
        ("<seed:think>", ("<think>", "</think>"), SEED),
        ("<|channel>thought", (), GEMMA),
        (None, (), THINK),
    ],
)
def test_the_format_is_that_of_the_template_else_of_the_vocabulary(
    template: str | None, tokens: tuple[str, ...], form: Any
) -> None:
    assert ThoughtMarks(words(*tokens, template=template)).format == form


# ------------------------------------------------------------------------------------ JSON schemas

SCHEMA = {"enum": ["whale", "sail"]}


def with_marks(template: str, *marks: str) -> PreTrainedTokenizerFast:
    made = copy.deepcopy(byte_tokenizer())
    made.add_tokens(list(marks), special_tokens=True)
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "marks", "thinks"),
    [
        (R1, (), False),
        (R1, THINK.marks, True),
        ("{{ messages[0].content }}[THINK]", MISTRAL.marks, True),
        ("{{ messages[0].content }}<|START_THINKING|>", COHERE.marks, True),
        (f"{{{{ messages[0].content }}}}<|start|>assistant{HARMONY.opening_mark}", HARMONY.marks, True),
    ],
    ids=["no tokens", "think", "mistral", "cohere", "harmony"],
)
def test_thoughts_come_first_and_the_answer_fits_the_schema(
    template: str, marks: tuple[str, ...], thinks: bool
) -> None:
    tokenizer = with_marks(template, *marks)
    target = tiny_target("llama-gqa", vocabulary=len(tokenizer))
    with LLM.from_models(target, None, tokenizer, "retrieval", SIZES) as llm:
        result = llm.chat([user("Who?")], json_schema=SCHEMA, max_tokens=80)
        assert json.loads(result.answer) in ("whale", "sail"), result.text
        assert (len(result.tokens) > 20) == thinks, "up to half of the tokens are for thoughts"
        with llm.read([user("Who?")]) as context:
            asked = context.ask(None, json_schema=SCHEMA, max_tokens=80)
            assert asked.tokens == result.tokens
            context.rewind(asked.prompt_tokens)
            plain = context.generate(json_schema=SCHEMA, max_tokens=80, config="plain")
            assert plain.tokens == result.tokens
            assert context.messages is not None and context.messages[-1]["content"] == result.answer
        if thinks:
            forced = llm.chat([user("Who?")], json_schema=SCHEMA, max_tokens=80, thinking=True)
            assert forced.tokens == result.tokens
        else:
            with pytest.raises(UsageError, match="cannot be combined with thinking"):
                llm.chat([user("Who?")], json_schema=SCHEMA, thinking=True)


def test_a_schema_behind_closed_thoughts_is_all_of_the_text() -> None:
    target = tiny_target("llama-gqa", vocabulary=258)
    with LLM.from_models(target, None, with_marks(QWEN, *THINK.marks), "plain", SIZES) as llm:
        result = llm.chat([user("Who?")], json_schema=SCHEMA)
        assert result.text == result.answer and json.loads(result.text) in ("whale", "sail")
