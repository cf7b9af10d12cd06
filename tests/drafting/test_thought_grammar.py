"""Budgets of thoughts: what may follow, by hand, and in whole engines. `test_enumeration_thoughts.py` proves
that they keep drafts exact."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.chat_templates import HARMONY_TOOLS, QWEN, R1, tokenizer, user
from support.small_engine import SIZES
from support.tiny_models import noisy_copy, tiny_target

from offload_rt import LLM, SamplingParams, UsageError
from offload_rt.drafting.thought_grammar import ThoughtsFirst, thoughts_first
from offload_rt.text.thoughts import FORMATS, THINK, ThoughtMarks
from offload_rt.text.tools import Tool, Tools

HARMONY = FORMATS[0]
END = 0


def marked(template: str, *marks: str) -> Any:
    made = tokenizer(template)
    made.add_tokens(list(marks), special_tokens=True)
    return made


class Limits:
    """The grammar of thoughts behind a prompt, in text."""

    def __init__(self, made: Any, prompt: str, budget: int, may_open: bool = True) -> None:
        self._made = made
        marks = ThoughtMarks(made)
        grammar = thoughts_first(marks, None, self._ids(prompt), budget, (END,), len(made), may_open=may_open)
        assert isinstance(grammar, ThoughtsFirst)
        self._grammar = grammar

    def _ids(self, text: str) -> list[int]:
        return list(self._made(text, add_special_tokens=False)["input_ids"])

    def __call__(self, text: str) -> set[str] | None:
        """Returns what may follow a text; None: anything."""
        words = self._grammar.allowed(self._ids(text))
        assert words is not None and not self._grammar.complete(self._ids(text))
        size = len(self._made)
        tokens = [at for at in range(size) if int(words[at // 64]) >> (at % 64) & 1]
        return None if len(tokens) == size else {str(self._made.decode([token])) for token in tokens}


def test_thoughts_that_the_prompt_opens_are_closed() -> None:
    limits = Limits(marked(R1, *THINK.marks), "Who?<think>\n", 3)
    assert limits("abc") == {"</think>"}
    for anything in ("", "ab", "ab</think>", "ab</think>abcdef", "ab</think><think>abcdef"):
        assert limits(anything) is None
    assert Limits(marked(R1, *THINK.marks), "Who?<think>", 0)("") == {"</think>"}


def test_thoughts_that_the_model_opens_are_closed() -> None:
    limits = Limits(marked(QWEN, *THINK.marks), "assistant\n", 2)
    assert limits("<think>ab") == limits("\n <think>ab") == {"</think>"}
    for anything in ("", "<think>", "<think>a", "\n<think>a", "abcdef", "a <think>bcd", "<think></think>abc"):
        assert limits(anything) is None
    assert Limits(marked(QWEN, *THINK.marks), "assistant\n", 0)("<think>") == {"</think>"}


def test_all_messages_of_thoughts_share_a_budget() -> None:
    """At its end, another channel follows."""
    analysis = "<|channel|>analysis<|message|>"
    header = "<|end|><|start|>assistant"
    limits = Limits(marked(HARMONY_TOOLS, *HARMONY.marks), "<|start|>assistant", 4)
    assert limits(f"{analysis}abcd") == {"<|end|>"}
    assert limits(f"{analysis}abcd<|end|>") == {"<|start|>"}
    assert limits(f"{analysis}abc{header}{analysis}d") == {"<|end|>"}
    after = limits(f"{analysis}abcd{header}<|channel|>")
    assert after is not None and "a" not in after and {"f", "c"} <= after
    for anything in ("", "<|channel|>", analysis, f"{analysis}abc", f"{analysis}abc{header}<|channel|>"):
        assert limits(anything) is None
    none = Limits(marked(HARMONY_TOOLS, *HARMONY.marks), "<|start|>assistant", 0)
    assert none("") is None and "a" not in (none("<|channel|>") or "a")


def test_an_end_of_thoughts_that_is_no_token() -> None:
    closing = Limits(tokenizer(R1), "Who?<think>", 0)
    assert closing("") == {"<"} and closing("</think") == {">"} and closing("</think>abc") is None
    with pytest.raises(UsageError, match="thinking-budget: </think> is no token of this model; use 0"):
        Limits(tokenizer(R1), "Who?<think>", 5)


def test_where_there_are_no_thoughts_a_budget_changes_nothing() -> None:
    for made, prompt in (
        (tokenizer(QWEN), "assistant\n"),
        (marked(QWEN, *THINK.marks), "<think>\n\n</think>\n"),
    ):
        grammar = thoughts_first(
            ThoughtMarks(made), None, made(prompt)["input_ids"], 3, (), 300, may_open=True
        )
        assert grammar is None


@pytest.mark.parametrize("budget", [0, 5])
@pytest.mark.parametrize("config", ["plain", "naive"])
def test_a_budget_in_an_engine(config: str, budget: int) -> None:
    made = marked(R1, *THINK.marks)
    target = tiny_target("llama-gqa", vocabulary=len(made))
    with LLM.from_models(target, noisy_copy(target), made, config, SIZES) as llm:
        result = llm.chat([user("Who?")], max_tokens=24, thinking_budget=budget)
        closing = made.convert_tokens_to_ids("</think>")
        assert result.tokens.index(closing) <= budget and len(result.tokens) == 24
        assert result.answer and len(result.thoughts) <= budget


def test_json_and_calls_behind_thoughts() -> None:
    """Which the model opens itself."""
    made = marked(QWEN, *THINK.marks)
    target = tiny_target("llama-gqa", vocabulary=len(made))
    opening, closing = (made.convert_tokens_to_ids(mark) for mark in THINK.marks)
    target.lm_head.weight.data[opening] *= 40  # of the first token, where it is allowed, and of no other
    schema = {"enum": ["whale", "sail"]}
    with LLM.from_models(target, noisy_copy(target), made, "naive", SIZES) as llm:
        seen = set()
        for seed in range(3):
            params = SamplingParams(1.0, max_tokens=60, seed=seed)
            result = llm.chat([user("Who?")], params, json_schema=schema, thinking=True)
            assert json.loads(result.answer) in ("whale", "sail"), result.text
            seen.add(opening in result.tokens[:1])
            assert result.tokens.count(closing) == (opening in result.tokens[:1])
            tools = Tools((Tool("look"),), "look")
            called = llm.chat([user("Who?")], params, tools=tools, thinking_budget=9, max_tokens=200)
            assert [call.name for call in called.tool_calls] == ["look"], called.text
            quiet = llm.chat([user("Who?")], params, json_schema=schema)
            assert opening not in quiet.tokens and json.loads(quiet.text) in ("whale", "sail")
    assert True in seen
