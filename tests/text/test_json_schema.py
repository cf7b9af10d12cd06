"""Texts that fit a JSON schema, of whole engines; test_enumeration.py proves that masks keep drafts exact."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.small_engine import CONFIGS, ON_CUDA, PROMPT, SIZES, again, engine_overrides, link_to
from support.tiny_models import byte_tokenizer, noisy_copy, tiny_target, to
from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams, UsageError
from offload_rt.model.decoder import NotANumber
from offload_rt.text.json_grammar import JsonGrammar, JsonGrammars, checked_schema


def record(**properties: object) -> dict[str, object]:
    """The schema of an object that has all of its properties and no other."""
    required = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


DENSE = {"whitespace_flexible": False}  # tiny models like blanks
AGE = {"type": "integer", "minimum": 17, "maximum": 58}
SHIP = record(masts={"type": "integer", "minimum": 1, "maximum": 3}, sunk={"type": "boolean"})
BOATS = {"type": "array", "items": {"enum": ["a", "bc", None]}, "minItems": 1, "maxItems": 3}
SAILOR = record(name={"enum": ["Ahab", "Ishmael"]}, age=AGE, ship=SHIP, boats=BOATS)


def is_ship(value: Any) -> bool:
    return list(value) == ["masts", "sunk"] and value["masts"] in (1, 2, 3) and type(value["sunk"]) is bool


def is_sailor(value: Any) -> bool:
    return (
        list(value) == ["name", "age", "ship", "boats"]
        and value["name"] in ("Ahab", "Ishmael")
        and type(value["age"]) is int
        and 17 <= value["age"] <= 58
        and is_ship(value["ship"])
        and 1 <= len(value["boats"]) <= 3
        and all(boat in ("a", "bc", None) for boat in value["boats"])
    )


PARAMS = SamplingParams(max_tokens=120, json_schema=SAILOR | {"x-guidance": DENSE})


def open_llm(target: PreTrainedModel, draft: PreTrainedModel | None, config: str, **options: Any) -> LLM:
    options = {"overrides": SIZES} | options
    return LLM.from_models(target, draft, byte_tokenizer(), config, **options)


@pytest.fixture(scope="module")
def sailor(target: PreTrainedModel) -> list[int]:
    """What follows `PROMPT` by `PARAMS`, decoded plainly."""
    with open_llm(target, None, "plain") as llm:
        return llm.generate(PROMPT, PARAMS).tokens


@pytest.mark.parametrize("config", CONFIGS)
def test_greedy_tokens_are_those_of_plain_decoding(
    target: PreTrainedModel, draft: PreTrainedModel, sailor: list[int], config: str
) -> None:
    with open_llm(target, draft, config) as llm:
        result = llm.generate(PROMPT, PARAMS)
    assert result.tokens == sailor and result.finish_reason == "stop"
    assert is_sailor(json.loads(result.text)) and " " not in result.text
    assert config == "plain" or result.timings.accepted_tokens > 0


@pytest.mark.parametrize("config", ["triforce", "trees"])
def test_texts_that_are_drawn_fit_their_schemas(
    target: PreTrainedModel, draft: PreTrainedModel, config: str
) -> None:
    """In a batch, of which one sequence has no schema; with blanks where the model wants them."""
    cases: list[tuple[object, Callable[[Any], bool]]] = [
        (SAILOR, is_sailor),
        ({"enum": ["whale", 7, None]}, lambda value: value in ("whale", 7, None)),
        (AGE, lambda value: type(value) is int and 17 <= value <= 58),
        (BOATS, lambda value: 1 <= len(value) <= 3 and set(value) <= {"a", "bc", None}),
        ({"type": "string", "maxLength": 9}, lambda value: isinstance(value, str) and len(value) <= 9),
    ]
    params = [
        SamplingParams(1.0, max_tokens=400, json_schema=schema, seed=seed)  # type: ignore[arg-type]
        for seed, (schema, _) in enumerate(cases)
    ]
    free = SamplingParams(1.0, max_tokens=20, seed=9)
    with open_llm(target, draft, config) as llm:
        *texts, other = llm.generate([PROMPT] * 6, [*params, free])
        alone = llm.generate(PROMPT, free)
    for result, (_, fits) in zip(texts, cases, strict=True):
        assert result.finish_reason == "stop" and fits(json.loads(result.text)), result.text
    assert other.tokens == alone.tokens


def test_a_batch_leaves_a_sequence_without_a_schema_alone(
    target: PreTrainedModel, draft: PreTrainedModel, sailor: list[int], plain_tokens: list[int]
) -> None:
    with open_llm(target, draft, "naive") as llm:
        some, free = llm.generate([PROMPT] * 2, [PARAMS, SamplingParams(max_tokens=40)])
    assert some.tokens == sailor and free.tokens == plain_tokens


def test_each_continuation_writes_a_text_of_its_own(
    target: PreTrainedModel, draft: PreTrainedModel, sailor: list[int]
) -> None:
    with open_llm(target, draft, "triforce") as llm, llm.read(PROMPT, 400) as context:
        first = context.generate((), PARAMS)
        second = context.generate((), PARAMS)
        context.rewind(second.start)
        cut = context.generate((), PARAMS, max_tokens=9)
        context.rewind(first.start)
        stream = context.stream((), PARAMS)
        taken = [next(stream).token for _ in range(5)]
        between = list(context.tokens)
        context.rewind(first.start)
        other = context.generate((), PARAMS, json_schema={"enum": ["yes"]})
    assert first.tokens == sailor and is_sailor(json.loads(second.text))
    assert cut.tokens == second.tokens[:9] and cut.finish_reason == "length"
    assert between == [*PROMPT, *taken] == [*PROMPT, *sailor[:5]]
    assert (other.text, other.finish_reason) == ('"yes"', "stop")


@pytest.mark.parametrize("end", [0, 10], ids=["a byte that no JSON has", "a line break"])
def test_an_end_token_comes_when_the_text_is_complete(end: int) -> None:
    """A line break is also a blank within JSON, where it would end the text."""
    target = tiny_target("llama-gqa", eos_token_id=[end, 999])
    with open_llm(target, noisy_copy(target), "triforce") as llm:
        result = llm.generate(PROMPT, SamplingParams(json_schema=SHIP))
        longer = llm.generate(PROMPT, SamplingParams(json_schema=SHIP, ignore_eos=True))
    assert result.tokens[-1] == end and result.finish_reason == "eos" and end not in result.tokens[:-1]
    assert longer.finish_reason == "stop" and end not in longer.tokens[-1:]
    assert is_ship(json.loads(result.text)) and is_ship(json.loads(longer.text))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("which", ["target", "draft"])
def test_logits_that_are_not_numbers_are_found_behind_a_mask(which: str, temperature: float) -> None:
    models = {"target": tiny_target("llama-gqa"), "draft": tiny_target("llama-gqa")}
    with open_llm(models["target"], models["draft"], "naive") as llm:
        stream = llm.stream(PROMPT, PARAMS, temperature=temperature)
        next(stream)
        models[which].model.layers[1].mlp.register_forward_hook(
            lambda module, inputs, output: torch.full_like(output, torch.nan)
        )
        with pytest.raises(NotANumber, match="output of layer 1"):
            stream.finish()


@ON_CUDA
def test_a_schema_on_a_gpu(device: torch.device) -> None:
    target = tiny_target("llama-gqa")
    draft, link = to(noisy_copy(target), device), link_to(device)
    params = SamplingParams(max_tokens=8, json_schema=SAILOR, presence_penalty=0.5, logprobs=1)
    with (
        open_llm(to(target, device), draft, "trees", link=link, overrides=engine_overrides()) as llm,
        llm.read(PROMPT) as context,
    ):
        result, plain = again(context, params), again(context, params, "plain")
    assert result.tokens == plain.tokens and result.timings.accepted_tokens > 0
    assert result.text.startswith("{")


# ---------------------------------------------------------------------------------- the grammar


def allowed(grammar: JsonGrammar, text: bytes) -> set[int] | None:
    words = grammar.allowed(list(text))
    if words is None:
        return None
    return {token for token in range(64 * len(words)) if int(words[token // 64]) >> (token % 64) & 1}


def grammar(schema: object, vocabulary: int = 256, ends: tuple[int, ...] = ()) -> JsonGrammar:
    return JsonGrammars(byte_tokenizer(), vocabulary).grammar(checked_schema(schema), ends)


def test_what_may_follow_by_hand() -> None:
    colours = grammar({"enum": ["red", "reed"]}, vocabulary=300, ends=(0,))
    assert allowed(colours, b"") == {ord('"')}
    assert allowed(colours, b'"re') == {ord("d"), ord("e")}
    assert allowed(colours, b'"red"') == {0} and not colours.complete(list(b'"red"'))
    assert allowed(colours, b'"rex') is allowed(colours, b'"red"\0') is None
    endless = grammar({"enum": ["red"]})
    assert allowed(endless, b'"red"') is None
    assert endless.complete(list(b'"red"')) and not endless.complete(list(b'"red'))
    assert allowed(grammar({"enum": ["zoo"]}, vocabulary=ord("z")), b'"') is None
    number = grammar({"type": "integer", "minimum": 1, "maximum": 30}, ends=(0,))
    assert allowed(number, b"2") == {0, *b"0123456789"} and allowed(number, b"29") == {0}


def test_blanks_end() -> None:
    some = grammar({"type": "array"})
    assert b"\n"[0] in (allowed(some, b"[") or ()) and allowed(some, b"[\n\n" + 40 * b" ") is not None
    assert allowed(some, b"[\n\n" + 41 * b" ") is None and allowed(some, b"[   ") is None


def test_answers_depend_on_nothing_that_was_asked_before() -> None:
    schema, draw = SAILOR | {"x-guidance": DENSE}, random.Random(1)
    text = b'{"name":"Ahab","age":58,"ship":{"masts":3,"sunk":false},"boats":["a",null,"bc"]}'
    wrong = b'{"name":"Ahab","age":5x'
    asked = [draw.choice([text[: draw.randint(0, len(text))], wrong, b"x"]) for _ in range(60)]
    used, grammars = grammar(schema), JsonGrammars(byte_tokenizer(), 256)
    for tokens in asked:
        fresh = grammars.grammar(checked_schema(schema), ())
        assert allowed(used, tokens) == allowed(fresh, tokens)
        if tokens not in (wrong, b"x"):
            assert used.complete(list(tokens)) == fresh.complete(list(tokens)) == (tokens == text)


def test_a_model_with_fewer_tokens_than_its_tokenizer_writes_what_it_can() -> None:
    """Its last token is y."""
    target = tiny_target("llama-gqa", vocabulary=ord("z"))
    prompt = [byte % 100 for byte in PROMPT]
    with open_llm(target, noisy_copy(target), "triforce") as llm:
        assert llm.generate(prompt, json_schema={"enum": ["zoo", "yes", "{}"]}).text == '"yes"'
        with pytest.raises(UsageError, match="vocabulary cannot write what must follow here, at token 2 of"):
            llm.generate(prompt, json_schema={"enum": ["azure"]}, temperature=1.0)
        good, bad = llm.generate(
            [prompt] * 2, [SamplingParams(json_schema={"enum": [word]}) for word in ("ox", "zoo")]
        )
        assert (good.text, bad.finish_reason, bad.text) == ('"ox"', "error", "")


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "json-schema '{' is not JSON: Expecting property name"),
        (100_000 * "[", "is not JSON: "),
        ("[1]", "json-schema must be a JSON object, got '[1]'"),
        (True, "json-schema must be a JSON object, got True"),
        (b"{}", "json-schema must be a JSON object, got b'{}'"),
        ({"enum": {1}}, "is not JSON: Object of type set is not JSON serializable"),
        ({"maximum": float("nan")}, "is not JSON: Out of range float"),
        ({"type": "nope"}, "json-schema is refused by llguidance: Invalid type: nope"),
        ({"not": {}}, 'refused by llguidance: Unimplemented keys: ["not"]'),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "refused by llguidance: Unsatisfiable schema"),
        ({"type": "string", "pattern": "("}, "regex parse error: ( ^ error: unclosed group"),
        ({"$ref": "https://example.org/a"}, "retrieving it failed"),
        ({"enum": ["\ud800"]}, "json-schema is refused by llguidance: "),
    ],
    ids=lambda value: str(value)[:40].encode("ascii", "replace").decode(),
)
def test_bad_schemas(schema: Any, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        SamplingParams(json_schema=schema)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_schema_is_kept_as_its_text() -> None:
    params = SamplingParams(json_schema={"enum": [1, "é"]})
    assert params == SamplingParams(json_schema='{"enum": [1, "é"]}') and hash(params)


def test_a_schema_needs_a_tokenizer_and_llguidance(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        LLM.from_models(target, config="plain", overrides=SIZES) as llm,
        pytest.raises(UsageError, match="json-schema needs a model with a fast tokenizer"),
    ):
        llm.generate(PROMPT, PARAMS)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"llguidance: .* install .*\[json\]'"):
        SamplingParams(json_schema={"enum": ["not seen before"]})
